// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The store of a low-bit copy against a twin in double precision that follows the publication.
#include "src/specache_store.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "dualdecoder/testing/store_conformance.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/simulated_scheduler.hpp"
#include "tests/unit/specache_twin.hpp"

using namespace dualdecoder;
using testing::Hint;
using testing::StoreDriver;
using testing::Story;
using Twin = test::SpeCacheTwin;

namespace {

StoreOptions small_options(int bits = 2) {
  return {.kind = StoreKind::specache,
          .layers = 2,
          .heads = 6,
          .kv_heads = 2,
          .head_dim = 16,
          .max_context = 320,
          .max_sequences = 2,
          .rows_per_sequence = 2,
          .row1_set = Row1Set::row0,
          .kv_type = DataType::f32,
          .specache = {.bits = bits, .group = 32, .exact_tokens = 20, .fetched_tokens = 12},
          .miss_policy = MissPolicy::estimate};
}

using MakeScheduler = std::function<std::unique_ptr<TransferScheduler>(const SchedulerOptions&)>;

/// Store, scheduler and driver with the twins of its sequences.
class Bench {
 public:
  explicit Bench(const StoreOptions& options, const MakeScheduler& make_scheduler = {}) : options_(options) {
    store_ = backend_->make_store(options);
    SchedulerOptions link;
    link.layers = options.layers;
    const KvStore::Capacities capacities = store_->capacities();
    link.max_items_per_submit = std::max({1, capacities.prefetch, capacities.write_back});
    scheduler_ = make_scheduler ? make_scheduler(link) : backend_->make_scheduler(link);
    driver_ = std::make_unique<StoreDriver>(testing::workplace_of(*backend_), *store_, *scheduler_, options);
  }

  void start(int slot, const Story& story, int tokens) {
    store_->open(slot, options_.max_context, backend_->stream());
    driver_->prefill(slot, story, tokens, 50);
    stories_.insert_or_assign(slot, story);
    twins_.insert_or_assign(slot, Twin(options_, story, tokens));
  }
  void truncate(int slot, int tokens, const Story& next) {
    driver_->settle();
    store_->truncate(slot, tokens, backend_->stream());
    stories_.insert_or_assign(slot, next);
    twins_.at(slot).truncate(tokens, next);
  }

  /// One dual pass of all sequences, checked against the twins; adds what the twins fetch to `fetched` and `wanted`.
  void step(Hint hint, int number) {
    std::vector<StoreDriver::Place> places;
    for (const auto& [slot, twin] : twins_) {
      places.push_back({slot, RowMode::dual, stories_.at(slot), twin.length(), Story(static_cast<std::uint64_t>(900 + number)), false});
    }
    const StoreDriver::Pass pass = driver_->pass(places, hint);
    for (Layer layer = 0; layer < options_.layers; ++layer) {
      for (std::size_t p = 0; p < places.size(); ++p) {
        for (int head = 0; head < options_.kv_heads; ++head) check(pass, layer, places[p], static_cast<int>(p), head, hint);
      }
    }
    for (auto& [slot, twin] : twins_) twin.commit();
  }

  KvStore& store() { return *store_; }
  StoreDriver& driver() { return *driver_; }
  Backend& backend() { return *backend_; }
  double worst() const { return worst_; }
  std::uint64_t wanted() const { return wanted_; }
  std::uint64_t needed() const { return needed_; }
  std::uint64_t hit() const { return hit_; }

 private:
  bool waits() const { return options_.miss_policy == MissPolicy::wait; }

