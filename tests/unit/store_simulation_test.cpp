// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
// The stores of the CPU backend live through seeded loads, evictions, adds, removes, truncates and lost transfers on a simulated link (see
// lanes_simulation_test.cpp). What row 0 gives is compared with the definition of dense or sparse attention in double precision, and with
// the bits of a twin that has a slot for everything, no predictions, and a link that moves at once: a chunk that is stale, torn or late
// changes them. Failures name their seed, and a seed replays.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/testing/store_driver.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "tests/catch.hpp"
#include "tests/unit/simulated_scheduler.hpp"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define DUALDECODER_TEST_SANITIZED
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DUALDECODER_TEST_SANITIZED
#endif

namespace dualdecoder::test {
namespace {

#ifdef DUALDECODER_TEST_SANITIZED
constexpr std::uint64_t kSeeds = 600;  // a sanitizer takes fifteen times as long
#else
constexpr std::uint64_t kSeeds = 6000;
#endif

using testing::Hint;
using testing::StoreDriver;
using testing::Story;

/// Moves everything inside submit().
class ImmediateScheduler final : public TransferScheduler {
 public:
  void submit(Lane, Layer, const TransferList& list, StreamRef) override {
    for (int i = 0; i < *list.count; ++i) {
      if (list.items[i].bytes > 0) std::memcpy(list.items[i].target, list.items[i].source, list.items[i].bytes);
    }
  }
  void wait(Lane, Layer, StreamRef) override {}
  void drain(StreamRef) override {}
  LaneStatistics statistics(Lane) const override { return {}; }
};

/// Row 0's attention from its definition, in double precision: exact over sinks, chosen chunks, window and itself, and where the options
/// ask for it every other chunk as tokens that all have its mean key and the mean value of its group (docs/concepts.md, "Tail estimate";
/// keys int8 and values int4 with one scale each). `chosen` holds the chunks of each KV head. Tails are not calibrated here.
class SparseTwin {
 public:
  SparseTwin(const StoreOptions& options, const Story& story, Layer layer, int position)
      : options_(options),
        dim_(static_cast<std::size_t>(options.head_dim)),
        width_(static_cast<std::size_t>(options.kv_heads) * dim_),
        position_(position) {
    for (int token = 0; token <= position; ++token) {
      story.append(keys_, Story::Part::key, layer, token, static_cast<int>(width_));
      story.append(values_, Story::Part::value, layer, token, static_cast<int>(width_));
    }
    story.append(queries_, Story::Part::query, layer, position, options.heads * options.head_dim);
  }

  std::vector<double> attend(int head, const std::vector<int>& chosen) const {
    const int chunk = options_.selection.chunk_tokens;
    const int sinks = (options_.selection.sink_tokens + chunk - 1) / chunk;
    const int window = std::max(sinks, (position_ - options_.selection.local_tokens) / chunk);
    std::vector<double> sum(dim_ + 1, 0.0);  // values, then the mass
    for (int token = 0; token <= position_; ++token) {
      const int c = token / chunk;
      if (c < sinks || c >= window || std::binary_search(chosen.begin(), chosen.end(), c))
        add(head, numbers(keys_, head, token, 1), numbers(values_, head, token, 1), 1, sum);
    }
    for (int c = sinks; options_.selection.tail_estimate && c < window; ++c) {
      if (std::binary_search(chosen.begin(), chosen.end(), c)) continue;
      const int together = options_.selection.value_group_chunks;
      const int group = c / together * together;
      const int whole = std::min(together, position_ / chunk - group);  // chunks of the group
      add(head, quantised(numbers(keys_, head, c * chunk, chunk), 127), quantised(numbers(values_, head, group * chunk, whole * chunk), 7),
          chunk, sum);
    }
    for (std::size_t i = 0; i < dim_; ++i) sum[i] /= sum[dim_];
    sum.pop_back();
    return sum;
  }

 private:
  // Mean of `count` tokens in the KV head of `head`.
  std::vector<double> numbers(const std::vector<float>& of, int head, int token, int count) const {
    const auto kv = static_cast<std::size_t>(head / (options_.heads / options_.kv_heads));
    std::vector<double> mean(dim_, 0.0);
    for (int t = token; t < token + count; ++t) {
      for (std::size_t i = 0; i < dim_; ++i)
        mean[i] += static_cast<double>(of[static_cast<std::size_t>(t) * width_ + kv * dim_ + i]) / count;
    }
    return mean;
  }
  static std::vector<double> quantised(std::vector<double> mean, int levels) {
    double largest = 0;
    for (double x : mean) largest = std::max(largest, std::abs(x));
    const double scale = largest / levels;
    for (double& x : mean) x = scale > 0 ? std::round(x / scale) * scale : 0.0;
    return mean;
  }
  void add(int head, const std::vector<double>& key, const std::vector<double>& value, int tokens, std::vector<double>& sum) const {
    double score = 0;
    for (std::size_t i = 0; i < dim_; ++i) score += static_cast<double>(queries_[static_cast<std::size_t>(head) * dim_ + i]) * key[i];
    const double mass = tokens * std::exp(score / std::sqrt(static_cast<double>(dim_)));
    for (std::size_t i = 0; i < dim_; ++i) sum[i] += mass * value[i];
    sum[dim_] += mass;
  }

