// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <string>

#include "cuda/check.hpp"
#include "cuda/launch.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/store_kernels.hpp"
#include "cuda/tensor_core.cuh"
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

/// Reads here, not where the compiler finds it needed, so that reads which do not depend on each other are on their way together.
__device__ int read_now(const int* from) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

/// Starts copying 16 bytes that are read once: past L1, and the first to leave L2, where the scores are to stay. Without the hint at kDim
/// 256, where nvcc 13.0 makes an instruction of it that an H200 refuses as illegal.
template <int kDim>
__device__ void copy_once(std::uint32_t to, const std::int8_t* from, std::uint64_t policy) {
  if constexpr (kDim > 128) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    return;
  }
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}

__device__ std::uint64_t leave_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Read anew each time, where registers do not hold all of them.
__device__ uint4 load_fragment(const uint4* from) {
  uint4 data;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
               : "r"(shared_address(from)));
  return data;
}

/// sums[16 x 8] += a[16 x 32] b[32 x 8]
__device__ void multiply(int (&sums)[4], const uint4& a, std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
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
    sum *= power_of_two((largest - top) * kLog2e);
    largest = top;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += power_of_two((scores[i] - top) * kLog2e);
  }
  __device__ void merge(float other_largest, float other_sum) {
    const float top = fmaxf(largest, other_largest);
    sum = sum * power_of_two((largest - top) * kLog2e) + other_sum * power_of_two((other_largest - top) * kLog2e);
    largest = top;
  }
};

/// How a warp scores 16 chunks at once. The matrix instruction takes queries as its 16 rows, high planes in rows 0-7 and low planes in rows
/// 8-15, and kBlocks times 8 chunks as its columns, so that lane (g, t) holds both planes of query g. Which chunk is which column, and
/// which of its bytes are which k, is free as long as all agree: a lane reads 16 whole bytes of a mean at a time, which are two k-steps of
/// its own, and column n of block b is chunk (n / 2) * kLaneChunks + 2 b + n % 2, which gives a lane consecutive chunks to store.
///
/// The means of a unit lie together, so a warp copies them in whole lines into a ring of its own in shared memory, kStages units ahead of
/// the one it works on: memory stays busy while warps compute, though they all start at once.
template <int kDim>
struct Unit {
  static constexpr int kParts = (kDim + 63) / 64;  // 64 bytes of a mean, which four lanes read together
  static constexpr int kSteps = 2 * kParts;        // of the matrix instruction
  static constexpr int kBlocks = 2;
  static constexpr int kLaneChunks = 2 * kBlocks;
  static constexpr int kChunks = 8 * kBlocks;
  static constexpr int kBytes = kChunks * kDim;
  static constexpr int kStages = kDim > 128 ? 2 : 3;  // with three of 2 KB, seven blocks of four warps share a multiprocessor
  // Rows of a multiple of 128 bytes begin in the same bank: odd ones swap the halves of their 128 bytes, as two rows are read at a time.
  static constexpr int kSwap = kDim % 128 == 0 ? 64 : 0;
};
static_assert(kTileChunks % Unit<128>::kChunks == 0, "a unit in range lies within max_chunks");

template <int kDim, int kQueryTiles>
struct ScoreMemory {
  uint4 fragments[kQueryTiles][Unit<kDim>::kSteps][32];  // high, low, high, low words of a lane
  alignas(16) float key_scales[kSplitChunks];
  float query_scales[kQueryTiles * kQueries];
  float largest[kMaxWarps][kQueryTiles * kQueries];
  float sums[kMaxWarps][kQueryTiles * kQueries];
};

