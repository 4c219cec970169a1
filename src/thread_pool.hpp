// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace dualdecoder::cpu {

/// Threads that share loops with the thread that calls. Made for thousands of tiny loops per token: an idle worker spins for some ten
/// microseconds before it sleeps, a loop allocates nothing, and nobody waits for a worker that comes too late to help.
/// Threading: parallel_for may be called from any thread; while another loop is under way (or from inside a body) the caller runs alone.
class ThreadPool {
 public:
  /// `threads` take part in a loop, the caller included; 0: as many as the machine has. Throws InvalidArgument, std::system_error.
  explicit ThreadPool(int threads);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  /// Threads that take part in a loop, the caller included.
  int size() const noexcept { return static_cast<int>(workers_.size()) + 1; }

  /// Calls body(index) or body(index, worker) once for every index in 0 .. count-1 in no fixed order, and returns when all are done. No two
  /// bodies run with the same `worker` (0 .. size()-1) at once within this loop. Rethrows the first exception; indices not yet begun are
  /// then left out.
  template <class F>
  void parallel_for(int count, F&& body) {
    using Body = std::remove_reference_t<F>;
    constexpr auto call = [](void* object, int index, int worker) {
      if constexpr (std::is_invocable_v<Body&, int, int>) {
        (*static_cast<Body*>(object))(index, worker);
      } else {
        (*static_cast<Body*>(object))(index);
      }
    };
    run(count, call, const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }

 private:
  using Call = void (*)(void* object, int index, int worker);

  void run(int count, Call call, void* object);
  void take_indices(int worker) noexcept;
  void work(int worker) noexcept;
  bool enter(std::uint64_t& seen) noexcept;
  void sleep(std::uint64_t seen);
  void stop() noexcept;

  // The loop under way. Written while no worker is inside, published by gate_.
  Call call_ = nullptr;
  void* object_ = nullptr;
  int count_ = 0;
  std::exception_ptr failure_;  // written by whoever sets failed_

  /// Number of the loop in the upper 47 bits, then whether it may be entered, then how many workers are inside.
  alignas(64) std::atomic<std::uint64_t> gate_{0};
  alignas(64) std::atomic<int> next_{0};
  std::atomic<bool> failed_{false};
  alignas(64) std::atomic<bool> busy_{false};  // a caller owns the pool
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace dualdecoder::cpu
