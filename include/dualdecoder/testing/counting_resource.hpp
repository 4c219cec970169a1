// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>

#include "dualdecoder/error.hpp"
#include "dualdecoder/memory.hpp"

namespace dualdecoder::testing {

/// Counts what passes through to another resource, and plays one that runs out: at a limit of bytes, or at a chosen allocation, so that a
/// test can fail each allocation of an operation in turn. Threading: any thread.
class CountingResource final : public MemoryResource {
 public:
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

  /// `upstream` must outlive this.
  explicit CountingResource(MemoryResource& upstream) : upstream_(upstream) {}

  /// Throws OutOfMemory past the limit or at the chosen allocation, else what upstream throws; a failed call changes no live count.
  void* allocate(std::size_t bytes, std::size_t alignment, StreamRef stream) override {
    const std::lock_guard lock(mutex_);
    if (allocations_++ == fail_at_) throw OutOfMemory("the allocation that a test fails", bytes, limit_ - live_bytes_);
    if (bytes > limit_ - live_bytes_) throw OutOfMemory("a limited resource", bytes, limit_ - live_bytes_);
    void* memory = upstream_.allocate(bytes, alignment, stream);
    live_bytes_ += bytes;
    ++live_allocations_;
    if (live_bytes_ > peak_bytes_) peak_bytes_ = live_bytes_;
    return memory;
  }
  void deallocate(void* memory, std::size_t bytes, std::size_t alignment, StreamRef stream) noexcept override {
    const std::lock_guard lock(mutex_);
    upstream_.deallocate(memory, bytes, alignment, stream);
    live_bytes_ -= bytes;
    --live_allocations_;
  }

  /// The allocation `from_now` calls ahead throws, 0 being the next one; kNever: none.
  void fail_at(std::uint64_t from_now) {
    const std::lock_guard lock(mutex_);
    fail_at_ = from_now == kNever ? kNever : allocations_ + from_now;
  }
  /// Live bytes never exceed this. Throws InvalidArgument below what is live now.
  void limit(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    detail::require(bytes >= live_bytes_, "limit", bytes, "at least the live bytes");
    limit_ = bytes;
  }

  std::size_t live_bytes() const { return read(live_bytes_); }
  std::size_t live_allocations() const { return read(live_allocations_); }
  std::size_t peak_bytes() const { return read(peak_bytes_); }
  /// Calls of allocate so far, failed ones included.
  std::uint64_t allocations() const { return read(allocations_); }

 private:
  template <class Value>
  Value read(const Value& value) const {
    const std::lock_guard lock(mutex_);
    return value;
  }

  MemoryResource& upstream_;
  mutable std::mutex mutex_;
  std::size_t live_bytes_ = 0;
  std::size_t live_allocations_ = 0;
  std::size_t peak_bytes_ = 0;
  std::size_t limit_ = std::numeric_limits<std::size_t>::max();
  std::uint64_t allocations_ = 0;
  std::uint64_t fail_at_ = kNever;
};

}  // namespace dualdecoder::testing
