// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder::testing {

/// A TransferScheduler to check, and where it runs.
struct SchedulerSubject {
  std::function<std::unique_ptr<TransferScheduler>(const SchedulerOptions&)> make;
  Workplace workplace;
  bool keeps_rate = false;  ///< honours bytes_per_second, so that times may be checked
  bool has_lanes = true;    ///< urgent overtakes prefetch, and a waited-for prefetch others; checked together with keeps_rate
};

namespace detail {

/// Cells of equal size in both tiers, filled and read through the workplace.
class SchedulerBench {
 public:
  static constexpr std::size_t kCell = 512;

  SchedulerBench(const SchedulerSubject& subject, const SchedulerOptions& options, int cells)
      : cells_(cells),
        workplace_(subject.workplace),
        source_(*workplace_.host_tier, static_cast<std::size_t>(cells) * kCell, workplace_.stream),
        target_(*workplace_.device, static_cast<std::size_t>(cells) * kCell, workplace_.stream),
        items_(*workplace_.device, kCapacity * sizeof(TransferItem), workplace_.stream),
        count_(*workplace_.device, sizeof(int), workplace_.stream),
        scheduler_(subject.make(options)) {
    const std::vector<std::byte> blank(source_.bytes(), std::byte{0xee});
    workplace_.copy(source_.data(), blank.data(), blank.size());
    workplace_.copy(target_.data(), blank.data(), blank.size());
  }

  TransferScheduler& scheduler() { return *scheduler_; }
  StreamRef stream() const { return workplace_.stream; }
  int cells() const { return cells_; }
  void destroy_scheduler() { scheduler_.reset(); }

  void fill_source(int cell, std::uint8_t value) {
    const std::vector<std::byte> bytes(kCell, std::byte{value});
    workplace_.copy(source_.data() + at(cell), bytes.data(), kCell);
  }
  /// The value that all of the first `bytes` bytes of a target cell hold, or -1 if they differ.
  int target(int cell, std::size_t bytes = kCell) { return uniform_value(target_.data() + at(cell), bytes); }
  int source(int cell) { return uniform_value(source_.data() + at(cell), kCell); }

  TransferItem load(int from, int to, std::size_t bytes = kCell) {
    return {source_.data() + at(from), target_.data() + at(to), static_cast<std::uint32_t>(bytes), 1.0F};
  }
  TransferItem store(int from, int to) { return {target_.data() + at(from), source_.data() + at(to), kCell, 1.0F}; }

  void submit(Lane lane, Layer layer, const std::vector<TransferItem>& items) {
    const int count = static_cast<int>(items.size());
    if (count > 0) workplace_.copy(items_.data(), items.data(), items.size() * sizeof(TransferItem));
    workplace_.copy(count_.data(), &count, sizeof count);
    scheduler_->submit(lane, layer, {reinterpret_cast<TransferItem*>(items_.data()), reinterpret_cast<int*>(count_.data()), kCapacity},
                       workplace_.stream);
  }
  void wait(Lane lane, Layer layer) {
    scheduler_->wait(lane, layer, workplace_.stream);
    workplace_.synchronize();
  }
  void drain() {
    scheduler_->drain(workplace_.stream);
    workplace_.synchronize();
  }

  static constexpr int kCapacity = 512;

 private:
  static std::size_t at(int cell) { return static_cast<std::size_t>(cell) * kCell; }
  int uniform_value(const std::byte* memory, std::size_t bytes) {
    std::array<std::byte, kCell> seen{};
    workplace_.copy(seen.data(), memory, bytes);
    for (std::size_t i = 1; i < bytes; ++i) {
      if (seen[i] != seen[0]) return -1;
    }
    return static_cast<int>(seen[0]);
  }

