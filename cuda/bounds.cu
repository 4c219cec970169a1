// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include <cmath>

#include "cuda/bounds.hpp"
#include "cuda/check.hpp"
#include "cuda/fragments.cuh"
#include "cuda/shared_memory.hpp"
#include "cuda/tensor_core.cuh"
#include "cuda/top_chunks.cuh"

namespace dualdecoder::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kScoreThreads = 256;
constexpr int kBoundChunks = 64;  // of a block
constexpr int kMaxGroup = 16;
constexpr unsigned kLanes = 0xFFFFFFFFU;

__device__ __nv_bfloat16 element(const RowsIn& rows, std::size_t at) {
  if (rows.bf16) return static_cast<const __nv_bfloat16*>(rows.data)[at];
  return __float2bfloat16_rn(static_cast<const float*>(rows.data)[at]);
}

__device__ __nv_bfloat16* bounds_of(const BoundsLayout& layout, int slot, Layer layer, int kv_head, int chunk) {
  const std::size_t list = static_cast<std::size_t>(layer) * static_cast<std::size_t>(layout.kv_heads) + static_cast<std::size_t>(kv_head);
  const std::size_t at = list * static_cast<std::size_t>(layout.chunks[slot]) + static_cast<std::size_t>(chunk);
  return reinterpret_cast<__nv_bfloat16*>(layout.bounds[slot]) + at * static_cast<std::size_t>(2 * layout.dim);
}
__device__ std::uint16_t* kept_row(const BoundsLayout& layout, int slot, Layer layer, int kv_head) {
  const std::size_t list = (static_cast<std::size_t>(slot) * static_cast<std::size_t>(layout.layers) + static_cast<std::size_t>(layer)) *
                               static_cast<std::size_t>(layout.kv_heads) +
                           static_cast<std::size_t>(kv_head);
  return layout.row0 + list * static_cast<std::size_t>(layout.dim);
}

/// Grid: (chunks, KV heads).
__global__ void __launch_bounds__(kThreads) block_kernel(BoundsLayout layout, Layer layer, int slot, int first, int count, RowsIn keys) {
  const int kv_head = static_cast<int>(blockIdx.y);
  const int chunk = first / layout.chunk + static_cast<int>(blockIdx.x);
  const int begin = max(first, chunk * layout.chunk);
  const int end = min(first + count, (chunk + 1) * layout.chunk);
  __nv_bfloat16* const bounds = bounds_of(layout, slot, layer, kv_head, chunk);
  for (int d = static_cast<int>(threadIdx.x); d < layout.dim; d += kThreads) {
    const bool anew = begin % layout.chunk == 0;
    float least = anew ? INFINITY : __bfloat162float(bounds[d]);
    float largest = anew ? -INFINITY : __bfloat162float(bounds[layout.dim + d]);
    for (int position = begin; position < end; ++position) {
      const std::size_t at = layout.row_list(position - first, kv_head) * static_cast<std::size_t>(layout.dim);
      const float key = __bfloat162float(element(keys, at + static_cast<std::size_t>(d)));
      least = fminf(least, key);
      largest = fmaxf(largest, key);
    }
    bounds[d] = __float2bfloat16_rn(least);
    bounds[layout.dim + d] = __float2bfloat16_rn(largest);
  }
}

/// Grid: (KV heads, places).
__global__ void __launch_bounds__(kThreads) keep_kernel(BoundsLayout layout, Layer layer, StepView view, RowsIn keys) {
  const int kv_head = static_cast<int>(blockIdx.x);
  const int place = static_cast<int>(blockIdx.y);
  if (!row_is_live(view.mode[place], 0)) return;
  auto* const kept = reinterpret_cast<__nv_bfloat16*>(kept_row(layout, view.slot_of[place], layer, kv_head));
  const std::size_t from = layout.row_list(place * view.rows_per_sequence, kv_head) * static_cast<std::size_t>(layout.dim);
  for (int d = static_cast<int>(threadIdx.x); d < layout.dim; d += kThreads) kept[d] = element(keys, from + static_cast<std::size_t>(d));
}

