// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
// Expected times are computed by hand from bytes / rate + latency.
#include "src/link_queue.hpp"

#include <chrono>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "dualdecoder/error.hpp"
#include "tests/catch.hpp"

namespace dualdecoder::cpu {
namespace {

using std::chrono::nanoseconds;
using Time = LinkQueue::Time;

Time at(std::int64_t ns) { return Time(nanoseconds(ns)); }

/// 1 byte a nanosecond.
SchedulerOptions options_of(double bytes_per_second = 1e9, nanoseconds latency = nanoseconds(0)) {
  SchedulerOptions options;
  options.layers = 4;
  options.max_items_per_submit = 16;
  options.bytes_per_second = bytes_per_second;
  options.latency = latency;
  return options;
}

/// Items whose score tells them apart.
std::vector<TransferItem> items_of(int count, std::uint32_t bytes, float first_name) {
  std::vector<TransferItem> items(static_cast<std::size_t>(count));
  for (TransferItem& item : items) {
    item.bytes = bytes;
    item.score = first_name++;
  }
  return items;
}

void finish(LinkQueue& queue, const LinkQueue::Batch& batch, Time now) {
  LinkQueue::Completed completed;
  queue.finish(batch, batch.count, batch.bytes, now, completed);
}

/// Names of everything that starts by the horizon, in order.
std::vector<float> names_until(LinkQueue& queue, Time horizon) {
  std::vector<float> names;
  LinkQueue::Batch batch;
  while (queue.take(horizon, batch)) {
    for (int i = 0; i < batch.count; ++i) names.push_back(batch.items[static_cast<std::size_t>(i)].score);
    finish(queue, batch, horizon);
  }
  return names;
}

}  // namespace

TEST_CASE("items hold a throttled link one after another and arrive a latency later", "[lanes][link_queue]") {
  LinkQueue queue(options_of(1e9, nanoseconds(500)));
  queue.push(Lane::prefetch, 2, items_of(3, 100, 0), at(1000));
  LinkQueue::Batch batch;
  CHECK_FALSE(queue.take(at(999), batch));
  REQUIRE(queue.take(at(1100), batch));
  REQUIRE(batch.count == 2);  // the third starts at 1200
  CHECK(batch.arrivals[0] == at(1600));
  CHECK(batch.arrivals[1] == at(1700));
  CHECK(queue.next_start() == at(1200));
  LinkQueue::Batch last;
  REQUIRE(queue.take(at(5000), last));
  CHECK(last.arrivals[0] == at(1800));
  finish(queue, batch, at(5000));
  CHECK(queue.outstanding(Lane::prefetch, 2) == 1);
  finish(queue, last, at(5000));
  CHECK(queue.outstanding(Lane::prefetch, 2) == 0);
  CHECK_FALSE(queue.is_done(Lane::prefetch, 2, at(1799)));
  CHECK(queue.is_done(Lane::prefetch, 2, at(1800)));
  CHECK(queue.statistics_of(Lane::prefetch).busy == nanoseconds(300));
  CHECK(queue.next_start() == Time::max());
}

TEST_CASE("fractions of a nanosecond add up to the rate", "[lanes][link_queue]") {
  LinkQueue queue(options_of(3e9));  // 100 bytes take 33.3 ns
  queue.push(Lane::urgent, 0, items_of(16, 100, 0), at(0));
  queue.push(Lane::urgent, 0, items_of(14, 100, 0), at(0));
  names_until(queue, at(100000));
  CHECK(queue.arrival(Lane::urgent, 0) >= at(999));  // 30 items rounded one by one would take 990
  CHECK(queue.arrival(Lane::urgent, 0) <= at(1000));
}

TEST_CASE("urgent overtakes prefetch overtakes write-back, item by item", "[lanes][link_queue]") {
  LinkQueue queue(options_of());
  queue.push(Lane::write_back, 0, items_of(2, 100, 30), at(0));
  queue.push(Lane::prefetch, 1, items_of(4, 100, 20), at(50));
  queue.push(Lane::urgent, 2, items_of(2, 100, 10), at(250));
  // at 0: only the write-back is there; at 100 and 200: prefetch; at 300 and 400: urgent; then the rest
  CHECK(names_until(queue, at(10000)) == std::vector<float>{30, 20, 21, 10, 11, 22, 23, 31});
}

TEST_CASE("the order does not depend on when the link is looked at", "[lanes][link_queue]") {
  for (const int stride : {1, 70, 130, 10000}) {
    LinkQueue queue(options_of());
    std::vector<float> names;
    const auto look = [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t t = from; t < to; t += stride) {
        for (float name : names_until(queue, at(t))) names.push_back(name);
      }
    };
    queue.push(Lane::prefetch, 0, items_of(4, 100, 20), at(0));
    look(0, 150);
    queue.push(Lane::urgent, 0, items_of(1, 100, 10), at(150));
    look(150, 160);
    queue.push(Lane::prefetch, 3, items_of(2, 100, 40), at(160));
    queue.promote(3, at(160));
    look(160, 20000);
    INFO("stride " << stride);
    CHECK(names == std::vector<float>{20, 21, 10, 40, 41, 22, 23});
  }
}

TEST_CASE("a promoted layer's prefetch starts before those of the others", "[lanes][link_queue]") {
  LinkQueue queue(options_of(0.0));
  for (Layer layer = 0; layer < 4; ++layer) queue.push(Lane::prefetch, layer, items_of(2, 8, static_cast<float>(10 * layer)), at(0));
  queue.promote(2, at(0));
  LinkQueue::Batch batch;
  REQUIRE(queue.take(at(1), batch));
  CHECK(batch.layer == 2);
  finish(queue, batch, at(1));
  CHECK(names_until(queue, at(1)) == std::vector<float>{0, 1, 10, 11, 30, 31});
}

