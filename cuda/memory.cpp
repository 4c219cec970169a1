// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <new>
#include <string>

#include "cuda/check.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr std::size_t kServedAlignment = 256;  // of whatever cudaMalloc and cudaMallocAsync return
constexpr std::size_t kUnknown = std::numeric_limits<std::size_t>::max();

std::size_t to_registered_end(const void* memory) { return kRegisteredStep - reinterpret_cast<std::uintptr_t>(memory) % kRegisteredStep; }

void* aligned_up(void* memory, std::size_t alignment) {
  return reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(memory) + alignment - 1) / alignment * alignment);
}

std::size_t read_number(const char* path) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? value : kUnknown;  // "max" is no number: no limit
}

// What a control group leaves, in either version of the interface; file caches count as used but can be dropped.
std::size_t free_in_group(const char* limit_path, const char* used_path, const char* details_path, const char* cache_key) {
  const std::size_t limit = read_number(limit_path);
  const std::size_t used = read_number(used_path);
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  std::size_t cache = 0;
  std::ifstream details(details_path);
  std::size_t value = 0;
  for (std::string key; details >> key >> value;) {
    if (key == cache_key) cache = value;
  }
  const std::size_t held = used - std::min(used, cache);
  return limit - std::min(limit, held);
}

}  // namespace

void copy_async(void* target, const void* source, std::size_t bytes, StreamRef stream) {
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  while (bytes > 0) {
    const std::size_t piece = std::min({bytes, to_registered_end(to), to_registered_end(from)});
    check(cudaMemcpyAsync(to, from, piece, cudaMemcpyDefault, stream.get()), "cudaMemcpyAsync");
    to += piece;
    from += piece;
    bytes -= piece;
  }
}

DevicePool::DevicePool(int device) : device_(device) {
  const DeviceGuard guard(device_);
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device_;
  check(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate");
  std::uint64_t keep_all = std::numeric_limits<std::uint64_t>::max();
  const cudaError_t status = cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep_all);
  if (status != cudaSuccess) cudaMemPoolDestroy(pool_);
  check(status, "cudaMemPoolSetAttribute");
}

DevicePool::~DevicePool() { cudaMemPoolDestroy(pool_); }

void* DevicePool::allocate(std::size_t bytes, std::size_t alignment, StreamRef stream) {
  const DeviceGuard guard(device_);
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream.get(), &capturing), "cudaStreamIsCapturing");
  if (capturing != cudaStreamCaptureStatusNone) {  // it would become memory of the recording, there when that is replayed
    throw InvalidArgument("stream: is being recorded; device memory can be allocated outside of a recording only");
  }
  const std::size_t slack = alignment > kServedAlignment ? alignment : 0;
  void* memory = nullptr;
  const cudaError_t status =
      bytes > kUnknown - slack ? cudaErrorMemoryAllocation : cudaMallocFromPoolAsync(&memory, bytes + slack, pool_, stream.get());
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    std::size_t free = 0;
    std::size_t total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) cudaGetLastError();
    const std::size_t used = used_bytes();
    throw OutOfMemory("device memory", bytes, free + reserved_bytes() - std::min(reserved_bytes(), used));
  }
  check(status, "cudaMallocFromPoolAsync", bytes);
  if (slack == 0) return memory;
  void* const aligned = aligned_up(memory, alignment);
  try {
    const std::lock_guard lock(mutex_);
    shifted_.emplace(aligned, memory);
  } catch (...) {
    cudaFreeAsync(memory, stream.get());
    throw;
  }
  return aligned;
}

void DevicePool::deallocate(void* memory, std::size_t, std::size_t alignment, StreamRef stream) noexcept {
  if (alignment > kServedAlignment) {
    const std::lock_guard lock(mutex_);
    const auto found = shifted_.find(memory);
    if (found != shifted_.end()) {
      memory = found->second;
      shifted_.erase(found);
    }
  }
  if (cudaFreeAsync(memory, stream.get()) != cudaSuccess) cudaGetLastError();  // an unloading driver, or a stream that is gone
}

void DevicePool::trim(std::size_t keep_bytes) {
  const DeviceGuard guard(device_);
  check(cudaMemPoolTrimTo(pool_, keep_bytes), "cudaMemPoolTrimTo");
}

std::size_t DevicePool::attribute(cudaMemPoolAttr which) const noexcept {
  std::uint64_t value = 0;
  if (cudaMemPoolGetAttribute(pool_, which, &value) != cudaSuccess) cudaGetLastError();
  return static_cast<std::size_t>(value);
}

void* PlainDeviceMemory::allocate(std::size_t bytes, std::size_t alignment, StreamRef) {
  detail::require(alignment <= kServedAlignment, "alignment", alignment, "at most 256 for memory of cudaMalloc");
  const DeviceGuard guard(device_);
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "device memory", bytes);
  return memory;
}

void PlainDeviceMemory::deallocate(void* memory, std::size_t, std::size_t, StreamRef stream) noexcept {
  if (cudaStreamSynchronize(stream.get()) != cudaSuccess || cudaFree(memory) != cudaSuccess) cudaGetLastError();
}

void* PageableMemory::allocate(std::size_t bytes, std::size_t alignment, StreamRef) {
  if (bytes > free_host_bytes()) throw OutOfMemory("host memory", bytes, free_host_bytes());
  void* memory = ::operator new(bytes, std::align_val_t(alignment), std::nothrow);
  if (memory == nullptr) throw OutOfMemory("host memory", bytes, free_host_bytes());
  return memory;
}

void PageableMemory::deallocate(void* memory, std::size_t, std::size_t alignment, StreamRef) noexcept {
  ::operator delete(memory, std::align_val_t(alignment));
}

std::size_t free_host_bytes() {
  std::size_t available = kUnknown;
  std::ifstream file("/proc/meminfo");
  for (std::string key, rest; file >> key; std::getline(file, rest)) {
    std::size_t kilobytes = 0;
    if (key == "MemAvailable:" && file >> kilobytes) available = kilobytes * 1024;
  }
  if (available == kUnknown) {
    const long pages = sysconf(_SC_PHYS_PAGES);
    const long page = sysconf(_SC_PAGESIZE);
    if (pages > 0 && page > 0) available = static_cast<std::size_t>(pages) * static_cast<std::size_t>(page);
  }
  const std::size_t second =
      free_in_group("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file");
  const std::size_t first = free_in_group("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
                                          "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file");
  return std::min({available, first, second});
}

}  // namespace dualdecoder::cuda
