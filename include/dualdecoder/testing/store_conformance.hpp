// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/store_options.hpp"
#include "dualdecoder/testing/store_driver.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder::testing {

/// A KvStore to check, the scheduler to run it with, and where it runs.
struct StoreSubject {
  std::function<std::unique_ptr<KvStore>(const StoreOptions&)> make;
  std::function<std::unique_ptr<TransferScheduler>(const SchedulerOptions&)> make_scheduler;
  Workplace workplace;
  StoreKind kind = StoreKind::resident;  ///< passed on in the options
  DataType kv_type = DataType::f32;      ///< bf16 widens the comparison with dense attention
  int head_dim = 16;                     ///< one that the store has
  bool estimates = true;                 ///< false: the store refuses MissPolicy::estimate, which is then all that is asked of it
  /// How far row 0 may differ, after truncate(), from a context that never was longer; more for a store that keeps what it learnt from it.
  double truncate_tolerance = 1e-5;
};

namespace detail {

/// A store and all that drives it.
class StoreBench {
 public:
  StoreBench(const StoreSubject& subject, const StoreOptions& options)
      : options_(options),
        store_(subject.make(options)),
        scheduler_(subject.make_scheduler(scheduler_options(*store_, options))),
        driver_(subject.workplace, *store_, *scheduler_, options),
        stream_(subject.workplace.stream) {}

  KvStore& store() { return *store_; }
  TransferScheduler& scheduler() { return *scheduler_; }
  StoreDriver& driver() { return driver_; }
  const StoreOptions& options() const { return options_; }
  StreamRef stream() const { return stream_; }

  void start(int slot, const Story& story, int tokens, int block = 64) {
    driver_.settle();
    store_->open(slot, options_.max_context, stream_);
    if (tokens > 0) driver_.prefill(slot, story, tokens, block);
  }

 private:
  static SchedulerOptions scheduler_options(const KvStore& store, const StoreOptions& options) {
    const KvStore::Capacities capacities = store.capacities();
    SchedulerOptions scheduler;
    scheduler.layers = options.layers;
    scheduler.max_items_per_submit = std::max({1, capacities.urgent, capacities.prefetch, capacities.write_back});
    return scheduler;
  }

  StoreOptions options_;
  std::unique_ptr<KvStore> store_;
  std::unique_ptr<TransferScheduler> scheduler_;  // goes first: it may still move what the store owns
  StoreDriver driver_;
  StreamRef stream_;
};

inline StoreOptions store_options(const StoreSubject& subject) {
  StoreOptions options;
  options.kind = subject.kind;
  options.layers = 2;
  options.heads = 4;
  options.kv_heads = 2;
  options.head_dim = subject.head_dim;
  options.max_context = 224;
  options.max_sequences = 3;
  options.rows_per_sequence = 2;
  options.kv_type = subject.kv_type;
  options.selection.chunk_tokens = 8;
  options.selection.budget_tokens = 32;
  options.selection.sink_tokens = 8;
  options.selection.local_tokens = 16;
  options.slots_per_budget = 2.0F;
  return options;
}

/// Row 0's numbers of every live row 0 in a pass, layer after layer.
inline std::vector<float> row0_of(const StoreOptions& options, const StoreDriver::Pass& pass) {
  std::vector<float> numbers;
  const std::size_t width = static_cast<std::size_t>(options.heads * options.head_dim);
  for (const std::vector<float>& out : pass.out) {
    for (std::size_t row = 0; row * width < out.size(); row += static_cast<std::size_t>(options.rows_per_sequence)) {
      const auto first = out.begin() + static_cast<std::ptrdiff_t>(row * width);
      numbers.insert(numbers.end(), first, first + static_cast<std::ptrdiff_t>(width));
    }
  }
  return numbers;
}

inline double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return HUGE_VAL;
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    largest = difference <= largest ? largest : difference;  // a NaN becomes the largest and stays
    if (std::isnan(difference)) return HUGE_VAL;
  }
  return largest;
}

/// One sequence decoded for some steps; what row 0 gave, step after step.
struct Decoding {
  Story story{7};
  int prompt = 100;
  int steps = 12;
  RowMode mode = RowMode::dual;
  Hint hint = Hint::none;
  Story guess{99};
};

