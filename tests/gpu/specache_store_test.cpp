// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend's store of a low-bit copy: it honours KvStore, its copy holds the codes of the CPU backend's, choices and results are
// those of a twin in double precision that follows the publication, and a session decodes with it as planned.
#include "cuda/specache_store.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/cuda/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "dualdecoder/testing/store_conformance.hpp"
#include "src/low_bit.hpp"
#include "tests/gpu/check.hpp"
#include "tests/gpu/small_config.hpp"
#include "tests/unit/specache_twin.hpp"

namespace dualdecoder::test {
namespace {

using testing::Hint;
using testing::StoreDriver;
using testing::Story;

constexpr double kOutBound = 2e-2;    // attention on the device takes weights in bf16; values are of variance 1
constexpr double kShareBound = 1e-3;  // of a share: what it may lie below the last one that was chosen

std::size_t at(int i) { return static_cast<std::size_t>(i); }

struct Shape {
  int bits;
  int group;
  int dim;
  int heads;
  int kv_heads;
  MissPolicy policy = MissPolicy::estimate;
  int fetched = 12;
  int exact = 20;
  int max_context = 420;
};

std::string name_of(const Shape& shape) {
  return std::to_string(shape.bits) + " bits in groups of " + std::to_string(shape.group) + ", dim " + std::to_string(shape.dim) +
         ", heads " + std::to_string(shape.heads) + "/" + std::to_string(shape.kv_heads) +
         (shape.policy == MissPolicy::wait ? ", wait" : ", estimate");
}

StoreOptions options_of(const Shape& shape) {
  return {.kind = StoreKind::specache,
          .layers = 2,
          .heads = shape.heads,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.dim,
          .max_context = shape.max_context,
          .max_sequences = 2,
          .rows_per_sequence = 2,
          .row1_set = Row1Set::row0,
          .specache = {.bits = shape.bits, .group = shape.group, .exact_tokens = shape.exact, .fetched_tokens = shape.fetched},
          .miss_policy = shape.policy};
}

testing::StoreSubject subject_of(Backend& backend, int head_dim, int bits) {
  const auto make = [&backend, bits](StoreOptions options) {
    // small enough for the suite's contexts; a budget that covers the context is an exact window that does
    const bool covers = options.selection.budget_tokens >= options.max_context;
    options.specache = {.bits = bits, .group = 32, .exact_tokens = covers ? options.max_context : 12, .fetched_tokens = 20};
    return backend.make_store(options);
  };
  return {make,
          [&backend](const SchedulerOptions& options) { return backend.make_scheduler(options); },
          testing::workplace_of(backend),
          StoreKind::specache,
          DataType::bf16,
          head_dim};
}

/// Store, scheduler and driver with the twins of its sequences. What the store chose is what the twins fetch, so they do not part.
class Bench {
 public:
  Bench(Backend& backend, const Shape& shape)
      : backend_(backend),
        name_(name_of(shape)),
        options_(options_of(shape)),
        store_(backend.make_store(options_)),
        scheduler_(backend.make_scheduler(link())),
        driver_(testing::workplace_of(backend), *store_, *scheduler_, options_) {}

