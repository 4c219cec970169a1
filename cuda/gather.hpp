// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "dualdecoder/stream.hpp"
#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder::cuda {

/// What a lane did, in device memory. Gathers of one lane never run at the same time. Times are of the device's global timer.
struct LaneState {
  unsigned long long moved_items = 0;
  unsigned long long moved_bytes = 0;
  unsigned long long busy_ns = 0;
  unsigned long long stalled_ns = 0;
  unsigned long long begin_ns = ~0ULL;  // earliest block of the gather that runs, ~0: none runs
  unsigned long long wait_begin_ns = 0;
  unsigned int arrived = 0;  // blocks of the gather that runs which are done
};

/// The link that all lanes of a scheduler share where it is throttled, in device memory. Times in 1/1024 ns since `epoch_ns`.
struct LinkState {
  unsigned long long epoch_ns = 0;  // set by launch_begin_link
  unsigned long long free_at = 0;   // when what has been accepted is through
  unsigned int stop = 0;            // not 0: what has not started is abandoned
};

/// How fast a gather may be: unthrottled unless `link` is set.
struct GatherPace {
  LinkState* link = nullptr;
  double ticks_per_byte = 0.0;           // 1/1024 ns
  unsigned long long latency_ticks = 0;  // of each item
};

/// When gathers ran, the newest ones, in device memory.
struct SpanRing {
  static constexpr unsigned kSpans = 1024;
  struct Span {
    unsigned long long begin_ns = 0;
    unsigned long long end_ns = 0;
    int lane = 0;
    int layer = 0;
    unsigned int number = 0;  // of the span plus 1, written last
  };
  unsigned int written = 0;
  Span spans[kSpans];  // span i at i % kSpans
};

/// What a gather says about itself in a ring; nothing without one.
struct GatherLabel {
  SpanRing* ring = nullptr;
  int lane = 0;
  int layer = 0;
};

/// Enqueues a kernel of at most `blocks` blocks that moves the items of a list in device memory, a warp for an item; either end of an item
/// may be host memory that the device reaches. Fast where both ends are multiples of 16. Counts in `lane`.
cudaError_t launch_gather(const TransferList& list, LaneState* lane, int blocks, const GatherPace& pace, StreamRef stream,
                          const GatherLabel& label = {});

/// Whether this build holds code that the current device runs; cudaErrorNoKernelImageForDevice if not.
cudaError_t find_gather();

/// Enqueues the start of a link's clock; once, before the first gather that it paces.
cudaError_t launch_begin_link(LinkState* link, StreamRef stream);

/// Enqueues a copy of the list into `snapshot`, whose capacity is at least the list's.
cudaError_t launch_snapshot(const TransferList& list, const TransferList& snapshot, StreamRef stream);

/// Enqueues the writing of the device's global timer to device memory.
cudaError_t launch_read_timer(unsigned long long* time_ns, StreamRef stream);

/// Enqueues the marks between which a stream stood still for `lane`.
cudaError_t launch_stall_begin(LaneState* lane, StreamRef stream);
cudaError_t launch_stall_end(LaneState* lane, StreamRef stream);

}  // namespace dualdecoder::cuda
