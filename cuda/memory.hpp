// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>

#include "dualdecoder/memory.hpp"
#include "dualdecoder/stream.hpp"

namespace dualdecoder::cuda {

/// Host ranges are registered in pieces that may end at multiples of this address step, and one copy must not span two of them.
inline constexpr std::size_t kRegisteredStep = std::size_t{64} << 20U;

/// Enqueues a copy between any two memories of device and host, in pieces that keep inside registered ranges of a PinnedPool. Pageable
/// memory is staged by the runtime, which may wait. Throws CudaError.
void copy_async(void* target, const void* source, std::size_t bytes, StreamRef stream);

/// Device memory from a pool of its own, served and taken back in the order of streams without waiting. What was freed stays in the pool
/// until trim(). Refuses streams that are being recorded (InvalidArgument). Threading: any thread.
class DevicePool final : public MemoryResource {
 public:
  explicit DevicePool(int device);
  ~DevicePool() override;

  void* allocate(std::size_t bytes, std::size_t alignment, StreamRef stream) override;
  void deallocate(void* memory, std::size_t bytes, std::size_t alignment, StreamRef stream) noexcept override;

  /// Gives memory back to the device that nothing uses, all but `keep_bytes` of it.
  void trim(std::size_t keep_bytes = 0);
  /// Bytes taken from the device, and of those the bytes in use.
  std::size_t reserved_bytes() const noexcept { return attribute(cudaMemPoolAttrReservedMemCurrent); }
  std::size_t used_bytes() const noexcept { return attribute(cudaMemPoolAttrUsedMemCurrent); }

 private:
  std::size_t attribute(cudaMemPoolAttr which) const noexcept;

  int device_;
  cudaMemPool_t pool_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<void*, void*> shifted_;  // over-aligned pieces: what was handed out -> what the pool gave
};

/// Device memory by cudaMalloc and cudaFree: each call stands by itself and may wait for the whole device. Threading: any thread.
class PlainDeviceMemory final : public MemoryResource {
 public:
  explicit PlainDeviceMemory(int device) : device_(device) {}

  void* allocate(std::size_t bytes, std::size_t alignment, StreamRef stream) override;
  void deallocate(void* memory, std::size_t bytes, std::size_t alignment, StreamRef stream) noexcept override;

 private:
  int device_;
};

/// Ordinary memory of the host, which the device need not be able to read. Threading: any thread.
class PageableMemory final : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, std::size_t alignment, StreamRef stream) override;
  void deallocate(void* memory, std::size_t bytes, std::size_t alignment, StreamRef stream) noexcept override;
};

/// Bytes that the machine could still give to this program: what is available, within the limit of its control group.
std::size_t free_host_bytes();

}  // namespace dualdecoder::cuda
