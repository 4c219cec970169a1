// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/store_options.hpp"
#include "dualdecoder/transfer_scheduler.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder::cpu {

/// First in, first out, in one growing array of a power of two. Elements keep their index from push until everything was popped.
template <class T>
class Ring {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  /// The next push of up to `count` elements altogether will not allocate; memory is not touched before it is used.
  void reserve(std::size_t count) {
    if (count > capacity_) grow(count);
  }
  std::uint64_t head() const noexcept { return head_; }
  std::uint64_t tail() const noexcept { return tail_; }
  bool empty() const noexcept { return head_ == tail_; }
  std::size_t capacity() const noexcept { return capacity_; }

  T& operator[](std::uint64_t index) noexcept { return at(storage_.data(), index, capacity_); }
  const T& operator[](std::uint64_t index) const noexcept { return at(storage_.data(), index, capacity_); }
  void push(const T* values, std::size_t count) {
    reserve(static_cast<std::size_t>(tail_ - head_) + count);
    if (storage_.size() < capacity_ && static_cast<std::size_t>(tail_) + count > storage_.size()) {
      storage_.resize(std::min(capacity_, static_cast<std::size_t>(tail_) + count));
    }
    for (std::size_t i = 0; i < count; ++i) (*this)[tail_ + i] = values[i];
    tail_ += count;
  }
  /// Forgets everything before `index`; an emptied ring starts over at its first element, so that only the peak is ever touched.
  void pop_until(std::uint64_t index) noexcept {
    head_ = index;
    if (head_ == tail_) head_ = tail_ = 0;
  }

 private:
  template <class U>
  static U& at(U* data, std::uint64_t index, std::size_t capacity) noexcept {
    return data[static_cast<std::size_t>(index) & (capacity - 1)];
  }
  void grow(std::size_t count) {
    std::size_t capacity = std::max<std::size_t>(capacity_, 16);
    while (capacity < count) capacity *= 2;
    std::vector<T> larger;
    larger.reserve(capacity);
    if (!empty()) {
      larger.resize(capacity);
      for (std::uint64_t i = head_; i != tail_; ++i) at(larger.data(), i, capacity) = (*this)[i];
    }
    storage_.swap(larger);
    capacity_ = capacity;
  }

  std::vector<T> storage_;  // [0 .. capacity], as far as it was used
  std::size_t capacity_ = 0;
  std::uint64_t head_ = 0;
  std::uint64_t tail_ = 0;
};

/// What moves next on the link, and when it arrives: the logic of a TransferScheduler without threads and without a clock.
///
/// A throttled link is a line in time: an item starts when the link is free, holds it for bytes / rate, and arrives `latency` later
/// (latency is pipelined). Which item starts is decided among those that were pushed by the moment of the start, however late take() is
/// called, so the order does not depend on when threads wake. An unthrottled link is free at any time and an item arrives when it was
/// copied. Threading: none; the caller locks. Times passed in must not decrease, except horizons of take().
class LinkQueue {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// Items of one submission that started together. Copy them, then call finish().
  struct Batch {
    static constexpr int kMaxItems = 32;
    static constexpr std::size_t kMaxBytes = 128 * 1024;

    Lane lane = Lane::prefetch;
    Layer layer = 0;
    int count = 0;
    std::size_t bytes = 0;
    std::array<TransferItem, kMaxItems> items;
    std::array<Time, kMaxItems> arrivals;  // of a throttled link
    std::uint64_t submission = 0;          // index into the ring of the queue
  };

  /// A submission of which everything has arrived.
  struct Completed {
    Lane lane = Lane::prefetch;
    Layer layer = 0;
    int items = 0;
    Time begin;
    Time end;
  };

  explicit LinkQueue(const SchedulerOptions& options)
      : layers_(options.layers), single_lane_(options.single_lane), latency_(options.latency) {
    validate(options);
    if (options.bytes_per_second > 0.0) nanoseconds_per_byte_ = 1e9 / options.bytes_per_second;
    const auto layers = static_cast<std::size_t>(options.layers);
    const auto longest = static_cast<std::size_t>(options.max_items_per_submit);
    for (auto& of_lane : pending_) of_lane.resize(layers);
    for (int q = 0; q < kLaneCount; ++q) {
      const bool whole_step = q == static_cast<int>(Lane::prefetch);  // the other lanes are waited for after each submission
      queues_[static_cast<std::size_t>(q)].submissions.reserve(2 * layers);
      queues_[static_cast<std::size_t>(q)].items.reserve(longest * (whole_step ? layers : 2));
    }
  }

  bool throttled() const noexcept { return nanoseconds_per_byte_ > 0.0; }
  int layers() const noexcept { return layers_; }

