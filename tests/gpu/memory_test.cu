// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Memory of the CUDA backend: device pool, plain device memory and pinned pool, which kernels read and write across the ends of registered
// pieces; what happens when it runs out; nothing leaks. With --bench [GiB]: the time to pin memory, beside one cudaHostAlloc.
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/memory.hpp"
#include "cuda/pinned_pool.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/log.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "tests/gpu/check.hpp"

namespace dualdecoder::test {
namespace {

using cuda::DevicePool;
using cuda::PinnedPool;
using cuda::PinnedPoolOptions;
using cuda::Stream;
using testing::CountingResource;

constexpr std::size_t kMiB = std::size_t{1} << 20U;
constexpr std::size_t kGiB = std::size_t{1} << 30U;

/// words[i] = first + i, by the device.
__global__ void count_up(std::uint32_t* words, std::size_t n, std::uint32_t first) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += std::size_t{gridDim.x} * blockDim.x) {
    words[i] = first + static_cast<std::uint32_t>(i);
  }
}

/// *wrong = how many words are not first + i, as the device reads them.
__global__ void check_count(const std::uint32_t* words, std::size_t n, std::uint32_t first, unsigned long long* wrong) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += std::size_t{gridDim.x} * blockDim.x) {
    if (words[i] != first + static_cast<std::uint32_t>(i)) atomicAdd(wrong, 1ULL);
  }
}

unsigned long long wrong_on_device(const void* memory, std::size_t bytes, std::uint32_t first, StreamRef stream) {
  DeviceArray<unsigned long long> wrong(std::vector<unsigned long long>{0});
  check_count<<<64, 256, 0, stream.get()>>>(static_cast<const std::uint32_t*>(memory), bytes / 4, first, wrong.data());
  cuda::check_launch("check_count");
  cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  return wrong.download().front();
}

void test_device_pool(StreamRef stream) {
  DevicePool pool(0);
  CountingResource counting(pool);
  std::vector<Buffer> buffers;
  testing::Random random(1);
  for (int round = 0; round < 300; ++round) {
    if (buffers.size() > 20) buffers.erase(buffers.begin() + random.below(20));
    buffers.emplace_back(counting, static_cast<std::size_t>(1 + random.below(3 << 20)), stream);
    DUALDECODER_EXPECT(reinterpret_cast<std::uintptr_t>(buffers.back().data()) % Buffer::kAlignment == 0, "a buffer is not aligned");
  }
  const std::size_t reserved = pool.reserved_bytes();
  DUALDECODER_EXPECT(pool.used_bytes() >= counting.live_bytes(), "the pool counts less in use than is");
  buffers.clear();
  cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  DUALDECODER_EXPECT(counting.live_allocations() == 0 && pool.used_bytes() == 0, "freed memory counts as used");
  DUALDECODER_EXPECT(pool.reserved_bytes() == reserved, "freed memory left the pool by itself");
  { const Buffer again(pool, reserved / 4, stream); }
  DUALDECODER_EXPECT(pool.reserved_bytes() <= reserved + 64 * kMiB, "freed memory was not used again");
  cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  pool.trim();
  DUALDECODER_EXPECT(pool.reserved_bytes() == 0, "trim() left %zu bytes", pool.reserved_bytes());

  void* const aligned = pool.allocate(1000, 1 << 16, stream);
  DUALDECODER_EXPECT(reinterpret_cast<std::uintptr_t>(aligned) % (1 << 16) == 0, "65536-byte alignment is not honoured");
  pool.deallocate(aligned, 1000, 1 << 16, stream);
}

void test_out_of_device_memory(StreamRef stream) {
  DevicePool pool(0);
  cuda::PlainDeviceMemory plain(0);
  for (MemoryResource* resource : {static_cast<MemoryResource*>(&pool), static_cast<MemoryResource*>(&plain)}) {
    for (const std::size_t bytes : {std::size_t{1} << 45U, ~std::size_t{0} - 5}) {
      try {
        resource->allocate(bytes, 256, stream);
        DUALDECODER_EXPECT(false, "%zu bytes were served", bytes);
      } catch (const OutOfMemory& error) {
        DUALDECODER_EXPECT(error.asked_bytes() == bytes && error.free_bytes() > 0 && error.free_bytes() < kGiB * 1024,
                           "the figures are wrong: %s", error.what());
      }
    }
    const Buffer after(*resource, kMiB, stream);
    count_up<<<4, 256, 0, stream.get()>>>(reinterpret_cast<std::uint32_t*>(after.data()), kMiB / 4, 5);
    cuda::check_launch("after out of memory");
    DUALDECODER_EXPECT(wrong_on_device(after.data(), kMiB, 5, stream) == 0, "memory is not usable after an allocation that failed");
  }
}

