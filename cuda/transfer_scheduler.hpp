// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "dualdecoder/stream.hpp"
#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder::cuda {

/// What a scheduler of the CUDA backend works with; everything outlives it.
struct SchedulerResources {
  int device = 0;
  MemoryResource* memory = nullptr;  ///< of the device
  StreamRef stream;                  ///< that memory is taken and given back on
  int prefetch_blocks = 8;           ///< of a gather beside compute: together 256 KiB on the link, which a step takes to keep it busy
  int urgent_blocks = 32;            ///< of a gather that compute waits for
};

/// Lanes that the device drives: kernels read the lists where they lie and move the items between the device and pinned host memory.
/// Urgent loads and write-backs run on the stream that submits them, so that waiting for them is the stream's own order; prefetches run on
/// the side stream or, if they are to be concurrent, on one of their own, both of the lowest priority. A prefetch submitted on the stream
/// that it runs on reads its list there; one from another stream takes a copy. A write-back that the side stream waits for is behind all
/// prefetches so far. Everything can be recorded; what runs on these streams when a recording begins must have been rejoined. A throttle,
/// if set, holds for all lanes together. Throws InvalidArgument, OutOfMemory, CudaError.
std::unique_ptr<TransferScheduler> make_cuda_scheduler(const SchedulerOptions& options, const SchedulerResources& resources);

}  // namespace dualdecoder::cuda
