// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <string>

#include "cuda/check.hpp"
#include "cuda/store_kernels.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr float kLowest = -INFINITY;
constexpr int kMaxGroup = 16;

// A query is kept in fixed point as 128 * high + low, two planes of int8; sums of products are exact, so scores do not depend on any order.
constexpr float kQueryLevels = 127 * 128 + 63;
constexpr float kSmallestQuery = 1e-30F;  // below it a query counts as zero, since its levels per unit would overflow
constexpr int kQueries = 8;               // of one matrix instruction
constexpr int kMaxWarps = 16;
constexpr float kLog2e = 1.44269504F;
constexpr std::uint32_t kNoRow = 0xFFFFFFFFU;

/// 16 bytes that are read once: kept out of L1 and the first to leave L2, where the scores are to stay.
__device__ uint4 load_once(const std::int8_t* from, std::uint64_t policy) {
  uint4 data;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "l"(from), "l"(policy));
  return data;
}

__device__ std::uint64_t leave_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Read anew each time: registers are for means in flight.
__device__ uint4 load_fragment(const uint4* from) {
  uint4 data;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(from))));
  return data;
}

/// sums[16 x 8] += a[16 x 32] b[32 x 8]
__device__ void multiply(int (&sums)[4], const uint4& a, std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Largest score and sum of exp(score - largest) of what was added; -FLT_MAX and 0 when nothing was.
struct Softmax {
  float largest = -FLT_MAX;
  float sum = 0.0F;

  template <int kCount>
  __device__ void add(const float (&scores)[kCount]) {
    float top = largest;
#pragma unroll
    for (int i = 0; i < kCount; ++i) top = fmaxf(top, scores[i]);
    sum *= exp2_fast((largest - top) * kLog2e);
    largest = top;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += exp2_fast((scores[i] - top) * kLog2e);
  }
  __device__ void merge(float other_largest, float other_sum) {
    const float top = fmaxf(largest, other_largest);
    sum = sum * exp2_fast((largest - top) * kLog2e) + other_sum * exp2_fast((other_largest - top) * kLog2e);
    largest = top;
  }
};

/// How a warp scores kUnit chunks at once. The matrix instruction takes queries as its 16 rows, high planes in rows 0-7 and low planes in
/// rows 8-15, and kBlocks times 8 chunks as its columns, so that lane (g, t) holds both planes of query g. Which chunk is which column, and
/// which of its bytes are which k, is free as long as all agree: a lane reads 16 whole bytes of a mean at a time, which are two k-steps of
/// its own, and column n of block b is chunk (n / 2) * kLaneChunks + 2 b + n % 2, which gives a lane consecutive chunks to store.
template <int kDim>
struct Unit {
  static constexpr int kParts = (kDim + 63) / 64;  // 64 bytes of a mean, which four lanes read together
  static constexpr int kSteps = 2 * kParts;        // of the matrix instruction
  static constexpr int kBlocks = kDim > 128 ? 2 : 4;
  static constexpr int kLaneChunks = 2 * kBlocks;
  static constexpr int kChunks = 8 * kBlocks;
};

template <int kDim, int kQueryTiles>
struct ScoreMemory {
  uint4 fragments[kQueryTiles][Unit<kDim>::kSteps][32];  // high, low, high, low words of a lane
  alignas(16) float key_scales[kSplitChunks];
  float query_scales[kQueryTiles * kQueries];
  float largest[kMaxWarps][kQueryTiles * kQueries];
  float sums[kMaxWarps][kQueryTiles * kQueries];
};

/// Four elements from `at` on, which is a multiple of four.
__device__ float4 load_four(const RowsIn& rows, std::size_t at) {
  if (!rows.bf16) return __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(rows.data) + at));
  const uint2 bits = __ldg(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(rows.data) + at));
  return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000U), __uint_as_float(bits.y << 16),
          __uint_as_float(bits.y & 0xFFFF0000U)};
}

