// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/check.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/stream.hpp"

namespace dualdecoder {
class LogSink;
}

namespace dualdecoder::cuda {

/// What a PinnedPool is made from.
struct PinnedPoolOptions {
  int device = 0;
  std::size_t reserve_bytes = 0;                      ///< pinned in the background from the start
  std::size_t piece_bytes = std::size_t{1} << 30U;    ///< registered in one call, a multiple of kRegisteredStep
  std::size_t address_bytes = std::size_t{1} << 40U;  ///< of address space set aside: bounds the pool, costs no memory
  int threads = 0;                                    ///< that touch and register, 0: as many as the machine has, at most 16
  bool huge_pages = true;                             ///< ask for them: fewer pages to pin, and fewer for the device to look up
  LogSink* log = nullptr;                             ///< may be null
  std::function<void(std::size_t done, std::size_t total)> on_progress;  ///< from background threads, one call at a time; must not throw
};

/// Host memory that kernels read and write by its host address. One range of addresses is set aside; what is reserved or asked for is
/// committed from its front in pieces, which several threads touch and register, so that an allocation of any size is contiguous and waits
/// for its own pieces alone. Freed ranges are used again when the stream that they were freed on gets there; pages stay pinned until the
/// pool goes. Where registering fails, pieces stay pageable, with a warning, if the device can read such memory. Threading: any thread.
class PinnedPool final : public MemoryResource {
 public:
  /// Throws InvalidArgument, OutOfMemory (reserve_bytes is more than the machine has), CudaError.
  explicit PinnedPool(PinnedPoolOptions options);
  ~PinnedPool() override;

  /// May wait for pages to be pinned; throws OutOfMemory, which names the limit of locked memory where that is the cause.
  void* allocate(std::size_t bytes, std::size_t alignment, StreamRef stream) override;
  void deallocate(void* memory, std::size_t bytes, std::size_t alignment, StreamRef stream) noexcept override;

  /// Waits until everything committed so far is pinned or has failed.
  void wait();
  std::size_t committed_bytes() const;
  std::size_t pinned_bytes() const;

 private:
  enum class State : unsigned char { queued, busy, pinned, pageable, failed };
  struct Piece {
    std::size_t offset;
    std::size_t bytes;
    State state;
    std::size_t withdrawn;  // bytes of a failed piece that are out of circulation
  };
  struct Freed {
    std::size_t offset;
    std::size_t bytes;
    Event event;  // of the stream that may still use the range
  };
  using Lock = std::unique_lock<std::mutex>;
  static constexpr std::size_t kNone = ~std::size_t{0};

  void set_address_space_aside();
  void start_threads();
  void work();
  bool pin_one(Lock& lock);
  std::string pin(const Piece& piece);
  State after_failure(const std::string& reason);
  void grow(std::size_t bytes, std::size_t alignment);
  std::size_t take(std::size_t bytes, std::size_t alignment);
  void give_back(std::size_t offset, std::size_t bytes);
  void reuse_freed(bool wait, Lock& lock);
  bool wait_for(std::size_t offset, std::size_t bytes, Lock& lock);
  void drop_failed();
  std::size_t withdraw(std::size_t offset, std::size_t bytes);
  std::size_t spare_bytes() const;

  PinnedPoolOptions options_;
  bool reads_pageable_ = false;
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  std::byte* base_ = nullptr;  // first multiple of piece_bytes of the mapping

  mutable std::mutex mutex_;
  std::condition_variable changed_;          // a piece was queued or has been dealt with, or the pool goes
  std::vector<Piece> pieces_;                // in the order of addresses, without gaps
  std::size_t next_ = 0;                     // first piece that nobody has taken up
  std::size_t end_ = 0;                      // committed bytes
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes, no two of them adjacent
  std::deque<Freed> freed_;
  std::size_t dealt_with_bytes_ = 0;
  std::size_t pinned_bytes_ = 0;
  std::string failure_;  // of the last registration that failed
  bool warned_ = false;
  bool stopping_ = false;
  std::mutex progress_mutex_;
  std::vector<std::thread> threads_;
};

}  // namespace dualdecoder::cuda
