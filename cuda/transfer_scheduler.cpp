// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/transfer_scheduler.hpp"

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/gather.hpp"
#include "cuda/lane_trace.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

using CaptureId = unsigned long long;  // 0: the stream runs what it is given

CaptureId capture_of(StreamRef stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CaptureId id = 0;
  check(cudaStreamGetCaptureInfo(stream.get(), &status, &id), "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

/// A point of a stream that others may wait for. One that was set in a recording means nothing outside it.
class Mark {
 public:
  void create() { event_ = Event::create(); }
  void set(StreamRef stream) {
    capture_ = capture_of(stream);
    event_.record(stream);
    is_set_ = true;
  }
  void clear() noexcept { is_set_ = false; }
  /// Whether a stream in this recording, or in none, has anything to wait for. Throws where work outside a recording would be waited for
  /// inside it.
  bool holds(CaptureId capture) {
    if (!is_set_) return false;
    if (capture_ != capture) {
      if (capture_ == 0) throw CudaError("a recording waits for transfers that were enqueued before it; call rejoin() before recording");
      is_set_ = false;
      return false;
    }
    return true;
  }
  void hold(StreamRef stream) {
    if (holds(capture_of(stream))) event_.hold(stream);
  }

 private:
  Event event_;
  CaptureId capture_ = 0;
  bool is_set_ = false;
};

constexpr int kSnapshots = 2;

struct DeviceState {
  std::array<LaneState, kLaneCount> lanes;
  LinkState link;
};

struct Pieces {
  DeviceState* state;
  std::array<TransferList, kSnapshots> snapshots;
};

Pieces carve(Carver& carver, const SchedulerOptions& options) {
  Pieces pieces{};
  pieces.state = carver.take<DeviceState>(1);
  for (TransferList& snapshot : pieces.snapshots) {
    snapshot.items = carver.take<TransferItem>(static_cast<std::size_t>(options.max_items_per_submit));
    snapshot.count = carver.take<int>(1);
    snapshot.capacity = options.max_items_per_submit;
  }
  return pieces;
}

std::size_t device_bytes(const SchedulerOptions& options) {
  Carver counting;
  carve(counting, options);
  return counting.bytes();
}

int lowest_priority() {
  int lowest = 0;
  int highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  return lowest;
}

class CudaScheduler final : public TransferScheduler {
 public:
  CudaScheduler(const SchedulerOptions& options, const SchedulerResources& resources)
      : options_(options),
        resources_(resources),
        side_(Stream::create(lowest_priority())),
        moving_(options.concurrent_prefetch ? Stream::create(lowest_priority()) : Stream()),
        reading_(Stream::create()),
        memory_(*resources.memory, device_bytes(options), resources.stream),
        layers_(static_cast<std::size_t>(options.layers)) {
    Carver carver(memory_.data());
    pieces_ = carve(carver, options);
    const DeviceState initial;
    check(cudaMemcpyAsync(pieces_.state, &initial, sizeof initial, cudaMemcpyDefault, resources.stream.get()), "cudaMemcpyAsync");
    if (options.bytes_per_second > 0.0) {
      pace_.link = &pieces_.state->link;
      pace_.ticks_per_byte = 1e9 * 1024.0 / options.bytes_per_second;
      pace_.latency_ticks = static_cast<unsigned long long>(options.latency.count()) << 10U;
      check(launch_begin_link(pace_.link, resources.stream), "the start of a link's clock");
    }
    check(cudaStreamSynchronize(resources.stream.get()), "cudaStreamSynchronize");
    for (Mark& layer : layers_) layer.create();
    for (Mark& snapshot : snapshot_read_) snapshot.create();
    if (options.trace != nullptr) trace_.emplace(*options.trace, *resources.memory, resources.stream, reading_);
    for (Event* event : {&fork_, &join_, &listed_, &moved_, &other_stream_}) *event = Event::create();
  }

  // What has not started is abandoned where it would take long; the rest ends before its memory goes.
  ~CudaScheduler() override {
    try {
      const DeviceGuard guard(resources_.device);
      if (pace_.link != nullptr) cudaMemsetAsync(&pace_.link->stop, 1, sizeof pace_.link->stop, reading_.get());
      cudaStreamSynchronize(side_.get());
      cudaStreamSynchronize(moving().get());
      if (trace_) trace_->report();
      cudaGetLastError();
    } catch (...) {  // an unloading driver: nothing runs any more
    }
  }

  void submit(Lane lane, Layer layer, const TransferList& list, StreamRef after) override {
    require_layer(layer);
    if (list.count == nullptr || list.capacity <= 0) return;
    const DeviceGuard guard(resources_.device);
    report_now_and_then(after);
    if (lane == Lane::prefetch) return submit_prefetch(layer, list, after);
    submitted_on_[static_cast<std::size_t>(lane)] = after;
    if (lane == Lane::urgent && options_.single_lane) return queue_behind_prefetch(layer, list, after);
    gather(lane, layer, list, resources_.urgent_blocks, after);
  }

  void wait(Lane lane, Layer layer, StreamRef stream) override {
    require_layer(layer);
    const DeviceGuard guard(resources_.device);
    // what a store does behind this on the side stream, it does to slots of every layer
    if (lane == Lane::write_back && stream == StreamRef(side_)) hold_for_moves(side_);
    if (lane != Lane::prefetch) return wait_for_other_stream(lane, stream);
    Mark& mark = layers_[static_cast<std::size_t>(layer)];
    if (!mark.holds(capture_of(stream))) return;
    stall(lane, stream, [&] { mark.hold(stream); });
  }

  StreamRef side_stream(StreamRef after) override {
    const DeviceGuard guard(resources_.device);
    const CaptureId capture = capture_of(after);
    if (forked_ && fork_capture_ != capture) forget(capture);
    fork_.record(after);
    fork_.hold(side_);
    forked_ = true;
    fork_capture_ = capture;
    return side_;
  }

  void rejoin(StreamRef stream) override {
    if (!forked_) return;
    const DeviceGuard guard(resources_.device);
    const CaptureId capture = capture_of(stream);
    if (fork_capture_ != capture) return forget(capture);
    stall(Lane::prefetch, stream, [&] {
      hold_for_moves(stream);
      join_.record(side_);
      join_.hold(stream);
    });
    clear();
  }

  void drain(StreamRef stream) override {
    rejoin(stream);
    const DeviceGuard guard(resources_.device);
    wait_for_other_stream(Lane::urgent, stream);
    wait_for_other_stream(Lane::write_back, stream);
  }

  LaneStatistics statistics(Lane lane) const override {
    const std::lock_guard lock(reading_mutex_);
    const DeviceGuard guard(resources_.device);
    LaneState state;
    check(cudaMemcpyAsync(&state, lane_state(lane), sizeof state, cudaMemcpyDefault, reading_.get()), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(reading_.get()), "cudaStreamSynchronize");
    if (trace_) trace_->report();
    LaneStatistics statistics;
    statistics.submitted_items = state.moved_items;  // the device learns of a list when it moves it
    statistics.moved_items = state.moved_items;
    statistics.moved_bytes = state.moved_bytes;
    statistics.busy = std::chrono::nanoseconds(state.busy_ns);
    // compute stands still for as long as an urgent gather runs in its own stream
    statistics.stalled = std::chrono::nanoseconds(lane == Lane::urgent && !options_.single_lane ? state.busy_ns : state.stalled_ns);
    return statistics;
  }

 private:
  void require_layer(Layer layer) const {
    detail::require(layer >= 0 && layer < options_.layers, "layer", layer, "a layer of the scheduler");
  }
  LaneState* lane_state(Lane lane) const { return pieces_.state->lanes.data() + static_cast<std::size_t>(lane); }

  void gather(Lane lane, Layer layer, const TransferList& list, int blocks, StreamRef stream) {
    const GatherLabel label{trace_ ? trace_->ring() : nullptr, static_cast<int>(lane), layer};
    check(launch_gather(list, lane_state(lane), blocks, pace_, stream, label), "a gather");
  }

  // Before the ring of spans can have come round; the reading waits, so not in a recording.
  void report_now_and_then(StreamRef after) {
    if (!trace_ || ++submitted_since_report_ < SpanRing::kSpans / 2 || capture_of(after) != 0) return;
    submitted_since_report_ = 0;
    const std::lock_guard lock(reading_mutex_);
    trace_->report();
  }

  /// Of prefetches: the side stream, or one beside it, so that the next layer's list is made while this one's items move.
  StreamRef moving() const { return options_.concurrent_prefetch ? moving_ : side_; }

  // From the list itself where its stream makes the next one only after it, else from a copy; the copy that is overwritten was read: its
  // mark is the end of its gather, two prefetches back.
  void submit_prefetch(Layer layer, const TransferList& list, StreamRef after) {
    if (after == moving()) {
      gather(Lane::prefetch, layer, list, resources_.prefetch_blocks, after);
    } else {
      detail::require(list.capacity <= options_.max_items_per_submit, "capacity of a transfer list", list.capacity,
                      "at most max_items_per_submit");
      const std::size_t index = next_snapshot_++ % kSnapshots;
      const TransferList& snapshot = pieces_.snapshots[index];
      snapshot_read_[index].hold(after);
      check(launch_snapshot(list, snapshot, after), "the copy of a transfer list");
      move_behind(after);
      gather(Lane::prefetch, layer, snapshot, resources_.prefetch_blocks, moving());
      snapshot_read_[index].set(moving());
    }
    layers_[static_cast<std::size_t>(layer)].set(moving());
  }

  void queue_behind_prefetch(Layer layer, const TransferList& list, StreamRef after) {
    move_behind(after);
    gather(Lane::urgent, layer, list, resources_.urgent_blocks, moving());
    stall(Lane::urgent, after, [&] {
      moved_.record(moving());
      moved_.hold(after);
    });
  }

  /// moving() goes on behind what `stream` holds so far.
  void move_behind(StreamRef stream) {
    if (stream != StreamRef(side_)) side_stream(stream);
    if (!options_.concurrent_prefetch) return;
    listed_.record(stream);
    listed_.hold(moving_);
    moves_ = true;
  }
  /// `stream` goes on when what moving_ was given since the last rejoin has run.
  void hold_for_moves(StreamRef stream) {
    if (!moves_) return;
    moved_.record(moving_);
    moved_.hold(stream);
  }

  // The stream that submitted goes on by itself; any other waits for everything there.
  void wait_for_other_stream(Lane lane, StreamRef stream) {
    const std::optional<StreamRef>& on = submitted_on_[static_cast<std::size_t>(lane)];
    if (!on || *on == stream || capture_of(*on) != capture_of(stream)) return;
    other_stream_.record(*on);
    other_stream_.hold(stream);
  }

  template <class Hold>
  void stall(Lane lane, StreamRef stream, Hold&& hold) {
    check(launch_stall_begin(lane_state(lane), stream), "a mark of time");
    hold();
    check(launch_stall_end(lane_state(lane), stream), "a mark of time");
  }

  // What was forked belongs to a recording that is over, and is forgotten, or was not recorded, and would be lost in one.
  void forget(CaptureId capture) {
    if (fork_capture_ == 0 && capture != 0) {
      throw CudaError("transfers that were enqueued before a recording are still in flight; call rejoin() before recording");
    }
    clear();
  }
  void clear() noexcept {
    forked_ = false;
    moves_ = false;
    for (Mark& layer : layers_) layer.clear();
    for (Mark& snapshot : snapshot_read_) snapshot.clear();
  }

  SchedulerOptions options_;
  SchedulerResources resources_;
  Stream side_;
  Stream moving_;   // of prefetches where they have one of their own, behind what made their lists
  Stream reading_;  // of the statistics, beside everything else
  Buffer memory_;
  Pieces pieces_{};
  GatherPace pace_;
  std::vector<Mark> layers_;  // [layers] the end of its last prefetch
  std::array<Mark, kSnapshots> snapshot_read_;
  std::size_t next_snapshot_ = 0;
  Event fork_, join_, listed_, moved_, other_stream_;
  bool forked_ = false;  // since the last rejoin
  bool moves_ = false;   // moving_ was given something since
  CaptureId fork_capture_ = 0;
  std::array<std::optional<StreamRef>, kLaneCount> submitted_on_;
  mutable std::optional<LaneTrace> trace_;
  unsigned submitted_since_report_ = 0;
  mutable std::mutex reading_mutex_;  // of reading_ and trace_->report()
};

}  // namespace

std::unique_ptr<TransferScheduler> make_cuda_scheduler(const SchedulerOptions& options, const SchedulerResources& resources) {
  validate(options);
  const DeviceGuard guard(resources.device);
  return std::make_unique<CudaScheduler>(options, resources);
}

}  // namespace dualdecoder::cuda