/// One warp lays one query out as fragments, or zeros where it is not `live`; returns the value of one level.
template <int kDim>
__device__ float lay_out_query(const RowsIn& queries, std::size_t at, bool live, int query, uint4 (&fragments)[Unit<kDim>::kSteps][32]) {
  constexpr int kPadded = Unit<kDim>::kParts * 64;
  constexpr int kFours = (kPadded + 127) / 128;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float4 four[kFours];
  float largest = 0.0F;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int d = i * 128 + lane * 4;
    four[i] = live && d < kDim ? load_four(queries, at + static_cast<std::size_t>(d)) : float4{};
    largest = fmaxf(fmaxf(fmaxf(largest, fabsf(four[i].x)), fmaxf(fabsf(four[i].y), fabsf(four[i].z))), fabsf(four[i].w));
  }
  largest = __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(largest)));
  const float levels = largest > kSmallestQuery ? __fdiv_rn(kQueryLevels, largest) : 0.0F;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int d = i * 128 + lane * 4;
    if (d >= kPadded) continue;
    const float elements[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
    std::uint32_t high_word = 0;
    std::uint32_t low_word = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int level = __float2int_rn(__fmul_rn(elements[e], levels));
      const int high = (level + 64) >> 7;
      high_word |= (static_cast<std::uint32_t>(high) & 0xFFU) << (8 * e);
      low_word |= (static_cast<std::uint32_t>(level - 128 * high) & 0xFFU) << (8 * e);
    }
    uint4& fragment = fragments[d / 64 * 2 + d % 16 / 8][query * 4 + d % 64 / 16];
    if (d % 8 == 0) {
      fragment.x = high_word;
      fragment.y = low_word;
    } else {
      fragment.z = high_word;
      fragment.w = low_word;
    }
  }
  return levels > 0.0F ? __fdiv_rn(largest, kQueryLevels) : 0.0F;
}

/// Rows of a place that are live: they follow each other.
struct LiveRows {
  int first;
  int count;
};
__device__ LiveRows live_rows(const StepView& view, int place) {
  const RowMode mode = view.mode[place];
  LiveRows live{0, 0};
  for (int r = view.rows_per_sequence; r-- > 0;) {
    if (!row_is_live(mode, r)) continue;
    live.first = r;
    ++live.count;
  }
  return live;
}

/// Threads that bound the registers of a kernel, to 72, 80 and 96: with the 72 of the usual case seven blocks of 128 threads share a
/// multiprocessor. Blocks have up to 32 * kMaxWarps threads.
constexpr int score_threads(int query_tiles) { return query_tiles == 1 ? 896 : query_tiles == 2 ? 768 : 640; }