  /// That `chosen` are the best by `shares`, but for what rounding may swap.
  void check_best(const std::vector<int>& chosen, const std::vector<double>& shares) const {
    std::vector<double> sorted = shares;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const std::size_t count = std::min(sorted.size(), static_cast<std::size_t>(options_.specache.fetched_tokens));
    REQUIRE(chosen.size() == count);
    REQUIRE(std::adjacent_find(chosen.begin(), chosen.end(), std::greater_equal<>()) == chosen.end());
    for (const int token : chosen) REQUIRE(shares.at(static_cast<std::size_t>(token)) >= sorted[count - 1] * (1 - 1e-5));
  }
  void check_out(const std::vector<float>& out, std::size_t first, const std::vector<double>& expected) {
    for (std::size_t i = 0; i < expected.size(); ++i) worst_ = std::max(worst_, std::abs(out[first + i] - expected[i]));
  }
  void check(const StoreDriver::Pass& pass, Layer layer, const StoreDriver::Place& place, int p, int head, Hint hint) {
    Twin& twin = twins_.at(place.slot);
    const int position = place.position;
    const auto list = [&](int row) {
      return pass.chosen[static_cast<std::size_t>(layer)][static_cast<std::size_t>((p * 2 + row) * options_.kv_heads + head)];
    };
    const std::vector<int> own = list(0);
    const std::vector<int> guessed = list(1);
    check_best(own, twin.shares(layer, head, place.story, position, !waits()));
    check_best(guessed, twin.shares(layer, head, place.guess, position + 1, !waits()));
    needed_ += own.size();
    for (const int token : own) hit_ += twin.fetched(layer, head).count(token);
    if (waits()) twin.fetch(layer, head, own);
    const std::vector<float>& out = pass.out[static_cast<std::size_t>(layer)];
    const std::size_t width = static_cast<std::size_t>(options_.heads / options_.kv_heads * options_.head_dim);
    const auto at = [&](int row) { return static_cast<std::size_t>((p * 2 + row) * options_.kv_heads + head) * width; };
    const std::pair<Story, int> row0{place.story, position};
    check_out(out, at(0), twin.attend(layer, head, {row0}));
    check_out(out, at(1), twin.attend(layer, head, {row0, {place.guess, position + 1}}));
    const std::vector<int> predicted = hint == Hint::row1 ? guessed : std::vector<int>();
    for (const int token : predicted) wanted_ += 1 - twin.fetched(layer, head).count(token);
    twin.fetch(layer, head, predicted);
  }

  StoreOptions options_;
  std::shared_ptr<Backend> backend_ = cpu::make_cpu_backend({.threads = 2});
  std::unique_ptr<KvStore> store_;
  std::unique_ptr<TransferScheduler> scheduler_;
  std::unique_ptr<StoreDriver> driver_;
  std::map<int, Story> stories_;
  std::map<int, Twin> twins_;
  double worst_ = 0;
  std::uint64_t wanted_ = 0;  // tokens that the twins fetched for the next step
  std::uint64_t needed_ = 0;
  std::uint64_t hit_ = 0;  // of the needed: fetched before
};

/// Numbers of row 0 over some steps, every step's row 1 predicting for the next.
std::vector<float> decode(const StoreOptions& options, const MakeScheduler& make_scheduler) {
  Bench bench(options, make_scheduler);
  bench.start(0, Story(1), 150);
  std::vector<float> numbers;
  for (int step = 0; step < 30; ++step) {
    const StoreDriver::Pass pass = bench.driver().pass({{0, RowMode::dual, Story(1), 150 + step, Story(50), false}}, Hint::row1);
    for (const std::vector<float>& out : pass.out) numbers.insert(numbers.end(), out.begin(), out.end());
  }
  return numbers;
}

}  // namespace

