// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/pinned_pool.hpp"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <system_error>
#include <utility>

#include "cuda/memory.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/log.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr std::size_t kGrain = 256;  // sizes are rounded up to it, so that ranges stay aligned for vector loads

std::size_t round_up(std::size_t value, std::size_t step) { return (value + step - 1) / step * step; }

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

// Gives every page of a piece its memory; what the machine cannot give is found out here and not by a kernel.
void touch(std::byte* memory, std::size_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  if (madvise(memory, bytes, MADV_POPULATE_WRITE) == 0) return;
#endif
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t at = 0; at < bytes; at += page) *reinterpret_cast<volatile unsigned char*>(memory + at) = 0;
}

// ", and the limit of locked memory (ulimit -l) is 65536 bytes" where that may be why `bytes` could not be pinned
std::string limit_of_locked_memory(std::size_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur > bytes) return "";
  return ", and the limit of locked memory (ulimit -l) is " + std::to_string(limit.rlim_cur) + " bytes";
}

}  // namespace

PinnedPool::PinnedPool(PinnedPoolOptions options) : options_(std::move(options)) {
  detail::require(options_.piece_bytes > 0 && options_.piece_bytes % kRegisteredStep == 0, "piece_bytes", options_.piece_bytes,
                  "a multiple of 64 MiB");
  const DeviceGuard guard(options_.device);
  if (attribute(cudaDevAttrCanUseHostPointerForRegisteredMem, options_.device) == 0) {
    throw CudaError("device " + std::to_string(options_.device) + " cannot reach registered host memory by its host address");
  }
  reads_pageable_ = attribute(cudaDevAttrPageableMemoryAccess, options_.device) != 0;
  if (options_.threads <= 0) options_.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 16U));
  set_address_space_aside();
  if (options_.reserve_bytes == 0) return;
  try {
    grow(options_.reserve_bytes, 1);
    start_threads();
  } catch (...) {
    munmap(mapping_, mapping_bytes_);
    throw;
  }
}

PinnedPool::~PinnedPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  for (const Freed& freed : freed_) cudaEventSynchronize(freed.event.get());
  std::atomic<std::size_t> next{0};
  const auto unpin = [&] {
    cudaSetDevice(options_.device);
    for (std::size_t i = next++; i < pieces_.size(); i = next++) {
      if (pieces_[i].state == State::pinned) cudaHostUnregister(base_ + pieces_[i].offset);
    }
    cudaGetLastError();  // of a driver that is unloading
  };
  std::vector<std::thread> helpers;
  try {
    for (int i = 0; i < options_.threads && static_cast<std::size_t>(i) < pieces_.size(); ++i) helpers.emplace_back(unpin);
  } catch (const std::exception&) {  // fewer threads do it too
  }
  if (helpers.empty() && !pieces_.empty()) {
    int before = 0;
    const bool known = cudaGetDevice(&before) == cudaSuccess;
    unpin();
    if (known) cudaSetDevice(before);
  }
  for (std::thread& helper : helpers) helper.join();
  munmap(mapping_, mapping_bytes_);
}

void PinnedPool::set_address_space_aside() {
  const std::size_t least = round_up(options_.reserve_bytes, options_.piece_bytes) + options_.piece_bytes;
  for (std::size_t bytes = std::max(options_.address_bytes, least); bytes >= least; bytes /= 2) {
    mapping_bytes_ = bytes + options_.piece_bytes;
    mapping_ = mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED) continue;  // a limit of address space (ulimit -v)
    const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
    base_ = static_cast<std::byte*>(mapping_) + (round_up(address, options_.piece_bytes) - address);
    options_.address_bytes = bytes;
    return;
  }
  throw OutOfMemory("the address space of pinned memory", least, 0);
}

