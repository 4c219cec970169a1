// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/transfer_scheduler.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/testing/scheduler_conformance.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "dualdecoder/trace.hpp"
#include "tests/catch.hpp"

namespace dualdecoder::cpu {
namespace {

using Clock = std::chrono::steady_clock;

const StreamRef kStream(reinterpret_cast<CUstream_st*>(std::uintptr_t{64}));

SchedulerOptions options_of(double bytes_per_second = 0.0) {
  SchedulerOptions options;
  options.layers = 6;
  options.max_items_per_submit = 256;
  options.bytes_per_second = bytes_per_second;
  return options;
}

/// Two tiers of 4 KiB cells.
struct Tiers {
  static constexpr std::size_t kCell = 4096;
  explicit Tiers(int cells) : source(static_cast<std::size_t>(cells) * kCell), target(source.size()) {
    testing::Random random(5);
    for (std::byte& byte : source) byte = static_cast<std::byte>(random.next());
  }
  TransferItem item(int from, int to) {
    return {source.data() + static_cast<std::size_t>(from) * kCell, target.data() + static_cast<std::size_t>(to) * kCell, kCell, 0.0F};
  }
  bool arrived(int from, int to) const {
    return std::memcmp(source.data() + static_cast<std::size_t>(from) * kCell, target.data() + static_cast<std::size_t>(to) * kCell,
                       kCell) == 0;
  }
  std::vector<std::byte> source;
  std::vector<std::byte> target;
};

void submit(TransferScheduler& scheduler, Lane lane, Layer layer, std::vector<TransferItem> items) {
  int count = static_cast<int>(items.size());
  scheduler.submit(lane, layer, {items.data(), &count, count}, kStream);
}

struct RecordingSink final : TraceSink {
  struct Span {
    std::string track;
    std::string name;
    Time begin;
    Time end;
  };
  void span(std::string_view track, std::string_view name, Time begin, Time end) noexcept override {
    const std::scoped_lock lock(mutex);
    spans.push_back({std::string(track), std::string(name), begin, end});
  }
  void counter(std::string_view name, Time, double value) noexcept override {
    const std::scoped_lock lock(mutex);
    if (name == "bytes in flight") counts.push_back(value);
  }
  std::mutex mutex;
  std::vector<Span> spans;
  std::vector<double> counts;
};

}  // namespace

TEST_CASE("what wait returned for is there while everything else is still moving", "[lanes]") {
  Tiers tiers(512);
  const auto scheduler = make_threaded_scheduler(options_of());
  testing::Random random(3);
  for (int step = 0; step < 200; ++step) {
    std::vector<int> from(256);
    for (Layer layer = 0; layer < 4; ++layer) {
      std::vector<TransferItem> items;
      for (int i = 0; i < 64; ++i) {
        const int to = layer * 64 + i;
        from[static_cast<std::size_t>(to)] = random.below(512);
        items.push_back(tiers.item(from[static_cast<std::size_t>(to)], to));
      }
      submit(*scheduler, layer % 2 == 0 ? Lane::prefetch : Lane::urgent, layer, items);
    }
    for (const Layer layer : {3, 2, 1, 0}) {
      scheduler->wait(layer % 2 == 0 ? Lane::prefetch : Lane::urgent, layer, kStream);
      for (int to = layer * 64; to < layer * 64 + 64; ++to) REQUIRE(tiers.arrived(from[static_cast<std::size_t>(to)], to));
    }
  }
}

TEST_CASE("prefetch moves on its own, without anybody waiting", "[lanes]") {
  for (const double rate : {0.0, 100e6}) {
    Tiers tiers(64);
    const auto scheduler = make_threaded_scheduler(options_of(rate));
    std::vector<TransferItem> items;
    for (int i = 0; i < 64; ++i) items.push_back(tiers.item(i, i));
    const auto moved = [&](Lane lane, std::uint64_t count) {
      const auto patience = Clock::now() + std::chrono::seconds(20);
      while (scheduler->statistics(lane).moved_items < count && Clock::now() < patience) std::this_thread::yield();
      return scheduler->statistics(lane).moved_items == count;
    };
    submit(*scheduler, Lane::prefetch, 0, items);
    CHECK(moved(Lane::prefetch, 64));
    submit(*scheduler, Lane::write_back, 1, {tiers.item(0, 0)});  // to a link that has gone to sleep
    CHECK(moved(Lane::write_back, 1));
    CHECK(scheduler->statistics(Lane::prefetch).stalled.count() == 0);
  }
}

TEST_CASE("a wait on a throttled link ends when the link would have brought the last item", "[lanes]") {
  SchedulerOptions options = options_of(10e6);  // 4 KiB take 409.6 us
  options.latency = std::chrono::milliseconds(5);
  Tiers tiers(16);
  const auto scheduler = make_threaded_scheduler(options);
  std::vector<TransferItem> items;
  for (int i = 0; i < 16; ++i) items.push_back(tiers.item(i, i));
  const auto begin = Clock::now();
  submit(*scheduler, Lane::prefetch, 0, items);
  scheduler->wait(Lane::prefetch, 0, kStream);
  const auto took = Clock::now() - begin;
  CHECK(took >= std::chrono::nanoseconds(16 * 409'600 + 5'000'000));  // the latency once, not sixteen times
  CHECK(scheduler->statistics(Lane::prefetch).busy == std::chrono::nanoseconds(16 * 409'600));
  CHECK(scheduler->statistics(Lane::prefetch).stalled <= took);
  for (int i = 0; i < 16; ++i) CHECK(tiers.arrived(i, i));
}

TEST_CASE("an urgent load waits for the item on the link, and with a single lane for all prefetches", "[lanes]") {
  for (const bool single_lane : {false, true}) {
    SchedulerOptions options = options_of(2.048e6);  // 4 KiB take 2 ms
    options.single_lane = single_lane;
    Tiers tiers(128);
    const auto scheduler = make_threaded_scheduler(options);
    std::vector<TransferItem> items;
    for (int i = 0; i < 100; ++i) items.push_back(tiers.item(i, i));
    submit(*scheduler, Lane::prefetch, 0, items);
    submit(*scheduler, Lane::urgent, 0, {tiers.item(100, 100)});
    const auto begin = Clock::now();
    scheduler->wait(Lane::urgent, 0, kStream);
    const auto took = Clock::now() - begin;
    CHECK(tiers.arrived(100, 100));
    if (single_lane) {
      CHECK(scheduler->statistics(Lane::prefetch).moved_items == 100);
      CHECK(took > std::chrono::milliseconds(100));
    } else {
      CHECK(scheduler->statistics(Lane::prefetch).moved_items < 50);  // a machine that stops for 100 ms would be needed
    }
  }
}

TEST_CASE("what a copy throws reaches the wait of its lane and layer, once, and the rest moves", "[lanes]") {
  for (const double rate : {0.0, 1e9}) {
    Tiers tiers(64);
    const std::byte* const poisoned = tiers.source.data() + 5 * Tiers::kCell;
    const auto scheduler = make_threaded_scheduler(options_of(rate), [poisoned](const TransferItem& item) {
      if (item.source == poisoned) throw std::runtime_error("bad sector");
      std::memcpy(item.target, item.source, item.bytes);
    });
    std::vector<TransferItem> items;
    for (int i = 0; i < 64; ++i) items.push_back(tiers.item(i, i));
    submit(*scheduler, Lane::prefetch, 1, items);
    submit(*scheduler, Lane::prefetch, 2, {tiers.item(0, 5)});
    CHECK_NOTHROW(scheduler->wait(Lane::prefetch, 2, kStream));
    CHECK_THROWS_WITH(scheduler->wait(Lane::prefetch, 1, kStream), "bad sector");
    CHECK_NOTHROW(scheduler->wait(Lane::prefetch, 1, kStream));
    for (int i = 0; i < 64; ++i) CHECK((i == 5 || tiers.arrived(i, i)));
    CHECK(scheduler->statistics(Lane::prefetch).submitted_items == 65);
    CHECK(scheduler->statistics(Lane::prefetch).moved_items == 64);
    submit(*scheduler, Lane::urgent, 0, {tiers.item(5, 6)});
    CHECK_THROWS_WITH(scheduler->drain(kStream), "bad sector");
    CHECK_NOTHROW(scheduler->drain(kStream));
  }
}

TEST_CASE("lanes with a copy function honour TransferScheduler", "[lanes]") {
  testing::HeapMemory memory;
  const auto make = [](const SchedulerOptions& options) {
    return make_threaded_scheduler(options, [](const TransferItem& item) { std::memcpy(item.target, item.source, item.bytes); });
  };
  for (const std::string& finding : testing::check_transfer_scheduler({make, testing::host_workplace(memory), true, true}))
    FAIL_CHECK(finding);
  SUCCEED();
}

TEST_CASE("destroying a scheduler abandons what has not started", "[lanes]") {
  Tiers tiers(256);
  std::vector<TransferItem> items;
  for (int i = 0; i < 256; ++i) items.push_back(tiers.item(i, i));
  const auto begin = Clock::now();
  for (int round = 0; round < 30; ++round) {
    const auto scheduler = make_threaded_scheduler(options_of(round % 2 == 0 ? 0.0 : 1e4));  // 1e4: two minutes for the list
    for (Layer layer = 0; layer < 6; ++layer) submit(*scheduler, Lane::prefetch, layer, items);
  }
  CHECK(Clock::now() - begin < std::chrono::seconds(60));
}

TEST_CASE("each submission is one span on its lane's track", "[lanes]") {
  RecordingSink sink;
  Tiers tiers(128);
  {
    SchedulerOptions options = options_of(100e6);
    options.trace = &sink;
    const auto scheduler = make_threaded_scheduler(options);
    std::vector<TransferItem> items;
    for (int i = 0; i < 100; ++i) items.push_back(tiers.item(i, i));
    submit(*scheduler, Lane::prefetch, 3, items);
    submit(*scheduler, Lane::urgent, 1, {tiers.item(100, 100)});
    submit(*scheduler, Lane::write_back, 0, {tiers.item(101, 101), tiers.item(102, 102)});
    submit(*scheduler, Lane::urgent, 1, {});
    scheduler->drain(kStream);
  }
  REQUIRE(sink.spans.size() == 3);
  const auto span_of = [&](const std::string& track) {
    const auto found = std::find_if(sink.spans.begin(), sink.spans.end(), [&](const auto& span) { return span.track == track; });
    REQUIRE(found != sink.spans.end());
    return *found;
  };
  CHECK(span_of("prefetch").name == "layer 3");
  CHECK(span_of("urgent").name == "layer 1");
  CHECK(span_of("write-back").name == "layer 0");
  CHECK(span_of("urgent").end - span_of("urgent").begin == std::chrono::nanoseconds(40'960));
  CHECK(span_of("prefetch").end - span_of("prefetch").begin >= std::chrono::nanoseconds(100 * 40'960));
  CHECK(span_of("write-back").begin >= span_of("prefetch").end);
  REQUIRE(!sink.counts.empty());
  CHECK(*std::max_element(sink.counts.begin(), sink.counts.end()) >= 100.0 * 4096);
  CHECK(sink.counts.back() == 0.0);
}

TEST_CASE("statistics may be read from other threads", "[lanes]") {
  Tiers tiers(128);
  const auto scheduler = make_threaded_scheduler(options_of());
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    std::uint64_t last = 0;
    while (!stop) {
      const std::uint64_t moved = scheduler->statistics(Lane::prefetch).moved_items;
      if (moved < last) break;
      last = moved;
    }
  });
  std::vector<TransferItem> items;
  for (int i = 0; i < 64; ++i) items.push_back(tiers.item(i, i));
  for (int round = 0; round < 300; ++round) {
    submit(*scheduler, Lane::prefetch, round % 6, items);
    if (round % 3 == 0) scheduler->wait(Lane::prefetch, round % 6, kStream);
  }
  scheduler->drain(kStream);
  stop = true;
  reader.join();
  CHECK(scheduler->statistics(Lane::prefetch).moved_items == 300 * 64);
  CHECK(scheduler->statistics(Lane::prefetch).busy.count() > 0);
}

TEST_CASE("a list that is longer than its capacity or negative is refused and changes nothing", "[lanes]") {
  Tiers tiers(4);
  const auto scheduler = make_threaded_scheduler(options_of());
  TransferItem item = tiers.item(0, 1);
  int count = 2;
  CHECK_THROWS_AS(scheduler->submit(Lane::urgent, 0, {&item, &count, 1}, kStream), InvalidArgument);
  count = -1;
  CHECK_THROWS_AS(scheduler->submit(Lane::urgent, 0, {&item, &count, 1}, kStream), InvalidArgument);
  CHECK_NOTHROW(scheduler->submit(Lane::urgent, 0, TransferList{}, kStream));
  CHECK(scheduler->statistics(Lane::urgent).submitted_items == 0);
}

}  // namespace dualdecoder::cpu
