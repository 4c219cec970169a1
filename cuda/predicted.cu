// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/predicted.hpp"

#include <cuda_bf16.h>

#include <cmath>

#include "cuda/check.hpp"
#include "cuda/resolve_tools.cuh"

namespace dualdecoder::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

__device__ float lane_sum(float value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

__global__ void forget_kernel(PredictedLayout layout, std::size_t first, int lists) {
  for (int i = static_cast<int>(threadIdx.x); i < lists; i += static_cast<int>(blockDim.x)) {
    const std::size_t list = first + static_cast<std::size_t>(i);
    layout.predicted_count[list] = -1;
    layout.seen[list] = 0;
    layout.turned[list] = 0;
  }
}

/// Mean cosine over the query group; a warp takes a query head. Grid: (KV heads, places).
__global__ void __launch_bounds__(kThreads) compare_kernel(PredictedLayout layout, Layer layer, StepView view, RowsIn queries) {
  __shared__ float cosines[kWarps];
  const int kv_head = static_cast<int>(blockIdx.x);
  const int place = static_cast<int>(blockIdx.y);
  if (!row_is_live(view.mode[place], 0)) return;
  const std::size_t list = layout.list(view.slot_of[place], layer, kv_head);
  const std::size_t width = static_cast<std::size_t>(layout.group * layout.dim);
  const std::size_t first =
      (static_cast<std::size_t>(place) * static_cast<std::size_t>(layout.kv_heads) + static_cast<std::size_t>(kv_head)) * width;
  float* const last = layout.queries + list * width;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float cosine = 0.0F;
  for (int head = warp; head < layout.group; head += kWarps) {
    float dot = 0.0F;
    float now_square = 0.0F;
    float last_square = 0.0F;
    for (int d = lane; d < layout.dim; d += 32) {
      const std::size_t at = static_cast<std::size_t>(head * layout.dim + d);
      const float now = queries.bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(queries.data)[first + at])
                                     : static_cast<const float*>(queries.data)[first + at];
      const float before = last[at];
      dot += now * before;
      now_square += now * now;
      last_square += before * before;
      last[at] = now;
    }
    dot = lane_sum(dot);
    cosine += dot / sqrtf(fmaxf(lane_sum(now_square) * lane_sum(last_square), 1e-30F));
  }
  if (lane == 0) cosines[warp] = cosine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0.0F;
  for (const float of_warp : cosines) sum += of_warp;
  layout.turned[list] = layout.seen[list] != 0 && sum < layout.correct_below * static_cast<float>(layout.group) ? 1 : 0;
  layout.seen[list] = 1;
}

__device__ bool contains(const int* sorted, int count, int value) {
  int low = 0;
  while (low < count) {
    const int middle = (low + count) / 2;
    if (sorted[middle] == value) return true;
    if (sorted[middle] < value) {
      low = middle + 1;
    } else {
      count = middle;
    }
  }
  return false;
}

__device__ void add_count(const PredictedLayout& layout, PredictedLayout::Count counter, int value) {
  if (value != 0) atomicAdd(reinterpret_cast<unsigned long long*>(layout.counters) + counter, static_cast<unsigned long long>(value));
}

/// Grid: (KV heads, places).
__global__ void __launch_bounds__(kThreads)
    use_kernel(PredictedLayout layout, Layer layer, StepView view, Selection selected, Selection used) {
  __shared__ int hits;
  const int kv_head = static_cast<int>(blockIdx.x);
  const int place = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  if (!row_is_live(view.mode[place], 0)) {
    if (thread == 0) used.count_of(place, kv_head) = 0;
    return;
  }
  const std::size_t list = layout.list(view.slot_of[place], layer, kv_head);
  const ChunkList own = list_of(selected, place, kv_head);
  const int* const predicted = layout.predicted + list * static_cast<std::size_t>(layout.selected);
  const int predicted_count = layout.predicted_count[list];
  const bool has_prediction = predicted_count >= 0;
  const bool takes = has_prediction && layout.turned[list] == 0;
  if (thread == 0) hits = 0;
  __syncthreads();
  int found = 0;
  for (int i = thread; i < own.count; i += kThreads) found += contains(predicted, predicted_count, own.chunks[i]) ? 1 : 0;
  sum_into(&hits, found);
  const int count = takes ? predicted_count : own.count;
  for (int i = thread; i < count; i += kThreads) {
    used.chunks_of(place, kv_head)[i] = takes ? predicted[i] : own.chunks[i];
    used.scores_of(place, kv_head)[i] = 0.0F;
  }
  __syncthreads();
  if (thread != 0) return;
  used.count_of(place, kv_head) = count;
  add_count(layout, PredictedLayout::needed, own.count);
  if (has_prediction) add_count(layout, PredictedLayout::predictable, own.count);
  add_count(layout, PredictedLayout::predicted_hit, hits);
}

/// Grid: (KV heads, places).
__global__ void __launch_bounds__(kThreads) keep_kernel(PredictedLayout layout, Layer target, StepView view, Selection predicted) {
  const int kv_head = static_cast<int>(blockIdx.x);
  const int place = static_cast<int>(blockIdx.y);
  if (view.mode[place] == RowMode::idle) return;
  const std::size_t list = layout.list(view.slot_of[place], target, kv_head);
  const ChunkList given = list_of(predicted, place, kv_head);
  const int count = min(given.count, layout.selected);
  int* const to = layout.predicted + list * static_cast<std::size_t>(layout.selected);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) to[i] = given.chunks[i];
  if (threadIdx.x == 0) layout.predicted_count[list] = count;
}

dim3 grid_of(const PredictedLayout& layout, const StepView& view) {
  return {static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(view.sequences)};
}

}  // namespace

void forget_predicted(const PredictedLayout& layout, int slot, cudaStream_t stream) {
  forget_kernel<<<1, kThreads, 0, stream>>>(layout, layout.list(slot, 0, 0), layout.layers * layout.kv_heads);
  check_launch("forget_predicted");
}

void compare_queries(const PredictedLayout& layout, Layer layer, const StepView& view, RowsIn queries, cudaStream_t stream) {
  if (view.sequences == 0) return;
  compare_kernel<<<grid_of(layout, view), kThreads, 0, stream>>>(layout, layer, view, queries);
  check_launch("compare_queries");
}

void use_predicted(const PredictedLayout& layout, Layer layer, const StepView& view, const Selection& selected, const Selection& used,
                   cudaStream_t stream) {
  if (view.sequences == 0) return;
  use_kernel<<<grid_of(layout, view), kThreads, 0, stream>>>(layout, layer, view, selected, used);
  check_launch("use_predicted");
}

void keep_predicted(const PredictedLayout& layout, Layer target, const StepView& view, const Selection& predicted, cudaStream_t stream) {
  if (view.sequences == 0 || predicted.chunks == nullptr) return;
  keep_kernel<<<grid_of(layout, view), kThreads, 0, stream>>>(layout, target, view, predicted);
  check_launch("keep_predicted");
}

}  // namespace dualdecoder::cuda