inline std::vector<float> decode(StoreBench& bench, int slot, const Decoding& decoding, int from) {
  std::vector<float> numbers;
  for (int step = 0; step < decoding.steps; ++step) {
    const StoreDriver::Pass pass = bench.driver().pass({{slot, decoding.mode, decoding.story, from + step, decoding.guess, false}},
                                                       decoding.hint, static_cast<std::uint64_t>(step + 1));
    const std::vector<float> row0 = row0_of(bench.options(), pass);
    numbers.insert(numbers.end(), row0.begin(), row0.end());
  }
  return numbers;
}

inline std::vector<float> decode_afresh(const StoreSubject& subject, const StoreOptions& options, const Decoding& decoding,
                                        int block = 64) {
  StoreBench bench(subject, options);
  bench.start(0, decoding.story, decoding.prompt, block);
  return decode(bench, 0, decoding, decoding.prompt);
}

/// Sequences of different lengths, some of a length that is no multiple of a chunk, with a budget that covers everything.
inline void check_equals_dense(const StoreSubject& subject, Findings& findings) {
  StoreOptions options = store_options(subject);
  options.selection.budget_tokens = options.max_context;
  const double tolerance = options.kv_type == DataType::f32 ? 1e-3 : 3e-2;
  StoreBench bench(subject, options);
  const std::vector<int> prompts = {5, 64, 131};
  std::vector<StoreDriver::Place> places;
  for (int slot = 0; slot < 3; ++slot) {
    const Story story(static_cast<std::uint64_t>(40 + slot));
    bench.start(slot, story, prompts[static_cast<std::size_t>(slot)]);
    places.push_back({slot, RowMode::dual, story, prompts[static_cast<std::size_t>(slot)], Story(77), false});
  }
  double worst[2] = {0, 0};
  for (int step = 0; step < 20; ++step) {
    const StoreDriver::Pass pass = bench.driver().pass(places, step % 2 == 0 ? Hint::row1 : Hint::none);
    for (Layer layer = 0; layer < options.layers; ++layer) {
      for (std::size_t p = 0; p < places.size(); ++p) {
        const StoreDriver::Place& place = places[p];
        const std::pair<Story, int> row0{place.story, place.position};
        const std::pair<Story, int> row1{place.guess, place.position + 1};
        for (int row = 0; row < 2; ++row) {
          const std::vector<double> expected = row == 0 ? dense_attention(options, place.story, layer, place.position, {row0}, row0)
                                                        : dense_attention(options, place.story, layer, place.position, {row0, row1}, row1);
          const float* got = pass.out[static_cast<std::size_t>(layer)].data() + (p * 2 + static_cast<std::size_t>(row)) * expected.size();
          for (std::size_t i = 0; i < expected.size(); ++i) {
            const double difference = std::abs(static_cast<double>(got[i]) - expected[i]);
            worst[row] = std::isnan(difference) ? HUGE_VAL : std::max(worst[row], difference);
          }
        }
      }
    }
    for (StoreDriver::Place& place : places) ++place.position;
  }
  findings.expect(worst[0] <= tolerance,
                  "With a budget that covers the context, row 0 differs from dense attention by " + std::to_string(worst[0]) + ".");
  findings.expect(worst[1] <= tolerance,
                  "With a budget that covers the context, row 1 differs from dense attention by " + std::to_string(worst[1]) + ".");
}

inline void check_blocks(const StoreSubject& subject, Findings& findings) {
  const StoreOptions options = store_options(subject);
  const Decoding decoding{Story(7), 100, 3};
  const std::vector<float> whole = decode_afresh(subject, options, decoding, 100);
  for (const int block : {1, 7, 64}) {
    findings.expect(largest_difference(whole, decode_afresh(subject, options, decoding, block)) <= 1e-4,
                    "A prompt appended in blocks of " + std::to_string(block) + " tokens gives other answers than one appended at once.");
  }
}