  void start(int slot, const Story& story, int tokens, int block) {
    store_->open(slot, options_.max_context, backend_.stream());
    driver_.prefill(slot, story, tokens, block);
    stories_.insert_or_assign(slot, story);
    twins_.insert_or_assign(slot, SpeCacheTwin(options_, story, tokens));
  }
  void truncate(int slot, int tokens, const Story& next) {
    driver_.settle();
    store_->truncate(slot, tokens, backend_.stream());
    stories_.insert_or_assign(slot, next);
    twins_.at(slot).truncate(tokens, next);
  }
  void step(Hint hint, int number) {
    std::vector<StoreDriver::Place> places;
    for (const auto& [slot, twin] : twins_) {
      places.push_back({slot, RowMode::dual, stories_.at(slot), twin.length(), Story(at(900 + number)), false});
    }
    const StoreDriver::Pass pass = driver_.pass(places, hint);
    for (Layer layer = 0; layer < options_.layers; ++layer) {
      for (std::size_t p = 0; p < places.size(); ++p) {
        for (int head = 0; head < options_.kv_heads; ++head) check(pass, layer, places[p], static_cast<int>(p), head, hint);
      }
    }
    for (auto& [slot, twin] : twins_) twin.commit();
  }
  /// The copy of a sequence, code for code and scale for scale, against quantise() of the CPU backend.
  void check_copy(int slot) {
    driver_.settle();
    const cuda::SpeCacheLayout& layout = static_cast<cuda::SpeCacheStore&>(*store_).layout();
    const cuda::LowBitGroup& group = layout.copy;
    const cpu::LowBitLayout want_layout = cpu::low_bit_layout(options_.specache, options_.head_dim);
    const int copied = twins_.at(slot).copied();
    const int groups = read(layout.copy_groups + slot, 1).front();
    const std::byte* const base = read(layout.copies + slot, 1).front();
    std::vector<std::byte> want(want_layout.bytes);
    for (int list = 0; list < options_.layers * options_.kv_heads; ++list) {
      for (int first = 0; first < copied; first += group.tokens) {
        quantise_story(slot, list, first, want_layout, want);
        const std::vector<std::byte> got =
            read(base + (at(list) * at(groups) + at(first / group.tokens)) * at(group.bytes), at(group.bytes));
        compare_group(got, group, want, want_layout);
      }
    }
  }
  void check_counts() {
    driver_.settle();
    const StoreStatistics statistics = store_->statistics();
    const std::uint64_t token_bytes = 4 * static_cast<std::uint64_t>(options_.head_dim);
    const bool waits = options_.miss_policy == MissPolicy::wait;
    expect_count("needed", statistics.needed, needed_);
    expect_count("resident_hit", statistics.resident_hit, hit_);
    expect_count("estimated", statistics.estimated, waits ? 0 : needed_ - hit_);
    expect_count("urgent_bytes", statistics.urgent_bytes, waits ? (needed_ - hit_) * token_bytes : 0);
    expect_count("prefetch_bytes", statistics.prefetch_bytes, wanted_ * token_bytes);
  }
  double worst() const { return worst_; }

 private:
  SchedulerOptions link() const {
    const KvStore::Capacities capacities = store_->capacities();
    SchedulerOptions options;
    options.layers = options_.layers;
    options.max_items_per_submit = std::max({1, capacities.urgent, capacities.prefetch, capacities.write_back});
    return options;
  }
  bool waits() const { return options_.miss_policy == MissPolicy::wait; }
  template <class T>
  std::vector<T> read(const T* from, std::size_t count) {
    std::vector<T> values(count);
    backend_.copy(values.data(), from, count * sizeof(T), backend_.stream());
    return values;
  }
  void expect_count(const char* what, std::uint64_t got, std::uint64_t want) {
    DUALDECODER_EXPECT(got == want, "%s: %s %llu, twin %llu", name_.c_str(), what, static_cast<unsigned long long>(got),
                       static_cast<unsigned long long>(want));
  }
  void quantise_story(int slot, int list, int first, const cpu::LowBitLayout& layout, std::vector<std::byte>& group) const {
    std::vector<float> rows[2];
    const int head = list % options_.kv_heads;
    for (int part = 0; part < 2; ++part) {
      for (int position = first; position < first + options_.specache.group; ++position) {
        std::vector<float> all;
        stories_.at(slot).append(all, part == 0 ? Story::Part::key : Story::Part::value, list / options_.kv_heads, position,
                                 options_.kv_heads * options_.head_dim);
        for (int d = 0; d < options_.head_dim; ++d) rows[part].push_back(static_cast<float>(bf16(all[at(head * options_.head_dim + d)])));
      }
    }
    cpu::quantise(rows[0].data(), rows[1].data(), layout, group.data());
  }
  void compare_group(const std::vector<std::byte>& got, const cuda::LowBitGroup& group, const std::vector<std::byte>& want,
                     const cpu::LowBitLayout& layout) {
    const auto half_at = [](const std::vector<std::byte>& bytes, std::size_t offset, int i) {
      std::uint16_t value = 0;
      std::memcpy(&value, bytes.data() + offset + at(i) * sizeof value, sizeof value);
      return value;
    };
    const auto code_at = [&](int token, int d, bool value) {
      const cuda::CodePlace place = value ? value_code_place(group, token, d) : key_code_place(group, token, d);
      std::uint32_t word = 0;
      std::memcpy(&word, got.data() + (value ? group.value_codes : 0) + at(place.word) * sizeof word, sizeof word);
      return word >> place.shift & ((1U << group.bits) - 1U);
    };
    const auto want_code = [&](int token, int d, bool value) {
      const int bit = d * group.bits;
      const std::byte byte = want[(value ? layout.value_codes : 0) + at(token) * layout.row_bytes + at(bit / 8)];
      return static_cast<unsigned>(byte) >> bit % 8 & ((1U << group.bits) - 1U);
    };
    int wrong = 0;
    for (int d = 0; d < group.dim; ++d) {
      wrong += half_at(got, at(group.key_zeros), d) != half_at(want, layout.key_zeros, d);
      wrong += half_at(got, at(group.key_scales), d) != half_at(want, layout.key_scales, d);
    }
    for (int token = 0; token < group.tokens; ++token) {
      for (int v = 0; v < group.value_groups; ++v) {
        const int own = v * group.tokens + token;
        const int other = token * group.value_groups + v;
        wrong += half_at(got, at(group.value_zeros), own) != half_at(want, layout.value_zeros, other);
        wrong += half_at(got, at(group.value_scales), own) != half_at(want, layout.value_scales, other);
      }
      for (int d = 0; d < group.dim; ++d) {
        for (const bool value : {false, true}) wrong += code_at(token, d, value) != want_code(token, d, value);
      }
    }
    DUALDECODER_EXPECT(wrong == 0, "%s: %d codes and scales of a group differ from the CPU backend's", name_.c_str(), wrong);
  }

