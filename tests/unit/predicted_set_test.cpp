// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The store that attends to what was predicted, against attention in double precision over the tokens that FreeKV (arXiv 2505.13109) says:
// first and last ones and the pages that the query before selected, or, for heads that turned, those that the present one does.
#include "examples/common/predicted_set.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
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
          .kv_type = DataType::f32,
          .selection = {.chunk_tokens = 8, .budget_tokens = 48, .sink_tokens = 16, .local_tokens = 24, .tail_estimate = false},
          .slots_per_budget = 1.0F,
          .selects_ahead = false};
}

std::vector<float> vectors(const Story& story, Story::Part part, Layer layer, int position, int count) {
  std::vector<float> out;
  story.append(out, part, layer, position, count);
  return out;
}

double mean_cosine(const StoreOptions& options, const Story& story, Layer layer, int kv_head, int position) {
  const int group = options.heads / options.kv_heads;
  const std::vector<float> now = vectors(story, Story::Part::query, layer, position, options.heads * options.head_dim);
  const std::vector<float> before = vectors(story, Story::Part::query, layer, position - 1, options.heads * options.head_dim);
  double mean = 0;
  for (int g = 0; g < group; ++g) {
    double dot = 0;
    double a = 0;
    double b = 0;
    for (int d = 0; d < options.head_dim; ++d) {
      const auto i = static_cast<std::size_t>((kv_head * group + g) * options.head_dim + d);
      dot += double(now[i]) * before[i];
      a += double(now[i]) * now[i];
      b += double(before[i]) * before[i];
    }
    mean += dot / std::sqrt(a * b) / group;
  }
  return mean;
}

/// Attention of the query at `position` over the sinks, the window, the row itself and `chunks`. [group * dim]
std::vector<double> attention(const StoreOptions& options, const Story& story, Layer layer, int kv_head, int position,
                              const std::vector<int>& chunks) {
  const int chunk = options.selection.chunk_tokens;
  const int window = (position - options.selection.local_tokens) / chunk * chunk;
  std::set<int> tokens;
  for (int t = 0; t <= position; ++t) {
    if (t < options.selection.sink_tokens || t >= window) tokens.insert(t);
  }
  for (const int c : chunks) {
    for (int t = c * chunk; t < (c + 1) * chunk; ++t) tokens.insert(t);
  }
  const int group = options.heads / options.kv_heads;
  const std::vector<float> queries = vectors(story, Story::Part::query, layer, position, options.heads * options.head_dim);
  std::vector<double> out;
  for (int g = 0; g < group; ++g) {
    std::vector<double> sum(static_cast<std::size_t>(options.head_dim), 0.0);
    double weights = 0;
    for (const int t : tokens) {
      const std::vector<float> key = vectors(story, Story::Part::key, layer, t, options.kv_heads * options.head_dim);
      const std::vector<float> value = vectors(story, Story::Part::value, layer, t, options.kv_heads * options.head_dim);
      double dot = 0;
      for (int d = 0; d < options.head_dim; ++d) {
        dot += double(queries[static_cast<std::size_t>((kv_head * group + g) * options.head_dim + d)]) *
               key[static_cast<std::size_t>(kv_head * options.head_dim + d)];
      }
      const double weight = std::exp(dot / std::sqrt(double(options.head_dim)));
      weights += weight;
      for (int d = 0; d < options.head_dim; ++d) {
        sum[static_cast<std::size_t>(d)] += weight * value[static_cast<std::size_t>(kv_head * options.head_dim + d)];
      }
    }
    for (const double x : sum) out.push_back(x / weights);
  }
  return out;
}

}  // namespace