/// docs/concepts.md, "What is deterministic": under `wait` row 0 depends on weights, tokens and selection options alone.
inline void check_independence(const StoreSubject& subject, Findings& findings) {
  StoreOptions options = store_options(subject);
  const std::vector<float> expected = decode_afresh(subject, options, {Story(7), 150, 24});
  for (const Hint hint : {Hint::row0, Hint::row1, Hint::some, Hint::ahead}) {
    findings.expect(decode_afresh(subject, options, {Story(7), 150, 24, RowMode::dual, hint}) == expected,
                    "Under wait, what is predicted (hint " + std::to_string(static_cast<int>(hint)) + ") changes row 0's bits.");
  }
  for (const float slots : {1.0F, 1.5F, 8.0F}) {
    options.slots_per_budget = slots;
    findings.expect(decode_afresh(subject, options, {Story(7), 150, 24, RowMode::dual, Hint::some}) == expected,
                    "Under wait, the number of slots (" + std::to_string(slots) + " budgets) changes row 0's bits.");
  }
  options.prefetch_bytes_per_step = 600;
  findings.expect(decode_afresh(subject, options, {Story(7), 150, 24, RowMode::dual, Hint::row1}) == expected,
                  "Under wait, the bound on prefetch changes row 0's bits.");
}

inline void check_row1_leaves_no_mark(const StoreSubject& subject, Findings& findings) {
  const StoreOptions options = store_options(subject);
  const std::vector<float> alone = decode_afresh(subject, options, {Story(7), 90, 20, RowMode::single});
  findings.expect(decode_afresh(subject, options, {Story(7), 90, 20, RowMode::dual, Hint::row1}) == alone,
                  "Running a guess beside the true token changes row 0's bits.");
  StoreBench bench(subject, options);
  bench.start(0, Story(7), 90);
  std::vector<float> numbers;
  for (int step = 0; step < 20; ++step) {
    if (step % 3 == 1) {
      const StoreDriver::Pass pass = bench.driver().pass({{0, RowMode::resync, Story(7), 90 + step}}, Hint::row1);
      findings.expect(pass.urgent_items == 0, "A resync row made urgent loads.");
      findings.expect(pass.write_back_items == 0, "A resync row was committed: it caused a write-back.");
    }
    const std::vector<float> row0 = row0_of(options, bench.driver().pass({{0, RowMode::single, Story(7), 90 + step}}, Hint::none));
    numbers.insert(numbers.end(), row0.begin(), row0.end());
  }
  findings.expect(numbers == alone, "Resync passes in between change row 0's bits.");
}

inline void check_dead_rows(const StoreSubject& subject, Findings& findings) {
  const StoreOptions options = store_options(subject);
  StoreBench bench(subject, options);
  for (int slot = 0; slot < 3; ++slot) bench.start(slot, Story(static_cast<std::uint64_t>(slot)), 60 + 10 * slot);
  const std::vector<RowMode> modes = {RowMode::single, RowMode::idle, RowMode::resync};
  std::vector<StoreDriver::Place> places;
  for (int slot = 0; slot < 3; ++slot) {
    places.push_back(
        {slot, modes[static_cast<std::size_t>(slot)], Story(static_cast<std::uint64_t>(slot)), 60 + 10 * slot, Story(5), false});
  }
  const std::size_t width = static_cast<std::size_t>(options.heads * options.head_dim);
  const StoreDriver::Pass pass = bench.driver().pass(places, Hint::none);
  for (const std::vector<float>& out : pass.out) {
    for (std::size_t row = 0; row < 6; ++row) {
      const bool live = row_is_live(modes[row / 2], static_cast<int>(row % 2));
      const auto first = out.begin() + static_cast<std::ptrdiff_t>(row * width);
      const bool zero = std::all_of(first, first + static_cast<std::ptrdiff_t>(width), [](float x) { return x == 0.0F; });
      const bool finite = std::all_of(first, first + static_cast<std::ptrdiff_t>(width), [](float x) { return std::isfinite(x); });
      findings.expect(live || zero, "The output of a dead row is not zero.");
      findings.expect(!live || (finite && !zero), "The output of a live row is zero or not finite beside dead rows that hold NaN.");
    }
  }
  for (const auto& of_layer : pass.chosen) {
    for (std::size_t list = 0; list < of_layer.size(); ++list) {
      const std::size_t row = list / static_cast<std::size_t>(options.kv_heads);
      if (!row_is_live(modes[row / 2], static_cast<int>(row % 2))) findings.expect(of_layer[list].empty(), "A dead row chose chunks.");
    }
  }
}