void test_pinned_pieces(StreamRef stream) {
  // 64 MiB pieces, so that 200 MiB straddle at least three of them
  PinnedPool pool({.piece_bytes = 64 * kMiB, .address_bytes = 4 * kGiB});
  CountingResource counting(pool);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, small_run() ? 70 * kMiB : 200 * kMiB, 65 * kMiB + 4}) {
    const Buffer buffer(counting, bytes, stream);
    auto* const words = reinterpret_cast<std::uint32_t*>(buffer.data());
    if (bytes < 4) continue;
    for (std::size_t i = 0; i < bytes / 4; ++i) words[i] = 17 + static_cast<std::uint32_t>(i);
    DUALDECODER_EXPECT(wrong_on_device(words, bytes, 17, stream) == 0, "a kernel reads %zu pinned bytes wrongly", bytes);
    count_up<<<64, 256, 0, stream.get()>>>(words, bytes / 4, 90);
    cuda::check_launch("count_up");
    cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < bytes / 4; ++i) wrong += words[i] != 90 + static_cast<std::uint32_t>(i) ? 1U : 0U;
    DUALDECODER_EXPECT(wrong == 0, "%zu words that a kernel wrote to pinned memory are wrong", wrong);

    DeviceArray<std::uint32_t> there(bytes / 4);
    cuda::copy_async(there.data(), words, bytes / 4 * 4, stream);
    DUALDECODER_EXPECT(wrong_on_device(there.data(), bytes, 90, stream) == 0, "copy_async to the device is wrong");
    std::memset(words, 0, bytes);
    cuda::copy_async(words, there.data(), bytes / 4 * 4, stream);
    DUALDECODER_EXPECT(wrong_on_device(words, bytes, 90, stream) == 0, "copy_async from the device is wrong");
  }
  DUALDECODER_EXPECT(counting.live_allocations() == 0, "the buffers are still counted");
  DUALDECODER_EXPECT(pool.committed_bytes() <= 384 * kMiB, "%zu bytes were committed although ranges were free", pool.committed_bytes());
  DUALDECODER_EXPECT(pool.pinned_bytes() == pool.committed_bytes(), "what was committed is not pinned");
}

void test_pinned_reuse(StreamRef stream) {
  PinnedPool pool({.piece_bytes = 64 * kMiB, .address_bytes = 2 * kGiB});
  testing::Random random(4);
  std::vector<Buffer> buffers;
  for (int round = 0; round < (small_run() ? 60 : 500); ++round) {
    if (buffers.size() > 8 || (!buffers.empty() && random.chance(0.45))) {
      buffers.erase(buffers.begin() + random.below(static_cast<int>(buffers.size())));
      continue;
    }
    const std::size_t words = static_cast<std::size_t>(1 + random.below(4 << 20));
    buffers.emplace_back(pool, words * 4, stream);
    count_up<<<32, 256, 0, stream.get()>>>(reinterpret_cast<std::uint32_t*>(buffers.back().data()), words, 0);
    cuda::check_launch("count_up");
  }
  for (const Buffer& buffer : buffers) {
    DUALDECODER_EXPECT(wrong_on_device(buffer.data(), buffer.bytes(), 0, stream) == 0, "two live ranges overlap");
  }
  const std::size_t committed = pool.committed_bytes();
  DUALDECODER_EXPECT(committed <= 512 * kMiB, "%zu bytes were committed for at most 144 MiB in use", committed);
  buffers.clear();
  const Buffer whole(pool, committed, stream);  // waits until the stream is done with what was freed
  DUALDECODER_EXPECT(pool.committed_bytes() == committed, "free ranges do not join");
}

