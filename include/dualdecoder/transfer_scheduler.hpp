// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "dualdecoder/stream.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder {

/// The three kinds of traffic between the host tier and the device, in falling order of priority.
enum class Lane : std::uint8_t { urgent, prefetch, write_back };
inline constexpr int kLaneCount = 3;

/// One contiguous piece to move: a chunk-head's keys and values.
struct TransferItem {
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::uint32_t bytes = 0;
  float score = 0.0F;  ///< expected share of attention; a bounded lane moves the best first
};

/// Items of one submission, in memory of the backend.
struct TransferList {
  TransferItem* items = nullptr;  ///< [capacity]
  int* count = nullptr;           ///< [1]
  int capacity = 0;
};

/// What a lane did since the scheduler was made.
struct LaneStatistics {
  std::uint64_t submitted_items = 0;
  std::uint64_t moved_items = 0;
  std::uint64_t moved_bytes = 0;
  std::chrono::nanoseconds busy{0};     ///< the lane had an item on the link
  std::chrono::nanoseconds stalled{0};  ///< compute stood in wait()
};

/// When bytes move. A submitted list may be reused by whatever follows on the stream that it was submitted on. Per lane, layers move in the
/// order submitted; between lanes urgent overtakes prefetch, and prefetch overtakes write-back. Threading: submit and wait come from one
/// thread, the compute thread; statistics from any.
class TransferScheduler {
 public:
  TransferScheduler() = default;
  TransferScheduler(const TransferScheduler&) = delete;
  TransferScheduler& operator=(const TransferScheduler&) = delete;
  virtual ~TransferScheduler() = default;

  /// Enqueues the items for `layer`; they start after what `after` holds so far. Neither waits nor allocates after the first step.
  virtual void submit(Lane lane, Layer layer, const TransferList& list, StreamRef after) = 0;
  /// `stream` goes on when everything submitted to `lane` for `layer` has arrived. A waited-for prefetch overtakes those of other layers.
  /// Rethrows what a copy threw. On the CPU backend the calling thread is the stream, so it blocks.
  virtual void wait(Lane lane, Layer layer, StreamRef stream) = 0;
  /// A stream for work that later steps need and this one does not: what is enqueued there runs after what `after` holds so far and beside
  /// what follows on it. A scheduler without such a stream returns `after`.
  virtual StreamRef side_stream(StreamRef after) { return after; }
  /// `stream` goes on when everything on the side stream has run; nothing to do where there is none.
  virtual void rejoin(StreamRef stream) { static_cast<void>(stream); }
  /// wait() for every lane and layer.
  virtual void drain(StreamRef stream) = 0;
  virtual LaneStatistics statistics(Lane lane) const = 0;
};

}  // namespace dualdecoder