/// Four elements from `at` on, which is a multiple of four. A kernel ahead may have written them while this one ran.
__device__ float4 load_four(const RowsIn& rows, std::size_t at) {
  if (!rows.bf16) return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(rows.data) + at));
  const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(rows.data) + at));
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
__device__ LiveRows live_rows(RowMode mode, int rows_per_sequence) {
  LiveRows live{0, 0};
#pragma unroll 1
  for (int r = rows_per_sequence; r-- > 0;) {
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
  constexpr int kStages = Shape::kStages;
  constexpr bool kHeld = kQueryTiles == 1 && kDim <= 128;  // registers hold the queries
  extern __shared__ uint4 rings[];                         // [warps, kStages] units
  __shared__ ScoreMemory<kDim, kQueryTiles> shared;

  const int split = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const int place = static_cast<int>(blockIdx.z);
  // The key means too wait for it: an append may be right ahead, and of kernels that overlap several can be under way.
  wait_for_earlier_kernels();
  const int storage = read_now(view.slot_of + place);
  const int position = read_now(view.position + place);
  const RowMode mode = view.mode[place];
  const LiveRows live = live_rows(mode, view.rows_per_sequence);
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
  const int end = min(layout.range_end(position) - first_chunk, kSplitChunks);
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

  const std::size_t at =
      layout.list(storage, layer, kv_head) * static_cast<std::size_t>(layout.max_chunks) + static_cast<std::size_t>(first_chunk);
  const std::int8_t* const means = layout.key_means + at * kDim;
  const std::uint64_t policy = leave_first();
  char* const ring = reinterpret_cast<char*>(rings) + warp * kStages * Shape::kBytes;
  // A lane copies every 32nd piece of 16 bytes; all of its rows are odd or all even where rows swap halves.
  const int lane_to = lane * 16 ^ (lane * 16 / kDim % 2 * Shape::kSwap);
  const auto copy_unit = [&](int unit, int stage) {
    const std::int8_t* const from = means + unit * Shape::kBytes + lane * 16;
    const auto to = shared_address(ring + stage * Shape::kBytes + lane_to);
#pragma unroll
    for (int i = 0; i < Shape::kBytes; i += 512) {
      if (i + 512 <= Shape::kBytes || i + lane * 16 < Shape::kBytes) copy_once<kDim>(to + static_cast<std::uint32_t>(i), from + i, policy);
    }
  };
  int unit = begin / Shape::kChunks + warp;
  const int units = (end + Shape::kChunks - 1) / Shape::kChunks;
  // The queries are prepared while these are on their way: scales, then the first units, each a group. What is behind the range but in its
  // last unit is copied too, and does not count.
  for (int c = thread * 4; c < kSplitChunks; c += static_cast<int>(blockDim.x) * 4) {
    copy_async(shared_address(shared.key_scales + c), layout.key_scales + at + c, c < end);
  }
  commit_copies();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (unit + stage * warps < units) copy_unit(unit + stage * warps, stage);
    commit_copies();
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
  wait_for_copies<kStages>();  // the scales
  __syncthreads();

  uint4 held[kHeld ? Shape::kSteps : 1];
  if constexpr (kHeld) {
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) held[step] = shared.fragments[0][step][lane];
  }
  const auto fragment = [&](int n, int step) {
    if constexpr (kHeld) return held[step];
    return load_fragment(&shared.fragments[n][step][lane]);
  };
  // A lane behind the end of a mean reads bytes that meet zeros of the query.
  const int first_part = lane_part * 16 ^ (lane_row % 2 * Shape::kSwap);
  const int last_part = (kParts - 1) * 64 + lane_part * 16 < kDim ? (kParts - 1) * 64 : 0;
  const int lane_from = (lane_row / 2 * kLaneChunks + lane_row % 2) * kDim;
  Softmax softmax[kQueryTiles];
  for (int stage = 0; unit < units; unit += warps, stage = stage + 1 < kStages ? stage + 1 : 0) {
    wait_for_copies<kStages - 1>();
    __syncwarp();  // what other lanes copied is there too
    const char* const from = ring + stage * Shape::kBytes + lane_from;
    uint4 mean[kBlocks][kParts];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const int part = kDim % 64 != 0 && p == kParts - 1 ? last_part : p * 64;
        mean[b][p] = *reinterpret_cast<const uint4*>(from + 2 * b * kDim + (part ^ first_part));
      }
    }
    __syncwarp();  // all have read before the next one is copied there
    if (unit + kStages * warps < units) copy_unit(unit + kStages * warps, stage);
    commit_copies();

    const int chunk = unit * Shape::kChunks + lane_part * kLaneChunks;
    const bool whole = unit * Shape::kChunks >= begin && (unit + 1) * Shape::kChunks <= end;
    const float4 key_scale = *reinterpret_cast<const float4*>(shared.key_scales + chunk);
    const float key_scales[kLaneChunks] = {key_scale.x, key_scale.y, key_scale.z, key_scale.w};
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      int sums[kBlocks][4] = {};
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const uint4 first = fragment(n, 2 * p);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) multiply(sums[b], first, mean[b][p].x, mean[b][p].y);
        const uint4 second = fragment(n, 2 * p + 1);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) multiply(sums[b], second, mean[b][p].z, mean[b][p].w);
      }
      const float query_scale = shared.query_scales[n * kQueries + lane_row];
      float score[kLaneChunks];
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i) {
        const int sum = 128 * sums[i / 2][i % 2] + sums[i / 2][2 + i % 2];
        score[i] = __fmul_rn(static_cast<float>(sum), __fmul_rn(key_scales[i], query_scale));
      }
      if (!whole) {
#pragma unroll
        for (int i = 0; i < kLaneChunks; ++i) {
          if (chunk + i < begin || chunk + i >= end) score[i] = kLowest;
        }
      }
      softmax[n].add(score);
      if (score_row[n] == kNoRow || chunk >= end) continue;
      *reinterpret_cast<float4*>(scores + score_row[n] + chunk) = {score[0], score[1], score[2], score[3]};
    }
  }

  let_next_kernel_begin();
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
  float largest = -FLT_MAX;
  for (int w = 0; w < warps; ++w) largest = fmaxf(largest, shared.largest[w][thread]);
  float sum = 0.0F;  // of terms that do not wait for each other
  for (int w = 0; w < warps; ++w) sum += shared.sums[w][thread] * power_of_two((shared.largest[w][thread] - largest) * kLog2e);
  layout.score_max[statistics_at(thread)] = largest;
  layout.score_sum[statistics_at(thread)] = sum;
}