  /// That `chosen` are the best by `shares`, but for what rounding may swap.
  void check_best(const std::vector<int>& chosen, const std::vector<double>& shares) {
    std::vector<double> sorted = shares;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const std::size_t count = std::min(sorted.size(), at(options_.specache.fetched_tokens));
    DUALDECODER_EXPECT(chosen.size() == count, "%s: %zu of %zu chosen", name_.c_str(), chosen.size(), count);
    DUALDECODER_EXPECT(std::adjacent_find(chosen.begin(), chosen.end(), std::greater_equal<>()) == chosen.end(), "%s", name_.c_str());
    for (const int token : chosen) {
      const double share = token >= 0 && at(token) < shares.size() ? shares[at(token)] : -1.0;
      DUALDECODER_EXPECT(share >= sorted[count - 1] * (1 - kShareBound), "%s: token %d with a share of %g, the last has %g", name_.c_str(),
                         token, share, sorted[count - 1]);
    }
  }
  void check_out(const std::vector<float>& out, std::size_t first, const std::vector<double>& expected) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double difference = std::abs(static_cast<double>(out[first + i]) - expected[i]);
      worst_ = difference <= worst_ ? worst_ : difference;  // a NaN becomes the worst and stays
    }
    DUALDECODER_EXPECT(worst_ <= kOutBound, "%s: differs from the twin by %g", name_.c_str(), worst_);
  }
  void check(const StoreDriver::Pass& pass, Layer layer, const StoreDriver::Place& place, int p, int head, Hint hint) {
    SpeCacheTwin& twin = twins_.at(place.slot);
    const int position = place.position;
    const auto list = [&](int row) { return pass.chosen[at(layer)][at((p * 2 + row) * options_.kv_heads + head)]; };
    const std::vector<int> own = list(0);
    const std::vector<int> guessed = list(1);
    check_best(own, twin.shares(layer, head, place.story, position, !waits()));
    check_best(guessed, twin.shares(layer, head, place.guess, position + 1, !waits()));
    needed_ += own.size();
    for (const int token : own) hit_ += twin.fetched(layer, head).count(token);
    if (waits()) twin.fetch(layer, head, own);
    const std::vector<float>& out = pass.out[at(layer)];
    const std::size_t width = at(options_.heads / options_.kv_heads * options_.head_dim);
    const auto first = [&](int row) { return at((p * 2 + row) * options_.kv_heads + head) * width; };
    const std::pair<Story, int> row0{place.story, position};
    check_out(out, first(0), twin.attend(layer, head, {row0}));
    check_out(out, first(1), twin.attend(layer, head, {row0, {place.guess, position + 1}}));
    const std::vector<int> predicted = hint == Hint::row1 ? guessed : std::vector<int>();
    for (const int token : predicted) wanted_ += 1 - twin.fetched(layer, head).count(token);
    twin.fetch(layer, head, predicted);
  }

