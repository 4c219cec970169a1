// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The gather kernel: items of every size and alignment, in both directions, against memcpy; its counts; its pace. With --bench: GB/s by
// size of item and number of blocks, with and without huge host pages. With --bench-ways: the same bytes gathered by the host's threads, by
// the copy engines and by the kernel.
#include "cuda/gather.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
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

/// Sizes of all kinds, or small ones in runs of some, as a warp brings several at once.
std::vector<std::uint32_t> sizes_of(int count, bool small, Random& random) {
  std::vector<std::uint32_t> sizes;
  while (static_cast<int>(sizes.size()) < count) {
    const int kind = random.below(4);
    if (small) {
      const int bytes = kind == 0 ? 16 * (1 + random.below(128)) : kind == 1 ? 640 : 512 << random.below(3);
      sizes.insert(sizes.end(), static_cast<std::size_t>(1 + random.below(80)), static_cast<std::uint32_t>(bytes));
    } else {
      sizes.push_back(static_cast<std::uint32_t>(kind == 0   ? random.below(40)
                                                 : kind == 1 ? 512 << random.below(5)
                                                             : 1 + random.below(9000)));
    }
  }
  sizes.resize(static_cast<std::size_t>(count));
  return sizes;
}

/// Items of `sizes`, packed into a host area and a device area with random gaps, aligned to `alignment`.
void test_moves(cudaStream_t stream, std::size_t alignment, bool to_device, int blocks, const std::vector<std::uint32_t>& sizes,
                PinnedPool& pool, Random& random) {
  std::vector<std::size_t> host_at;
  std::vector<std::size_t> device_at;
  std::size_t end = 0;
  for (const std::uint32_t bytes : sizes) {
    host_at.push_back(end + alignment * static_cast<std::size_t>(random.below(5)));
    device_at.push_back(end + alignment * static_cast<std::size_t>(random.below(5)));
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
  DUALDECODER_EXPECT(std::memcmp(result.data(), expected.data(), end) == 0, "alignment %zu, to device %d, %d blocks, %zu items", alignment,
                     to_device, blocks, sizes.size());
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
    for (const std::size_t bytes : {std::size_t{512}, std::size_t{1024}, std::size_t{2048}, std::size_t{4096}, std::size_t{8192}}) {
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
      for (const int blocks : {4, 8, 16, 32, 64}) {
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

/// Chunks that lie anywhere in 4 GiB of pinned memory, to be brought behind each other into device memory: what one sequence of an 8B shape
/// chooses in a step with a budget of 1,024, in every way that there is. Each chunk begins with its number, which is looked for afterwards.
class GatherWays {
 public:
  GatherWays(cudaStream_t stream, std::size_t item_bytes)
      : stream_(stream),
        item_bytes_(item_bytes),
        pool_({.reserve_bytes = kHost}),
        host_(pool_, kHost, stream),
        staging_(pinned(kMoved)),
        device_(kMoved) {
    Random random(item_bytes);
    const std::size_t chunks = kHost / item_bytes;
    for (std::size_t i = 0; i < chunks; ++i) std::memcpy(host_.data() + i * item_bytes, &i, sizeof i);
    for (std::size_t i = 0; i < kMoved / item_bytes; ++i) chosen_.push_back(random.next() % chunks);
  }

  void run() {
    for (const int threads : {1, 4, 16}) {
      double gather_ms = 0.0;
      const double ms = best_of([&] {
        const auto begin = Clock::now();
        gather_on_host(threads);
        gather_ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
        cuda::check(cudaMemcpyAsync(device_.data(), staging_.get(), kMoved, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
      });
      print("cpu", threads, ms, gather_ms);
    }
    print("copy-calls", 1, best_of([&] {
            for (std::size_t i = 0; i < chosen_.size(); ++i) {
              cuda::check(cudaMemcpyAsync(target(i), source(i), item_bytes_, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
            }
          }),
          0.0);
    copy_batch();
    std::vector<TransferItem> items;
    for (std::size_t i = 0; i < chosen_.size(); ++i) items.push_back({source(i), target(i), static_cast<std::uint32_t>(item_bytes_), 0.0F});
    const List list(items);
    const Lane lane;
    for (const int blocks : {8, 32}) {
      print("zero-copy", blocks,
            best_of([&] { cuda::check(launch_gather(list.view(), lane.state.data(), blocks, {}, stream_), "launch_gather"); }), 0.0);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  using Pinned = std::unique_ptr<std::byte, cudaError_t (*)(void*)>;

  static constexpr std::size_t kHost = std::size_t{4} << 30U;
  static constexpr std::size_t kMoved = 128 * kMiB;

  static Pinned pinned(std::size_t bytes) {
    void* memory = nullptr;
    cuda::check(cudaMallocHost(&memory, bytes), "cudaMallocHost", bytes);
    return {static_cast<std::byte*>(memory), &cudaFreeHost};
  }
  const std::byte* source(std::size_t i) const { return host_.data() + chosen_[i] * item_bytes_; }
  std::byte* target(std::size_t i) const { return reinterpret_cast<std::byte*>(device_.data()) + i * item_bytes_; }

  void gather_on_host(int threads) {
    const std::size_t each = (chosen_.size() + static_cast<std::size_t>(threads) - 1) / static_cast<std::size_t>(threads);
    std::vector<std::jthread> workers;
    for (std::size_t first = 0; first < chosen_.size(); first += each) {
      workers.emplace_back([=, this] {
        const std::size_t last = std::min(first + each, chosen_.size());
        for (std::size_t i = first; i < last; ++i) std::memcpy(staging_.get() + i * item_bytes_, source(i), item_bytes_);
      });
    }
  }

  void copy_batch() {
#if CUDART_VERSION >= 13000
    std::vector<void*> targets;
    std::vector<const void*> sources;
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
      targets.push_back(target(i));
      sources.push_back(source(i));
    }
    const std::vector<std::size_t> sizes(chosen_.size(), item_bytes_);
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
    print("copy-batch", 1, best_of([&] {
            cuda::check(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(), &attributes, &first, 1, stream_),
                        "cudaMemcpyBatchAsync");
          }),
          0.0);
#endif
  }

  /// Milliseconds on the host's clock until everything is in device memory, the best of five; the result is checked.
  template <class F>
  double best_of(F&& move) {
    double best = 1e9;
    for (int round = 0; round < 6; ++round) {  // the first does not count
      cuda::check(cudaMemsetAsync(device_.data(), 0, kMoved, stream_), "cudaMemsetAsync");
      cuda::check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      const auto begin = Clock::now();
      move();
      cuda::check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      const double ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
      if (round > 0) best = std::min(best, ms);
    }
    const std::vector<std::uint8_t> arrived = device_.download();
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
      std::size_t number = 0;
      std::memcpy(&number, arrived.data() + i * item_bytes_, sizeof number);
      DUALDECODER_EXPECT(number == chosen_[i], "item %zu is chunk %zu instead of %zu", i, number, chosen_[i]);
    }
    return best;
  }

  /// `workers` are threads of the host, or blocks of the kernel; `gather_ms` is the host's part where it gathers.
  void print(const char* way, int workers, double ms, double gather_ms) const {
    std::printf(
        "{\"row\":\"gather-ways\",\"way\":\"%s\",\"workers\":%d,\"item_bytes\":%zu,\"bytes\":%zu,\"ms\":%.3f,\"gather_ms\":%.3f,\"gb_s\":%."
        "2f}\n",
        way, workers, item_bytes_, kMoved, ms, gather_ms, static_cast<double>(kMoved) * 1e-6 / ms);
    std::fflush(stdout);
  }

  cudaStream_t stream_;
  std::size_t item_bytes_;
  PinnedPool pool_;
  Buffer host_;
  Pinned staging_;  // one call copies it, so it is registered in one
  DeviceArray<std::uint8_t> device_;
  std::vector<std::size_t> chosen_;
};

}  // namespace
}  // namespace dualdecoder::test

int main(int argc, char** argv) {
  namespace test = dualdecoder::test;
  return test::run_on_device([&] {
    const auto stream = dualdecoder::cuda::Stream::create();
    if (argc > 1 && std::string(argv[1]) == "--bench") return test::bench(stream.get());
    if (argc > 1 && std::string(argv[1]) == "--bench-ways") {
      for (const std::size_t bytes : {std::size_t{4096}, std::size_t{2048}}) test::GatherWays(stream.get(), bytes).run();
      return;
    }
    dualdecoder::cuda::PinnedPool pool({.address_bytes = std::size_t{1} << 31U});
    dualdecoder::testing::Random random(5);
    for (const std::size_t alignment : {std::size_t{16}, std::size_t{4}, std::size_t{1}}) {
      for (const bool to_device : {true, false}) {
        for (const int blocks : {1, 3, 16}) {
          for (const int count : {1, 17, 700}) {
            for (const bool small : {false, true}) {
              test::test_moves(stream.get(), alignment, to_device, blocks, test::sizes_of(count, small, random), pool, random);
            }
          }
        }
      }
    }
    test::test_odd_counts(stream.get());
    if (!test::small_run()) test::test_pace(stream.get());
  });
}