void test_reserve(StreamRef stream) {
  std::atomic<int> calls{0};
  std::atomic<std::size_t> last{0};
  constexpr std::size_t kReserve = 640 * kMiB;
  {
    PinnedPool pool(
        {.reserve_bytes = kReserve, .piece_bytes = 64 * kMiB, .threads = 4, .on_progress = [&](std::size_t done, std::size_t total) {
           DUALDECODER_EXPECT(total >= kReserve && done >= last && done <= total, "progress of %zu in %zu", done, total);
           last = done;
           ++calls;
         }});
    const Buffer early(pool, 64 * kMiB, stream);  // waits for its own piece
    std::memset(early.data(), 1, early.bytes());
    pool.wait();
    DUALDECODER_EXPECT(pool.pinned_bytes() == kReserve && pool.committed_bytes() == kReserve, "the reserve is not pinned");
    const Buffer rest(pool, kReserve - 64 * kMiB, stream);
    DUALDECODER_EXPECT(pool.committed_bytes() == kReserve, "the reserve was not used");
    const Buffer more(pool, 100 * kMiB, stream);  // grows on demand
    count_up<<<64, 256, 0, stream.get()>>>(reinterpret_cast<std::uint32_t*>(more.data()), 100 * kMiB / 4, 3);
    cuda::check_launch("count_up");
    DUALDECODER_EXPECT(wrong_on_device(more.data(), 100 * kMiB, 3, stream) == 0, "memory behind the reserve is not usable");
  }
  DUALDECODER_EXPECT(calls >= 10, "progress was told %d times", calls.load());
  // a pool that goes while it is still being pinned
  for (int round = 0; round < 3; ++round) PinnedPool pool({.reserve_bytes = kReserve, .piece_bytes = 64 * kMiB});
}

void test_out_of_pinned_memory(StreamRef stream) {
  const std::string text = thrown<OutOfMemory>("more than there is", [] { PinnedPool pool({.reserve_bytes = std::size_t{1} << 43U}); });
  DUALDECODER_EXPECT(text.find("pinned") != std::string::npos, "the sentence names no pinned memory: %s", text.c_str());
  PinnedPool pool({});
  for (const std::size_t bytes : {(std::size_t{1} << 40U) + 1, std::size_t{1} << 46U, ~std::size_t{0} - 3}) {
    try {
      pool.allocate(bytes, 256, stream);
      DUALDECODER_EXPECT(false, "%zu bytes were served", bytes);
    } catch (const OutOfMemory& error) {
      DUALDECODER_EXPECT(error.asked_bytes() == bytes && error.free_bytes() > 0, "the figures are wrong: %s", error.what());
    }
  }
  const Buffer after(pool, kMiB, stream);
  std::memset(after.data(), 0, kMiB);
  thrown<InvalidArgument>("an odd piece", [] { PinnedPool odd({.piece_bytes = 1000}); });
}

class Collected final : public LogSink {
 public:
  void log(LogLevel level, std::string_view message) override {
    text += (level == LogLevel::warning ? "warning: " : "") + std::string(message);
  }
  std::string text;
};

// A page where the pool will commit next is registered by somebody else, so that registering the pool's piece fails.
void test_registering_fails(StreamRef stream) {
  int reads_pageable = 0;
  cuda::check(cudaDeviceGetAttribute(&reads_pageable, cudaDevAttrPageableMemoryAccess, 0), "cudaDeviceGetAttribute");
  Collected log;
  PinnedPool pool({.piece_bytes = 64 * kMiB, .log = &log});
  const Buffer first(pool, 60 * kMiB, stream);
  std::byte* const page = first.data() + pool.committed_bytes();  // the first buffer lies at the start of the pool
  cuda::check(mprotect(page, 4096, PROT_READ | PROT_WRITE) == 0 ? cudaSuccess : cudaErrorUnknown, "mprotect");
  cuda::check(cudaHostRegister(page, 4096, cudaHostRegisterDefault), "cudaHostRegister of one page");
  constexpr std::size_t kBytes = 150 * kMiB;
  if (reads_pageable != 0) {
    const Buffer pageable(pool, kBytes, stream);
    DUALDECODER_EXPECT(log.text.find("warning: host memory stays pageable") == 0, "the log says: %s", log.text.c_str());
    cuda::check(cudaHostUnregister(page), "cudaHostUnregister");
    count_up<<<64, 256, 0, stream.get()>>>(reinterpret_cast<std::uint32_t*>(pageable.data()), kBytes / 4, 8);
    cuda::check_launch("count_up");
    DUALDECODER_EXPECT(wrong_on_device(pageable.data(), kBytes, 8, stream) == 0, "pageable memory is not usable");
    return;
  }
  const std::string text = thrown<OutOfMemory>("a page that is registered already", [&] { const Buffer refused(pool, kBytes, stream); });
  DUALDECODER_EXPECT(text.find("cudaHostRegister") != std::string::npos, "the sentence is: %s", text.c_str());
  const Buffer small(pool, kMiB, stream);  // what is pinned still serves
  cuda::check(cudaHostUnregister(page), "cudaHostUnregister");
  const Buffer again(pool, kBytes, stream);
  count_up<<<64, 256, 0, stream.get()>>>(reinterpret_cast<std::uint32_t*>(again.data()), kBytes / 4, 8);
  cuda::check_launch("count_up");
  DUALDECODER_EXPECT(wrong_on_device(again.data(), kBytes, 8, stream) == 0, "memory is not usable after a registration that failed");
}