  Backend& backend_;
  std::string name_;
  StoreOptions options_;
  std::unique_ptr<KvStore> store_;
  std::unique_ptr<TransferScheduler> scheduler_;
  StoreDriver driver_;
  std::map<int, Story> stories_;
  std::map<int, SpeCacheTwin> twins_;
  double worst_ = 0;
  std::uint64_t wanted_ = 0;  // tokens that the twins fetched for the next step
  std::uint64_t needed_ = 0;
  std::uint64_t hit_ = 0;  // of the needed: fetched before
};

void check_twins(Backend& backend) {
  const std::vector<Shape> shapes = {
      {2, 64, 128, 8, 2},
      {2, 32, 64, 6, 2},
      {1, 64, 128, 8, 2},
      {1, 32, 64, 4, 4},
      {2, 32, 80, 4, 2},
      {1, 32, 80, 4, 2},
      {1, 64, 80, 10, 1},
      {2, 64, 96, 6, 3},
      {1, 32, 96, 6, 3},
      {2, 64, 256, 16, 1},
      {1, 32, 256, 8, 2},
      {2, 32, 128, 16, 1, MissPolicy::wait},
      {2, 64, 64, 14, 2, MissPolicy::wait},
      {2, 64, 128, 8, 2, MissPolicy::estimate, 0},
      {2, 32, 128, 8, 2, MissPolicy::estimate, 300, 20},
      {2, 64, 64, 2, 1, MissPolicy::estimate, 64, 600, 1400},  // splits, fetched and window in several parts
  };
  for (const Shape& shape : shapes) {
    if (small_run() && &shape - shapes.data() > 2) break;
    Bench bench(backend, shape);
    const int long_prompt = shape.max_context - 120;
    bench.start(0, Story(11), long_prompt, 50);
    bench.start(1, Story(12), shape.exact + shape.group - 4, 7);  // its first group comes with the fourth step
    const int steps = small_run() ? 2 : 6;
    for (int step = 0; step < steps; ++step) bench.step(step == 4 ? Hint::none : Hint::row1, step);
    bench.check_copy(0);
    for (int step = 0; step < steps; ++step) bench.step(Hint::row1, 100 + step);
    bench.check_copy(1);
    bench.check_counts();
    const Story other = Story(11).continued(101, 77);  // in the midst of a group
    bench.truncate(0, 101, other);
    for (int step = 0; step < steps; ++step) bench.step(Hint::row1, 200 + step);
    bench.check_copy(0);
    std::printf("%s: differs from the twin by %.5f at most\n", name_of(shape).c_str(), bench.worst());
  }
}

void check_conformance(Backend& backend) {
  for (const auto& [dim, bits] : {std::pair(64, 2), std::pair(128, 1)}) {
    for (const std::string& finding : testing::check_kv_store(subject_of(backend, dim, bits))) {
      DUALDECODER_EXPECT(finding.empty(), "head_dim %d, %d bits: %s", dim, bits, finding.c_str());
    }
  }
}

/// The plan is what the resources are asked for.
void check_plan(Backend& backend) {
  for (const int bits : {1, 2}) {
    const StoreOptions options = options_of({bits, 64, 128, 8, 2});
    testing::CountingResource device(backend.memory(MemoryKind::device));
    testing::CountingResource host(backend.memory(MemoryKind::pinned));
    {
      const std::unique_ptr<KvStore> store = cuda::make_cuda_store(options, {&device, &host, backend.stream()});
      for (int slot = 0; slot < options.max_sequences; ++slot) store->open(slot, options.max_context, backend.stream());
      const MemoryPlan plan = cuda::cuda_store_plan(options);
      DUALDECODER_EXPECT(device.live_bytes() == plan.device_bytes(), "%zu, planned %zu", device.live_bytes(), plan.device_bytes());
      DUALDECODER_EXPECT(host.live_bytes() == plan.pinned_bytes(), "%zu, planned %zu", host.live_bytes(), plan.pinned_bytes());
    }
    backend.synchronize(backend.stream());
    DUALDECODER_EXPECT(device.live_bytes() == 0 && host.live_bytes() == 0, "%zu and %zu bytes left", device.live_bytes(),
                       host.live_bytes());
  }
}