  const StoreOptions& options_;
  std::size_t dim_;
  std::size_t width_;
  int position_;
  std::vector<float> keys_;
  std::vector<float> values_;
  std::vector<float> queries_;
};

struct Sequence {
  bool open = false;
  int capacity = 0;
  int position = 0;
  Story story{};
};

/// A store with its scheduler; the two of a simulation go through the same life.
struct Actor {
  Actor(Backend& backend, const StoreOptions& store_options, std::unique_ptr<TransferScheduler> lanes)
      : options(store_options),
        store(backend.make_store(store_options)),
        scheduler(std::move(lanes)),
        driver(testing::workplace_of(backend), *store, *scheduler, store_options) {}
  StoreOptions options;
  std::unique_ptr<KvStore> store;
  std::unique_ptr<TransferScheduler> scheduler;
  StoreDriver driver;
};

/// What a seed stands for.
struct Plan {
  StoreOptions options;
  SchedulerOptions lanes;
  SimulationOptions simulation;
  bool covers_context = false;
};

Plan plan_of(std::uint64_t seed) {
  testing::Random random(seed);
  Plan plan;
  StoreOptions& options = plan.options;
  const int kind = random.below(10);
  options.kind = kind == 0 ? StoreKind::full : kind < 4 ? StoreKind::ping_pong : StoreKind::resident;
  options.layers = (options.kind == StoreKind::ping_pong ? 2 : 1) + random.below(3);
  options.kv_heads = 1 + random.below(2);
  options.heads = options.kv_heads * (1 + random.below(2));
  options.head_dim = random.chance(0.5) ? 8 : 16;
  options.max_context = 96;
  options.max_sequences = 1 + random.below(3);
  options.rows_per_sequence = 2;
  options.kv_type = random.chance(0.7) ? DataType::f32 : DataType::bf16;
  options.selection.chunk_tokens = random.chance(0.7) ? 4 : 8;
  options.selection.sink_tokens = random.below(10);
  options.selection.local_tokens = 1 + random.below(12);
  options.selection.tail_estimate = random.chance(0.7);
  options.selection.calibrate_tail = random.chance(0.3);
  if (testing::Random together(seed ^ 0x96000U); together.chance(0.5)) options.selection.value_group_chunks = 2 << together.below(2);
  plan.covers_context = random.chance(0.3);
  options.selection.budget_tokens = plan.covers_context ? options.max_context : options.selection.chunk_tokens * (1 + random.below(4));
  options.slots_per_budget = 1.0F + static_cast<float>(random.below(5)) * 0.5F;
  options.miss_policy = plan.covers_context || random.chance(0.7) ? MissPolicy::wait : MissPolicy::estimate;
  options.prefetch_bytes_per_step = random.chance(0.2) ? static_cast<std::size_t>(1 + random.below(2000)) : 0;
  if (testing::Random low_bit(seed ^ 0x10b17U); options.kind != StoreKind::full && low_bit.chance(0.25)) {
    options.kind = StoreKind::specache;
    options.specache = {.bits = 1 + low_bit.below(2),
                        .group = 32,
                        .exact_tokens = plan.covers_context ? options.max_context : 1 + low_bit.below(20),
                        .fetched_tokens = low_bit.below(12)};
  }
  plan.lanes.layers = options.layers;
  plan.lanes.bytes_per_second = random.chance(0.3) ? 0.0 : 1e6 * static_cast<double>(1 + random.below(200));
  plan.lanes.latency = std::chrono::microseconds(random.below(20));
  plan.lanes.single_lane = random.chance(0.2);
  plan.simulation.seed = seed;
  plan.simulation.fault_probability = random.chance(0.3) ? 0.002 : 0.0;
  plan.simulation.compute = std::chrono::microseconds(random.chance(0.3) ? 0 : 1 << random.below(10));
  plan.simulation.extra_delay = std::chrono::microseconds(random.chance(0.3) ? 0 : 1 << random.below(12));
  return plan;
}

class Simulation {
 public:
  Simulation(Backend& backend, std::uint64_t seed)
      : random_(seed ^ 0x5eedU),
        plan_(plan_of(seed)),
        link_(new SimulatedScheduler(plan_.lanes, plan_.simulation)),
        real_(backend, plan_.options, std::unique_ptr<TransferScheduler>(link_)),
        twin_(backend, twin_options(plan_.options), std::make_unique<ImmediateScheduler>()),
        sequences_(static_cast<std::size_t>(plan_.options.max_sequences)) {}

