// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Chunks ranked by bounds against Quest's definition (arXiv 2406.10774, equation of its Algorithm 1) over all keys, in double precision.
#include "examples/common/page_bounds.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "dualdecoder/testing/store_driver.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"

using namespace dualdecoder;
using namespace dualdecoder::examples;
using testing::Hint;
using testing::Story;

namespace {

StoreOptions small_options() {
  return {.layers = 2,
          .heads = 6,
          .kv_heads = 2,
          .head_dim = 16,
          .max_context = 320,
          .max_sequences = 2,
          .rows_per_sequence = 2,
          .kv_type = DataType::f32,
          .selection = {.chunk_tokens = 16, .budget_tokens = 64, .sink_tokens = 16, .local_tokens = 16, .tail_estimate = false}};
}

/// Largest share over the query group of each chunk that can be chosen, by bounds over its keys.
std::vector<double> ranks(const StoreOptions& options, const Story& story, Layer layer, int kv_head, int length, const Story& row,
                          int position) {
  const int dim = options.head_dim;
  const int group = options.heads / options.kv_heads;
  const int chunk = options.selection.chunk_tokens;
  const int end = (length - options.selection.local_tokens) / chunk;
  std::vector<float> queries;
  row.append(queries, Story::Part::query, layer, position, options.heads * dim);
  std::vector<double> rank(static_cast<std::size_t>(end - 1), 0.0);
  for (int g = 0; g < group; ++g) {
    std::vector<double> mass;
    double sum = 0;
    for (int c = 1; c < end; ++c) {
      std::vector<double> best(static_cast<std::size_t>(dim), -HUGE_VAL);  // largest product of a channel over the chunk's keys
      for (int t = c * chunk; t < (c + 1) * chunk; ++t) {
        std::vector<float> keys;
        story.append(keys, Story::Part::key, layer, t, options.kv_heads * dim);
        for (int d = 0; d < dim; ++d) {
          const double product = double(queries[static_cast<std::size_t>((kv_head * group + g) * dim + d)]) *
                                 keys[static_cast<std::size_t>(kv_head * dim + d)];
          best[static_cast<std::size_t>(d)] = std::max(best[static_cast<std::size_t>(d)], product);
        }
      }
      double bound = 0;
      for (const double b : best) bound += b;
      mass.push_back(std::exp(bound / std::sqrt(double(dim))));
      sum += mass.back();
    }
    for (std::size_t c = 0; c < mass.size(); ++c) rank[c] = std::max(rank[c], mass[c] / sum);
  }
  return rank;
}

}  // namespace

TEST_CASE("chunks are chosen by the bounds of their keys, those of generated tokens too") {
  const StoreOptions options = small_options();
  PageBoundsBackend backend(cpu::make_cpu_backend({.threads = 2}));
  const std::unique_ptr<KvStore> store = backend.make_store(options);
  const std::unique_ptr<TransferScheduler> scheduler =
      backend.make_scheduler({.layers = options.layers, .max_items_per_submit = store->capacities().prefetch});
  testing::StoreDriver driver(testing::workplace_of(backend), *store, *scheduler, options);
  store->open(0, options.max_context, backend.stream());
  store->open(1, 60, backend.stream());
  driver.prefill(0, Story(5), 150, 64);
  driver.prefill(1, Story(6), 20, 64);
  for (int step = 0; step < 40; ++step) {
    const int length = 150 + step;
    const auto pass = driver.pass(
        {{0, RowMode::dual, Story(5), length, Story(70), false}, {1, RowMode::dual, Story(6), 20 + step, Story(71), false}}, Hint::row1);
    if (step % 13 != 0) continue;
    for (Layer layer = 0; layer < options.layers; ++layer) {
      for (int head = 0; head < options.kv_heads; ++head) {
        for (int row = 0; row < 2; ++row) {
          INFO("step " << step << ", layer " << layer << ", head " << head << ", row " << row);
          const std::vector<int>& chosen = pass.chosen[static_cast<std::size_t>(layer)][static_cast<std::size_t>(row * 2 + head)];
          const std::vector<double> rank = ranks(options, Story(5), layer, head, length, row == 0 ? Story(5) : Story(70), length + row);
          std::vector<double> sorted = rank;
          std::sort(sorted.begin(), sorted.end(), std::greater<>());
          REQUIRE(chosen.size() == 4);  // 64 tokens in chunks of 16
          CHECK(std::is_sorted(chosen.begin(), chosen.end()));
          for (const int chunk : chosen) CHECK(rank.at(static_cast<std::size_t>(chunk - 1)) >= sorted[3] * (1 - 1e-5));
        }
      }
    }
    CHECK(pass.chosen[0][4].size() == (step < 28 ? 0U : 1U));  // 20 + step tokens: the second chunk leaves the window at 48
  }
}

TEST_CASE("keys of 16 bits have the bounds of what is stored") {
  StoreOptions options = small_options();
  options.kv_type = DataType::bf16;
  PageBoundsBackend backend(cpu::make_cpu_backend({.threads = 1}));
  const std::unique_ptr<KvStore> store = backend.make_store(options);
  const std::unique_ptr<TransferScheduler> scheduler =
      backend.make_scheduler({.layers = options.layers, .max_items_per_submit = store->capacities().prefetch});
  testing::StoreDriver driver(testing::workplace_of(backend), *store, *scheduler, options);
  store->open(0, options.max_context, backend.stream());
  driver.prefill(0, Story(5), 200, 64);
  const auto pass = driver.pass({{0, RowMode::dual, Story(5), 200, Story(70), false}}, Hint::none);
  const std::vector<double> rank = ranks(options, Story(5), 0, 0, 200, Story(5), 200);
  std::vector<double> sorted = rank;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  for (const int chunk : pass.chosen[0][0]) CHECK(rank.at(static_cast<std::size_t>(chunk - 1)) >= sorted[3] * 0.97);
}

TEST_CASE("the bounds are planned for") {
  const std::shared_ptr<Backend> host = cpu::make_cpu_backend({.threads = 1});
  testing::CountingResource device(host->memory(MemoryKind::device));
  PageBoundsBackend backend(cpu::make_cpu_backend({.threads = 1, .device = &device}));
  const StoreOptions options = small_options();
  {
    const std::unique_ptr<KvStore> store = backend.make_store(options);
    for (int slot = 0; slot < 2; ++slot) store->open(slot, options.max_context, backend.stream());
    // a plan counts the calibration queries of one sequence at a time
    CHECK(device.live_bytes() <= backend.store_plan(options).device_bytes() + 2 * 64 * 6 * 16 * 4);
    CHECK(PageBoundsStore::sequence_bytes(options, 320) == 2 * 2 * 20 * 2 * 16 * 4);
    for (int slot = 0; slot < 2; ++slot) store->close(slot, backend.stream());
  }
  CHECK(device.live_bytes() == 0);
}

TEST_CASE("bounds cannot stand for the tail") {
  StoreOptions options = small_options();
  options.selection.tail_estimate = true;
  PageBoundsBackend backend(cpu::make_cpu_backend({.threads = 1}));
  test::expect_error<InvalidArgument>([&] { backend.make_store(options); }, {"tail_estimate = true", "must be false"});
}