TEST_CASE("both rows see the copy with what the step before fetched laid over it") {
  for (const auto& [bits, type] : {std::pair(1, DataType::f32), std::pair(2, DataType::bf16)}) {
    INFO(bits << " bits, " << name_of(type));
    StoreOptions options = small_options(bits);
    options.kv_type = type;
    Bench bench(options);
    bench.start(0, Story(11), 150);  // 128 tokens in the copy
    bench.start(1, Story(12), 45);   // none, its first group comes with the seventh token
    for (int step = 0; step < 40; ++step) bench.step(Hint::row1, step);
    CHECK(bench.worst() < 2e-5);

    bench.driver().settle();
    const StoreStatistics statistics = bench.store().statistics();
    const std::uint64_t token_bytes = 2 * 16 * size_of(type);
    CHECK(statistics.urgent_bytes == 0);
    CHECK(statistics.prefetch_bytes == bench.wanted() * token_bytes);
    CHECK(statistics.needed == bench.needed());
    CHECK(statistics.resident_hit == bench.hit());
    CHECK(statistics.estimated == bench.needed() - bench.hit());
    // 150 -> 190 completes the group that ends at 160; 45 -> 85 one that ends at 64
    CHECK(statistics.write_back_bytes == 2 * 4 * 32 * token_bytes);
  }
}

TEST_CASE("without prediction the rows see the bare copy") {
  for (const int fetched : {0, 12}) {
    StoreOptions options = small_options();
    options.specache.fetched_tokens = fetched;
    Bench bench(options);
    bench.start(0, Story(11), 150);
    for (int step = 0; step < 5; ++step) bench.step(Hint::none, step);
    CHECK(bench.worst() < 2e-5);
    bench.driver().settle();
    CHECK(bench.store().statistics().prefetch_bytes == 0);
  }
}

TEST_CASE("values in more than one group of channels") {
  StoreOptions options = small_options(1);
  options.head_dim = 80;  // 32 + 32 + 16
  options.layers = 1;
  Bench bench(options);
  bench.start(0, Story(13), 100);
  for (int step = 0; step < 6; ++step) bench.step(Hint::row1, step);
  CHECK(bench.worst() < 2e-5);
}

TEST_CASE("under wait row 0's own tokens are laid over the copy") {
  StoreOptions options = small_options();
  options.miss_policy = MissPolicy::wait;
  Bench bench(options);
  bench.start(0, Story(11), 150);
  for (int step = 0; step < 12; ++step) bench.step(Hint::row1, step);
  CHECK(bench.worst() < 2e-5);
  bench.driver().settle();
  CHECK(bench.store().statistics().estimated == 0);
  CHECK(bench.store().statistics().urgent_bytes == (bench.needed() - bench.hit()) * 2 * 16 * 4);
}

TEST_CASE("a context of many tiles") {
  StoreOptions options = small_options();
  options.layers = 1;
  options.max_context = 1400;
  options.max_sequences = 1;
  options.specache = {.bits = 2, .group = 64, .exact_tokens = 600, .fetched_tokens = 64};  // tiles of copy and window, the last ones ragged
  Bench bench(options);
  bench.start(0, Story(21), 1300);
  for (int step = 0; step < 3; ++step) bench.step(Hint::row1, step);
  CHECK(bench.worst() < 2e-5);
}

TEST_CASE("after a truncation the copy grows anew from the kept tokens") {
  Bench bench(small_options());
  bench.start(0, Story(31), 150);
  for (int step = 0; step < 20; ++step) bench.step(Hint::row1, step);
  const Story other = Story(31).continued(101, 77);  // in the midst of a group
  bench.truncate(0, 101, other);
  for (int step = 0; step < 60; ++step) bench.step(Hint::row1, 100 + step);
  bench.truncate(0, 5, other);
  for (int step = 0; step < 60; ++step) bench.step(Hint::row1, 200 + step);
  CHECK(bench.worst() < 2e-5);
}

TEST_CASE("a slot that is opened again remembers nothing") {
  Bench bench(small_options());
  bench.start(0, Story(41), 150);
  for (int step = 0; step < 4; ++step) bench.step(Hint::row1, step);
  bench.driver().settle();
  bench.store().close(0, bench.backend().stream());
  bench.start(0, Story(42), 120);
  for (int step = 0; step < 4; ++step) bench.step(Hint::row1, 10 + step);
  CHECK(bench.worst() < 2e-5);
}

