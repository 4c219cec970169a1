// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>

#include "cuda/check.hpp"
#include "cuda/gather.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/stream.hpp"
#include "dualdecoder/trace.hpp"

namespace dualdecoder::cuda {

/// Brings the spans that gathers leave in device memory to a TraceSink, on the host's clock. Gathers of recorded steps are among them. Only
/// the newest SpanRing::kSpans since the last report() are kept. Threading: report() from one thread at a time.
class LaneTrace {
 public:
  /// `stream` is one that nothing else uses; memory is taken on `owner`. Waits. Throws OutOfMemory, CudaError.
  LaneTrace(TraceSink& sink, MemoryResource& memory, StreamRef owner, StreamRef stream);

  SpanRing* ring() const noexcept { return reinterpret_cast<SpanRing*>(memory_.data()); }
  /// Reports what has ended since the last call. Waits for one small copy. Throws CudaError.
  void report();

 private:
  TraceSink::Time time_of(unsigned long long device_ns) const;

  TraceSink& sink_;
  Buffer memory_;
  StreamRef stream_;
  unsigned long long device_zero_ns_ = 0;  // the device's clock at host_zero_
  TraceSink::Time host_zero_;
  unsigned reported_ = 0;
};

}  // namespace dualdecoder::cuda