  /// Takes copies of the items; an empty list leaves no trace.
  void push(Lane lane, Layer layer, std::span<const TransferItem> items, Time now) {
    if (items.empty()) return;
    Queue& queue = queue_of(lane);
    Submission submission;
    submission.lane = lane;
    submission.layer = layer;
    submission.count = static_cast<int>(items.size());
    submission.ready = now;
    queue.submissions.reserve(static_cast<std::size_t>(queue.submissions.tail() - queue.submissions.head()) + 1);
    if (queue.submissions.empty()) queue.next = 0;
    queue.items.push(items.data(), items.size());
    submission.first_item = queue.items.tail() - items.size();
    queue.submissions.push(&submission, 1);
    Pending& pending = pending_of(lane, layer);
    pending.unstarted += submission.count;
    pending.outstanding += submission.count;
    for (const TransferItem& item : items) bytes_in_flight_ += item.bytes;
    statistics_of(lane).submitted_items += items.size();
  }

  /// From `now` on, prefetches of this layer start before those of others. With a single lane nothing overtakes.
  void promote(Layer layer, Time now) noexcept {
    if (single_lane_ || pending_of(Lane::prefetch, layer).unstarted == 0 || promoted_ == layer) return;
    promoted_ = layer;
    promoted_at_ = now;
  }

  /// Starts items of the submission whose turn it is, as far as they start by `horizon`. False if none does, or if it is the turn of a
  /// submission while batches of another one of its lane are unfinished: within a lane, a later submission may write where an earlier did.
  bool take(Time horizon, Batch& batch) noexcept {
    batch.count = 0;
    batch.bytes = 0;
    const Queue* from = nullptr;
    while (batch.count < Batch::kMaxItems && batch.bytes < Batch::kMaxBytes) {
      const Time start = next_start(horizon);
      if (start > horizon) break;
      const Turn turn = turn_at(start);
      if (turn.queue == nullptr) break;
      if (turn.queue->moving_items > 0 && turn.queue->moving != turn.submission) break;
      if (batch.count > 0 && (turn.queue != from || turn.submission != batch.submission)) break;
      from = turn.queue;
      start_item(turn, start, batch);
    }
    if (batch.count > 0 && !throttled()) note_copying(batch.lane, horizon);
    return batch.count > 0;
  }

  /// The items of `batch` are in place, except failed ones. Returns whether that completed its submission, then described in `completed`.
  bool finish(const Batch& batch, int moved_items, std::size_t moved_bytes, Time now, Completed& completed) noexcept {
    Queue& queue = queue_of(batch.lane);
    Submission& submission = queue.submissions[batch.submission];
    submission.arrived += batch.count;
    queue.moving_items -= batch.count;
    submission.last_arrival =
        std::max(submission.last_arrival, throttled() ? batch.arrivals[static_cast<std::size_t>(batch.count - 1)] : now);
    pending_of(batch.lane, batch.layer).outstanding -= batch.count;
    bytes_in_flight_ -= batch.bytes;
    LaneStatistics& statistics = statistics_of(batch.lane);
    statistics.moved_items += static_cast<std::uint64_t>(moved_items);
    statistics.moved_bytes += moved_bytes;
    if (!throttled()) note_copied(batch.lane, now);
    const bool complete = submission.arrived == submission.count;
    if (complete) completed = {batch.lane, batch.layer, submission.count, submission.first_start, submission.last_arrival};
    retire(queue);
    return complete;
  }

  /// When take() will have something next; Time::max() if nothing is queued. Meaningful on a throttled link.
  Time next_start() const noexcept { return next_start(Time::min()); }
  /// Items of the layer that were pushed and not yet finished.
  int outstanding(Lane lane, Layer layer) const noexcept { return pending_of(lane, layer).outstanding; }
  /// When the last item of the layer that has started arrives; on an unthrottled link always in the past.
  Time arrival(Lane lane, Layer layer) const noexcept { return pending_of(lane, layer).arrival; }
  bool is_done(Lane lane, Layer layer, Time now) const noexcept { return outstanding(lane, layer) == 0 && arrival(lane, layer) <= now; }
  std::size_t bytes_in_flight() const noexcept { return bytes_in_flight_; }
  LaneStatistics& statistics_of(Lane lane) noexcept { return statistics_[index(lane)]; }
  const LaneStatistics& statistics_of(Lane lane) const noexcept { return statistics_[index(lane)]; }
  /// Items that the queues hold without allocating.
  std::size_t item_capacity() const noexcept {
    std::size_t sum = 0;
    for (const Queue& queue : queues_) sum += queue.items.capacity();
    return sum;
  }

 private:
  struct Submission {
    Lane lane = Lane::prefetch;
    Layer layer = 0;
    int count = 0;
    int started = 0;
    int arrived = 0;
    std::uint64_t first_item = 0;
    Time ready;
    Time first_start;
    Time last_arrival;
  };
  struct Queue {
    Ring<Submission> submissions;
    Ring<TransferItem> items;
    std::uint64_t next = 0;    // first submission that has items left to start
    std::uint64_t moving = 0;  // the submission that the unfinished batches belong to
    int moving_items = 0;      // items in those
  };
  struct Pending {
    int unstarted = 0;
    int outstanding = 0;
    Time arrival = Time::min();
  };
  struct Turn {
    Queue* queue = nullptr;
    std::uint64_t submission = 0;
  };

