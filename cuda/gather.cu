// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/gather.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/launch.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr int kWarp = 32;
// Twice the threads in half as many blocks move as fast, but slow the kernels beside them more: docs/adr/0012-gathers-beside-compute.md.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// Loads of 16 bytes that a lane starts before its first store: with 8 a warp has 4 KiB on the link, which hides its latency of some 2 us.
constexpr int kInFlight = 8;
constexpr unsigned kAll = 0xffffffffU;

__device__ unsigned long long now_ns() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// Sources are read once, so they need no place in L1. Not a load of constants (.nc): the compiler would put some behind the stores.
__device__ uint4 load_once(const uint4* source) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source)
               : "memory");
  return value;
}

// Right here, in front of the copies that it is to pass beside: the compiler moves other loads behind them.
__device__ TransferItem load_item(const TransferItem* source) {
  static_assert(sizeof(TransferItem) == 24);
  unsigned long long words[3];
  const auto* from = reinterpret_cast<const unsigned long long*>(source);
#pragma unroll
  for (int i = 0; i < 3; ++i) asm volatile("ld.global.u64 %0, [%1];" : "=l"(words[i]) : "l"(from + i) : "memory");
  return {reinterpret_cast<const std::byte*>(words[0]), reinterpret_cast<std::byte*>(words[1]), static_cast<std::uint32_t>(words[2]), 0.0F};
}

// kLoads vectors a lane, all on their way before the first is stored. No load has a condition: the compiler would put the store under the
// same one, right behind the load, and a lane would wait for each.
template <int kLoads>
__device__ void copy_block(uint4* target, const uint4* source) {
  uint4 held[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) held[i] = load_once(source + kWarp * i);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) __stcg(target + kWarp * i, held[i]);
}

// Blocks as large as the rest allows.
template <int kLoads>
__device__ void copy_blocks(uint4*& target, const uint4*& source, unsigned& left) {
#pragma unroll 1
  for (; left >= kLoads * kWarp; left -= kLoads * kWarp) {
    copy_block<kLoads>(target, source);
    target += kLoads * kWarp;
    source += kLoads * kWarp;
  }
}

__device__ void copy_vectors(std::byte* target, const std::byte* source, unsigned vectors, unsigned lane) {
  const auto* from = reinterpret_cast<const uint4*>(source) + lane;
  auto* to = reinterpret_cast<uint4*>(target) + lane;
  copy_blocks<kInFlight>(to, from, vectors);
  copy_blocks<kInFlight / 2>(to, from, vectors);
  copy_blocks<1>(to, from, vectors);
  if (lane < vectors) __stcg(to, load_once(from));
}

__device__ bool is_aligned(const TransferItem& item) {
  return (reinterpret_cast<std::uintptr_t>(item.source) | reinterpret_cast<std::uintptr_t>(item.target)) % 16 == 0;
}

__device__ void copy_item(const TransferItem& item, unsigned lane) {
  const unsigned vectors = is_aligned(item) ? item.bytes / 16 : 0;
  copy_vectors(item.target, item.source, vectors, lane);
  for (unsigned at = vectors * 16 + lane; at < item.bytes; at += kWarp) item.target[at] = item.source[at];
}

/// A warp's next items, one a lane; the first `count` lanes have one.
struct WarpItems {
  TransferItem own;
  int count = 0;

  __device__ TransferItem item(int i) const {
    return {reinterpret_cast<const std::byte*>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(own.source), i)),
            reinterpret_cast<std::byte*>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(own.target), i)),
            __shfl_sync(kAll, own.bytes, i), 0.0F};
  }
  /// How many from `first` on have at most `vectors` of 16 bytes and nothing else, as a number of ones.
  __device__ int small_ones(int first, unsigned vectors) const {
    const bool is_small = own.bytes > 0 && own.bytes % 16 == 0 && own.bytes <= 16 * vectors && is_aligned(own);
    const unsigned others = ~(__ballot_sync(kAll, is_small) >> first);
    return others == 0 ? kWarp : __ffs(static_cast<int>(others)) - 1;
  }
};

