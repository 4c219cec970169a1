// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/block_tools.cuh"
#include "cuda/resolve_tools.cuh"
#include "cuda/slot_table.cuh"
#include "cuda/store_layout.hpp"

namespace dualdecoder::cuda {

inline constexpr int kPredictBlocks = 32;  ///< beside the dense products, whose blocks need the multiprocessors
inline constexpr int kSortedInShared = 1024;
inline constexpr int kChunkBits = 30;

/// A chunk that may be loaded, ordered as loads are: what was predicted before what was only missed, the best score first, the lower chunk
/// first. The last bit, which orders nothing, tells that a predicted chunk was missed too.
struct Candidate {
  __device__ static std::uint64_t make(bool missed, float score, int chunk, bool missed_too) {
    return (std::uint64_t{missed} << 63) | (std::uint64_t{~order_key(score)} << (kChunkBits + 1)) |
           (static_cast<std::uint64_t>(chunk) << 1) | std::uint64_t{missed_too};
  }
  __device__ static std::uint64_t without_chunk(std::uint64_t key) { return key >> (kChunkBits + 1); }
  __device__ static int chunk(std::uint64_t key) { return static_cast<int>((key >> 1) & ((1U << kChunkBits) - 1U)); }
  __device__ static int missed_too(std::uint64_t key) { return static_cast<int>(key & 1U); }
  __device__ static float score(std::uint64_t key) {
    const std::uint32_t order = ~static_cast<std::uint32_t>(key >> (kChunkBits + 1));
    return __uint_as_float(order ^ ((order >> 31) != 0 ? 0x80000000U : 0xFFFFFFFFU));
  }
};

/// Candidates of every place and KV head, between the kernels that list and place them.
struct CandidateLists {
  std::uint64_t* keys;  // [places, kv_heads, room], sorted
  int* count;           // [places, kv_heads]
  int* placeable;       // [places, kv_heads] those for which there is a victim
  int room;             // a power of two

  template <class Layout>
  CandidateLists(const Layout& layout, void* work) : keys(static_cast<std::uint64_t*>(work)), room(room_of(layout)) {
    const std::size_t lists = list_count(layout);
    count = reinterpret_cast<int*>(keys + lists * static_cast<std::size_t>(room));
    placeable = count + lists;
  }
  template <class Layout>
  static std::size_t list_count(const Layout& layout) {
    return static_cast<std::size_t>(layout.max_sequences) * static_cast<std::size_t>(layout.kv_heads);
  }
  template <class Layout>
  static int room_of(const Layout& layout) {
    int room = 1;
    while (room < 2 * layout.selected) room *= 2;
    return room;
  }
  template <class Layout>
  static std::size_t bytes(const Layout& layout) {
    return list_count(layout) * (static_cast<std::size_t>(room_of(layout)) * sizeof(std::uint64_t) + 2 * sizeof(int));
  }
  __device__ std::uint64_t* of(int list) const { return keys + static_cast<std::size_t>(list) * static_cast<std::size_t>(room); }
};

__device__ inline int block_sum(int* sum, int value) {
  __syncthreads();
  if (threadIdx.x == 0) *sum = 0;
  __syncthreads();
  sum_into(sum, value);
  __syncthreads();
  return *sum;
}

/// How many of the sorted keys come before `key`, equal ones included or not.
__device__ inline int rank_in(const std::uint64_t* keys, int count, std::uint64_t key, bool equal_too) {
  int low = 0;
  while (low < count) {
    const int middle = (low + count) / 2;
    const std::uint64_t other = Candidate::without_chunk(keys[middle]);
    if (other < key || (equal_too && other == key)) {
      low = middle + 1;
    } else {
      count = middle;
    }
  }
  return low;
}

/// How many of an item's candidates are among the best `bound` of all items; among equal scores the lower storage slot and KV head first.
__device__ inline int count_within(int* sum, const CandidateLists& lists, const StepView& view, int kv_heads, int item, int bound) {
  const int items = view.sequences * kv_heads;
  int mine = 0;
  for (int other = static_cast<int>(threadIdx.x); other < items; other += kSlotThreads) mine += lists.placeable[other];
  int high = lists.placeable[item];
  if (block_sum(sum, mine) <= bound) return high;
  const int storage = view.slot_of[item / kv_heads];
  int low = 0;  // so many are within the bound
  while (low < high) {
    const int middle = (low + high) / 2;
    const std::uint64_t key = Candidate::without_chunk(lists.of(item)[middle]);
    int before = 0;
    for (int other = static_cast<int>(threadIdx.x); other < items; other += kSlotThreads) {
      if (other == item) continue;
      const int other_storage = view.slot_of[other / kv_heads];
      const bool first = other_storage < storage || (other_storage == storage && other % kv_heads < item % kv_heads);
      before += rank_in(lists.of(other), lists.placeable[other], key, first);
    }
    if (block_sum(sum, before) + middle < bound) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace dualdecoder::cuda