template <int kDim, int kQueryTiles>
void launch_scores(const StoreLayout& layout, Layer layer, const StepView& view, RowsIn queries, cudaStream_t stream) {
  constexpr int kRingBytes = Unit<kDim>::kStages * Unit<kDim>::kBytes;  // of a warp
  const dim3 grid(static_cast<unsigned>(layout.splits), static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(view.sequences));
  const std::size_t blocks = std::size_t{grid.x} * grid.y * grid.z;
  // few blocks get more warps each, to keep as many reads in flight, as far as shared memory goes
  unsigned threads = blocks >= 512 ? 128 : blocks >= 256 ? 256 : 512;
  const std::size_t offered = offered_shared_memory();
  while (threads > 128 && sizeof(ScoreMemory<kDim, kQueryTiles>) + threads / 32 * kRingBytes > offered) threads /= 2;
  const std::size_t bytes = std::size_t{threads} / 32 * kRingBytes;
  const auto kernel = score_kernel<kDim, kQueryTiles>;
  allow_shared_memory(kernel, bytes, "score_summaries: shared memory");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "score_summaries: shared memory next to L1");
  check(launch_overlapped(kernel, grid, threads, bytes, stream, layout, layer, view, queries, 1.0F / std::sqrt(static_cast<float>(kDim))),
        "score_summaries");
}

template <int kDim>
void launch_scores(const StoreLayout& layout, Layer layer, const StepView& view, RowsIn queries, cudaStream_t stream) {
  const int count = view.rows_per_sequence * layout.group;
  if (count <= kQueries) return launch_scores<kDim, 1>(layout, layer, view, queries, stream);
  if (count <= 2 * kQueries) return launch_scores<kDim, 2>(layout, layer, view, queries, stream);
  launch_scores<kDim, 4>(layout, layer, view, queries, stream);
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
