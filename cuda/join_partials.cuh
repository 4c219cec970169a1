// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "cuda/attend_tokens.cuh"
#include "cuda/check.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/store_layout.hpp"

namespace dualdecoder::cuda {

/// Which of a row list's partial results were written: three runs, [first, end) each.
struct LiveParts {
  int first[3];
  int end[3];

  __device__ int count() const { return end[0] - first[0] + end[1] - first[1] + end[2] - first[2]; }
  __device__ int at(int i) const {
    int run = 0;
    while (run < 2 && i >= end[run] - first[run]) i -= end[run] - first[run], ++run;
    return first[run] + i;
  }
};

inline constexpr int kJoinWidth = 128;  // threads over the dims of a head

/// A block joins the partial results of one head of a row, in an order that depends on their number alone, and writes its output; heads of
/// dead rows are zeros. `plan(row, kv_head)` names the partial results. Shared memory: a factor, a place and a sum per partial result, and
/// a head's values for every kJoinWidth threads.
template <class Plan>
__global__ void join_partials(const float* partials, int parts, int kv_heads, int group, int dim, Plan plan, RowsOut out) {
  auto* const factors = reinterpret_cast<float*>(block_memory());
  auto* const places = reinterpret_cast<int*>(factors + parts);
  float* const sums = factors + 2 * parts;
  float* const slices = factors + 3 * parts;
  __shared__ float total_of_block;
  __shared__ int used_of_block;
  const int thread = static_cast<int>(threadIdx.x);
  const int slice = thread / kJoinWidth;
  const int slice_count = static_cast<int>(blockDim.x) / kJoinWidth;
  const int head = static_cast<int>(blockIdx.x) % (kv_heads * group);
  const int row = static_cast<int>(blockIdx.x) / (kv_heads * group);
  const std::size_t stride = static_cast<std::size_t>(dim + 2);
  const LiveParts live = plan(row, head / group);
  const int count = live.count();
  // partial results of this head: [parts, group, dim + 2]
  const float* const own =
      partials + ((static_cast<std::size_t>(row) * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(head / group)) *
                      static_cast<std::size_t>(parts) * static_cast<std::size_t>(group) +
                  static_cast<std::size_t>(head % group)) *
                     stride;
  const std::size_t part_stride = stride * static_cast<std::size_t>(group);
  if (thread < 32) {
    float top = lowest();
    for (int i = thread; i < count; i += 32) {
      const int place = live.at(i);
      const auto result = *reinterpret_cast<const float2*>(own + static_cast<std::size_t>(place) * part_stride + dim);
      places[i] = place;
      factors[i] = result.x;
      sums[i] = result.y;
      top = fmaxf(top, result.x);
    }
    for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    // what has no weight is left out, since it may never have been written
    float total = 0.0F;
    int used = 0;
    for (int base = 0; base < count; base += 32) {
      const int i = base + thread;
      const float largest = i < count ? factors[i] : lowest();
      const int place = i < count ? places[i] : 0;
      const float sum = i < count ? sums[i] : 0.0F;
      const float factor = largest == lowest() ? 0.0F : power_of_two(largest - top);
      const unsigned with_weight = __ballot_sync(kAllLanes, static_cast<int>(factor > 0.0F));
      if (factor > 0.0F) {
        const int to = used + __popc(with_weight & ((1U << thread) - 1U));
        factors[to] = factor;
        places[to] = place;
        total += factor * sum;
      }
      used += __popc(with_weight);
      __syncwarp();
    }
    for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(kAllLanes, total, step);
    if (thread == 0) {
      total_of_block = total;
      used_of_block = used;
    }
  }
  __syncthreads();
  const int used = used_of_block;
  const float total = total_of_block;
  for (int base = 0; base < dim; base += kJoinWidth) {
    const int d = base + thread % kJoinWidth;
    float value = 0.0F;
    if (d < dim) {
#pragma unroll 8
      for (int i = slice; i < used; i += slice_count) {
        value += factors[i] * own[static_cast<std::size_t>(places[i]) * part_stride + static_cast<std::size_t>(d)];
      }
    }
    slices[thread] = value;
    __syncthreads();
    if (slice == 0 && d < dim) {
      for (int s = 1; s < slice_count; ++s) value += slices[s * kJoinWidth + thread];
      value = used > 0 ? value / total : 0.0F;
      const std::size_t at = static_cast<std::size_t>(blockIdx.x) * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d);
      if (out.bf16) {
        static_cast<__nv_bfloat16*>(out.data)[at] = __float2bfloat16_rn(value);
      } else {
        static_cast<float*>(out.data)[at] = value;
      }
    }
    __syncthreads();
  }
}

template <class Plan>
void launch_join(const float* partials, int parts, int rows, int kv_heads, int group, int dim, const Plan& plan, RowsOut out,
                 cudaStream_t stream) {
  const int slices = parts > 32 ? 4 : 2;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(rows * kv_heads * group));
  config.blockDim = dim3(static_cast<unsigned>(slices * kJoinWidth));
  config.dynamicSmemBytes = static_cast<std::size_t>(3 * parts + slices * kJoinWidth) * sizeof(float);
  config.stream = stream;
  allow_shared_memory(join_partials<Plan>, config.dynamicSmemBytes,
                      "join_partials: shared memory of a block for this many partial results");
  check(cudaLaunchKernelEx(&config, join_partials<Plan>, partials, parts, kv_heads, group, dim, plan, out), "join_partials");
}

}  // namespace dualdecoder::cuda
