// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The decorators of the CUDA backend's stores: chunks ranked by bounds against Quest's formula (arXiv 2406.10774), and rows that attend to
// what was predicted against attention over the tokens that FreeKV (arXiv 2505.13109) says, both in double precision.
#include "dualdecoder/cuda/rivals.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/cuda/backend.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "dualdecoder/testing/store_driver.hpp"
#include "tests/gpu/bf16.hpp"
#include "tests/gpu/check.hpp"

namespace dualdecoder::test {
namespace {

using testing::Hint;
using testing::StoreDriver;
using testing::Story;

constexpr double kOutBound = 2e-2;    // attention on the device takes weights in bf16; values are of variance 1
constexpr double kShareBound = 1e-3;  // of a share: what it may lie below the last one that was chosen

std::size_t at(int i) { return static_cast<std::size_t>(i); }

StoreOptions options_of(int head_dim, int heads, int kv_heads, int chunk, int rows) {
  return {.layers = 2,
          .heads = heads,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .max_context = 320,
          .max_sequences = 2,
          .rows_per_sequence = rows,
          .selection = {.chunk_tokens = chunk, .budget_tokens = 64, .sink_tokens = 16, .local_tokens = 24, .tail_estimate = false},
          .slots_per_budget = 1.0F,
          .selects_ahead = false};
}

/// Numbers of one KV head, keys and values as the store keeps them.
std::vector<double> row_of(const StoreOptions& options, const Story& story, Story::Part part, Layer layer, int kv_head, int position) {
  const bool query = part == Story::Part::query;
  const int width = (query ? options.heads / options.kv_heads : 1) * options.head_dim;
  std::vector<float> all;
  story.append(all, part, layer, position, width * options.kv_heads);
  std::vector<double> own;
  for (int i = 0; i < width; ++i) {
    const float x = all[at(kv_head * width + i)];
    own.push_back(static_cast<double>(query ? x : rounded_to_bf16(x)));
  }
  return own;
}

/// Largest share over the query group of every chunk that can be chosen, by the bounds of its keys.
std::vector<double> shares_by_bounds(const StoreOptions& options, const Story& context, Layer layer, int kv_head, const Story& row,
                                     int position, int length) {
  const SelectionOptions& selection = options.selection;
  const int chunk = selection.chunk_tokens;
  const int first = (selection.sink_tokens + chunk - 1) / chunk;
  const int count = std::max(0, (length - selection.local_tokens) / chunk - first);
  const auto dim = at(options.head_dim);
  const std::vector<double> queries = row_of(options, row, Story::Part::query, layer, kv_head, position);
  std::vector<double> best(at(count), 0.0);
  std::vector<std::vector<double>> least(at(count), std::vector<double>(dim, HUGE_VAL));
  std::vector<std::vector<double>> largest(at(count), std::vector<double>(dim, -HUGE_VAL));
  for (int t = first * chunk; t < (first + count) * chunk; ++t) {
    const std::vector<double> key = row_of(options, context, Story::Part::key, layer, kv_head, t);
    const std::size_t c = at(t / chunk - first);
    for (std::size_t d = 0; d < dim; ++d) {
      least[c][d] = std::min(least[c][d], key[d]);
      largest[c][d] = std::max(largest[c][d], key[d]);
    }
  }
  for (std::size_t g = 0; g < queries.size() / dim; ++g) {
    std::vector<double> weights;
    double sum = 0.0;
    for (std::size_t c = 0; c < at(count); ++c) {
      double bound = 0.0;
      for (std::size_t d = 0; d < dim; ++d) {
        const double q = queries[g * dim + d];
        bound += std::max(q * least[c][d], q * largest[c][d]);
      }
      weights.push_back(std::exp(bound / std::sqrt(static_cast<double>(dim))));
      sum += weights.back();
    }
    for (std::size_t c = 0; c < at(count); ++c) best[c] = std::max(best[c], weights[c] / sum);
  }
  return best;
}

/// A decorated store with what drives it.
class Bench {
 public:
  using Decorate = std::function<std::unique_ptr<KvStore>(std::unique_ptr<KvStore>)>;