TEST_CASE("the speed of the link changes no bit") {
  const StoreOptions options = small_options();
  const std::vector<float> expected = decode(options, {});
  CHECK(decode(options, [](SchedulerOptions link) {
          link.bytes_per_second = 2e6;
          link.latency = std::chrono::microseconds(20);
          return cpu::make_cpu_backend({.threads = 1})->make_scheduler(link);
        }) == expected);
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    CHECK(decode(options, [seed](SchedulerOptions link) {
            link.bytes_per_second = 1e6 * static_cast<double>(seed);
            test::SimulationOptions simulation;
            simulation.seed = seed;
            simulation.extra_delay = std::chrono::milliseconds(2);
            return std::make_unique<test::SimulatedScheduler>(link, simulation);
          }) == expected);
  }
}

TEST_CASE("a bound on prefetch brings the best tokens first and counts the others") {
  StoreOptions options = small_options();
  options.max_sequences = 1;
  options.prefetch_bytes_per_step = 2 * 5 * 2 * 16 * 4;  // five tokens a layer
  Bench bench(options);
  bench.start(0, Story(11), 150);
  bench.driver().pass({{0, RowMode::dual, Story(11), 150, Story(50), false}}, Hint::row1);
  bench.driver().settle();
  CHECK(bench.store().statistics().prefetch_bytes == options.prefetch_bytes_per_step);
  CHECK(bench.store().statistics().prefetch_dropped == 2 * (2 * 12 - 5));
}

TEST_CASE("a bound on prefetch below one load is one load a layer") {
  StoreOptions options = small_options();
  options.max_sequences = 1;
  options.prefetch_bytes_per_step = 1;
  Bench bench(options);
  bench.start(0, Story(11), 150);
  bench.driver().pass({{0, RowMode::dual, Story(11), 150, Story(50), false}}, Hint::row1);
  bench.driver().settle();
  CHECK(bench.store().statistics().prefetch_bytes == 2 * 2 * 16 * 4);  // a token in each of two layers
  CHECK(bench.store().statistics().prefetch_dropped == 2 * (2 * 12 - 1));
}

TEST_CASE("the memory plan names every kind and holds") {
  for (const DataType type : {DataType::f32, DataType::bf16}) {
    const std::shared_ptr<Backend> host = cpu::make_cpu_backend({.threads = 2});
    testing::CountingResource device(host->memory(MemoryKind::device));
    testing::CountingResource pinned(host->memory(MemoryKind::pinned));
    const std::shared_ptr<Backend> backend = cpu::make_cpu_backend({.threads = 2, .device = &device, .pinned = &pinned});
    StoreOptions options = small_options();
    options.kv_type = type;
    const MemoryPlan plan = backend->store_plan(options);
    std::set<std::string> names;
    for (const MemoryPlan::Item& item : plan.items) names.insert(item.what);
    CHECK(names == std::set<std::string>{"attention work space", "low-bit copy", "exact last tokens", "fetched tokens", "keys and values"});
    {
      const std::unique_ptr<KvStore> store = backend->make_store(options);
      for (int slot = 0; slot < options.max_sequences; ++slot) store->open(slot, options.max_context, backend->stream());
      CHECK(device.live_bytes() == plan.device_bytes());
      CHECK(pinned.live_bytes() == plan.pinned_bytes());
    }
    CHECK(device.live_bytes() == 0);
    CHECK(pinned.live_bytes() == 0);
  }
}

TEST_CASE("options of the low-bit copy are checked") {
  const auto refused = [](SpeCacheOptions wrong, std::initializer_list<const char*> parts) {
    StoreOptions options = small_options();
    options.specache = wrong;
    test::expect_error<InvalidArgument>([&] { validate(options); }, parts);
  };
  refused({.bits = 3}, {"specache.bits = 3", "1 or 2"});
  refused({.group = 48}, {"specache.group = 48", "32 or 64"});
  refused({.exact_tokens = 0}, {"specache.exact_tokens = 0", "in 1 .."});
  refused({.fetched_tokens = -1}, {"specache.fetched_tokens = -1", "in 0 .. 4096"});
}
