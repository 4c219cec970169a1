// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/store_layout.hpp"
#include "dualdecoder/step_view.hpp"

namespace dualdecoder::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;

/// To a count of a store's layout.
template <class Layout>
__device__ void add_to(const Layout& layout, Counter counter, std::uint64_t value) {
  if (value == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(layout.counters) + static_cast<int>(counter), static_cast<unsigned long long>(value));
}

/// Sum over the block into `sum`, which starts at zero; visible after the next barrier.
__device__ inline void sum_into(int* sum, int value) {
  value = __reduce_add_sync(kAllLanes, value);
  if (threadIdx.x % 32 == 0 && value != 0) atomicAdd(sum, value);
}

template <class Layout>
__device__ bool place_waits(const Layout& layout, const StepView& view, int place) {
  return layout.wait_policy || (view.waits != nullptr && view.waits[place] != 0);
}

/// Words of a bitmap over the chunks.
__host__ __device__ inline int bitmap_words(const StoreLayout& layout) { return (layout.max_chunks + 31) / 32; }
__device__ inline bool test_bit(const std::uint32_t* bits, int chunk) { return ((bits[chunk / 32] >> (chunk % 32)) & 1U) != 0; }
__device__ inline void set_bit(std::uint32_t* bits, int chunk) { atomicOr(bits + chunk / 32, 1U << (chunk % 32)); }
/// Whether it was set.
__device__ inline bool clear_bit(std::uint32_t* bits, int chunk) {
  const std::uint32_t bit = 1U << (chunk % 32);
  return (atomicAnd(bits + chunk / 32, ~bit) & bit) != 0;
}

/// Lists of a selection, for one row or place and KV head.
struct ChunkList {
  const int* chunks;
  const float* scores;
  int count;
};
__device__ inline ChunkList list_of(const Selection& selection, int row, int kv_head) {
  const std::size_t at = static_cast<std::size_t>(row) * static_cast<std::size_t>(selection.kv_heads) + static_cast<std::size_t>(kv_head);
  return {selection.chunks + at * static_cast<std::size_t>(selection.capacity),
          selection.scores + at * static_cast<std::size_t>(selection.capacity), selection.count[at]};
}

}  // namespace dualdecoder::cuda