/// Tokens that a session gives, and what its store counted.
struct Run {
  std::vector<Token> tokens;
  StoreStatistics statistics;
  std::size_t device_bytes = 0;  // at most, without the weights
};

Run run_session(const SessionOptions& options) {
  auto own = cuda::make_cuda_backend();
  testing::CountingResource device(own->memory(MemoryKind::device));
  const std::shared_ptr<Backend> backend = cuda::make_cuda_backend({.device_memory = &device});
  const auto weights = make_synthetic_weights(small_config(), 5, *backend);
  const std::size_t before = device.live_bytes();
  auto session = make_session(backend, weights, options);
  std::mt19937_64 random(9);
  std::uniform_int_distribution<Token> token(0, weights->config().vocabulary - 1);
  std::vector<Token> prompt(900);
  for (Token& one : prompt) one = token(random);
  Run run;
  session.add(prompt, {.max_new_tokens = 100});
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) run.tokens.push_back(event.token);
  }
  run.statistics = session.store_statistics();
  run.device_bytes = device.peak_bytes() - before;
  return run;
}

int common_prefix(const std::vector<Token>& a, const std::vector<Token>& b) {
  return static_cast<int>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

/// A whole session, whose steps are recorded: as published at 1 and 2 bits, and with a window that covers the context, which is full
/// attention.
void check_session() {
  const std::shared_ptr<Backend> backend = cuda::make_cuda_backend();
  SessionOptions options;
  options.max_context = 1024;
  options.resync = Resync::never;
  options.miss_policy = MissPolicy::estimate;
  SessionOptions full = options;
  full.store = StoreKind::full;
  full.predictor = PredictorKind::none;
  const Run expected = run_session(full);
  options.store = StoreKind::specache;
  options.predictor = PredictorKind::published_dual_row;
  for (const int bits : {1, 2}) {
    options.specache = {.bits = bits, .group = 64, .exact_tokens = 64, .fetched_tokens = 64};
    const Run run = run_session(options);
    DUALDECODER_EXPECT(run.tokens.size() == 100, "%zu tokens", run.tokens.size());
    DUALDECODER_EXPECT(run.statistics.urgent_bytes == 0 && run.statistics.prefetch_bytes > 0, "%d bits", bits);
    DUALDECODER_EXPECT(run.statistics.resident_hit + run.statistics.estimated == run.statistics.needed, "%d bits", bits);
    const std::size_t planned = memory_plan(*backend, small_config(), options).device_bytes();
    DUALDECODER_EXPECT(run.device_bytes <= planned && run.device_bytes * 100 >= planned * 98, "%d bits: %zu bytes, planned %zu", bits,
                       run.device_bytes, planned);
    std::printf(
        "session, %d bits: %d of 100 tokens before it parts from full attention, hits %.3f, %zu bytes at most, %zu planned\n", bits,
        common_prefix(run.tokens, expected.tokens),
        static_cast<double>(run.statistics.predicted_hit) / static_cast<double>(std::max<std::uint64_t>(run.statistics.predictable, 1)),
        run.device_bytes, planned);
  }
  options.specache.exact_tokens = 1024;
  const Run covered = run_session(options);
  std::printf("session, all tokens exact: %d of 100 tokens before it parts from full attention\n",
              common_prefix(covered.tokens, expected.tokens));
  DUALDECODER_EXPECT(common_prefix(covered.tokens, expected.tokens) >= 20, "parts from full attention after %d tokens",
                     common_prefix(covered.tokens, expected.tokens));
}

/// A layer at the shape of an 8B model with 131,072 tokens, of which random codes make the worst case.
void measure(Backend& backend) {
  constexpr int kTokens = 131072 - 256;
  constexpr int kBlock = 4096;
  for (const int bits : {2, 1}) {
    StoreOptions options;
    options.kind = StoreKind::specache;
    options.layers = 2;
    options.heads = 32;
    options.kv_heads = 8;
    options.head_dim = 128;
    options.max_context = 131072;
    options.rows_per_sequence = 2;
    options.specache.bits = bits;
    options.miss_policy = MissPolicy::estimate;
    options.selects_ahead = false;
    const std::unique_ptr<KvStore> store = backend.make_store(options);
    store->open(0, options.max_context, backend.stream());
    std::vector<float> numbers;
    for (int t = 0; t < kBlock; ++t) Story(1).append(numbers, Story::Part::key, 0, t, options.kv_heads * options.head_dim);
    const DeviceArray<float> rows(numbers);
    for (int first = 0; first < kTokens; first += kBlock) {
      const int count = std::min(kBlock, kTokens - first);
      const ConstTensor block(rows.data(), DataType::f32, {count, options.kv_heads, options.head_dim});
      for (Layer layer = 0; layer < options.layers; ++layer) store->append(layer, 0, {block, block}, {}, backend.stream());
    }
    store->seal(0, backend.stream());
    const testing::Workplace workplace = testing::workplace_of(backend);
    testing::Mirror<int> slot(workplace, 1, 0);
    testing::Mirror<int> position(workplace, 1, kTokens);
    testing::Mirror<RowMode> mode(workplace, 1, RowMode::dual);
    const KvStore::Capacities capacities = store->capacities();
    testing::SelectionMirror by_row(workplace, 2, options.kv_heads, capacities.selection);
    testing::SelectionMirror predicted(workplace, 1, options.kv_heads, capacities.selection);
    testing::Mirror<TransferItem> items(workplace, at(capacities.prefetch));
    testing::Mirror<int> count(workplace, 1);
    testing::Mirror<float> out(workplace, at(2 * options.heads * options.head_dim));
    const StepView view{1, 2, slot.data(), position.data(), mode.data(), nullptr};
    const ConstTensor queries(rows.data(), DataType::f32, {2, options.heads, options.head_dim});
    const ConstTensor keys(rows.data(), DataType::f32, {2, options.kv_heads, options.head_dim});
    const Tensor result(out.data(), DataType::f32, {2, options.heads, options.head_dim});
    const TransferList list{items.data(), count.data(), capacities.prefetch};
    const auto select = [&] { store->select(0, view, queries, by_row.view, backend.stream()); };
    const auto attend = [&] { store->attend(0, view, {queries, keys, keys}, by_row.view, result, backend.stream()); };
    const auto predict = [&] {
      Prediction prediction{0, false, predicted.view};
      backend.kernels().copy_row(view, by_row.view, 1, predicted.view, backend.stream());
      store->resolve_needed(0, view, by_row.view, list, backend.stream());
      store->resolve_predicted(0, view, prediction, list, backend.stream());
    };
    select();
    predict();
    const auto timed = [&](const std::function<void()>& work) {
      const std::unique_ptr<StepGraph> graph = backend.record(
          [&] {
            for (int i = 0; i < 10; ++i) work();
          },
          backend.stream());
      return milliseconds(backend.stream().get(), 10, [&] { graph->launch(backend.stream()); }) / 10;
    };
    const auto& layout = static_cast<cuda::SpeCacheStore&>(*store).layout();
    const double half_bytes = static_cast<double>(layout.copied(kTokens) / layout.copy.tokens) * layout.copy.bytes * options.kv_heads / 2;
    const double score_bytes = static_cast<double>(layout.copied(kTokens)) * 4 * 2 * options.heads;
    const double select_ms = timed(select);
    const double attend_ms = timed(attend);
    std::printf(
        "131,072 tokens, 8B shape, two rows, %d bits: select %.1f us (%.0f GB/s of codes, %.0f with scores), attend %.1f us (%.0f, "
        "%.0f), predict %.1f us\n",
        bits, select_ms * 1e3, half_bytes / select_ms * 1e-6, (half_bytes + score_bytes) / select_ms * 1e-6, attend_ms * 1e3,
        half_bytes / attend_ms * 1e-6, (half_bytes + score_bytes) / attend_ms * 1e-6, timed(predict) * 1e3);
    store->close(0, backend.stream());
    backend.synchronize(backend.stream());
  }
}

}  // namespace
}  // namespace dualdecoder::test

int main() {
  using namespace dualdecoder;
  return test::run_on_device([] {
    const std::shared_ptr<Backend> backend = cuda::make_cuda_backend();
    test::check_plan(*backend);
    test::check_session();
    if (!test::small_run()) test::measure(*backend);
    test::check_twins(*backend);
    if (!test::small_run()) test::check_conformance(*backend);
  });
}
