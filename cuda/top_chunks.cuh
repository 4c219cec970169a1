// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/block_tools.cuh"

namespace dualdecoder::cuda {

inline constexpr int kTopThreads = 512;  ///< of a block that chooses
inline constexpr int kTopBuckets = 4 * kTopThreads;
inline constexpr float kTopBucketsPerUnit = 64.0F;  ///< of rank, from 0 down to -32

/// What a block that chooses needs of shared memory beside a bit for each chunk.
struct TopMemory {
  static constexpr int kMembers = 1024;  // of the bucket where the choice ends, sorted
  alignas(16) int histogram[kTopBuckets];
  std::uint64_t members[kMembers];
  int warp_sums[kTopThreads / 32];
  int member_count;
  int bucket;
  int before;
  int sum;
};

namespace detail {

/// Ranks in linear buckets, the best in bucket 0: a floating-point digit would put nearly all of them into a few.
__device__ inline int top_bucket(float rank) {
  return min(kTopBuckets - 1, static_cast<int>(fmaxf(-rank, 0.0F) * kTopBucketsPerUnit));  // the conversion saturates
}

/// Orders chunks by rank, among equals the lower chunk is the better one. No two are equal.
__device__ inline std::uint64_t top_key(float rank, int chunk) {
  return (std::uint64_t{order_key(rank)} << 32) | (0xFFFFFFFFU - static_cast<std::uint32_t>(chunk));
}

/// The lowest key that is chosen of a bucket's members: the `rest` best of them are. Called by the whole block.
__device__ inline std::uint64_t top_threshold(TopMemory& memory, const float* ranks, int count, int bucket, int members, int rest) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto visit = [&](auto f) {
    for (int c = thread; c < count; c += kTopThreads) {
      if (top_bucket(ranks[c]) == bucket) f(top_key(ranks[c], c));
    }
  };
  if (members <= TopMemory::kMembers) {
    visit([&](std::uint64_t key) { memory.members[atomicAdd(&memory.member_count, 1)] = key; });
    block_sort(memory.members, members);
    return memory.members[members - rest];
  }
  std::uint64_t threshold = 0;  // of so many equal ranks, or nearly so, found bit by bit
  for (int bit = 63; bit >= 0; --bit) {
    const std::uint64_t tried = threshold | (std::uint64_t{1} << bit);
    int mine = 0;
    visit([&](std::uint64_t key) { mine += key >= tried ? 1 : 0; });
    mine = __reduce_add_sync(0xFFFFFFFFU, mine);
    __syncthreads();
    if (thread == 0) memory.sum = 0;
    __syncthreads();
    if (thread % 32 == 0) atomicAdd(&memory.sum, mine);
    __syncthreads();
    if (memory.sum >= rest) threshold = tried;
  }
  return threshold;
}

}  // namespace detail

/// Calls emit(place, chunk, rank) for the `wanted` chunks of the highest ranks among 0 .. count-1, in ascending order of chunks, ties to
/// the lower one; 0 < wanted <= count. Ranks of interest lie in -32 .. 0, others are ordered all the same. By a block of kTopThreads; what
/// it wrote to `ranks` need not be visible yet. `bits`: shared memory of a bit for each chunk.
template <class Emit>
__device__ void choose_top(TopMemory& memory, const float* ranks, int count, int wanted, std::uint32_t* bits, Emit emit) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  int4& own = reinterpret_cast<int4*>(memory.histogram)[thread];
  own = {0, 0, 0, 0};
  if (thread == 0) memory.member_count = 0;
  __syncthreads();
  for (int c = thread; c < count; c += kTopThreads) atomicAdd(&memory.histogram[detail::top_bucket(ranks[c])], 1);
  __syncthreads();
  const int counts[4] = {own.x, own.y, own.z, own.w};
  int total;
  int before = block_exclusive_sum<kTopThreads>(counts[0] + counts[1] + counts[2] + counts[3], memory.warp_sums, total);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (before < wanted && wanted <= before + counts[i]) {
      memory.bucket = thread * 4 + i;
      memory.before = before;
    }
    before += counts[i];
  }
  __syncthreads();
  const int bucket = memory.bucket;
  const int members = memory.histogram[bucket];
  const int rest = wanted - memory.before;  // wanted of the bucket
  const std::uint64_t threshold = rest < members ? detail::top_threshold(memory, ranks, count, bucket, members, rest) : 0;

  const int words = (count + 31) / 32;
  for (int word = thread / 32; word < words; word += kTopThreads / 32) {
    const int c = word * 32 + lane;
    bool chosen = false;
    if (c < count) {
      const float rank = ranks[c];
      const int of = detail::top_bucket(rank);
      chosen = of < bucket || (of == bucket && detail::top_key(rank, c) >= threshold);
    }
    const unsigned set = __ballot_sync(0xFFFFFFFFU, static_cast<int>(chosen));
    if (lane == 0) bits[word] = set;
  }
  __syncthreads();
  const int each = (words + kTopThreads - 1) / kTopThreads;
  const int first = min(words, thread * each);
  const int last = min(words, first + each);
  int mine = 0;
  for (int word = first; word < last; ++word) mine += __popc(bits[word]);
  int place = block_exclusive_sum<kTopThreads>(mine, memory.warp_sums, total);
  for (int word = first; word < last; ++word) {
    for (std::uint32_t left = bits[word]; left != 0; left &= left - 1) {
      const int c = word * 32 + __ffs(static_cast<int>(left)) - 1;
      emit(place++, c, ranks[c]);
    }
  }
}

}  // namespace dualdecoder::cuda