/// Grid: (layers and KV heads, places).
__global__ void __launch_bounds__(kThreads) commit_kernel(BoundsLayout layout, StepView view) {
  const int layer = static_cast<int>(blockIdx.x) / layout.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % layout.kv_heads;
  const int place = static_cast<int>(blockIdx.y);
  if (!row_is_live(view.mode[place], 0)) return;
  const int slot = view.slot_of[place];
  const int position = view.position[place];
  const auto* const kept = reinterpret_cast<const __nv_bfloat16*>(kept_row(layout, slot, layer, kv_head));
  __nv_bfloat16* const bounds = bounds_of(layout, slot, layer, kv_head, position / layout.chunk);
  const bool anew = position % layout.chunk == 0;
  for (int d = static_cast<int>(threadIdx.x); d < layout.dim; d += kThreads) {
    const __nv_bfloat16 key = kept[d];
    if (anew || __hlt(key, bounds[d])) bounds[d] = key;
    if (anew || __hgt(key, bounds[layout.dim + d])) bounds[layout.dim + d] = key;
  }
}

/// Bounds of some chunks for the query heads of a KV head of a row; a warp takes a chunk. Grid: (kBoundChunks chunks, KV heads, rows).
__global__ void __launch_bounds__(kScoreThreads) score_kernel(BoundsLayout layout, Layer layer, StepView view, RowsIn queries) {
  auto* const memory = reinterpret_cast<float2*>(block_memory());  // [group, dim / 2]
  const int kv_head = static_cast<int>(blockIdx.y);
  const int row = static_cast<int>(blockIdx.z);
  const int place = row / view.rows_per_sequence;
  if (!row_is_live(view.mode[place], row % view.rows_per_sequence)) return;
  const int count = layout.choosable(view.position[place]);
  const int first = static_cast<int>(blockIdx.x) * kBoundChunks;
  if (first >= count) return;
  const int pairs = layout.dim / 2;
  const std::size_t row_list = layout.row_list(row, kv_head);
  const std::size_t from = row_list * static_cast<std::size_t>(layout.group * layout.dim);
  const float scale = 1.4426950408889634F * rsqrtf(static_cast<float>(layout.dim));
  for (int i = static_cast<int>(threadIdx.x); i < layout.group * pairs; i += kScoreThreads) {
    const std::size_t at = from + static_cast<std::size_t>(2 * i);
    const float2 query = queries.bf16
                             ? unpack_bf16(*reinterpret_cast<const std::uint32_t*>(static_cast<const std::uint16_t*>(queries.data) + at))
                             : *reinterpret_cast<const float2*>(static_cast<const float*>(queries.data) + at);
    memory[i] = {query.x * scale, query.y * scale};
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int last = min(first + kBoundChunks, count);
  for (int c = first + static_cast<int>(threadIdx.x) / 32; c < last; c += kScoreThreads / 32) {
    const auto* const least =
        reinterpret_cast<const std::uint32_t*>(bounds_of(layout, view.slot_of[place], layer, kv_head, layout.first_chunk + c));
    float sums[kMaxGroup] = {};
    for (int pair = lane; pair < pairs; pair += 32) {
      const float2 low = unpack_bf16(least[pair]);
      const float2 high = unpack_bf16(least[pairs + pair]);
#pragma unroll
      for (int g = 0; g < kMaxGroup; ++g) {
        if (g >= layout.group) break;
        const float2 query = memory[g * pairs + pair];
        sums[g] += fmaxf(query.x * low.x, query.x * high.x) + fmaxf(query.y * low.y, query.y * high.y);
      }
    }
#pragma unroll
    for (int g = 0; g < kMaxGroup; ++g) {
      if (g >= layout.group) break;
      for (int step = 16; step > 0; step /= 2) sums[g] += __shfl_xor_sync(kLanes, sums[g], step);
      if (lane == 0) {
        layout.scores[(row_list * static_cast<std::size_t>(layout.group) + static_cast<std::size_t>(g)) *
                          static_cast<std::size_t>(layout.stride) +
                      static_cast<std::size_t>(c)] = sums[g];
      }
    }
  }
}

/// log 2 of the sum of 2^score over the chunks of a query head; called by a warp.
__device__ float log_sum_of(const float* scores, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float top = -INFINITY;
  for (int c = lane; c < count; c += 32) top = fmaxf(top, scores[c]);
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kLanes, top, step));
  float sum = 0.0F;
  for (int c = lane; c < count; c += 32) sum += power_of_two(scores[c] - top);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kLanes, sum, step);
  return top + log2f(sum);
}