TEST_CASE("row 0 attends to the prediction, heads that turned to what they select") {
  for (const float correct_below : {0.0F, 0.05F}) {
    const StoreOptions options = small_options();
    const std::shared_ptr<Backend> backend =
        std::make_shared<PredictedSetBackend>(cpu::make_cpu_backend({.threads = 2}), PredictedSetOptions{correct_below});
    const std::unique_ptr<KvStore> store = backend->make_store(options);
    const std::unique_ptr<TransferScheduler> scheduler =
        backend->make_scheduler({.layers = options.layers, .max_items_per_submit = 2 * store->capacities().prefetch});
    testing::StoreDriver driver(testing::workplace_of(*backend), *store, *scheduler, options);
    const Story story(5);
    store->open(0, options.max_context, backend->stream());
    driver.prefill(0, story, 250, 64);

    std::map<std::pair<Layer, int>, std::vector<int>> predicted;
    std::uint64_t needed = 0;
    std::uint64_t hit = 0;
    int corrected = 0;
    double worst = 0;
    constexpr int kSteps = 12;
    for (int step = 0; step < kSteps; ++step) {
      const int position = 250 + step;
      const auto pass = driver.pass({{0, RowMode::single, story, position}}, Hint::row0);
      int may_load = 0;  // chunks that heads without a prediction to attend to may lack
      for (Layer layer = 0; layer < options.layers; ++layer) {
        for (int head = 0; head < options.kv_heads; ++head) {
          const std::vector<int>& own = pass.chosen[static_cast<std::size_t>(layer)][static_cast<std::size_t>(head)];
          std::vector<int>& before = predicted[{layer, head}];
          const bool turned = step > 0 && mean_cosine(options, story, layer, head, position) < correct_below && correct_below > 0;
          corrected += turned ? 1 : 0;
          may_load += step == 0 || turned ? 6 : 0;
          needed += own.size();
          for (const int chunk : own) hit += static_cast<std::uint64_t>(std::count(before.begin(), before.end(), chunk));
          const std::vector<double> expected = attention(options, story, layer, head, position, step == 0 || turned ? own : before);
          const float* got = pass.out[static_cast<std::size_t>(layer)].data() + static_cast<std::size_t>(head) * expected.size();
          for (std::size_t i = 0; i < expected.size(); ++i) worst = std::max(worst, std::abs(got[i] - expected[i]));
          before = own;
        }
      }
      CHECK(pass.urgent_items <= may_load);
    }
    CHECK(worst < 1e-5);
    // as many as the queries of the made-up text turn: their cosines are 0 on average
    if (correct_below > 0.0F) CHECK((corrected > 8 && corrected < 4 * (kSteps - 1)));
    if (correct_below == 0.0F) CHECK(corrected == 0);
    driver.settle();
    const StoreStatistics statistics = store->statistics();
    CHECK(statistics.needed == needed);
    CHECK(statistics.predicted_hit == hit);
    CHECK(statistics.predictable == needed * (kSteps - 1) / kSteps);
    CHECK(statistics.estimated == 0);
  }
}

TEST_CASE("what was predicted is forgotten with its sequence") {
  const StoreOptions options = small_options();
  const auto run = [&](bool used_before) {
    const auto backend = std::make_shared<PredictedSetBackend>(cpu::make_cpu_backend({.threads = 1}), PredictedSetOptions{0.05F});
    const std::unique_ptr<KvStore> store = backend->make_store(options);
    const std::unique_ptr<TransferScheduler> scheduler =
        backend->make_scheduler({.layers = options.layers, .max_items_per_submit = 2 * store->capacities().prefetch});
    testing::StoreDriver driver(testing::workplace_of(*backend), *store, *scheduler, options);
    if (used_before) {
      store->open(0, options.max_context, backend->stream());
      driver.prefill(0, Story(9), 200, 64);
      driver.pass({{0, RowMode::single, Story(9), 200}}, Hint::row0);
      driver.settle();
      store->close(0, backend->stream());
    }
    store->open(0, options.max_context, backend->stream());
    driver.prefill(0, Story(5), 250, 64);
    return driver.pass({{0, RowMode::single, Story(5), 250}}, Hint::row0).out;
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("two rows cannot attend to what was predicted") {
  StoreOptions options = small_options();
  options.rows_per_sequence = 2;
  PredictedSetBackend backend(cpu::make_cpu_backend({.threads = 1}), {});
  test::expect_error<InvalidArgument>([&] { backend.make_store(options); }, {"rows_per_sequence = 2", "must be 1"});
}