/// One block scores the chunks of a split for all live rows of a sequence and one KV head, in one read of the key means.
template <int kDim, int kQueryTiles>
__global__ void __launch_bounds__(score_threads(kQueryTiles))
    score_kernel(StoreLayout layout, Layer layer, StepView view, RowsIn queries, float scale) {
  using Shape = Unit<kDim>;
  constexpr int kParts = Shape::kParts;
  constexpr int kBlocks = Shape::kBlocks;
  constexpr int kLaneChunks = Shape::kLaneChunks;
  __shared__ ScoreMemory<kDim, kQueryTiles> shared;

  const int split = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const int place = static_cast<int>(blockIdx.z);
  const LiveRows live = live_rows(view, place);
  const int query_count = live.count * layout.group;
  if (query_count == 0) return;
  const int first_row = place * view.rows_per_sequence + live.first;
  const auto statistics_at = [&](int query) {
    const std::size_t list = layout.work_list(layer, first_row + query / layout.group, kv_head);
    return (list * static_cast<std::size_t>(layout.splits) + static_cast<std::size_t>(split)) * static_cast<std::size_t>(layout.group) +
           static_cast<std::size_t>(query % layout.group);
  };

  // from here on chunks count from the beginning of the split
  const int first_chunk = split * kSplitChunks;
  const int begin = max(layout.range_begin() - first_chunk, 0);
  const int end = min(layout.range_end(view.position[place]) - first_chunk, kSplitChunks);
  const int thread = static_cast<int>(threadIdx.x);
  if (begin >= end) {
    if (thread < query_count) {
      layout.score_max[statistics_at(thread)] = kLowest;
      layout.score_sum[statistics_at(thread)] = 0.0F;
    }
    return;
  }
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int lane_row = lane / 4;   // column that it reads, query that it scores
  const int lane_part = lane % 4;  // of 64 bytes that it reads, of a unit's chunks that it scores

  const std::size_t at = layout.list(view.slot_of[place], layer, kv_head) * static_cast<std::size_t>(layout.max_chunks) +
                         static_cast<std::size_t>(first_chunk);
  const std::int8_t* const means = layout.key_means + at * kDim + lane_part * 16;
  const std::uint64_t policy = leave_first();
  // Reads are unconditional: a lane behind the range reads chunks of the last group in range, all within max_chunks, and one behind the end
  // of a mean reads bytes that meet zeros of the query.
  const int last_chunks = (end - 1) / kLaneChunks * kLaneChunks;
  const int last_part = (kParts - 1) * 64 + lane_part * 16 < kDim ? (kParts - 1) * 64 : 0;
  uint4 mean[kBlocks][kParts];
  const auto load_unit = [&](int unit) {
    const int chunk = min(last_chunks, unit * Shape::kChunks + lane_row / 2 * kLaneChunks) + lane_row % 2;
    const std::int8_t* const from = means + chunk * kDim;
    const std::int8_t* const last = from + (kDim % 64 == 0 ? (kParts - 1) * 64 : last_part);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) mean[b][p] = load_once((p == kParts - 1 ? last : from + p * 64) + 2 * b * kDim, policy);
    }
  };
  int unit = begin / Shape::kChunks + warp;
  const int units = (end + Shape::kChunks - 1) / Shape::kChunks;
  load_unit(unit);  // the queries are prepared while these are on their way

  for (int c = thread; c < kSplitChunks; c += static_cast<int>(blockDim.x)) {
    shared.key_scales[c] = c >= begin && c < end ? __ldg(layout.key_scales + at + c) : 0.0F;
  }
  for (int query = warp; query < kQueryTiles * kQueries; query += warps) {
    const std::size_t row = static_cast<std::size_t>(first_row + query / layout.group);
    const std::size_t head = static_cast<std::size_t>(kv_head * layout.group + query % layout.group);
    const float level = lay_out_query<kDim>(queries, (row * static_cast<std::size_t>(layout.heads) + head) * kDim, query < query_count,
                                            query % kQueries, shared.fragments[query / kQueries]);
    if (lane == 0) shared.query_scales[query] = level * scale;
  }
  float* const scores =
      layout.scores +
      layout.work_list(layer, first_row, kv_head) * static_cast<std::size_t>(layout.group) * static_cast<std::size_t>(layout.max_chunks) +
      first_chunk;
  std::uint32_t score_row[kQueryTiles];  // from `scores` on; row lists of a second row lie layout.heads rows on
