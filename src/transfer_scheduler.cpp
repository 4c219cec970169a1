// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/transfer_scheduler.hpp"

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/trace.hpp"
#include "src/link_queue.hpp"

namespace dualdecoder::cpu {
namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

constexpr std::array<std::string_view, kLaneCount> kTracks = {"urgent", "prefetch", "write-back"};
// An operating system's sleep ends tens of microseconds late, so the rest of a short wait is spent yielding.
constexpr std::chrono::microseconds kSpin{100};
// The link's thread lets items of a throttled link gather before it copies them; their times are those of the link either way.
constexpr std::chrono::microseconds kGather{200};
// Waking a thread costs about what copying this much does. Urgent loads are waited for at once, and whoever waits for less copies it alone.
constexpr std::size_t kWakeBytes = 64 * 1024;
// Other lanes have a whole step's time, so the thread of an unthrottled link wakes once, lets what a step submits layer by layer gather
// this long or up to this size, and does not take a core from the compute threads thirty times a step.
constexpr std::chrono::milliseconds kLinger{4};
constexpr std::size_t kLingerBytes = 1024 * 1024;

void sleep_until(Time time) {
  if (time - Clock::now() > kSpin) std::this_thread::sleep_until(time - kSpin);
  while (Clock::now() < time) std::this_thread::yield();
}

class ThreadedScheduler final : public TransferScheduler {
 public:
  ThreadedScheduler(const SchedulerOptions& options, CopyFunction copy) : queue_(options), copy_(std::move(copy)), trace_(options.trace) {
    for (auto& of_lane : errors_) of_lane.resize(static_cast<std::size_t>(options.layers));
    thread_ = std::thread([this] { drive_link(); });
  }

  ~ThreadedScheduler() override {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    work_.notify_one();
    thread_.join();
  }

  void submit(Lane lane, Layer layer, const TransferList& list, StreamRef /*after*/) override {
    require_layer(layer);
    const int count = list.count == nullptr ? 0 : *list.count;
    if (count == 0) return;
    detail::require(count > 0 && count <= list.capacity, "count of a transfer list", count, "in 0 .. its capacity");
    bool wake = false;
    Time now;
    std::size_t in_flight = 0;
    {
      const std::scoped_lock lock(mutex_);
      now = Clock::now();
      try {
        queue_.push(lane, layer, std::span(list.items, static_cast<std::size_t>(count)), now);
      } catch (const std::bad_alloc&) {
        throw OutOfMemory("a transfer queue", static_cast<std::size_t>(count) * sizeof(TransferItem), 0);
      }
      in_flight = queue_.bytes_in_flight();
      const bool enough = in_flight >= (lane == Lane::urgent ? kWakeBytes : kLingerBytes);
      wake = (idle_ && (lane != Lane::urgent || enough)) || (lingering_ && enough);
      if (wake) idle_ = lingering_ = false;
    }
    if (wake) work_.notify_one();
    if (trace_ != nullptr) trace_->counter("bytes in flight", now, static_cast<double>(in_flight));
  }

  void wait(Lane lane, Layer layer, StreamRef /*stream*/) override {
    require_layer(layer);
    std::unique_lock lock(mutex_);
    wait_for(lane, layer, lock);
    if (std::exception_ptr error = std::exchange(error_of(lane, layer), nullptr)) std::rethrow_exception(error);
  }

  void drain(StreamRef /*stream*/) override {
    std::unique_lock lock(mutex_);
    std::exception_ptr first;
    for (const Lane lane : {Lane::urgent, Lane::prefetch, Lane::write_back}) {
      for (Layer layer = 0; layer < queue_.layers(); ++layer) {
        wait_for(lane, layer, lock);
        std::exception_ptr error = std::exchange(error_of(lane, layer), nullptr);
        if (first == nullptr) first = error;
      }
    }
    if (first != nullptr) std::rethrow_exception(first);
  }

  LaneStatistics statistics(Lane lane) const override {
    const std::scoped_lock lock(mutex_);
    return queue_.statistics_of(lane);
  }

 private:
  void require_layer(Layer layer) const {
    detail::require(layer >= 0 && layer < queue_.layers(), "layer", layer, "a layer of the scheduler");
  }
  std::exception_ptr& error_of(Lane lane, Layer layer) { return errors_[static_cast<std::size_t>(lane)][static_cast<std::size_t>(layer)]; }

