// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "dualdecoder/memory.hpp"

namespace dualdecoder::cpu {

/// Ordinary memory of the host. Large requests are checked against what the machine has free, so that they fail here instead of when they
/// are first touched. Threading: any thread.
class HostMemory final : public MemoryResource {
 public:
  /// `huge_pages`: large pieces ask the system for huge pages, which suits memory that is filled whole and then streamed.
  explicit HostMemory(bool huge_pages) : huge_pages_(huge_pages) {}

  void* allocate(std::size_t bytes, std::size_t alignment, StreamRef stream) override;
  void deallocate(void* memory, std::size_t bytes, std::size_t alignment, StreamRef stream) noexcept override;

 private:
  std::size_t alignment_of(std::size_t bytes, std::size_t alignment) const noexcept;

  bool huge_pages_;
};

/// Bytes that the machine could still give to programs.
std::size_t free_host_bytes();

}  // namespace dualdecoder::cpu