inline void check_idle_places(const StoreSubject& subject, Findings& findings) {
  const StoreOptions options = store_options(subject);
  std::vector<float> numbers[2];
  for (const bool with_idle_steps : {false, true}) {
    StoreBench bench(subject, options);
    bench.start(0, Story(1), 80);
    bench.start(1, Story(2), 110);
    for (int step = 0; with_idle_steps && step < 10; ++step) {
      bench.driver().pass({{0, RowMode::dual, Story(1), 80 + step, Story(3), false}, {1, RowMode::idle, Story(2), 110}}, Hint::row1);
    }
    for (int step = 0; step < 6; ++step) {
      const StoreDriver::Pass pass =
          bench.driver().pass({{0, RowMode::idle, Story(1), 80}, {1, RowMode::dual, Story(2), 110 + step, Story(3), false}}, Hint::row1);
      const std::vector<float> row0 = row0_of(options, pass);
      auto& run = numbers[with_idle_steps ? 1 : 0];
      run.insert(run.end(), row0.begin(), row0.end());
    }
  }
  findings.expect(largest_difference(numbers[0], numbers[1]) == 0.0, "Steps in which a place was idle changed its sequence.");
}

inline void check_selection(const StoreSubject& subject, Findings& findings) {
  const StoreOptions options = store_options(subject);
  const int unit = selected_tokens(options);
  const int budget = options.kind == StoreKind::specache ? options.specache.fetched_tokens : options.selection.budget_tokens;
  StoreBench bench(subject, options);
  const std::vector<int> prompts = {3, 77, 180};
  for (int slot = 0; slot < 3; ++slot) bench.start(slot, Story(static_cast<std::uint64_t>(slot)), prompts[static_cast<std::size_t>(slot)]);
  for (int step = 0; step < 12; ++step) {
    std::vector<StoreDriver::Place> places;
    for (int slot = 0; slot < 3; ++slot) {
      places.push_back(
          {slot, RowMode::dual, Story(static_cast<std::uint64_t>(slot)), prompts[static_cast<std::size_t>(slot)] + step, Story(6), false});
    }
    const StoreDriver::Pass pass = bench.driver().pass(places, Hint::row1);
    findings.expect(pass.lists_fit, "A list is longer than capacities() says.");
    findings.expect(pass.urgent_items <= bench.store().capacities().urgent * options.layers, "More urgent loads than capacities() allows.");
    for (const auto& of_layer : pass.chosen) {
      for (std::size_t list = 0; list < of_layer.size(); ++list) {
        const std::vector<int>& chunks = of_layer[list];
        const int position = places[list / static_cast<std::size_t>(2 * options.kv_heads)].position;
        findings.expect(std::adjacent_find(chunks.begin(), chunks.end(), std::greater_equal<>()) == chunks.end(),
                        "Chosen chunks are not ascending, or one was chosen twice.");
        findings.expect(chunks.empty() || (chunks.front() >= 0 && (chunks.back() + 1) * unit <= position),
                        "A chosen chunk is not a complete chunk of the context.");
        findings.expect(options.kind == StoreKind::full || static_cast<int>(chunks.size()) * unit <= budget,
                        "More chunks were chosen than the budget holds.");
      }
    }
  }
}