void PinnedPool::start_threads() {
  const std::size_t wanted = std::min(static_cast<std::size_t>(options_.threads), pieces_.size() - next_);
  try {
    while (threads_.size() < wanted) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {  // whoever allocates pins what is missing
  }
}

void PinnedPool::work() {
  cudaSetDevice(options_.device);  // of this thread alone
  Lock lock(mutex_);
  while (!stopping_) {
    if (!pin_one(lock)) changed_.wait(lock);
  }
}

// Takes up the next piece, if there is one, and deals with it without the lock.
bool PinnedPool::pin_one(Lock& lock) {
  if (next_ == pieces_.size()) return false;
  const std::size_t index = next_++;
  pieces_[index].state = State::busy;
  const Piece piece = pieces_[index];
  lock.unlock();
  const std::string reason = pin(piece);
  const State state = reason.empty() ? State::pinned : after_failure(reason);
  lock.lock();
  pieces_[index].state = state;
  dealt_with_bytes_ += piece.bytes;
  if (state == State::pinned) pinned_bytes_ += piece.bytes;
  if (!reason.empty()) failure_ = reason;
  changed_.notify_all();
  if (options_.on_progress) {
    lock.unlock();
    {
      const std::lock_guard one_at_a_time(progress_mutex_);
      lock.lock();
      const std::size_t done = dealt_with_bytes_;
      const std::size_t total = end_;
      lock.unlock();
      options_.on_progress(done, total);
    }
    lock.lock();
  }
  return true;
}

// Returns why the piece could not be pinned, or nothing.
std::string PinnedPool::pin(const Piece& piece) {
  std::byte* const memory = base_ + piece.offset;
  if (mprotect(memory, piece.bytes, PROT_READ | PROT_WRITE) != 0) return "mprotect failed";
#if defined(MADV_HUGEPAGE)
  if (options_.huge_pages) madvise(memory, piece.bytes, MADV_HUGEPAGE);  // a wish: a refusal changes nothing
#endif
  touch(memory, piece.bytes);
  const cudaError_t status = cudaHostRegister(memory, piece.bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (status == cudaSuccess) return "";
  cudaGetLastError();
  return std::string("cudaHostRegister of ") + std::to_string(piece.bytes) + " bytes: " + cudaGetErrorString(status) +
         limit_of_locked_memory(piece.offset + piece.bytes);
}

PinnedPool::State PinnedPool::after_failure(const std::string& reason) {
  if (!reads_pageable_) return State::failed;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(warned_, true)) return State::pageable;
  }
  if (options_.log != nullptr) {
    try {
      options_.log->log(LogLevel::warning, "host memory stays pageable, which the device reads more slowly (" + reason + ")");
    } catch (...) {  // a sink's trouble is not the memory's
    }
  }
  return State::pageable;
}

void* PinnedPool::allocate(std::size_t bytes, std::size_t alignment, StreamRef) {
  const DeviceGuard guard(options_.device);  // this thread may register too
  const std::size_t asked = bytes;
  if (bytes > options_.address_bytes) throw OutOfMemory("pinned host memory", asked, free_host_bytes());
  bytes = round_up(bytes, kGrain);
  Lock lock(mutex_);
  reuse_freed(false, lock);
  std::size_t offset = take(bytes, alignment);
  if (offset == kNone && !freed_.empty()) {
    reuse_freed(true, lock);
    offset = take(bytes, alignment);
  }
  if (offset == kNone) {
    grow(bytes, alignment);
    start_threads();
    changed_.notify_all();
    offset = take(bytes, alignment);
  }
  if (wait_for(offset, bytes, lock)) return base_ + offset;
  give_back(offset, bytes);
  drop_failed();
  throw OutOfMemory("pinned host memory (" + failure_ + ")", asked, spare_bytes());
}

void PinnedPool::deallocate(void* memory, std::size_t bytes, std::size_t, StreamRef stream) noexcept {
  const auto offset = static_cast<std::size_t>(static_cast<std::byte*>(memory) - base_);
  bytes = round_up(bytes, kGrain);
  Event event;
  try {
    const DeviceGuard guard(options_.device);
    event = Event::create();
    event.record(stream);
  } catch (...) {  // an unloading driver: nothing can use the range any more
    event = Event();
  }
  try {
    const std::lock_guard lock(mutex_);
    if (event.get() == nullptr) {
      give_back(offset, bytes);
    } else {
      freed_.push_back({offset, bytes, std::move(event)});
    }
  } catch (...) {  // no memory for the note: the range stays unused
  }
}

void PinnedPool::wait() {
  const DeviceGuard guard(options_.device);
  Lock lock(mutex_);
  wait_for(0, end_, lock);
}

std::size_t PinnedPool::committed_bytes() const {
  const std::lock_guard lock(mutex_);
  return end_;
}

std::size_t PinnedPool::pinned_bytes() const {
  const std::lock_guard lock(mutex_);
  return pinned_bytes_;
}

