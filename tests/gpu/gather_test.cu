// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The gather kernel: items of every size and alignment, in both directions, against memcpy; its counts; its pace. With --bench: GB/s by
// size of item and number of blocks, with and without huge host pages.
#include "cuda/gather.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/memory.hpp"
#include "cuda/pinned_pool.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "tests/gpu/check.hpp"

namespace dualdecoder::test {
namespace {

using cuda::GatherPace;
using cuda::LaneState;
using cuda::LinkState;
using cuda::PinnedPool;
using testing::Random;

constexpr std::size_t kMiB = std::size_t{1} << 20U;

/// A list in device memory.
struct List {
  explicit List(const std::vector<TransferItem>& values, int extra_capacity = 0)
      : items(values),
        count(std::vector<int>{static_cast<int>(values.size())}),
        capacity(static_cast<int>(values.size()) + extra_capacity) {}
  TransferList view() const { return {items.data(), count.data(), capacity}; }

  DeviceArray<TransferItem> items;
  DeviceArray<int> count;
  int capacity;
};

struct Lane {
  Lane() : state(std::vector<LaneState>(1)) {}
  LaneState read() const { return state.download().front(); }

  DeviceArray<LaneState> state;
};

/// Items of random sizes, packed into a host area and a device area with random gaps, aligned to `alignment`.
void test_moves(cudaStream_t stream, std::size_t alignment, bool to_device, int blocks, int count, PinnedPool& pool, Random& random) {
  std::vector<std::size_t> host_at;
  std::vector<std::size_t> device_at;
  std::vector<std::uint32_t> sizes;
  std::size_t end = 0;
  for (int i = 0; i < count; ++i) {
    const int kind = random.below(4);
    const auto bytes = static_cast<std::uint32_t>(kind == 0   ? random.below(40)
                                                  : kind == 1 ? 1024 << random.below(4)
                                                              : 1 + random.below(9000));
    host_at.push_back(end + alignment * static_cast<std::size_t>(random.below(5)));
    device_at.push_back(end + alignment * static_cast<std::size_t>(random.below(5)));
    sizes.push_back(bytes);
    end += (bytes + alignment - 1) / alignment * alignment + 8 * alignment;
  }
  const Buffer host(pool, end + 16, stream);
  std::vector<std::uint8_t> source(end + 16);
  for (std::uint8_t& byte : source) byte = static_cast<std::uint8_t>(random.next());
  DeviceArray<std::uint8_t> device(std::vector<std::uint8_t>(end + 16, 0xee));
  if (to_device) {
    std::memcpy(host.data(), source.data(), end);
  } else {
    std::memset(host.data(), 0xee, end);
    device.upload(source);
  }
  auto* const device_bytes = reinterpret_cast<std::byte*>(device.data());
  std::vector<TransferItem> items;
  std::vector<std::uint8_t> expected(end + 16, 0xee);
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (to_device) {
      items.push_back({host.data() + host_at[i], device_bytes + device_at[i], sizes[i], 0.0F});
      std::memcpy(expected.data() + device_at[i], source.data() + host_at[i], sizes[i]);
    } else {
      items.push_back({device_bytes + device_at[i], host.data() + host_at[i], sizes[i], 0.0F});
      std::memcpy(expected.data() + host_at[i], source.data() + device_at[i], sizes[i]);
    }
    bytes += sizes[i];
  }
  const List list(items, 100);
  const Lane lane;
  cuda::check(launch_gather(list.view(), lane.state.data(), blocks, {}, stream), "launch_gather");
  cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  std::vector<std::uint8_t> result = device.download();
  if (!to_device) std::memcpy(result.data(), host.data(), end);
  DUALDECODER_EXPECT(std::memcmp(result.data(), expected.data(), end) == 0, "alignment %zu, to device %d, %d blocks, %d items", alignment,
                     to_device, blocks, count);
  const LaneState state = lane.read();
  DUALDECODER_EXPECT(state.moved_items == sizes.size() && state.moved_bytes == bytes && state.arrived == 0 && state.begin_ns == ~0ULL,
                     "counts: %llu items, %llu bytes, %u arrived", state.moved_items, state.moved_bytes, state.arrived);
}

/// Counts that no list has: negative, and above the capacity.
void test_odd_counts(cudaStream_t stream) {
  DeviceArray<std::uint8_t> bytes(std::vector<std::uint8_t>(64, 1));
  auto* const memory = reinterpret_cast<std::byte*>(bytes.data());
  const List list({{memory, memory + 32, 16, 0.0F}, {memory, memory + 48, 16, 0.0F}});
  bytes.upload(std::vector<std::uint8_t>(16, 7));
  const Lane lane;
  for (const int count : {-5, 0, 1000}) {
    DeviceArray<int> odd(std::vector<int>{count});
    cuda::check(launch_gather({list.items.data(), odd.data(), 1}, lane.state.data(), 4, {}, stream), "launch_gather");
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const std::vector<std::uint8_t> seen = bytes.download();
    DUALDECODER_EXPECT(seen[32] == (count > 0 ? 7 : 1) && seen[48] == 1, "a count of %d moved something else", count);
  }
}

void test_pace(cudaStream_t stream) {
  constexpr double kRate = 20e6;
  constexpr int kItems = 1000;
  PinnedPool pool({.address_bytes = std::size_t{1} << 31U});
  const Buffer host(pool, kItems * 2048, stream);
  DeviceArray<std::uint8_t> device(kItems * 2048);
  std::vector<TransferItem> items;
  for (std::size_t i = 0; i < kItems; ++i) {
    items.push_back({host.data() + i * 2048, reinterpret_cast<std::byte*>(device.data()) + i * 2048, 2048, 0.0F});
  }
  const List list(items);
  const Lane lane;
  DeviceArray<LinkState> link(std::vector<LinkState>(1));
  const GatherPace pace{link.data(), 1e9 * 1024 / kRate, 50'000ULL << 10U};
  cuda::check(launch_begin_link(link.data(), stream), "launch_begin_link");
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cuda::check(cudaEventCreate(&begin), "cudaEventCreate");
  cuda::check(cudaEventCreate(&end), "cudaEventCreate");
  const double least_ms = kItems * 2048 / kRate * 1e3;
  for (const int blocks : {1, 8}) {
    cuda::check(cudaEventRecord(begin, stream), "cudaEventRecord");
    cuda::check(launch_gather(list.view(), lane.state.data(), blocks, pace, stream), "launch_gather");
    cuda::check(cudaEventRecord(end, stream), "cudaEventRecord");
    cuda::check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float took = 0.0F;
    cuda::check(cudaEventElapsedTime(&took, begin, end), "cudaEventElapsedTime");
    DUALDECODER_EXPECT(took >= 0.999 * least_ms && took <= 1.1 * least_ms, "%d blocks took %.2f ms at a rate that needs %.2f", blocks,
                       static_cast<double>(took), least_ms);
  }
  const double busy_ms = static_cast<double>(lane.read().busy_ns) * 1e-6;
  DUALDECODER_EXPECT(busy_ms >= 1.99 * least_ms && busy_ms <= 2.2 * least_ms, "busy is %.2f ms", busy_ms);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

void bench(cudaStream_t stream) {
  constexpr std::size_t kHost = std::size_t{8} << 30U;
  constexpr std::size_t kMoved = 128 * kMiB;
  for (const bool huge_pages : {true, false}) {
    PinnedPool pool({.reserve_bytes = kHost, .huge_pages = huge_pages});
    const Buffer host(pool, kHost, stream);
    DeviceArray<std::uint8_t> device(kMoved);
    auto* const target = reinterpret_cast<std::byte*>(device.data());
    for (const std::size_t bytes : {std::size_t{1024}, std::size_t{2048}, std::size_t{4096}, std::size_t{8192}}) {
      Random random(bytes);
      std::vector<TransferItem> loads;
      std::vector<TransferItem> stores;
      for (std::size_t at = 0; at < kMoved; at += bytes) {
        std::byte* const chunk = host.data() + random.next() % (kHost / bytes) * bytes;
        loads.push_back({chunk, target + at, static_cast<std::uint32_t>(bytes), 0.0F});
        stores.push_back({target + at, chunk, static_cast<std::uint32_t>(bytes), 0.0F});
      }
      const List load_list(loads);
      const List store_list(stores);
      const Lane lane;
      for (const int blocks : {2, 4, 8, 16, 32}) {
        const auto rate = [&](const List& list) {
          return static_cast<double>(kMoved) * 1e-6 / milliseconds(stream, 3, [&] {
                   cuda::check(launch_gather(list.view(), lane.state.data(), blocks, {}, stream), "launch_gather");
                 });
        };
        const double load = rate(load_list);
        const double store = rate(store_list);
        std::printf("{\"row\":\"gather\",\"item_bytes\":%zu,\"blocks\":%d,\"huge_pages\":%s,\"load_gb_s\":%.1f,\"write_back_gb_s\":%.1f}\n",
                    bytes, blocks, huge_pages ? "true" : "false", load, store);
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace
}  // namespace dualdecoder::test

int main(int argc, char** argv) {
  namespace test = dualdecoder::test;
  return test::run_on_device([&] {
    const auto stream = dualdecoder::cuda::Stream::create();
    if (argc > 1 && std::string(argv[1]) == "--bench") return test::bench(stream.get());
    dualdecoder::cuda::PinnedPool pool({.address_bytes = std::size_t{1} << 31U});
    dualdecoder::testing::Random random(5);
    for (const std::size_t alignment : {std::size_t{16}, std::size_t{4}, std::size_t{1}}) {
      for (const bool to_device : {true, false}) {
        for (const int blocks : {1, 3, 16}) {
          for (const int count : {1, 17, 700}) test::test_moves(stream.get(), alignment, to_device, blocks, count, pool, random);
        }
      }
    }
    test::test_odd_counts(stream.get());
    if (!test::small_run()) test::test_pace(stream.get());
  });
}
