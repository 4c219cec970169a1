// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/stream.hpp"

namespace dualdecoder {

/// Where bytes live. On the CPU backend `device` and `pinned` are ordinary memory that plays the part.
enum class MemoryKind : std::uint8_t { device, pinned, pageable };

/// Source of memory of one kind. Threading: allocate and deallocate may be called from several threads at once.
class MemoryResource {
 public:
  MemoryResource() = default;
  MemoryResource(const MemoryResource&) = delete;
  MemoryResource& operator=(const MemoryResource&) = delete;
  virtual ~MemoryResource() = default;

  /// `bytes` > 0 at a multiple of `alignment` (a power of two), usable in the order of `stream`. Throws OutOfMemory.
  virtual void* allocate(std::size_t bytes, std::size_t alignment, StreamRef stream) = 0;
  /// Gives back what allocate returned, with the same size and alignment, in the order of `stream`.
  virtual void deallocate(void* memory, std::size_t bytes, std::size_t alignment, StreamRef stream) noexcept = 0;
};

/// One allocation of a resource; frees it when destroyed. The resource must outlive it.
class Buffer {
 public:
  static constexpr std::size_t kAlignment = 256;

  Buffer() = default;
  Buffer(MemoryResource& resource, std::size_t bytes, StreamRef stream) : resource_(&resource), bytes_(bytes), stream_(stream.get()) {
    if (bytes_ > 0) data_ = resource.allocate(bytes_, kAlignment, stream);
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) resource_->deallocate(data_, bytes_, kAlignment, StreamRef(stream_));
  }

  void swap(Buffer& other) noexcept {
    std::swap(resource_, other.resource_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(stream_, other.stream_);
  }
  std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  MemoryResource* resource_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  CUstream_st* stream_ = nullptr;
};

/// Sizes and carves one buffer with the same code: with no base it only counts, with a base it hands out aligned pieces.
class Carver {
 public:
  explicit Carver(std::byte* base = nullptr) : base_(base) {}

  /// `count` elements of T; null while counting.
  template <class T>
  T* take(std::size_t count) {
    offset_ = (offset_ + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
    std::byte* piece = base_ == nullptr ? nullptr : base_ + offset_;
    offset_ += count * sizeof(T);
    return reinterpret_cast<T*>(piece);
  }
  std::size_t bytes() const noexcept { return offset_; }

 private:
  static constexpr std::size_t kPieceAlignment = 64;
  std::byte* base_;
  std::size_t offset_ = 0;
};

/// What a session will take, known before anything is allocated.
struct MemoryPlan {
  struct Item {
    std::string what;
    MemoryKind kind;
    std::size_t bytes;
  };
  std::vector<Item> items;

  void add(std::string what, MemoryKind kind, std::size_t bytes) { items.push_back({std::move(what), kind, bytes}); }
  void add(const MemoryPlan& other) { items.insert(items.end(), other.items.begin(), other.items.end()); }
  std::size_t bytes(MemoryKind kind) const noexcept {
    std::size_t sum = 0;
    for (const Item& item : items) sum += item.kind == kind ? item.bytes : 0;
    return sum;
  }
  std::size_t device_bytes() const noexcept { return bytes(MemoryKind::device); }
  std::size_t pinned_bytes() const noexcept { return bytes(MemoryKind::pinned); }
  std::size_t pageable_bytes() const noexcept { return bytes(MemoryKind::pageable); }
  std::size_t total_bytes() const noexcept { return device_bytes() + pinned_bytes() + pageable_bytes(); }
};

}  // namespace dualdecoder