/// Rewinding and decoding the same tokens again, and reusing a slot, give what a fresh store gives.
inline void check_truncate_and_reuse(const StoreSubject& subject, Findings& findings) {
  StoreOptions options = store_options(subject);
  options.selection.calibrate_tail = false;  // a rewound prompt keeps the calibration of the whole
  StoreBench bench(subject, options);
  const Decoding decoding{Story(7), 100, 14, RowMode::dual, Hint::row1};
  bench.start(0, decoding.story, decoding.prompt);
  const std::vector<float> first = decode(bench, 0, decoding, 100);
  for (const int keep : {100, 107, 112, 51, 8}) {
    bench.driver().settle();
    bench.store().truncate(0, keep, bench.stream());
    const Decoding again{Story(7), keep, 14, RowMode::dual, Hint::some};
    const std::vector<float> expected = keep == 100 ? first : decode_afresh(subject, options, again);
    findings.expect(largest_difference(decode(bench, 0, again, keep), expected) <= subject.truncate_tolerance,
                    "After truncate() to " + std::to_string(keep) + " tokens, decoding differs from a context of so many tokens.");
    // another text behind the kept tokens, so that what was there before would be noticed
    bench.driver().settle();
    bench.store().truncate(0, keep, bench.stream());
    const Decoding other{Story(7).continued(keep, 55), keep, 40, RowMode::dual, Hint::row1};
    findings.expect(largest_difference(decode(bench, 0, other, keep), decode_afresh(subject, options, other)) <= subject.truncate_tolerance,
                    "After truncate() to " + std::to_string(keep) + " tokens and another text, traces of the old text show.");
    bench.driver().settle();
    bench.store().close(0, bench.stream());
    bench.start(0, decoding.story, decoding.prompt);
    findings.expect(decode(bench, 0, decoding, 100) == first, "A slot that was closed and opened again gives other bits.");
  }
  bench.driver().settle();
  bench.store().close(0, bench.stream());
  bench.store().close(0, bench.stream());
  bench.store().open(0, options.max_context, bench.stream());
  bench.driver().append(0, Story(3), 0, 20, 7);
  bench.store().close(0, bench.stream());  // unsealed
  bench.start(0, decoding.story, decoding.prompt);
  findings.expect(decode(bench, 0, decoding, 100) == first, "A slot that was closed unsealed gives other bits afterwards.");
}

inline void check_miss_policies(const StoreSubject& subject, Findings& findings) {
  StoreOptions options = store_options(subject);
  options.miss_policy = MissPolicy::estimate;
  options.slots_per_budget = 1.0F;
  if (!subject.estimates) {
    findings.expect_throw<InvalidArgument>([&] { subject.make(options); }, "MissPolicy::estimate is not refused.");
    return;
  }
  const Decoding decoding{Story(7), 150, 24, RowMode::dual, Hint::row1};
  const std::vector<float> once = decode_afresh(subject, options, decoding);
  findings.expect(decode_afresh(subject, options, decoding) == once, "Under estimate, the same run does not give the same bits.");
  StoreBench bench(subject, options);
  bench.start(0, Story(7), 150);
  StoreOptions waiting = options;
  waiting.miss_policy = MissPolicy::wait;
  const std::vector<float> waited = decode_afresh(subject, waiting, {Story(7), 150, 6});
  for (int step = 0; step < 6; ++step) {
    const StoreDriver::Pass pass = bench.driver().pass({{0, RowMode::dual, Story(7), 150 + step, Story(99), false}}, Hint::none);
    findings.expect(pass.urgent_items == 0, "Under estimate, a place that does not wait made urgent loads.");
  }
  bench.driver().settle();
  bench.store().close(0, bench.stream());
  bench.start(0, Story(7), 150);
  std::vector<float> numbers;
  for (int step = 0; step < 6; ++step) {
    const std::vector<float> row0 =
        row0_of(options, bench.driver().pass({{0, RowMode::dual, Story(7), 150 + step, Story(99), true}}, Hint::none));
    numbers.insert(numbers.end(), row0.begin(), row0.end());
  }
  findings.expect(numbers == waited, "Under estimate, a place told to wait does not give the bits of wait.");
}

inline void check_store_statistics(const StoreSubject& subject, Findings& findings) {
  const StoreOptions options = store_options(subject);
  StoreBench bench(subject, options);
  bench.start(0, Story(7), 170);
  std::uint64_t chosen = 0;
  for (int step = 0; step < 16; ++step) {
    const StoreDriver::Pass pass = bench.driver().pass({{0, RowMode::dual, Story(7), 170 + step, Story(99), false}}, Hint::row1);
    for (const auto& of_layer : pass.chosen) {
      for (int head = 0; head < options.kv_heads; ++head) chosen += of_layer[static_cast<std::size_t>(head)].size();
    }
  }
  bench.driver().settle();
  const StoreStatistics statistics = bench.store().statistics();
  findings.expect(statistics.needed == chosen, "needed is not the number of chunks that row 0 chose.");
  findings.expect(statistics.estimated == 0, "Under wait, needed chunks were estimated.");
  findings.expect(statistics.predicted_hit <= statistics.predictable && statistics.predictable <= statistics.needed &&
                      statistics.resident_hit <= statistics.needed,
                  "The counts of the statistics contradict each other.");
  findings.expect(statistics.urgent_bytes == bench.scheduler().statistics(Lane::urgent).moved_bytes &&
                      statistics.prefetch_bytes == bench.scheduler().statistics(Lane::prefetch).moved_bytes &&
                      statistics.write_back_bytes == bench.scheduler().statistics(Lane::write_back).moved_bytes,
                  "The bytes of the statistics are not those that the scheduler moved.");
}

