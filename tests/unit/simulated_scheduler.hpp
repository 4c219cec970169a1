// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/store_options.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "dualdecoder/transfer_scheduler.hpp"
#include "src/link_queue.hpp"

namespace dualdecoder::test {

/// What a simulated link throws for an item that it lost.
class SimulatedFault : public Error {
 public:
  using Error::Error;
};

/// How unkind the simulated link is. Everything else follows from the seed.
struct SimulationOptions {
  std::uint64_t seed = 1;
  double fault_probability = 0.0;                ///< of an item to be lost, half of them after its first bytes were written
  double torn_probability = 0.5;                 ///< of an item to be written in two pieces, one when it starts and one when it arrives
  std::chrono::nanoseconds compute{20'000};      ///< longest time that passes between two calls
  std::chrono::nanoseconds extra_delay{50'000};  ///< longest delay of an item beyond its time on the link
};

/// The scheduler that the lanes share their logic with, on a clock that only moves when it is called: between two calls some items arrive
/// and some do not, pieces of one item arrive at different times, and items are lost, all as the seed says, so that a failure replays.
/// What may happen is what a real link may do: lanes overlap, within a lane submissions arrive in the order they started.
class SimulatedScheduler final : public TransferScheduler {
 public:
  using Time = cpu::LinkQueue::Time;

  SimulatedScheduler(const SchedulerOptions& options, const SimulationOptions& simulation)
      : queue_(options), simulation_(simulation), random_(simulation.seed) {
    for (auto& of_lane : errors_) of_lane.resize(static_cast<std::size_t>(options.layers));
  }

  void submit(Lane lane, Layer layer, const TransferList& list, StreamRef /*after*/) override {
    require_layer(layer);
    let_time_pass();
    const int count = list.count == nullptr ? 0 : *list.count;
    if (count == 0) return;
    dualdecoder::detail::require(count > 0 && count <= list.capacity, "count of a transfer list", count, "in 0 .. its capacity");
    queue_.push(lane, layer, {list.items, static_cast<std::size_t>(count)}, now_);
  }

  void wait(Lane lane, Layer layer, StreamRef /*stream*/) override {
    require_layer(layer);
    let_time_pass();
    const Time begin = now_;
    if (lane == Lane::prefetch) queue_.promote(layer, now_);
    while (!queue_.is_done(lane, layer, now_)) advance_to(next_event(lane, layer));
    queue_.statistics_of(lane).stalled += now_ - begin;
    if (std::exception_ptr error = std::exchange(error_of(lane, layer), nullptr)) std::rethrow_exception(error);
  }

  void drain(StreamRef stream) override {
    std::exception_ptr first;
    for (const Lane lane : {Lane::urgent, Lane::prefetch, Lane::write_back}) {
      for (Layer layer = 0; layer < queue_.layers(); ++layer) {
        try {
          wait(lane, layer, stream);
        } catch (...) {
          if (first == nullptr) first = std::current_exception();
        }
      }
    }
    if (first != nullptr) std::rethrow_exception(first);
  }

  LaneStatistics statistics(Lane lane) const override { return queue_.statistics_of(lane); }
  Time now() const noexcept { return now_; }
  std::uint64_t lost_items() const noexcept { return lost_items_; }

 private:
  struct Flight {
    cpu::LinkQueue::Batch batch;
    std::array<Time, cpu::LinkQueue::Batch::kMaxItems> arrivals{};
    std::array<std::uint32_t, cpu::LinkQueue::Batch::kMaxItems> written{};  // bytes in place
    std::array<bool, cpu::LinkQueue::Batch::kMaxItems> landed{};
    std::array<bool, cpu::LinkQueue::Batch::kMaxItems> lost{};
    Time last = Time::min();
  };

  void require_layer(Layer layer) const {
    dualdecoder::detail::require(layer >= 0 && layer < queue_.layers(), "layer", layer, "a layer of the scheduler");
  }
  std::exception_ptr& error_of(Lane lane, Layer layer) { return errors_[static_cast<std::size_t>(lane)][static_cast<std::size_t>(layer)]; }

  std::chrono::nanoseconds random_time(std::chrono::nanoseconds longest) {
    const double share = random_.uniform();  // squared: mostly short, now and then long
    return std::chrono::nanoseconds(static_cast<std::int64_t>(share * share * static_cast<double>(longest.count())));
  }

  void let_time_pass() { advance_to(now_ + random_time(simulation_.compute)); }

  // Starts and lands everything that happens by `time`, in order.
  void advance_to(Time time) {
    while (true) {
      start_until(std::min(time, next_arrival()));
      const Time arrival = next_arrival();
      if (arrival > time) break;
      now_ = std::max(now_, arrival);
      land(arrival);
    }
    now_ = std::max(now_, time);
  }

  void start_until(Time horizon) {
    Flight flight;
    while (queue_.take(queue_.throttled() ? std::max(horizon, now_) : now_, flight.batch)) {
      for (int i = 0; i < flight.batch.count; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const TransferItem& item = flight.batch.items[at];
        const Time due = queue_.throttled() ? flight.batch.arrivals[at] : now_;
        flight.arrivals[at] = due + random_time(simulation_.extra_delay);
        flight.last = std::max(flight.last, flight.arrivals[at]);
        flight.landed[at] = false;
        flight.lost[at] = random_.chance(simulation_.fault_probability);
        flight.written[at] =
            random_.chance(simulation_.torn_probability) ? static_cast<std::uint32_t>(random_.below(static_cast<int>(item.bytes))) : 0;
        if (flight.written[at] > 0 && !(flight.lost[at] && random_.chance(0.5))) std::memcpy(item.target, item.source, flight.written[at]);
      }
      flights_.push_back(flight);
      flight = Flight{};
    }
  }

  Time next_arrival() const {
    Time first = Time::max();
    for (const Flight& flight : flights_) {
      for (int i = 0; i < flight.batch.count; ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (!flight.landed[at]) first = std::min(first, flight.arrivals[at]);
      }
    }
    return first;
  }

  void land(Time time) {
    for (Flight& flight : flights_) {
      for (int i = 0; i < flight.batch.count; ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (flight.landed[at] || flight.arrivals[at] > time) continue;
        const TransferItem& item = flight.batch.items[at];
        flight.landed[at] = true;
        if (!flight.lost[at]) {
          std::memcpy(item.target + flight.written[at], item.source + flight.written[at], item.bytes - flight.written[at]);
        }
      }
    }
    for (std::size_t f = 0; f < flights_.size();) {
      if (flights_[f].last <= time) {
        finish(flights_[f]);
        flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(f));
      } else {
        ++f;
      }
    }
  }

  void finish(const Flight& flight) {
    int moved_items = 0;
    std::size_t moved_bytes = 0;
    for (int i = 0; i < flight.batch.count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (flight.lost[at]) {
        ++lost_items_;
        error_of(flight.batch.lane, flight.batch.layer) =
            std::make_exception_ptr(SimulatedFault("the simulated link lost an item of layer " + std::to_string(flight.batch.layer) +
                                                   " (seed " + std::to_string(simulation_.seed) + ")"));
      } else {
        ++moved_items;
        moved_bytes += flight.batch.items[at].bytes;
      }
    }
    cpu::LinkQueue::Completed completed;
    queue_.finish(flight.batch, moved_items, moved_bytes, now_, completed);
  }

  Time next_event(Lane lane, Layer layer) const {
    Time next = next_arrival();
    if (queue_.outstanding(lane, layer) == 0) next = std::min(next, queue_.arrival(lane, layer));
    const Time start = queue_.next_start();
    if (start > now_) next = std::min(next, start);
    return std::max(next, now_);
  }

  cpu::LinkQueue queue_;
  SimulationOptions simulation_;
  testing::Random random_;
  Time now_{std::chrono::seconds(1)};
  std::vector<Flight> flights_;
  std::array<std::vector<std::exception_ptr>, kLaneCount> errors_;  // [lanes][layers]
  std::uint64_t lost_items_ = 0;
};

}  // namespace dualdecoder::test