  Bench(Backend& backend, const StoreOptions& options, const Decorate& decorate)
      : backend_(backend),
        store_(decorate(backend.make_store(options))),
        scheduler_(backend.make_scheduler({.layers = options.layers, .max_items_per_submit = 2 * store_->capacities().prefetch})),
        driver_(testing::workplace_of(backend), *store_, *scheduler_, options),
        capacity_(options.max_context) {}

  void start(int slot, const Story& story, int tokens, int block) {
    driver_.settle();
    store_->close(slot, backend_.stream());
    store_->open(slot, capacity_, backend_.stream());
    driver_.prefill(slot, story, tokens, block);
  }
  StoreDriver& driver() { return driver_; }
  KvStore& store() { return *store_; }

 private:
  Backend& backend_;
  std::unique_ptr<KvStore> store_;
  std::unique_ptr<TransferScheduler> scheduler_;
  StoreDriver driver_;
  int capacity_;
};

void check_bounds(Backend& backend) {
  for (const StoreOptions& options :
       {options_of(64, 8, 2, 16, 2), options_of(128, 6, 2, 8, 1), options_of(80, 5, 1, 4, 2), options_of(256, 16, 1, 32, 1)}) {
    Bench bench(backend, options, [&](std::unique_ptr<KvStore> inner) {
      return cuda::rank_by_bounds(std::move(inner), options, backend.memory(MemoryKind::device), backend.stream());
    });
    std::vector<StoreDriver::Place> places = {{0, RowMode::dual, Story(3), 203}, {1, RowMode::dual, Story(4), 31}};
    for (const StoreDriver::Place& place : places) bench.start(place.slot, place.story, place.position, 37);
    std::size_t lists = 0;
    for (int step = 0; step < 12; ++step) {
      for (StoreDriver::Place& place : places) place.mode = options.rows_per_sequence == 2 ? RowMode::dual : RowMode::single;
      const StoreDriver::Pass pass = bench.driver().pass(places, Hint::some, at(step + 1));
      for (Layer layer = 0; layer < options.layers; ++layer) {
        for (std::size_t list = 0; list < pass.chosen[at(layer)].size(); ++list) {
          const int row = static_cast<int>(list) / options.kv_heads;
          const StoreDriver::Place& place = places[at(row / options.rows_per_sequence)];
          const bool guess = row % options.rows_per_sequence == 1;
          const std::vector<double> shares =
              shares_by_bounds(options, place.story, layer, static_cast<int>(list) % options.kv_heads, guess ? place.guess : place.story,
                               place.position + (guess ? 1 : 0), place.position);
          std::vector<double> sorted = shares;
          std::sort(sorted.begin(), sorted.end(), std::greater<>());
          const std::size_t want = std::min(sorted.size(), at(options.selection.budget_tokens / options.selection.chunk_tokens));
          const std::vector<int>& chosen = pass.chosen[at(layer)][list];
          DUALDECODER_EXPECT(chosen.size() == want, "%zu chosen, %zu wanted", chosen.size(), want);
          DUALDECODER_EXPECT(std::adjacent_find(chosen.begin(), chosen.end(), std::greater_equal<>()) == chosen.end(), "not ascending");
          const int first = (options.selection.sink_tokens + options.selection.chunk_tokens - 1) / options.selection.chunk_tokens;
          for (const int chunk : chosen) {
            const int c = chunk - first;
            const double share = c >= 0 && at(c) < shares.size() ? shares[at(c)] : -1.0;
            DUALDECODER_EXPECT(share >= sorted[want - 1] * (1 - kShareBound), "dim %d: chunk %d with a share of %g, the last has %g",
                               options.head_dim, chunk, share, sorted[want - 1]);
          }
          lists += chosen.empty() ? 0 : 1;
        }
      }
      for (StoreDriver::Place& place : places) ++place.position;
    }
    DUALDECODER_EXPECT(lists > 0, "nothing could be chosen");
  }
}

double mean_cosine(const StoreOptions& options, const Story& story, Layer layer, int kv_head, int position) {
  const std::vector<double> now = row_of(options, story, Story::Part::query, layer, kv_head, position);
  const std::vector<double> before = row_of(options, story, Story::Part::query, layer, kv_head, position - 1);
  const auto dim = at(options.head_dim);
  double mean = 0.0;
  for (std::size_t g = 0; g < now.size(); g += dim) {
    double dot = 0.0;
    double a = 0.0;
    double b = 0.0;
    for (std::size_t i = g; i < g + dim; ++i) {
      dot += now[i] * before[i];
      a += now[i] * now[i];
      b += before[i] * before[i];
    }
    mean += dot / std::sqrt(a * b) / static_cast<double>(now.size() / dim);
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
  const auto dim = at(options.head_dim);
  const std::vector<double> queries = row_of(options, story, Story::Part::query, layer, kv_head, position);
  std::vector<double> out(queries.size(), 0.0);
  std::vector<double> weights(queries.size() / dim, 0.0);
  for (const int t : tokens) {
    const std::vector<double> key = row_of(options, story, Story::Part::key, layer, kv_head, t);
    const std::vector<double> value = row_of(options, story, Story::Part::value, layer, kv_head, t);
    for (std::size_t g = 0; g < weights.size(); ++g) {
      double dot = 0.0;
      for (std::size_t d = 0; d < dim; ++d) dot += queries[g * dim + d] * key[d];
      const double weight = std::exp(dot / std::sqrt(static_cast<double>(dim)));
      weights[g] += weight;
      for (std::size_t d = 0; d < dim; ++d) out[g * dim + d] += weight * value[d];
    }
  }
  for (std::size_t i = 0; i < out.size(); ++i) out[i] /= weights[i / dim];
  return out;
}

void check_predicted(Backend& backend) {
  for (const float correct_below : {0.0F, 0.05F}) {
    const StoreOptions options = options_of(64, 6, 2, 8, 1);
    Bench bench(backend, options, [&](std::unique_ptr<KvStore> inner) {
      return cuda::attend_predicted(std::move(inner), options, correct_below, backend.memory(MemoryKind::device), backend.stream());
    });
    const Story story(5);
    bench.start(0, Story(9), 200, 64);  // what was predicted goes with its sequence
    bench.driver().pass({{0, RowMode::single, Story(9), 200}}, Hint::row0);
    bench.driver().settle();
    const StoreStatistics before_all = bench.store().statistics();
    bench.start(0, story, 250, 64);
    std::map<std::pair<Layer, int>, std::vector<int>> predicted;
    std::uint64_t needed = 0;
    std::uint64_t hit = 0;
    int corrected = 0;
    double worst = 0.0;
    constexpr int kSteps = 12;
    for (int step = 0; step < kSteps; ++step) {
      const int position = 250 + step;
      const StoreDriver::Pass pass = bench.driver().pass({{0, RowMode::single, story, position}}, Hint::row0);
      for (Layer layer = 0; layer < options.layers; ++layer) {
        for (int head = 0; head < options.kv_heads; ++head) {
          const std::vector<int>& own = pass.chosen[at(layer)][at(head)];
          std::vector<int>& before = predicted[{layer, head}];
          const bool turned =
              step > 0 && correct_below > 0.0F && mean_cosine(options, story, layer, head, position) < static_cast<double>(correct_below);
          corrected += turned ? 1 : 0;
          needed += own.size();
          for (const int chunk : own) hit += static_cast<std::uint64_t>(std::count(before.begin(), before.end(), chunk));
          const std::vector<double> expected = attention(options, story, layer, head, position, step == 0 || turned ? own : before);
          const float* const got = pass.out[at(layer)].data() + at(head) * expected.size();
          for (std::size_t i = 0; i < expected.size(); ++i) {
            const double difference = std::abs(static_cast<double>(got[i]) - expected[i]);
            worst = difference <= worst ? worst : difference;  // a NaN becomes the worst and stays
          }
          before = own;
        }
      }
    }
    DUALDECODER_EXPECT(worst <= kOutBound, "differs from the formula by %g", worst);
    DUALDECODER_EXPECT(correct_below > 0.0F ? corrected > 8 && corrected < 4 * (kSteps - 1) : corrected == 0, "%d corrected", corrected);
    bench.driver().settle();
    const StoreStatistics statistics = bench.store().statistics();
    const std::uint64_t got_needed = statistics.needed - before_all.needed;
    const std::uint64_t got_hit = statistics.predicted_hit - before_all.predicted_hit;
    DUALDECODER_EXPECT(got_needed == needed, "%llu, want %llu", static_cast<unsigned long long>(got_needed),
                       static_cast<unsigned long long>(needed));
    DUALDECODER_EXPECT(got_hit == hit, "%llu, want %llu", static_cast<unsigned long long>(got_hit), static_cast<unsigned long long>(hit));
    DUALDECODER_EXPECT(statistics.predictable == needed * (kSteps - 1) / kSteps, "%llu",
                       static_cast<unsigned long long>(statistics.predictable));
    DUALDECODER_EXPECT(statistics.estimated == 0, "%llu", static_cast<unsigned long long>(statistics.estimated));
  }
}

/// The plans are what the memory is asked for.
void check_plans(Backend& backend) {
  const StoreOptions options = options_of(64, 6, 2, 8, 1);
  for (const bool bounds : {true, false}) {
    testing::CountingResource device(backend.memory(MemoryKind::device));
    MemoryPlan plan;
    {
      std::unique_ptr<KvStore> store = bounds
                                           ? cuda::rank_by_bounds(backend.make_store(options), options, device, backend.stream())
                                           : cuda::attend_predicted(backend.make_store(options), options, 0.8F, device, backend.stream());
      for (int slot = 0; slot < options.max_sequences; ++slot) store->open(slot, options.max_context, backend.stream());
      if (bounds) {
        cuda::plan_bounds(options, plan);
      } else {
        cuda::plan_predicted(options, 0.8F, plan);
      }
      DUALDECODER_EXPECT(device.live_bytes() == plan.device_bytes(), "%zu, planned %zu", device.live_bytes(), plan.device_bytes());
    }
    backend.synchronize(backend.stream());
    DUALDECODER_EXPECT(device.live_bytes() == 0, "%zu bytes left", device.live_bytes());
  }
}

void check_refusals(Backend& backend) {
  MemoryPlan plan;
  StoreOptions options = options_of(64, 6, 2, 8, 2);
  const std::string rows = thrown<InvalidArgument>("two rows", [&] { cuda::plan_predicted(options, 0.0F, plan); });
  DUALDECODER_EXPECT(rows.find("rows_per_sequence = 2: must be 1") == 0, "%s", rows.c_str());
  options.selection.tail_estimate = true;
  const std::string tail = thrown<InvalidArgument>(
      "a tail", [&] { cuda::rank_by_bounds(backend.make_store(options), options, backend.memory(MemoryKind::device), backend.stream()); });
  DUALDECODER_EXPECT(tail.find("tail_estimate = true") == 0, "%s", tail.c_str());
}

}  // namespace
}  // namespace dualdecoder::test

int main() {
  using namespace dualdecoder;
  return test::run_on_device([] {
    const std::shared_ptr<Backend> backend = cuda::make_cuda_backend();
    test::check_refusals(*backend);
    test::check_plans(*backend);
    test::check_bounds(*backend);
    test::check_predicted(*backend);
  });
}