// kItems of at most kInFlight / kItems vectors a lane at once. Where there are fewer, and behind an item's end, what is last is brought and
// written again: the same bytes to the same place, and still no load with a condition.
template <int kItems>
__device__ void copy_together(const WarpItems& items, int first, int count, unsigned lane) {
  constexpr int kLoads = kInFlight / kItems;
  uint4 held[kInFlight];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const TransferItem item = items.item(first + min(k, count - 1));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      held[k * kLoads + i] = load_once(reinterpret_cast<const uint4*>(item.source) + min(lane + kWarp * i, item.bytes / 16 - 1));
    }
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const TransferItem item = items.item(first + min(k, count - 1));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      __stcg(reinterpret_cast<uint4*>(item.target) + min(lane + kWarp * i, item.bytes / 16 - 1), held[k * kLoads + i]);
    }
  }
}

/// How many items, from `first` on, a warp brings at once: as many as fill what it may have on the link.
__device__ int group_of(const WarpItems& items, int first) {
  const int two = items.small_ones(first, kInFlight / 2 * kWarp);
  const int four = items.small_ones(first, kInFlight / 4 * kWarp);
  const int eight = items.small_ones(first, kInFlight / 8 * kWarp);
  if (eight > 4) return min(eight, 8);
  if (four > 2) return min(four, 4);
  return two > 1 ? 2 : 1;
}

__device__ void copy_group(const WarpItems& items, int first, int count, unsigned lane) {
  if (count > 4) {
    copy_together<8>(items, first, count, lane);
  } else if (count > 2) {
    copy_together<4>(items, first, count, lane);
  } else if (count > 1) {
    copy_together<2>(items, first, count, lane);
  } else {
    copy_item(items.item(first), lane);
  }
}

__device__ unsigned long long link_now(const LinkState& link) { return (now_ns() - link.epoch_ns) << 10U; }

// Books `bytes` on the link and waits until they would have come through; false when the link is stopped first. One lane of a warp.
__device__ bool pass_link(const GatherPace& pace, unsigned bytes) {
  LinkState& link = *pace.link;
  atomicMax(&link.free_at, link_now(link));  // an idle link starts now, not when it fell idle
  const auto cost = static_cast<unsigned long long>(pace.ticks_per_byte * bytes);
  const unsigned long long arrival = atomicAdd(&link.free_at, cost) + cost + pace.latency_ticks;
  for (unsigned long long now = link_now(link); now < arrival; now = link_now(link)) {
    if (*static_cast<volatile unsigned int*>(&link.stop) != 0) return false;
    const unsigned long long left_ns = (arrival - now) >> 10U;
    __nanosleep(static_cast<unsigned>(min(left_ns, 2000ULL)));
  }
  return true;
}

__device__ void note_span(SpanRing& ring, unsigned long long begin, unsigned long long end, int lane, int layer) {
  const unsigned number = atomicAdd(&ring.written, 1U);
  SpanRing::Span& span = ring.spans[number % SpanRing::kSpans];
  span.number = 0;
  __threadfence();
  span.begin_ns = begin;
  span.end_ns = end;
  span.lane = lane;
  span.layer = layer;
  __threadfence();
  span.number = number + 1;
}

