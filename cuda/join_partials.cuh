// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "cuda/attend_tokens.cuh"
#include "cuda/check.hpp"
#include "cuda/launch.hpp"
#include "cuda/store_layout.hpp"

namespace dualdecoder::cuda {

/// Which of a row list's partial results were written: four runs, [first, end) each.
struct LiveParts {
  static constexpr int kRuns = 4;
  int first[kRuns];
  int end[kRuns];

  __device__ int count() const {
    int sum = 0;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) sum += end[run] - first[run];
    return sum;
  }
  __device__ int at(int i) const {
    int shift = first[0];
    int before = 0;
#pragma unroll
    for (int run = 1; run < kRuns; ++run) {
      before += end[run - 1] - first[run - 1];
      if (i >= before) shift = first[run] - before;
    }
    return i + shift;
  }
};

inline constexpr int kJoinBatch = 4;  // partial results of a warp that are read at a time

/// Floats of shared memory that a warp of the join leaves its result in: values, then largest score and sum.
template <int kPairs>
inline constexpr int kJoinFloats = 64 * kPairs + 2;

/// A block joins the partial results of one head of a row, in an order that depends on their number alone, and writes its output; heads of
/// dead rows are zeros. `plan(row, kv_head)` names the partial results; it reads nothing that the kernel
/// before writes, which let this one begin when all others had ended. Every warp joins
/// each so many-th of them, with dims 2l, 2l + 1, 2l + 64, .. in lane l: kPairs pairs, of which those behind `dim` are none.
template <int kPairs, class Plan>
__global__ void join_partials(const float* partials, int parts, int dim, Plan plan, RowsOut out) {
  const int lane = static_cast<int>(threadIdx.x % 32U);
  const int warp = static_cast<int>(threadIdx.x / 32U);
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int head = static_cast<int>(blockIdx.x);  // of the group
  const int kv_head = static_cast<int>(blockIdx.y);
  const int row = static_cast<int>(blockIdx.z);
  const LiveParts live = plan(row, kv_head);
  const int count = live.count();
  // partial results of this head: [parts, group, dim + 2]
  const std::size_t stride = static_cast<std::size_t>(dim + 2);
  const std::size_t list = static_cast<std::size_t>(row) * gridDim.y + static_cast<std::size_t>(kv_head);
  const std::size_t group = gridDim.x;
  const float* const own = partials + (list * static_cast<std::size_t>(parts) * group + static_cast<std::size_t>(head)) * stride;
  const std::size_t part_stride = stride * group;
  let_next_kernel_begin();  // a product, which brings its weights meanwhile
  wait_for_earlier_kernels();
  float top = lowest();
  float total = 0.0F;
  float2 value[kPairs] = {};
  for (int base = warp; base < count; base += kJoinBatch * warps) {
    float2 score_and_sum[kJoinBatch];
    float2 read[kJoinBatch][kPairs];
#pragma unroll
    for (int b = 0; b < kJoinBatch; ++b) {  // all are asked for before the first is used
      const int i = base + b * warps;
      score_and_sum[b] = {lowest(), 0.0F};
      if (i >= count) continue;
      const auto* const from = reinterpret_cast<const float2*>(own + static_cast<std::size_t>(live.at(i)) * part_stride);
      score_and_sum[b] = from[dim / 2];
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        if (p * 32 + lane < dim / 2) read[b][p] = from[p * 32 + lane];
      }
    }
    float largest = top;
#pragma unroll
    for (int b = 0; b < kJoinBatch; ++b) largest = fmaxf(largest, score_and_sum[b].x);
    if (largest == lowest()) continue;
    const float before = power_of_two(top - largest);
    top = largest;
    total *= before;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) value[p] = {value[p].x * before, value[p].y * before};
#pragma unroll
    for (int b = 0; b < kJoinBatch; ++b) {
      const float factor = power_of_two(score_and_sum[b].x - top);
      if (factor == 0.0F) continue;  // what has no weight may never have been written
      total += factor * score_and_sum[b].y;
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        if (p * 32 + lane < dim / 2) value[p] = {value[p].x + factor * read[b][p].x, value[p].y + factor * read[b][p].y};
      }
    }
  }
  auto* const memory = reinterpret_cast<float*>(block_memory());
  auto* const result = reinterpret_cast<float2*>(memory + warp * kJoinFloats<kPairs>);
#pragma unroll
  for (int p = 0; p < kPairs; ++p) result[p * 32 + lane] = value[p];
  if (lane == 0) result[32 * kPairs] = {top, total};
  __syncthreads();
  const int d = static_cast<int>(threadIdx.x);  // a block has at least as many threads as a head has dims
  if (d >= dim) return;
  const int used = min(warps, count);
  top = lowest();
  for (int w = 0; w < used; ++w) top = fmaxf(top, memory[w * kJoinFloats<kPairs> + 64 * kPairs]);
  float sum = 0.0F;
  total = 0.0F;
  for (int w = 0; w < used; ++w) {
    const float* const of_warp = memory + w * kJoinFloats<kPairs>;
    const float factor = top == lowest() ? 0.0F : power_of_two(of_warp[64 * kPairs] - top);
    sum += factor * of_warp[d];
    total += factor * of_warp[64 * kPairs + 1];
  }
  const float joined = total == 0.0F ? 0.0F : sum / total;
  const std::size_t at = (list * group + static_cast<std::size_t>(head)) * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d);
  if (out.bf16) {
    static_cast<__nv_bfloat16*>(out.data)[at] = __float2bfloat16_rn(joined);
  } else {
    static_cast<float*>(out.data)[at] = joined;
  }
}

template <int kPairs, class Plan>
void launch_join_of(const float* partials, int parts, int rows, int kv_heads, int group, int dim, const Plan& plan, RowsOut out,
                    cudaStream_t stream) {
  const int warps = parts > 8 * kJoinBatch ? 16 : 8;
  check(launch_overlapped(join_partials<kPairs, Plan>,
                          dim3(static_cast<unsigned>(group), static_cast<unsigned>(kv_heads), static_cast<unsigned>(rows)),
                          dim3(static_cast<unsigned>(warps * 32)), static_cast<std::size_t>(warps * kJoinFloats<kPairs>) * sizeof(float),
                          stream, partials, parts, dim, plan, out),
        "join_partials");
}

/// Called right after the launch of the kernel that writes the partial results and, once what is ahead of it has ended, lets this one
/// begin.
template <class Plan>
void launch_join(const float* partials, int parts, int rows, int kv_heads, int group, int dim, const Plan& plan, RowsOut out,
                 cudaStream_t stream) {
  if (dim <= 64) return launch_join_of<1>(partials, parts, rows, kv_heads, group, dim, plan, out, stream);
  if (dim <= 128) return launch_join_of<2>(partials, parts, rows, kv_heads, group, dim, plan, out, stream);
  launch_join_of<4>(partials, parts, rows, kv_heads, group, dim, plan, out, stream);
}

}  // namespace dualdecoder::cuda