  int cells_;
  Workplace workplace_;
  Buffer source_;
  Buffer target_;
  Buffer items_;
  Buffer count_;
  std::unique_ptr<TransferScheduler> scheduler_;  // goes first: what it still moves is between the buffers
};

inline constexpr std::array<Lane, kLaneCount> kLanes = {Lane::urgent, Lane::prefetch, Lane::write_back};

inline SchedulerOptions scheduler_options(int layers, double bytes_per_second = 0.0) {
  SchedulerOptions options;
  options.layers = layers;
  options.max_items_per_submit = SchedulerBench::kCapacity;
  options.bytes_per_second = bytes_per_second;
  return options;
}

inline void check_bytes_arrive(const SchedulerSubject& subject, Findings& findings) {
  SchedulerBench bench(subject, scheduler_options(3), 24);
  for (int cell = 0; cell < bench.cells(); ++cell) bench.fill_source(cell, static_cast<std::uint8_t>(cell + 1));
  for (const Lane lane : kLanes) {
    for (Layer layer = 0; layer < 3; ++layer) {
      const int to = (static_cast<int>(lane) * 3 + layer) * 2;
      bench.submit(lane, layer, {bench.load(to + 1, to, 200)});
      bench.wait(lane, layer);
      findings.expect(bench.target(to, 200) == to + 2, "After wait(), the bytes of a submission are not at their target.");
      findings.expect(bench.target(to) == -1 && bench.target(to + 1) == 0xee, "Bytes were written outside an item's target.");
    }
  }
}

inline void check_lists_are_copied(const SchedulerSubject& subject, Findings& findings) {
  SchedulerBench bench(subject, scheduler_options(2), 8);
  for (int cell = 0; cell < 8; ++cell) bench.fill_source(cell, static_cast<std::uint8_t>(cell));
  for (int cell = 0; cell < 8; ++cell) bench.submit(Lane::prefetch, cell % 2, {bench.load(cell, cell)});  // reuses one list
  bench.wait(Lane::prefetch, 0);
  bench.wait(Lane::prefetch, 1);
  for (int cell = 0; cell < 8; ++cell) {
    findings.expect(bench.target(cell) == cell, "A list that was reused right after submit() changed what was moved.");
  }
}

inline void check_nothing_to_do(const SchedulerSubject& subject, Findings& findings) {
  SchedulerBench bench(subject, scheduler_options(2), 2);
  for (const Lane lane : kLanes) {
    bench.wait(lane, 0);  // nothing was ever submitted
    bench.submit(lane, 0, {});
    bench.wait(lane, 0);
    bench.wait(lane, 0);
    findings.expect(bench.scheduler().statistics(lane).submitted_items == 0, "Empty submissions were counted as items.");
  }
  bench.drain();
  findings.expect(bench.target(0) == 0xee && bench.source(0) == 0xee, "Memory changed although nothing was submitted.");
}

inline void check_order_within_a_lane(const SchedulerSubject& subject, Findings& findings) {
  SchedulerBench bench(subject, scheduler_options(4), 64);
  for (int cell = 0; cell < 64; ++cell) bench.fill_source(cell, static_cast<std::uint8_t>(cell));
  for (const Lane lane : kLanes) {
    for (int round = 0; round < 50; ++round) {
      const int first = round % 32;
      bench.submit(lane, 1, {bench.load(first, 0), bench.load(first, 1)});
      bench.submit(lane, 1, {bench.load(first + 1, 1), bench.load(first + 1, 2)});
      bench.submit(lane, 1, {bench.load(first + 2, 2)});
      bench.wait(lane, 1);
      findings.expect(bench.target(0) == first && bench.target(1) == first + 1 && bench.target(2) == first + 2,
                      "Within a lane and layer, a later submission did not win over an earlier one to the same target.");
    }
  }
}

inline void check_chains_across_lanes(const SchedulerSubject& subject, Findings& findings) {
  SchedulerBench bench(subject, scheduler_options(2), 8);
  bench.fill_source(0, 7);
  bench.submit(Lane::urgent, 0, {bench.load(0, 1)});
  bench.wait(Lane::urgent, 0);
  bench.submit(Lane::write_back, 0, {bench.store(1, 2)});
  bench.wait(Lane::write_back, 0);
  bench.submit(Lane::prefetch, 1, {bench.load(2, 3)});
  bench.wait(Lane::prefetch, 1);
  findings.expect(bench.source(2) == 7, "A write-back that was waited for is not in the host tier.");
  findings.expect(bench.target(3) == 7, "A load after a waited-for write-back does not see it.");
}

inline void check_statistics(const SchedulerSubject& subject, Findings& findings) {
  SchedulerBench bench(subject, scheduler_options(3), 32);
  std::array<std::uint64_t, kLaneCount> items{};
  std::array<std::uint64_t, kLaneCount> bytes{};
  Random random(11);
  for (int round = 0; round < 60; ++round) {
    const Lane lane = kLanes[static_cast<std::size_t>(random.below(kLaneCount))];
    std::vector<TransferItem> list;
    for (int i = random.below(5); i > 0; --i) {
      const int to = static_cast<int>(lane) * 10 + i;  // lanes may write at the same time, so never to the same cell
      list.push_back(bench.load(random.below(32), to, static_cast<std::size_t>(1 + random.below(512))));
      items[static_cast<std::size_t>(lane)] += 1;
      bytes[static_cast<std::size_t>(lane)] += list.back().bytes;
    }
    bench.submit(lane, random.below(3), list);
  }
  bench.drain();
  for (const Lane lane : kLanes) {
    const LaneStatistics statistics = bench.scheduler().statistics(lane);
    const auto l = static_cast<std::size_t>(lane);
    findings.expect(statistics.submitted_items == items[l], "submitted_items is not the number of items submitted to the lane.");
    findings.expect(statistics.moved_items == items[l], "After drain(), moved_items is not the number of items submitted to the lane.");
    findings.expect(statistics.moved_bytes == bytes[l], "After drain(), moved_bytes is not the sum of the items' bytes.");
    findings.expect(statistics.busy.count() >= 0 && statistics.stalled.count() >= 0, "A time in the statistics is negative.");
  }
}

inline void check_long_lists(const SchedulerSubject& subject, Findings& findings) {
  constexpr int kItems = SchedulerBench::kCapacity;
  SchedulerBench bench(subject, scheduler_options(2), 2 * kItems);
  for (int cell = 0; cell < bench.cells(); ++cell) bench.fill_source(cell, static_cast<std::uint8_t>(cell % 251));
  std::vector<TransferItem> list;
  for (int i = 0; i < kItems; ++i) list.push_back(bench.load(i + 3, i));
  for (int round = 0; round < 4; ++round) bench.submit(Lane::prefetch, round % 2, list);  // before any wait
  for (int i = 0; i < kItems; ++i) list[static_cast<std::size_t>(i)] = bench.load(i, kItems + i);
  bench.submit(Lane::urgent, 0, list);
  bench.drain();
  for (int i = 0; i < kItems; ++i) {
    findings.expect(bench.target(i) == (i + 3) % 251 && bench.target(kItems + i) == i % 251,
                    "Some items of lists of max_items_per_submit items did not arrive.");
  }
}

/// Lanes and layers have targets of their own, so what each must hold after its wait is known whatever the order between them.
inline void check_random_traffic(const SchedulerSubject& subject, Findings& findings, std::uint64_t seed) {
  constexpr int kLayers = 5;
  constexpr int kTargets = 12;
  SchedulerBench bench(subject, scheduler_options(kLayers), kLaneCount * kLayers * kTargets);
  std::vector<int> expected(static_cast<std::size_t>(bench.cells()), 0xee);
  for (int cell = 0; cell < bench.cells(); ++cell) bench.fill_source(cell, static_cast<std::uint8_t>(cell));
  Random random(seed);
  for (int round = 0; round < 400; ++round) {
    const Lane lane = kLanes[static_cast<std::size_t>(random.below(kLaneCount))];
    const Layer layer = random.below(kLayers);
    const int first = (static_cast<int>(lane) * kLayers + layer) * kTargets;
    if (random.chance(0.6)) {
      std::vector<TransferItem> list;
      for (int to = first; to < first + kTargets; ++to) {
        if (random.chance(0.5)) continue;
        const int from = random.below(bench.cells());
        list.push_back(bench.load(from, to));
        expected[static_cast<std::size_t>(to)] = static_cast<std::uint8_t>(from);
      }
      bench.submit(lane, layer, list);
    } else {
      bench.wait(lane, layer);
      for (int to = first; to < first + kTargets; ++to) {
        findings.expect(bench.target(to) == expected[static_cast<std::size_t>(to)],
                        "After wait(), a target does not hold what was last submitted to it (seed " + std::to_string(seed) + ").");
      }
    }
  }
  bench.drain();
  for (int to = 0; to < bench.cells(); ++to) {
    findings.expect(bench.target(to) == expected[static_cast<std::size_t>(to)],
                    "After drain(), a target does not hold what was last submitted to it (seed " + std::to_string(seed) + ").");
  }
}

inline void check_errors(const SchedulerSubject& subject, Findings& findings) {
  findings.expect_throw<InvalidArgument>([&] { subject.make(scheduler_options(0)); }, "Options with layers = 0 are not refused.");
  findings.expect_throw<InvalidArgument>([&] { subject.make(scheduler_options(1, -1.0)); },
                                         "Options with a negative bytes_per_second are not refused.");
  SchedulerBench bench(subject, scheduler_options(2), 2);
  bench.fill_source(0, 9);
  for (const Layer layer : {-1, 2}) {
    findings.expect_throw<InvalidArgument>([&] { bench.submit(Lane::urgent, layer, {bench.load(0, 1)}); },
                                           "submit() for a layer that there is not does not throw InvalidArgument.");
    findings.expect_throw<InvalidArgument>([&] { bench.wait(Lane::urgent, layer); },
                                           "wait() for a layer that there is not does not throw InvalidArgument.");
  }
  bench.submit(Lane::urgent, 1, {bench.load(0, 1)});
  bench.wait(Lane::urgent, 1);
  findings.expect(bench.target(1) == 9, "After a refused call, the scheduler does not work as before.");
}

inline void check_destruction_under_load(const SchedulerSubject& subject, Findings& findings) {
  for (int round = 0; round < 20; ++round) {
    SchedulerBench bench(subject, scheduler_options(4, round % 2 == 0 ? 0.0 : 1e6), 64);
    for (int i = 0; i < round; ++i) {
      const int lane = i % kLaneCount;
      std::vector<TransferItem> list;
      for (int cell = 0; cell < 20; ++cell) list.push_back(bench.load(cell, lane * 20 + cell));
      bench.submit(kLanes[static_cast<std::size_t>(lane)], i % 4, list);
    }
    bench.destroy_scheduler();
    findings.expect(bench.source(0) == 0xee, "Destroying a scheduler with work in its lanes disturbed memory.");
  }
}

inline void check_two_at_once(const SchedulerSubject& subject, Findings& findings) {
  SchedulerBench slow(subject, scheduler_options(1, 1e4), 256);
  SchedulerBench fast(subject, scheduler_options(1), 4);
  std::vector<TransferItem> list;
  for (int cell = 0; cell < 256; ++cell) list.push_back(slow.load(cell, cell));
  slow.submit(Lane::prefetch, 0, list);
  fast.fill_source(0, 5);
  fast.submit(Lane::prefetch, 0, {fast.load(0, 1)});
  fast.wait(Lane::prefetch, 0);
  findings.expect(fast.target(1) == 5, "A second scheduler does not move its items.");
  findings.expect(fast.scheduler().statistics(Lane::prefetch).submitted_items == 1, "Two schedulers share statistics.");
}

/// 512 items of 512 bytes at 2.6 MB/s take 0.1 s.
inline void check_rate(const SchedulerSubject& subject, Findings& findings) {
  constexpr double kRate = 2.6e6;
  SchedulerBench bench(subject, scheduler_options(1, kRate), SchedulerBench::kCapacity);
  std::vector<TransferItem> list;
  for (int i = 0; i < SchedulerBench::kCapacity; ++i) list.push_back(bench.load(i, i));
  const auto begin = std::chrono::steady_clock::now();
  bench.submit(Lane::prefetch, 0, list);
  bench.wait(Lane::prefetch, 0);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const double least = static_cast<double>(list.size() * SchedulerBench::kCell) / kRate;
  findings.expect(took.count() >= 0.999 * least, "A throttled link moved bytes faster than its rate.");
  const LaneStatistics statistics = bench.scheduler().statistics(Lane::prefetch);
  findings.expect(std::chrono::duration<double>(statistics.busy).count() >= 0.9 * least,
                  "busy of a throttled lane is below the time that its bytes take.");
  findings.expect(std::chrono::duration<double>(statistics.stalled).count() >= 0.5 * least,
                  "stalled does not grow while compute stands in wait().");
}

/// Behind 1 s of prefetches, an urgent item must not wait for all of them, nor the last layer's prefetch for those before it.
inline void check_overtaking(const SchedulerSubject& subject, Findings& findings) {
  constexpr int kLayers = 8;
  SchedulerBench bench(subject, scheduler_options(kLayers, 256e3), 64);
  for (int cell = 0; cell < 64; ++cell) bench.fill_source(cell, static_cast<std::uint8_t>(cell));
  std::vector<TransferItem> list;
  for (int i = 0; i < 62; ++i) list.push_back(bench.load(i, i));
  for (Layer layer = 0; layer < kLayers; ++layer) bench.submit(Lane::prefetch, layer, list);
  bench.submit(Lane::urgent, 0, {bench.load(1, 62)});
  bench.wait(Lane::urgent, 0);
  findings.expect(bench.target(62) == 1, "An urgent item that overtook prefetches is not at its target.");
  findings.expect(bench.scheduler().statistics(Lane::prefetch).moved_items < 62 * kLayers / 2,
                  "An urgent item waited for most of the prefetches submitted before it.");
  bench.wait(Lane::prefetch, kLayers - 1);
  findings.expect(bench.scheduler().statistics(Lane::prefetch).moved_items < 62 * kLayers * 3 / 4,
                  "A waited-for layer's prefetch waited for those of the other layers.");
  bench.drain();
  for (int i = 0; i < 62; ++i) findings.expect(bench.target(i) == i, "An overtaken item did not arrive at all.");
}

}  // namespace detail