  /// Empty, or what went wrong.
  std::string run(int rounds) {
    for (int round = 0; round < rounds && trouble_.empty(); ++round) {
      change(random_.below(plan_.options.max_sequences));
      pass();
    }
    return trouble_;
  }

  std::uint64_t compared() const { return compared_; }
  std::uint64_t compared_with_definition() const { return defined_; }
  std::uint64_t lost_items() const { return link_->lost_items(); }
  StoreStatistics statistics() const { return real_.store->statistics(); }

 private:
  static StoreOptions twin_options(StoreOptions options) {
    if (options.miss_policy == MissPolicy::estimate) return options;  // residency shows there, so the twin keeps its slots
    options.slots_per_budget = 64.0F;
    options.prefetch_bytes_per_step = 0;
    return options;
  }

  template <class Action>
  void both(Action&& action) {
    action(real_);
    action(twin_);
  }

  // Everything under way has arrived; what was lost takes every open sequence with it, since nobody can say whose it was.
  void settle() {
    twin_.driver.settle();
    try {
      real_.driver.settle();
    } catch (const SimulatedFault&) {
      abandon();
    }
  }
  void abandon() {
    while (true) {
      try {
        real_.driver.settle();
        break;
      } catch (const SimulatedFault&) {  // another one; all of them are drained now or next time
      }
    }
    for (std::size_t slot = 0; slot < sequences_.size(); ++slot) {
      if (sequences_[slot].open) close(static_cast<int>(slot));
    }
  }
  void close(int slot) {
    both([&](Actor& actor) { actor.store->close(slot, stream_); });
    sequences_[static_cast<std::size_t>(slot)] = {};
  }

  // Adds, removes or rewinds the sequence in `slot`, or leaves it.
  void change(int slot) {
    Sequence& sequence = sequences_[static_cast<std::size_t>(slot)];
    if (!sequence.open) {
      if (random_.chance(0.9)) add(slot);
    } else if (sequence.position >= sequence.capacity || random_.chance(0.08)) {
      settle();
      if (sequence.open) close(slot);
      if (random_.chance(0.7)) add(slot);
    } else if (random_.chance(0.1)) {
      settle();
      if (!sequence.open) return;
      sequence.position = 1 + random_.below(sequence.position);
      sequence.story = sequence.story.continued(sequence.position, random_.next());
      both([&](Actor& actor) { actor.store->truncate(slot, sequence.position, stream_); });
    }
  }
  void add(int slot) {
    Sequence& sequence = sequences_[static_cast<std::size_t>(slot)];
    sequence.open = true;
    sequence.capacity = 20 + random_.below(plan_.options.max_context - 19);
    sequence.position = 1 + random_.below(sequence.capacity - 1);
    sequence.story = Story(random_.next());
    const int block = 1 + random_.below(40);
    both([&](Actor& actor) {
      actor.store->open(slot, sequence.capacity, stream_);
      actor.driver.prefill(slot, sequence.story, sequence.position, block);
    });
  }

  std::vector<StoreDriver::Place> places() {
    std::vector<StoreDriver::Place> places;
    for (int slot = 0; slot < plan_.options.max_sequences; ++slot) {
      const Sequence& sequence = sequences_[static_cast<std::size_t>(slot)];
      StoreDriver::Place place;
      place.slot = slot;
      place.story = sequence.story;
      place.position = sequence.position;
      place.guess = Story(random_.chance(0.6) ? 0 : random_.next());
      if (random_.chance(0.6)) place.guess = sequence.story;  // the guess turns out right
      const int die = random_.below(10);
      place.mode = !sequence.open || sequence.position >= sequence.capacity || die == 0 ? RowMode::idle
                   : die == 1                                                           ? RowMode::resync
                   : die == 2                                                           ? RowMode::single
                                                                                        : RowMode::dual;
      place.waits = random_.chance(0.2);
      places.push_back(place);
    }
    for (std::size_t i = places.size(); i > 1; --i)
      std::swap(places[i - 1], places[static_cast<std::size_t>(random_.below(static_cast<int>(i)))]);
    return places;
  }