inline void check_store_errors(const StoreSubject& subject, Findings& findings) {
  const StoreOptions options = store_options(subject);
  StoreOptions bad = options;
  bad.head_dim = 0;
  findings.expect_throw<InvalidArgument>([&] { subject.make(bad); }, "Options with head_dim = 0 are not refused.");
  StoreBench bench(subject, options);
  KvStore& store = bench.store();
  const StreamRef stream = bench.stream();
  for (const int slot : {-1, options.max_sequences}) {
    findings.expect_throw<InvalidArgument>([&] { store.open(slot, 10, stream); }, "open() of a slot that there is not is not refused.");
    findings.expect_throw<InvalidArgument>([&] { store.truncate(slot, 0, stream); },
                                           "truncate() of a slot that there is not is not refused.");
    store.close(slot, stream);  // must not throw
  }
  findings.expect_throw<InvalidArgument>([&] { store.open(0, options.max_context + 1, stream); },
                                         "open() for more than max_context tokens is not refused.");
  findings.expect_throw<InvalidArgument>([&] { store.open(0, 0, stream); }, "open() for 0 tokens is not refused.");
  findings.expect_throw<InvalidArgument>([&] { bench.driver().append_block(0, 0, Story(1), 0, 4); },
                                         "append() to a closed slot is not refused.");
  store.open(0, 40, stream);
  findings.expect_throw<InvalidArgument>([&] { store.open(0, 40, stream); }, "open() of an open slot is not refused.");
  findings.expect_throw<InvalidArgument>([&] { bench.driver().append_block(options.layers, 0, Story(1), 0, 4); },
                                         "append() to a layer that there is not is not refused.");
  bench.driver().append(0, Story(1), 0, 30, 30);
  findings.expect_throw<InvalidArgument>([&] { bench.driver().append_block(0, 0, Story(1), 30, 41); },
                                         "append() beyond the slot's capacity is not refused.");
  store.seal(0, stream);
  for (const int tokens : {-1, 31}) {
    findings.expect_throw<InvalidArgument>([&] { store.truncate(0, tokens, stream); },
                                           "truncate() to " + std::to_string(tokens) + " of 30 tokens is not refused.");
  }
  // nothing of this changed the slot
  std::vector<float> numbers = decode(bench, 0, {Story(1), 30, 5}, 30);
  findings.expect(largest_difference(numbers, decode_afresh(subject, options, {Story(1), 30, 5})) <= 1e-5,
                  "Refused calls changed the store.");
}

}  // namespace detail

/// What every KvStore honours, as kv_store.hpp and docs/concepts.md, "Invariants" say. Needs a store for any StoreOptions
/// with the subject's kv_type and head_dim.
inline std::vector<std::string> check_kv_store(const StoreSubject& subject) {
  Findings findings;
  findings.run("Equality with dense attention", [&] { detail::check_equals_dense(subject, findings); });
  findings.run("Prompt blocks", [&] { detail::check_blocks(subject, findings); });
  findings.run("Independence of slots and predictions", [&] { detail::check_independence(subject, findings); });
  findings.run("Row 1", [&] { detail::check_row1_leaves_no_mark(subject, findings); });
  findings.run("Dead rows", [&] { detail::check_dead_rows(subject, findings); });
  findings.run("Idle places", [&] { detail::check_idle_places(subject, findings); });
  findings.run("Selection", [&] { detail::check_selection(subject, findings); });
  findings.run("truncate() and reuse", [&] { detail::check_truncate_and_reuse(subject, findings); });
  findings.run("Miss policies", [&] { detail::check_miss_policies(subject, findings); });
  findings.run("Statistics", [&] { detail::check_store_statistics(subject, findings); });
  findings.run("Errors", [&] { detail::check_store_errors(subject, findings); });
  return findings.take();
}

}  // namespace dualdecoder::testing