/// What every TransferScheduler honours, as transfer_scheduler.hpp says; takes about 2 s where rates are kept.
inline std::vector<std::string> check_transfer_scheduler(const SchedulerSubject& subject) {
  Findings findings;
  findings.run("Arrival", [&] { detail::check_bytes_arrive(subject, findings); });
  findings.run("Copies of lists", [&] { detail::check_lists_are_copied(subject, findings); });
  findings.run("Empty submissions", [&] { detail::check_nothing_to_do(subject, findings); });
  findings.run("Order within a lane", [&] { detail::check_order_within_a_lane(subject, findings); });
  findings.run("Chains across lanes", [&] { detail::check_chains_across_lanes(subject, findings); });
  findings.run("Statistics", [&] { detail::check_statistics(subject, findings); });
  findings.run("Long lists", [&] { detail::check_long_lists(subject, findings); });
  for (std::uint64_t seed = 1; seed <= 5; ++seed)
    findings.run("Random traffic", [&] { detail::check_random_traffic(subject, findings, seed); });
  findings.run("Errors", [&] { detail::check_errors(subject, findings); });
  findings.run("Destruction under load", [&] { detail::check_destruction_under_load(subject, findings); });
  findings.run("Two schedulers at once", [&] { detail::check_two_at_once(subject, findings); });
  if (subject.keeps_rate) findings.run("Rate", [&] { detail::check_rate(subject, findings); });
  if (subject.keeps_rate && subject.has_lanes) findings.run("Overtaking", [&] { detail::check_overtaking(subject, findings); });
  return findings.take();
}

}  // namespace dualdecoder::testing