  void pass() {
    const std::vector<StoreDriver::Place> rows = places();
    const Hint hint = static_cast<Hint>(random_.below(5));
    const std::uint64_t seed = random_.next();
    StoreDriver::Pass got;
    try {
      got = real_.driver.pass(rows, hint, seed);
    } catch (const SimulatedFault&) {
      abandon();
      return;
    }
    const Hint twin_hint = plan_.options.miss_policy == MissPolicy::wait ? Hint::none : hint;
    const StoreDriver::Pass expected = twin_.driver.pass(rows, twin_hint, seed);
    if (!got.lists_fit) trouble_ = "a list is longer than its capacity";
    for (std::size_t p = 0; p < rows.size(); ++p) {
      if (!row_is_live(rows[p].mode, 0)) continue;
      for (Layer layer = 0; layer < plan_.options.layers; ++layer) compare(layer, p, rows[p], got, expected);
      ++sequences_[static_cast<std::size_t>(rows[p].slot)].position;
    }
  }

  void compare(Layer layer, std::size_t place, const StoreDriver::Place& row, const StoreDriver::Pass& got,
               const StoreDriver::Pass& expected) {
    const auto l = static_cast<std::size_t>(layer);
    const std::size_t width = static_cast<std::size_t>(plan_.options.heads * plan_.options.head_dim);
    const float* ours = got.out[l].data() + place * 2 * width;
    const float* theirs = expected.out[l].data() + place * 2 * width;
    ++compared_;
    const std::string where =
        "layer " + std::to_string(layer) + ", slot " + std::to_string(row.slot) + ", position " + std::to_string(row.position);
    if (std::memcmp(ours, theirs, width * sizeof(float)) != 0) trouble_ = "row 0 differs from the twin's: " + where;
    for (int head = 0; head < plan_.options.kv_heads; ++head) {
      const std::size_t list = place * 2 * static_cast<std::size_t>(plan_.options.kv_heads) + static_cast<std::size_t>(head);
      if (got.chosen[l][list] != expected.chosen[l][list]) trouble_ = "row 0 chose other chunks than the twin: " + where;
    }
    const double tolerance = plan_.options.kv_type == DataType::f32 ? 1e-3 : 4e-2;
    const auto differs = [&](const std::vector<double>& definition, std::size_t first) {
      for (std::size_t i = 0; i < definition.size(); ++i) {
        if (!(std::abs(static_cast<double>(ours[first + i]) - definition[i]) <= tolerance)) return true;
      }
      return false;
    };
    if (plan_.options.miss_policy != MissPolicy::wait || !random_.chance(0.25)) return;  // the definitions are slow
    if (plan_.covers_context || plan_.options.kind == StoreKind::full) {
      const std::pair<Story, int> now{row.story, row.position};
      if (differs(testing::dense_attention(plan_.options, row.story, layer, row.position, {now}, now), 0))
        trouble_ = "row 0 differs from dense attention: " + where;
    } else if (plan_.options.kind != StoreKind::specache &&
               (!plan_.options.selection.tail_estimate || !plan_.options.selection.calibrate_tail)) {
      const SparseTwin definition(plan_.options, row.story, layer, row.position);
      for (int head = 0; head < plan_.options.heads; ++head) {
        const int kv = head / (plan_.options.heads / plan_.options.kv_heads);
        const std::vector<int>& chosen =
            got.chosen[l][place * 2 * static_cast<std::size_t>(plan_.options.kv_heads) + static_cast<std::size_t>(kv)];
        if (differs(definition.attend(head, chosen), static_cast<std::size_t>(head * plan_.options.head_dim)))
          trouble_ = "row 0 differs from the definition of sparse attention: " + where;
      }
      ++defined_;
    }
  }

  testing::Random random_;
  Plan plan_;
  SimulatedScheduler* link_;  // owned by real_
  Actor real_;
  Actor twin_;
  std::vector<Sequence> sequences_;
  StreamRef stream_{static_cast<CUstream_st*>(nullptr)};
  std::string trouble_;
  std::uint64_t compared_ = 0;
  std::uint64_t defined_ = 0;
};

}  // namespace

TEST_CASE("the stores read no stale, torn or late chunk under any interleaving of the lanes", "[simulation][store]") {
  const std::shared_ptr<Backend> backend = cpu::make_cpu_backend({.threads = 1});
  std::uint64_t compared = 0;
  std::uint64_t defined = 0;
  std::uint64_t lost = 0;
  std::uint64_t prefetched = 0;
  std::uint64_t urgent = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Simulation simulation(*backend, seed);
    const std::string trouble = simulation.run(24);
    if (!trouble.empty()) {
      INFO("seed " << seed);
      FAIL(trouble);
    }
    compared += simulation.compared();
    defined += simulation.compared_with_definition();
    lost += simulation.lost_items();
    prefetched += simulation.statistics().prefetch_bytes;
    urgent += simulation.statistics().urgent_bytes;
  }
  CHECK(compared > kSeeds * 50);
  CHECK(defined > kSeeds * 3);
  CHECK(lost > kSeeds / 20);
  CHECK(prefetched > kSeeds * 500);
  CHECK(urgent > kSeeds * 500);
}

}  // namespace dualdecoder::test