template <bool kPaced>
__global__ void __launch_bounds__(kThreads)
    gather(const TransferItem* items, const int* count, int capacity, LaneState* lane_state, GatherPace pace, GatherLabel label) {
  __shared__ unsigned long long block_bytes;
  wait_for_earlier_kernels();
  const int n = min(max(*count, 0), capacity);
  if (n == 0) return;
  if (threadIdx.x == 0) {
    block_bytes = 0;
    atomicMin(&lane_state->begin_ns, now_ns());
  }
  __syncthreads();

  const unsigned lane = threadIdx.x % kWarp;
  const int step = static_cast<int>(gridDim.x) * kWarps;
  int at = static_cast<int>(blockIdx.x + threadIdx.x / kWarp * gridDim.x);  // a short list is spread over the blocks
  const auto own_item = [&](int from) {
    const long long own = from + static_cast<long long>(lane) * step;
    return own < n ? load_item(items + own) : TransferItem{};
  };
  unsigned long long bytes = 0;
  WarpItems now;
  TransferItem next = own_item(at);
  for (bool open = true; open && at < n; at += kWarp * step) {
    now.own = next;
    now.count = min((n - at + step - 1) / step, kWarp);
    next = own_item(at + kWarp * step);  // on their way while these move
    for (int i = 0; i < now.count;) {
      const int count = group_of(now, i);
      if constexpr (kPaced) {
        const bool in_group = static_cast<int>(lane) >= i && static_cast<int>(lane) < i + count;
        const unsigned group_bytes = __reduce_add_sync(kAll, in_group ? now.own.bytes : 0);
        if (lane == 0) open = pass_link(pace, group_bytes);
        open = __shfl_sync(kAll, open, 0);
        if (!open) break;
      }
      copy_group(now, i, count, lane);
      i += count;
    }
    if (open) bytes += now.own.bytes;
  }
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) bytes += __shfl_down_sync(kAll, bytes, half);
  if (lane == 0 && bytes > 0) atomicAdd(&block_bytes, bytes);
  __syncthreads();

  if (threadIdx.x != 0) return;
  atomicAdd(&lane_state->moved_bytes, block_bytes);
  __threadfence();
  if (atomicAdd(&lane_state->arrived, 1U) + 1 < gridDim.x) return;
  lane_state->arrived = 0;  // the last block of this gather; the next one starts after it
  lane_state->moved_items += static_cast<unsigned long long>(n);
  const unsigned long long begin = atomicExch(&lane_state->begin_ns, ~0ULL);
  const unsigned long long end = now_ns();
  lane_state->busy_ns += end - begin;
  if (label.ring != nullptr) note_span(*label.ring, begin, end, label.lane, label.layer);
}

__global__ void begin_link(LinkState* link) { link->epoch_ns = now_ns(); }

__global__ void __launch_bounds__(256) copy_list(TransferList from, TransferList to) {
  const int n = min(max(*from.count, 0), from.capacity);
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (thread == 0) *to.count = n;
  for (int at = thread; at < n; at += static_cast<int>(gridDim.x * blockDim.x)) to.items[at] = from.items[at];
}

__global__ void read_timer(unsigned long long* time_ns) { *time_ns = now_ns(); }
__global__ void stall_begin(LaneState* lane) { lane->wait_begin_ns = now_ns(); }
__global__ void stall_end(LaneState* lane) { lane->stalled_ns += now_ns() - lane->wait_begin_ns; }

}  // namespace

cudaError_t launch_gather(const TransferList& list, LaneState* lane, int blocks, const GatherPace& pace, StreamRef stream,
                          const GatherLabel& label) {
  if (list.count == nullptr || list.capacity <= 0) return cudaSuccess;
  const int grid = std::clamp((list.capacity + kWarps - 1) / kWarps, 1, blocks);
  auto* const kernel = pace.link != nullptr ? gather<true> : gather<false>;
  return launch_overlapped(kernel, static_cast<unsigned>(grid), kThreads, 0, stream.get(), list.items, list.count, list.capacity, lane,
                           pace, label);
}

cudaError_t find_gather() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, gather<false>);
}

cudaError_t launch_begin_link(LinkState* link, StreamRef stream) {
  begin_link<<<1, 1, 0, stream.get()>>>(link);
  return cudaGetLastError();
}

cudaError_t launch_snapshot(const TransferList& list, const TransferList& snapshot, StreamRef stream) {
  const int grid = std::clamp((list.capacity + 255) / 256, 1, 64);
  copy_list<<<grid, 256, 0, stream.get()>>>(list, snapshot);
  return cudaGetLastError();
}

cudaError_t launch_read_timer(unsigned long long* time_ns, StreamRef stream) {
  read_timer<<<1, 1, 0, stream.get()>>>(time_ns);
  return cudaGetLastError();
}

cudaError_t launch_stall_begin(LaneState* lane, StreamRef stream) {
  stall_begin<<<1, 1, 0, stream.get()>>>(lane);
  return cudaGetLastError();
}

cudaError_t launch_stall_end(LaneState* lane, StreamRef stream) {
  stall_end<<<1, 1, 0, stream.get()>>>(lane);
  return cudaGetLastError();
}

}  // namespace dualdecoder::cuda