/// Grid: (KV heads, rows).
__global__ void __launch_bounds__(kTopThreads) choose_kernel(BoundsLayout layout, StepView view, Selection by_row) {
  __shared__ TopMemory memory;
  __shared__ float log_sums[kMaxGroup];
  const int kv_head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const int place = row / view.rows_per_sequence;
  const int thread = static_cast<int>(threadIdx.x);
  const bool live = row_is_live(view.mode[place], row % view.rows_per_sequence);
  const int count = live ? max(layout.choosable(view.position[place]), 0) : 0;
  const int wanted = min(min(by_row.capacity, layout.selected), count);
  if (wanted == 0) {
    if (thread == 0) by_row.count_of(row, kv_head) = 0;
    return;
  }
  const std::size_t row_list = layout.row_list(row, kv_head);
  const std::size_t stride = static_cast<std::size_t>(layout.stride);
  const float* const scores = layout.scores + row_list * static_cast<std::size_t>(layout.group) * stride;
  float* const ranks = layout.ranks + row_list * stride;
  for (int head = thread / 32; head < layout.group; head += kTopThreads / 32) {
    const float log_sum = log_sum_of(scores + static_cast<std::size_t>(head) * stride, count);
    if (thread % 32 == 0) log_sums[head] = log_sum;
  }
  __syncthreads();
  for (int c = thread; c < count; c += kTopThreads) {
    float rank = -INFINITY;
    for (int head = 0; head < layout.group; ++head) {
      rank = fmaxf(rank, scores[static_cast<std::size_t>(head) * stride + static_cast<std::size_t>(c)] - log_sums[head]);
    }
    ranks[c] = rank;
  }
  int* const chunks = by_row.chunks_of(row, kv_head);
  float* const shares = by_row.scores_of(row, kv_head);
  choose_top(memory, ranks, count, wanted, reinterpret_cast<std::uint32_t*>(block_memory()), [=](int to, int c, float rank) {
    chunks[to] = layout.first_chunk + c;
    shares[to] = power_of_two(rank);
  });
  if (thread == 0) by_row.count_of(row, kv_head) = wanted;
}

}  // namespace

void widen_by_block(const BoundsLayout& layout, Layer layer, int slot, int first, int count, RowsIn keys, cudaStream_t stream) {
  if (count == 0) return;
  const auto chunks = static_cast<unsigned>((first + count - 1) / layout.chunk - first / layout.chunk + 1);
  block_kernel<<<dim3(chunks, static_cast<unsigned>(layout.kv_heads)), kThreads, 0, stream>>>(layout, layer, slot, first, count, keys);
  check_launch("widen_by_block");
}

void keep_row0(const BoundsLayout& layout, Layer layer, const StepView& view, RowsIn keys, cudaStream_t stream) {
  if (view.sequences == 0) return;
  keep_kernel<<<dim3(static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(view.sequences)), kThreads, 0, stream>>>(layout, layer,
                                                                                                                            view, keys);
  check_launch("keep_row0");
}

void widen_by_row0(const BoundsLayout& layout, const StepView& view, cudaStream_t stream) {
  if (view.sequences == 0) return;
  const dim3 grid(static_cast<unsigned>(layout.layers * layout.kv_heads), static_cast<unsigned>(view.sequences));
  commit_kernel<<<grid, kThreads, 0, stream>>>(layout, view);
  check_launch("widen_by_row0");
}

void choose_by_bounds(const BoundsLayout& layout, Layer layer, const StepView& view, RowsIn queries, const Selection& by_row,
                      cudaStream_t stream) {
  if (view.rows() == 0) return;
  const auto kv_heads = static_cast<unsigned>(layout.kv_heads);
  const auto rows = static_cast<unsigned>(view.rows());
  const dim3 grid(static_cast<unsigned>((layout.stride + kBoundChunks - 1) / kBoundChunks), kv_heads, rows);
  const std::size_t bytes = static_cast<std::size_t>(layout.group * layout.dim) * sizeof(float);
  score_kernel<<<grid, kScoreThreads, bytes, stream>>>(layout, layer, view, queries);
  check_launch("choose_by_bounds: score");
  const std::size_t bit_bytes = static_cast<std::size_t>((layout.stride + 31) / 32) * sizeof(std::uint32_t);
  allow_shared_memory(choose_kernel, bit_bytes, "choose_by_bounds: shared memory");
  choose_kernel<<<dim3(kv_heads, rows), kTopThreads, bit_bytes, stream>>>(layout, view, by_row);
  check_launch("choose_by_bounds: choose");
}

}  // namespace dualdecoder::cuda