#pragma unroll
  for (int n = 0; n < kQueryTiles; ++n) {
    const int query = n * kQueries + lane_row;
    const int list_row = query / layout.group * layout.heads + query % layout.group;
    score_row[n] = query < query_count ? static_cast<std::uint32_t>(list_row) * static_cast<std::uint32_t>(layout.max_chunks) : kNoRow;
  }
  __syncthreads();

  Softmax softmax[kQueryTiles];
  for (; unit < units; unit += warps) {
    const int chunk = unit * Shape::kChunks + lane_part * kLaneChunks;
    const bool whole = unit * Shape::kChunks >= begin && (unit + 1) * Shape::kChunks <= end;
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      int sums[kBlocks][4] = {};
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const uint4 first = load_fragment(&shared.fragments[n][2 * p][lane]);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) multiply(sums[b], first, mean[b][p].x, mean[b][p].y);
        const uint4 second = load_fragment(&shared.fragments[n][2 * p + 1][lane]);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) multiply(sums[b], second, mean[b][p].z, mean[b][p].w);
      }
      if (n == kQueryTiles - 1) load_unit(unit + warps);  // behind the last one it reads the last chunks again
      const float query_scale = shared.query_scales[n * kQueries + lane_row];
      float score[kLaneChunks];
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i) {
        const int sum = 128 * sums[i / 2][i % 2] + sums[i / 2][2 + i % 2];
        score[i] = __fmul_rn(static_cast<float>(sum), __fmul_rn(shared.key_scales[chunk + i], query_scale));
      }
      if (!whole) {
#pragma unroll
        for (int i = 0; i < kLaneChunks; ++i) {
          if (chunk + i < begin || chunk + i >= end) score[i] = kLowest;
        }
      }
      softmax[n].add(score);
      if (score_row[n] == kNoRow || chunk >= end) continue;
      float* const to = scores + score_row[n] + chunk;
#pragma unroll
      for (int i = 0; i < kLaneChunks; i += 4) *reinterpret_cast<float4*>(to + i) = {score[i], score[i + 1], score[i + 2], score[i + 3]};
    }
  }

#pragma unroll
  for (int n = 0; n < kQueryTiles; ++n) {
    Softmax& total = softmax[n];
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      total.merge(__shfl_xor_sync(kAllLanes, total.largest, step), __shfl_xor_sync(kAllLanes, total.sum, step));
    }
    if (lane_part != 0) continue;
    shared.largest[warp][n * kQueries + lane_row] = total.largest;
    shared.sums[warp][n * kQueries + lane_row] = total.sum;
  }
  __syncthreads();
  if (thread >= query_count) return;
  Softmax total;
  for (int w = 0; w < warps; ++w) total.merge(shared.largest[w][thread], shared.sums[w][thread]);
  layout.score_max[statistics_at(thread)] = total.largest;
  layout.score_sum[statistics_at(thread)] = total.sum;
}

template <int kDim>
void launch_scores(const StoreLayout& layout, Layer layer, const StepView& view, RowsIn queries, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(layout.splits), static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(view.sequences));
  const std::size_t blocks = std::size_t{grid.x} * grid.y * grid.z;
  // few blocks get more warps each, to keep as many reads in flight
  const unsigned threads = blocks >= 512 ? 128 : blocks >= 256 ? 256 : 512;
  const float scale = 1.0F / std::sqrt(static_cast<float>(kDim));
  const int count = view.rows_per_sequence * layout.group;
  if (count <= kQueries) {
    score_kernel<kDim, 1><<<grid, threads, 0, stream>>>(layout, layer, view, queries, scale);
  } else if (count <= 2 * kQueries) {
    score_kernel<kDim, 2><<<grid, threads, 0, stream>>>(layout, layer, view, queries, scale);
  } else {
    score_kernel<kDim, 4><<<grid, threads, 0, stream>>>(layout, layer, view, queries, scale);
  }
  check_launch("score_summaries");
}

}  // namespace

void score_summaries(const StoreLayout& layout, Layer layer, const StepView& view, RowsIn queries, cudaStream_t stream) {
  if (view.sequences == 0) return;
  detail::require(layout.group >= 1 && layout.group <= kMaxGroup, "heads / kv_heads", layout.group, "in 1 .. 16 on CUDA");
  switch (layout.dim) {
    case 64: return launch_scores<64>(layout, layer, view, queries, stream);
    case 80: return launch_scores<80>(layout, layer, view, queries, stream);
    case 96: return launch_scores<96>(layout, layer, view, queries, stream);
    case 128: return launch_scores<128>(layout, layer, view, queries, stream);
    case 256: return launch_scores<256>(layout, layer, view, queries, stream);
    default: throw InvalidArgument("head_dim = " + std::to_string(layout.dim) + ": must be 64, 80, 96, 128 or 256 on CUDA");
  }
}

}  // namespace dualdecoder::cuda
