// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/host_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <new>
#include <string>

#include "dualdecoder/error.hpp"

namespace dualdecoder::cpu {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20U;
constexpr std::size_t kHugeBytes = 4 * kHugePage;              // smaller pieces would waste a share of their last page
constexpr std::size_t kCheckedBytes = std::size_t{64} << 20U;  // reading what is free takes some 20 us

}  // namespace

std::size_t free_host_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string key, rest; file >> key; std::getline(file, rest)) {
    std::size_t kilobytes = 0;
    if (key == "MemAvailable:" && file >> kilobytes) return kilobytes * 1024;
  }
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page = sysconf(_SC_PAGESIZE);
  return pages > 0 && page > 0 ? static_cast<std::size_t>(pages) * static_cast<std::size_t>(page) : std::numeric_limits<std::size_t>::max();
}

std::size_t HostMemory::alignment_of(std::size_t bytes, std::size_t alignment) const noexcept {
  return huge_pages_ && bytes >= kHugeBytes ? std::max(alignment, kHugePage) : alignment;
}

void* HostMemory::allocate(std::size_t bytes, std::size_t alignment, StreamRef) {
  if (bytes >= kCheckedBytes && bytes > free_host_bytes()) throw OutOfMemory("host memory", bytes, free_host_bytes());
  const std::size_t used = alignment_of(bytes, alignment);
  void* memory = ::operator new(bytes, std::align_val_t(used), std::nothrow);
  if (memory == nullptr) throw OutOfMemory("host memory", bytes, free_host_bytes());
#if defined(MADV_HUGEPAGE)
  if (used == kHugePage) madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // a wish: a refusal changes nothing
#endif
  return memory;
}

void HostMemory::deallocate(void* memory, std::size_t bytes, std::size_t alignment, StreamRef) noexcept {
  ::operator delete(memory, std::align_val_t(alignment_of(bytes, alignment)));
}

}  // namespace dualdecoder::cpu