void test_threads(StreamRef) {
  PinnedPool pool({.piece_bytes = 64 * kMiB});
  DevicePool device(0);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      try {
        cuda::check(cudaSetDevice(0), "cudaSetDevice");
        const Stream own = Stream::create();
        testing::Random random(static_cast<std::uint64_t>(t));
        for (int round = 0; round < (small_run() ? 5 : 50); ++round) {
          const std::size_t words = static_cast<std::size_t>(1000 + random.below(2 << 20));
          const Buffer pinned(pool, words * 4, own);
          const Buffer there(device, words * 4, own);
          auto* const host = reinterpret_cast<std::uint32_t*>(pinned.data());
          const auto first = static_cast<std::uint32_t>(t * 1000 + round);
          count_up<<<16, 256, 0, own.get()>>>(reinterpret_cast<std::uint32_t*>(there.data()), words, first);
          cuda::check_launch("count_up");
          cuda::copy_async(host, there.data(), words * 4, own);
          cuda::check(cudaStreamSynchronize(own.get()), "cudaStreamSynchronize");
          if (host[0] != first || host[words - 1] != first + static_cast<std::uint32_t>(words) - 1) ++wrong;
        }
      } catch (const std::exception&) {
        ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  DUALDECODER_EXPECT(wrong == 0, "%d times two threads disturbed each other", wrong.load());
}

template <class F>
double seconds(F&& action) {
  const auto begin = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// A JSON object a line: how long it takes until `gib` GiB are pinned.
void bench_pinning(std::size_t gib) {
  const std::size_t bytes = gib * kGiB;
  const auto report = [&](const char* how, int threads, bool huge_pages, std::size_t piece, double took) {
    std::printf("{\"row\":\"pin\",\"how\":\"%s\",\"gib\":%zu,\"threads\":%d,\"huge_pages\":%s,\"piece_mib\":%zu,\"seconds\":%.3f}\n", how,
                gib, threads, huge_pages ? "true" : "false", piece / kMiB, took);
    std::fflush(stdout);
  };
  cuda::check(cudaFree(nullptr), "the first use of the device");
  for (const bool huge_pages : {true, false}) {
    for (const int threads : {16, 4, 1}) {
      if ((threads < 16 || !huge_pages) && gib > 16) continue;
      std::unique_ptr<PinnedPool> pool;
      const double took = seconds([&] {
        pool = std::make_unique<PinnedPool>(PinnedPoolOptions{.reserve_bytes = bytes, .threads = threads, .huge_pages = huge_pages});
        pool->wait();
      });
      report("pool", threads, huge_pages, kGiB, took);
      std::printf("{\"row\":\"unpin\",\"gib\":%zu,\"threads\":%d,\"seconds\":%.3f}\n", gib, threads, seconds([&] { pool.reset(); }));
    }
  }
  void* memory = nullptr;
  report("cudaHostAlloc", 1, false, bytes,
         seconds([&] { cuda::check(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped), "cudaHostAlloc"); }));
  cuda::check(cudaFreeHost(memory), "cudaFreeHost");
}

}  // namespace
}  // namespace dualdecoder::test

int main(int argc, char** argv) {
  namespace test = dualdecoder::test;
  return test::run_on_device([&] {
    if (argc > 1 && std::string(argv[1]) == "--bench") {
      test::bench_pinning(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 16);
      return;
    }
    const auto stream = dualdecoder::cuda::Stream::create();
    test::test_device_pool(stream);
    test::test_out_of_device_memory(stream);
    test::test_pinned_pieces(stream);
    test::test_pinned_reuse(stream);
    test::test_reserve(stream);
    test::test_out_of_pinned_memory(stream);
    test::test_registering_fails(stream);
    test::test_threads(stream);
  });
}