  void drive_link() {
    LinkQueue::Batch batch;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      const Time now = Clock::now();
      if (queue_.take(now, batch)) {
        move(batch, lock);
        continue;
      }
      const Time next = queue_.next_start();
      if (next > now && next != Time::max()) {
        work_.wait_until(lock, next + kGather, [this] { return stopping_; });
      } else {
        const bool blocked = next != Time::max();  // by what the waiting thread is copying
        (blocked ? blocked_ : idle_) = true;
        work_.wait(lock, [&] { return stopping_ || !(blocked ? blocked_ : idle_); });
        blocked_ = idle_ = false;
        if (!blocked && !queue_.throttled() && queue_.bytes_in_flight() < kLingerBytes) {
          lingering_ = true;
          work_.wait_for(lock, kLinger, [this] { return stopping_ || !lingering_; });
          lingering_ = false;
        }
      }
    }
  }

  // Nobody submits while the compute thread stands here, so what starts next on a throttled link is settled: it may be copied ahead of
  // its time, as long as the wait ends no earlier than the last arrival.
  void wait_for(Lane lane, Layer layer, std::unique_lock<std::mutex>& lock) {
    if (queue_.outstanding(lane, layer) == 0 && !queue_.throttled()) return;
    const Time begin = Clock::now();
    if (queue_.is_done(lane, layer, begin)) return;
    if (lane == Lane::prefetch) queue_.promote(layer, begin);
    while (queue_.outstanding(lane, layer) > 0) {
      if (queue_.take(queue_.throttled() ? Time::max() : Clock::now(), waiting_batch_)) {
        move(waiting_batch_, lock);
      } else {
        waiting_ = true;
        arrived_.wait(lock);
        waiting_ = false;
      }
    }
    if (queue_.throttled()) {
      const Time arrival = queue_.arrival(lane, layer);
      lock.unlock();
      sleep_until(arrival);
      lock.lock();
    }
    queue_.statistics_of(lane).stalled += Clock::now() - begin;
  }

  // Copies without the lock and reports with it.
  void move(const LinkQueue::Batch& batch, std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    int moved_items = 0;
    std::size_t moved_bytes = 0;
    std::exception_ptr error;
    for (int i = 0; i < batch.count; ++i) {
      const TransferItem& item = batch.items[static_cast<std::size_t>(i)];
      if (copy_) {
        try {
          copy_(item);
        } catch (...) {
          if (error == nullptr) error = std::current_exception();
          continue;
        }
      } else if (item.bytes > 0) {
        std::memcpy(item.target, item.source, item.bytes);
      }
      ++moved_items;
      moved_bytes += item.bytes;
    }
    lock.lock();
    const Time now = Clock::now();
    LinkQueue::Completed completed;
    const bool complete = queue_.finish(batch, moved_items, moved_bytes, now, completed);
    if (error != nullptr && error_of(batch.lane, batch.layer) == nullptr) error_of(batch.lane, batch.layer) = std::move(error);
    if (waiting_) arrived_.notify_one();
    if (std::exchange(blocked_, false)) work_.notify_one();
    if (trace_ != nullptr && complete) report(completed, now, lock);
  }

  void report(const LinkQueue::Completed& completed, Time now, std::unique_lock<std::mutex>& lock) {
    const auto in_flight = static_cast<double>(queue_.bytes_in_flight());
    lock.unlock();
    std::array<char, 32> name;
    const int length = std::snprintf(name.data(), name.size(), "layer %d", completed.layer);
    trace_->span(kTracks[static_cast<std::size_t>(completed.lane)], std::string_view(name.data(), static_cast<std::size_t>(length)),
                 completed.begin, completed.end);
    trace_->counter("bytes in flight", now, in_flight);
    lock.lock();
  }

  LinkQueue queue_;
  CopyFunction copy_;
  TraceSink* trace_;
  std::array<std::vector<std::exception_ptr>, kLaneCount> errors_;  // [lanes][layers]
  LinkQueue::Batch waiting_batch_;                                  // of the compute thread
  bool idle_ = false;                                               // the link's thread sleeps until there is work
  bool lingering_ = false;                                          // or until enough of it has gathered
  bool blocked_ = false;                                            // or until the compute thread has finished its batch
  bool waiting_ = false;                                            // the compute thread sleeps until something arrives
  bool stopping_ = false;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable arrived_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<TransferScheduler> make_threaded_scheduler(const SchedulerOptions& options, CopyFunction copy) {
  try {
    return std::make_unique<ThreadedScheduler>(options, std::move(copy));
  } catch (const std::bad_alloc&) {
    throw OutOfMemory("the transfer queues", static_cast<std::size_t>(options.max_items_per_submit) * sizeof(TransferItem), 0);
  }
}

}  // namespace dualdecoder::cpu