  static constexpr std::size_t index(Lane lane) noexcept { return static_cast<std::size_t>(lane); }
  std::size_t queue_index(Lane lane) const noexcept { return index(single_lane_ && lane == Lane::urgent ? Lane::prefetch : lane); }
  Queue& queue_of(Lane lane) noexcept { return queues_[queue_index(lane)]; }
  Pending& pending_of(Lane lane, Layer layer) noexcept { return pending_[index(lane)][static_cast<std::size_t>(layer)]; }
  const Pending& pending_of(Lane lane, Layer layer) const noexcept { return pending_[index(lane)][static_cast<std::size_t>(layer)]; }

  Time next_start(Time horizon) const noexcept {
    Time ready = Time::max();
    for (const Queue& queue : queues_) {
      if (queue.next < queue.submissions.tail()) ready = std::min(ready, queue.submissions[queue.next].ready);
    }
    if (ready == Time::max()) return ready;
    return throttled() ? std::max(ready, link_free_) : std::max(ready, horizon);
  }

  Turn turn_at(Time start) noexcept {
    for (Queue& queue : queues_) {
      const std::uint64_t tail = queue.submissions.tail();
      if (queue.next >= tail || queue.submissions[queue.next].ready > start) continue;
      if (&queue == &queues_[index(Lane::prefetch)] && promoted_ >= 0 && promoted_at_ <= start) {
        for (std::uint64_t s = queue.next; s < tail; ++s) {
          const Submission& candidate = queue.submissions[s];
          if (candidate.layer == promoted_ && candidate.started < candidate.count && candidate.ready <= start) return {&queue, s};
        }
      }
      return {&queue, queue.next};
    }
    return {};
  }

  void start_item(const Turn& turn, Time start, Batch& batch) noexcept {
    Queue& queue = *turn.queue;
    Submission& submission = queue.submissions[turn.submission];
    const TransferItem& item = queue.items[submission.first_item + static_cast<std::uint64_t>(submission.started)];
    Pending& pending = pending_of(submission.lane, submission.layer);
    if (submission.started == 0) submission.first_start = start;
    if (throttled()) {
      const double exact = static_cast<double>(item.bytes) * nanoseconds_per_byte_ + fraction_;
      const std::chrono::nanoseconds wire(static_cast<std::int64_t>(exact));
      fraction_ = exact - static_cast<double>(wire.count());
      link_free_ = start + wire;
      statistics_of(submission.lane).busy += wire;
      pending.arrival = link_free_ + latency_;
    }
    batch.lane = submission.lane;
    batch.layer = submission.layer;
    batch.submission = turn.submission;
    batch.items[static_cast<std::size_t>(batch.count)] = item;
    batch.arrivals[static_cast<std::size_t>(batch.count)] = pending.arrival;
    ++batch.count;
    batch.bytes += item.bytes;
    queue.moving = turn.submission;
    ++queue.moving_items;
    ++submission.started;
    if (--pending.unstarted == 0 && submission.lane == Lane::prefetch && promoted_ == submission.layer) promoted_ = -1;
    while (queue.next < queue.submissions.tail() && queue.submissions[queue.next].started == queue.submissions[queue.next].count) {
      ++queue.next;
    }
  }

  void retire(Queue& queue) noexcept {
    std::uint64_t head = queue.submissions.head();
    const std::uint64_t tail = queue.submissions.tail();
    std::uint64_t items = queue.items.head();
    while (head < tail && queue.submissions[head].arrived == queue.submissions[head].count) {
      items = queue.submissions[head].first_item + static_cast<std::uint64_t>(queue.submissions[head].count);
      ++head;
    }
    queue.items.pop_until(items);
    queue.submissions.pop_until(head);
    if (queue.submissions.empty()) queue.next = 0;
  }

  void note_copying(Lane lane, Time now) noexcept {
    if (copiers_[index(lane)]++ == 0) copying_since_[index(lane)] = now;
  }
  void note_copied(Lane lane, Time now) noexcept {
    if (--copiers_[index(lane)] == 0) statistics_of(lane).busy += now - copying_since_[index(lane)];
  }

  int layers_;
  bool single_lane_;
  std::chrono::nanoseconds latency_;
  double nanoseconds_per_byte_ = 0.0;  // 0: unthrottled
  double fraction_ = 0.0;              // of a nanosecond, carried so that rounding does not change the rate
  Time link_free_ = Time::min();
  Layer promoted_ = -1;
  Time promoted_at_;
  std::size_t bytes_in_flight_ = 0;
  std::array<Queue, kLaneCount> queues_;                  // by falling priority
  std::array<std::vector<Pending>, kLaneCount> pending_;  // [lanes][layers]
  std::array<LaneStatistics, kLaneCount> statistics_;
  std::array<int, kLaneCount> copiers_{};
  std::array<Time, kLaneCount> copying_since_;
};

}  // namespace dualdecoder::cpu
