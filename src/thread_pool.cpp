// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/thread_pool.hpp"

#include <algorithm>

#include "dualdecoder/error.hpp"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace dualdecoder::cpu {
namespace {

constexpr std::uint64_t kInside = 0xFFFF;  // gate: workers inside
constexpr std::uint64_t kOpen = 0x10000;   // gate: may be entered
constexpr int kNumberShift = 17;           // gate: number of the loop
constexpr int kMaxThreads = 1024;
constexpr int kSpins = 1000;         // pauses before a worker sleeps: about 20 us where a pause takes 20 ns
constexpr int kSpinsOfCaller = 200;  // pauses before the caller lets other threads of the machine run

void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  detail::require(threads >= 0 && threads <= kMaxThreads, "threads", threads, "in 0 (all of the machine) .. 1024");
  const int wanted = threads > 0 ? threads : std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxThreads);
  workers_.reserve(static_cast<std::size_t>(wanted - 1));
  try {
    for (int worker = 1; worker < wanted; ++worker) workers_.emplace_back([this, worker] { work(worker); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int count, Call call, void* object) {
  if (count <= 0) return;
  if (count == 1 || workers_.empty() || busy_.exchange(true, std::memory_order_acquire)) {
    for (int index = 0; index < count; ++index) call(object, index, 0);
    return;
  }
  call_ = call;
  object_ = object;
  count_ = count;
  next_.store(0, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  // The order of this store and the load of sleepers_ mirrors sleep(): either the sleeper sees the loop or the caller sees the sleeper.
  gate_.store(((gate_.load(std::memory_order_relaxed) >> kNumberShift) + 1) << kNumberShift | kOpen);
  if (sleepers_.load() > 0) {
    { const std::lock_guard lock(mutex_); }
    wake_.notify_all();
  }
  take_indices(0);
  gate_.fetch_and(~kOpen, std::memory_order_relaxed);
  for (int spins = 0; (gate_.load(std::memory_order_acquire) & kInside) != 0; ++spins) {
    if (spins < kSpinsOfCaller) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  const std::exception_ptr failure = std::exchange(failure_, nullptr);
  busy_.store(false, std::memory_order_release);
  if (failure) std::rethrow_exception(failure);
}

void ThreadPool::take_indices(int worker) noexcept {
  const Call call = call_;
  const int count = count_;
  for (int index = next_.fetch_add(1, std::memory_order_relaxed); index < count; index = next_.fetch_add(1, std::memory_order_relaxed)) {
    try {
      call(object_, index, worker);
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_relaxed)) failure_ = std::current_exception();
      next_.store(count, std::memory_order_relaxed);
    }
  }
}

bool ThreadPool::enter(std::uint64_t& seen) noexcept {
  std::uint64_t gate = gate_.load(std::memory_order_acquire);
  while ((gate & kOpen) != 0 && gate >> kNumberShift != seen) {
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire)) {
      seen = gate >> kNumberShift;
      return true;
    }
  }
  return false;
}

void ThreadPool::sleep(std::uint64_t seen) {
  std::unique_lock lock(mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] {
    const std::uint64_t gate = gate_.load();
    return stopping_.load() || ((gate & kOpen) != 0 && gate >> kNumberShift != seen);
  });
  sleepers_.fetch_sub(1);
}

void ThreadPool::work(int worker) noexcept {
  std::uint64_t seen = 0;
  for (int spins = 0; !stopping_.load(std::memory_order_relaxed);) {
    if (enter(seen)) {
      take_indices(worker);
      gate_.fetch_sub(1, std::memory_order_release);
      spins = 0;
    } else if (spins < kSpins) {
      ++spins;
      pause();
    } else {
      sleep(seen);
      spins = 0;
    }
  }
}

}  // namespace dualdecoder::cpu
