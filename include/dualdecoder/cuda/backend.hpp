// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/export.hpp"
#include "dualdecoder/memory.hpp"

struct CUstream_st;

namespace dualdecoder::cuda {

/// What a CUDA backend is made from. All pointers may be null, and must outlive the backend where they are not.
struct BackendOptions {
  int device = 0;                 ///< 0 .. device_count()-1
  CUstream_st* stream = nullptr;  ///< of that device, for everything that the backend enqueues; null: one of its own
  LogSink* log = nullptr;
  TraceSink* trace = nullptr;
  MemoryResource* device_memory = nullptr;  ///< serves MemoryKind::device in place of the backend's own pool; likewise the next two
  MemoryResource* pinned = nullptr;         ///< must be host memory that kernels reach by its host address
  MemoryResource* pageable = nullptr;
  std::size_t reserve_pinned_bytes = 0;  ///< of the backend's own pinned memory, pinned in the background from the start
  /// Told how much of it is pinned, from background threads, one call at a time; must not throw nor call the backend.
  std::function<void(std::size_t done, std::size_t total)> on_pinned;
  int prefetch_blocks = 8;  ///< of 256 threads that bring chunks beside compute: fewer leave the link idle, more slow it down; 1 .. 1024
  int urgent_blocks = 32;   ///< and those that compute waits for
};

/// Devices that make_cuda_backend() can use, as CUDA counts them up to the first that is too old: 0 in a build without the CUDA backend,
/// without a driver, with one that is older than the runtime, or without a device. Never throws.
DUALDECODER_EXPORT int device_count() noexcept;

/// The CUDA backend. Needs compute capability 8.0. Work is enqueued and waited for on streams alone: other threads, streams and graphs of
/// the process are not held up, and the current device is the caller's again after every call. Throws InvalidArgument (no such device, a
/// stream that is being recorded or belongs to another device, options out of range), OutOfMemory, CudaError (no driver, a driver older
/// than the runtime, no device, a device too old), and Error in a build without the CUDA backend.
DUALDECODER_EXPORT std::shared_ptr<Backend> make_cuda_backend(const BackendOptions& options = {});
DUALDECODER_EXPORT std::shared_ptr<Backend> make_cuda_backend(int device);

}  // namespace dualdecoder::cuda