// Commits pieces behind the last one until a range of `bytes` fits there; small pieces where there would be fewer of them than threads.
void PinnedPool::grow(std::size_t bytes, std::size_t alignment) {
  std::size_t at = end_;
  if (!free_.empty()) {
    const auto& [offset, length] = *free_.rbegin();
    if (offset + length == end_) at = offset;
  }
  const std::size_t target = round_up(round_up(at, alignment) + bytes, kRegisteredStep);
  std::size_t more = target - end_;
  const std::size_t spare = spare_bytes();
  if (target > options_.address_bytes || more > spare) throw OutOfMemory("pinned host memory", bytes, spare);
  const std::size_t share = round_up(more / static_cast<std::size_t>(options_.threads) + 1, kRegisteredStep);
  const std::size_t piece = std::min(options_.piece_bytes, share);
  pieces_.reserve(pieces_.size() + more / piece + 1);
  give_back(end_, more);
  while (more > 0) {
    const std::size_t size = std::min(piece, more);
    pieces_.push_back({end_, size, State::queued, 0});
    end_ += size;
    more -= size;
  }
}

// First fit: low addresses are pinned first.
std::size_t PinnedPool::take(std::size_t bytes, std::size_t alignment) {
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [offset, length] = *range;
    const std::size_t first = round_up(offset, alignment);
    if (first + bytes > offset + length) continue;
    if (offset + length > first + bytes) free_.emplace(first + bytes, offset + length - first - bytes);
    if (first > offset) {
      range->second = first - offset;
    } else {
      free_.erase(range);
    }
    return first;
  }
  return kNone;
}

void PinnedPool::give_back(std::size_t offset, std::size_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace_hint(next, offset, bytes);
}

void PinnedPool::reuse_freed(bool wait, Lock& lock) {
  std::deque<Freed> still;
  std::deque<Freed> freed = std::move(freed_);
  freed_.clear();
  if (wait) lock.unlock();
  for (Freed& range : freed) {
    const cudaError_t status = wait ? cudaEventSynchronize(range.event.get()) : cudaEventQuery(range.event.get());
    if (status != cudaSuccess) cudaGetLastError();
    if (status == cudaErrorNotReady) {
      still.push_back(std::move(range));
      range.bytes = 0;
    }
  }
  if (wait) lock.lock();
  for (const Freed& range : freed) {
    if (range.bytes > 0) give_back(range.offset, range.bytes);
  }
  for (Freed& range : still) freed_.push_back(std::move(range));
}

// Until every piece of the range has been dealt with, helping; whether all of them can be used.
bool PinnedPool::wait_for(std::size_t offset, std::size_t bytes, Lock& lock) {
  const auto first_at = [&] {
    return std::partition_point(pieces_.begin(), pieces_.end(), [&](const Piece& piece) { return piece.offset + piece.bytes <= offset; });
  };
  for (;;) {
    bool open = false;
    bool usable = true;
    for (auto piece = first_at(); piece != pieces_.end() && piece->offset < offset + bytes; ++piece) {
      open = open || piece->state == State::queued || piece->state == State::busy;
      usable = usable && piece->state != State::failed;
    }
    if (!open || !usable) return usable;
    if (!pin_one(lock)) changed_.wait(lock);
  }
}

// Takes failed pieces out of circulation, and forgets those at the end that nobody waits for, so that the pool can try again there.
void PinnedPool::drop_failed() {
  for (Piece& piece : pieces_) {
    if (piece.state == State::failed) piece.withdrawn += withdraw(piece.offset, piece.bytes);
  }
  while (!pieces_.empty() && pieces_.back().withdrawn == pieces_.back().bytes) {
    const Piece last = pieces_.back();
    mmap(base_ + last.offset, last.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    dealt_with_bytes_ -= last.bytes;
    end_ = last.offset;
    pieces_.pop_back();
    next_ = pieces_.size();
  }
}

// Takes whatever of the range is free out of the free ranges; returns how much that was.
std::size_t PinnedPool::withdraw(std::size_t offset, std::size_t bytes) {
  const std::size_t end = offset + bytes;
  std::size_t taken = 0;
  auto range = free_.upper_bound(offset);
  if (range != free_.begin()) --range;
  while (range != free_.end() && range->first < end) {
    const auto [first, length] = *range;
    const std::size_t last = first + length;
    if (last <= offset) {
      ++range;
      continue;
    }
    range = free_.erase(range);
    taken += std::min(last, end) - std::max(first, offset);
    if (first < offset) free_.emplace(first, offset - first);
    if (last > end) free_.emplace(end, last - end);
  }
  return taken;
}

// Bytes that can still be committed: what the machine has, without what committed pieces will yet take.
std::size_t PinnedPool::spare_bytes() const {
  std::size_t untouched = 0;
  for (std::size_t i = next_; i < pieces_.size(); ++i) untouched += pieces_[i].bytes;
  const std::size_t free = free_host_bytes();
  return free - std::min(free, untouched);
}

}  // namespace dualdecoder::cuda