TEST_CASE("with a single lane nothing overtakes prefetch", "[lanes][link_queue]") {
  SchedulerOptions options = options_of();
  options.single_lane = true;
  LinkQueue queue(options);
  queue.push(Lane::prefetch, 0, items_of(2, 100, 20), at(0));
  queue.push(Lane::prefetch, 1, items_of(1, 100, 25), at(0));
  queue.push(Lane::urgent, 0, items_of(1, 100, 10), at(0));
  queue.promote(1, at(0));
  CHECK(names_until(queue, at(10000)) == std::vector<float>{20, 21, 25, 10});
  CHECK(queue.statistics_of(Lane::urgent).moved_items == 1);
  CHECK(queue.statistics_of(Lane::prefetch).moved_items == 3);
  CHECK(queue.is_done(Lane::urgent, 0, at(400)));
}

TEST_CASE("two submissions of a lane are never copied at once, those of two lanes may be", "[lanes][link_queue]") {
  LinkQueue queue(options_of(0.0));
  queue.push(Lane::prefetch, 0, items_of(1, 8, 0), at(0));
  queue.push(Lane::prefetch, 0, items_of(1, 8, 1), at(0));
  LinkQueue::Batch first;
  LinkQueue::Batch second;
  REQUIRE(queue.take(at(1), first));
  CHECK_FALSE(queue.take(at(1), second));
  queue.push(Lane::urgent, 0, items_of(1, 8, 2), at(1));
  REQUIRE(queue.take(at(1), second));
  CHECK(second.lane == Lane::urgent);
  finish(queue, first, at(2));
  finish(queue, second, at(2));
  REQUIRE(queue.take(at(2), first));
  CHECK(first.items[0].score == 1.0F);
}

TEST_CASE("a long submission is taken in batches, which may finish in any order", "[lanes][link_queue]") {
  LinkQueue queue(options_of(0.0));
  queue.push(Lane::urgent, 1, items_of(50, 8, 0), at(0));
  LinkQueue::Batch first;
  LinkQueue::Batch second;
  REQUIRE(queue.take(at(1), first));
  REQUIRE(queue.take(at(1), second));
  CHECK(first.count == LinkQueue::Batch::kMaxItems);
  CHECK(first.count + second.count == 50);
  LinkQueue::Completed completed;
  CHECK(queue.bytes_in_flight() == 400);
  CHECK_FALSE(queue.finish(second, second.count, second.bytes, at(5), completed));
  CHECK(queue.finish(first, first.count - 1, first.bytes - 8, at(7), completed));  // one was lost
  CHECK(completed.lane == Lane::urgent);
  CHECK(completed.layer == 1);
  CHECK(completed.items == 50);
  CHECK(completed.begin == at(1));
  CHECK(completed.end == at(7));
  CHECK(queue.bytes_in_flight() == 0);
  CHECK(queue.statistics_of(Lane::urgent).submitted_items == 50);
  CHECK(queue.statistics_of(Lane::urgent).moved_items == 49);
  CHECK(queue.statistics_of(Lane::urgent).moved_bytes == 392);
  CHECK(queue.statistics_of(Lane::urgent).busy == nanoseconds(6));  // both at once count once
}

TEST_CASE("queues keep their size while lists stay within the options, and grow beyond", "[lanes][link_queue]") {
  LinkQueue queue(options_of(0.0));
  const std::size_t capacity = queue.item_capacity();
  CHECK(capacity >= 4 * 16 + 2 * 16 + 2 * 16);
  for (int step = 0; step < 100; ++step) {
    for (Layer layer = 0; layer < 4; ++layer) queue.push(Lane::prefetch, layer, items_of(16, 8, 0), at(step));
    queue.push(Lane::urgent, 0, items_of(16, 8, 0), at(step));
    queue.push(Lane::write_back, 0, items_of(16, 8, 0), at(step));
    names_until(queue, at(step));
  }
  CHECK(queue.item_capacity() == capacity);
  queue.push(Lane::prefetch, 0, items_of(40, 8, 100), at(100));
  for (int i = 0; i < 5; ++i) queue.push(Lane::prefetch, 1, items_of(40, 8, static_cast<float>(200 + 100 * i)), at(100));
  CHECK(queue.item_capacity() > capacity);
  std::vector<float> expected;
  for (int i = 0; i < 6; ++i) {
    for (int item = 0; item < 40; ++item) expected.push_back(static_cast<float>(100 + 100 * i + item));
  }
  CHECK(names_until(queue, at(101)) == expected);
}

TEST_CASE("options out of range are refused by name", "[lanes][link_queue]") {
  const auto message = [](auto change) {
    SchedulerOptions options = options_of();
    change(options);
    try {
      const LinkQueue queue(options);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message([](auto& o) { o.layers = 0; }) == "layers = 0: must be at least 1");
  CHECK(message([](auto& o) { o.max_items_per_submit = -1; }) == "max_items_per_submit = -1: must be at least 0");
  CHECK(message([](auto& o) { o.bytes_per_second = -1; }).find("bytes_per_second") == 0);
  CHECK(message([](auto& o) { o.bytes_per_second = 10; }).find("bytes_per_second") == 0);
  CHECK(message([](auto& o) { o.bytes_per_second = std::numeric_limits<double>::quiet_NaN(); }).find("bytes_per_second") == 0);
  CHECK(message([](auto& o) { o.bytes_per_second = std::numeric_limits<double>::infinity(); }).find("bytes_per_second") == 0);
  CHECK(message([](auto& o) { o.latency = nanoseconds(-1); }).find("latency") == 0);
}

}  // namespace dualdecoder::cpu
