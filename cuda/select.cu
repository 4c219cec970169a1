// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <string>

#include "cuda/check.hpp"
#include "cuda/launch.hpp"
#include "cuda/select.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/store_kernels.hpp"
#include "cuda/tensor_core.cuh"
#include "cuda/warp_ring.cuh"
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

/// Reads here, not where the compiler finds it needed, so that reads which do not depend on each other are on their way together.
__device__ int read_now(const int* from) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
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

__device__ void exchange(uint4& a, uint4& b, bool exchanged) {
  const uint4 first = exchanged ? b : a;
  b = exchanged ? a : b;
  a = first;
}

/// Largest score and, in each lane, the sum of exp(score - largest) of what it added; -FLT_MAX and 0 when nothing was.
struct Softmax {
  float largest = -FLT_MAX;
  float sum = 0.0F;

  /// `top` is the largest of the scores and those that the other lanes add.
  template <int kCount>
  __device__ void add(const float (&scores)[kCount], float top) {
    const float before = largest;
    largest = fmaxf(largest, top);
    sum *= power_of_two((before - largest) * kLog2e);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += power_of_two((scores[i] - largest) * kLog2e);
  }
};

/// What is stored of two scores of a tile, the first in the low half.
__device__ std::uint32_t levels_below(float top, float first, float second) {
  constexpr float kInteger = 8388608.0F;  // 2^23, at which the low bits of a float are the nearest integer
  const float low = fminf((top - first) * kScoreLevels, kLowestLevel) + kInteger;
  const float high = fminf((top - second) * kScoreLevels, kLowestLevel) + kInteger;
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x5410);
}

/// How a warp scores 16 chunks at once. The matrix instruction takes queries as its 16 rows, high planes in rows 0-7 and low planes in rows
/// 8-15, and kBlocks times 8 chunks as its columns, so that lane (g, t) holds both planes of query g and scores chunks 2t, 2t + 1, 2t + 8
/// and 2t + 9. Which bytes of a mean are which k is free as long as all agree: a lane reads 16 whole bytes at a time, which are two k-steps
/// of its own.
///
/// The means of a unit lie together, so a warp copies them into a ring of its own in shared memory, kStages units ahead of the one it works
/// on: memory stays busy while warps compute, though they all start at once.
template <int kDim>
struct Unit {
  static constexpr int kParts = (kDim + 63) / 64;  // 64 bytes of a mean, which four lanes read together
  static constexpr int kSteps = 2 * kParts;        // of the matrix instruction
  static constexpr int kBlocks = 2;
  static constexpr int kLaneChunks = 2 * kBlocks;
  static constexpr int kChunks = 8 * kBlocks;
  static constexpr int kBytes = kChunks * kDim;
  static constexpr int kStages = kDim > 128 ? 2 : 3;  // with three of 2 KB, seven blocks of four warps share a multiprocessor
  // Rows of a multiple of 128 bytes begin in the same bank, and two are read at a time: odd ones are read second half first.
  static constexpr bool kSwaps = kDim % 128 == 0;
};
static_assert(kTileChunks == Unit<128>::kChunks, "a unit is a tile");

template <int kDim, int kQueryTiles>
struct ScoreMemory {
  uint4 fragments[kQueryTiles][Unit<kDim>::kSteps][32];  // high, low, high, low words of a lane
  alignas(16) float key_scales[kMostPieceTiles * kTileChunks];
  float query_scales[kQueryTiles * kQueries];
  std::uint64_t barriers[kMaxWarps][Unit<kDim>::kStages];
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

/// A lane's elements of a query: four from each multiple of 128 on.
template <int kDim>
struct QueryPart {
  static constexpr int kPadded = Unit<kDim>::kParts * 64;
  static constexpr int kFours = (kPadded + 127) / 128;
  float4 four[kFours];

  /// Zeros where the query is not `live`.
  __device__ static QueryPart load(const RowsIn& queries, std::size_t at, bool live) {
    QueryPart part;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int d = i * 128 + static_cast<int>(threadIdx.x) % 32 * 4;
      part.four[i] = live && d < kDim ? load_four(queries, at + static_cast<std::size_t>(d)) : float4{};
    }
    return part;
  }
};

/// One warp lays one query out as fragments; returns the value of one level.
template <int kDim>
__device__ float lay_out_query(const QueryPart<kDim>& part, int query, uint4 (&fragments)[Unit<kDim>::kSteps][32]) {
  constexpr int kPadded = QueryPart<kDim>::kPadded;
  constexpr int kFours = QueryPart<kDim>::kFours;
  const auto& four = part.four;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float largest = 0.0F;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
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
  const bool first = row_is_live(mode, 0);
  const bool second = rows_per_sequence == 2 && row_is_live(mode, 1);
  return {first ? 0 : 1, (first ? 1 : 0) + (second ? 1 : 0)};
}

/// Threads that bound the registers of a kernel, to 72, 80 and 96: with the 72 of the usual case seven blocks of 128 threads share a
/// multiprocessor. Blocks have up to 32 * kMaxWarps threads.
constexpr int score_threads(int dim, int query_tiles) { return query_tiles == 1 ? 896 : query_tiles == 2 && dim <= 128 ? 768 : 640; }

/// One block scores the chunks of a piece for all live rows of a sequence and one KV head, in one read of the key means.
template <int kDim, int kQueryTiles>
__global__ void __launch_bounds__(score_threads(kDim, kQueryTiles))
    score_kernel(StoreLayout layout, ScoreCut cut, Layer layer, StepView view, RowsIn queries, float scale) {
  using Shape = Unit<kDim>;
  constexpr int kParts = Shape::kParts;
  constexpr int kBlocks = Shape::kBlocks;
  constexpr int kLaneChunks = Shape::kLaneChunks;
  constexpr int kStages = Shape::kStages;
  constexpr bool kHeld = kQueryTiles == 1 && kDim <= 128;  // registers hold the queries
  extern __shared__ uint4 rings[];                         // [warps, kStages] units
  __shared__ ScoreMemory<kDim, kQueryTiles> shared;

  const int kv_head = static_cast<int>(blockIdx.x);
  const int place = static_cast<int>(blockIdx.y);
  const int piece = static_cast<int>(blockIdx.z);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  using Ring = WarpRing<Shape::kBytes, kStages>;
  Ring ring(reinterpret_cast<std::byte*>(rings) + warp * kStages * Shape::kBytes, shared.barriers[warp]);
  // The key means too wait for it: an append may be right ahead, and of kernels that overlap several can be under way.
  wait_for_earlier_kernels();
  const int storage = read_now(view.slot_of + place);
  const int position = read_now(view.position + place);
  const RowMode mode = view.mode[place];
  const LiveRows live = live_rows(mode, view.rows_per_sequence);
  const int query_count = live.count * layout.group;
  if (query_count == 0) return;
  const int first_row = place * view.rows_per_sequence + live.first;
  const auto row_of = [&](int query) { return query < layout.group ? 0 : 1; };  // of the live ones
  const auto statistics_at = [&](int query) {
    const std::size_t list = layout.work_list(layer, first_row + row_of(query), kv_head);
    return (list * static_cast<std::size_t>(layout.score_pieces()) + static_cast<std::size_t>(piece)) *
               static_cast<std::size_t>(layout.group) +
           static_cast<std::size_t>(query - row_of(query) * layout.group);
  };

  // from here on chunks count from the beginning of the piece
  const int first_chunk = cut.begin(piece) * kTileChunks;
  const int piece_chunks = cut.begin(piece + 1) * kTileChunks - first_chunk;
  const int begin = max(layout.range_begin() - first_chunk, 0);
  const int end = min(layout.range_end(position) - first_chunk, piece_chunks);
  if (begin >= end) {
    if (thread < query_count) {
      layout.score_max[statistics_at(thread)] = kLowest;
      layout.score_sum[statistics_at(thread)] = 0.0F;
    }
    return;
  }
  const int lane_row = lane / 4;   // column that it reads, query that it scores
  const int lane_part = lane % 4;  // of 64 bytes that it reads, of a unit's chunks that it scores

  const std::size_t at =
      layout.list(storage, layer, kv_head) * static_cast<std::size_t>(layout.max_chunks) + static_cast<std::size_t>(first_chunk);
  const std::int8_t* const means = layout.key_means + at * kDim;
  int unit = begin / Shape::kChunks;
  int last_unit = (end + Shape::kChunks - 1) / Shape::kChunks;
  const int each = (last_unit - unit + warps - 1) >> (31 - __clz(warps));  // a power of two
  unit += warp * each;
  last_unit = min(last_unit, unit + each);
  // What is read is asked for in the order of need, as memory answers in turn: queries and scales, then the first units. What is behind the
  // range but in its last unit is copied too, and does not count.
  const auto load_query = [&](int query) {
    const int head = (first_row + row_of(query)) * layout.heads + kv_head * layout.group + query - row_of(query) * layout.group;
    return QueryPart<kDim>::load(queries, static_cast<std::size_t>(head) * kDim, query < query_count);
  };
  constexpr int kAllQueries = kQueryTiles * kQueries;
  constexpr int kTogether = 2;  // by the four warps of a block at least
  QueryPart<kDim> parts[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    if (warp + i * warps < kAllQueries) parts[i] = load_query(warp + i * warps);
  }
  for (int c = thread * 4; c < piece_chunks; c += static_cast<int>(blockDim.x) * 4) {
    copy_async(shared_address(shared.key_scales + c), layout.key_scales + at + c, c < end);
  }
  commit_copies();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    ring.start(stage, means + (unit + stage) * Shape::kBytes, unit + stage < last_unit ? Shape::kBytes : 0);
  }
  for (int first = warp; first < kAllQueries; first += kTogether * warps) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int query = first + i * warps;
      if (query >= kAllQueries) continue;
      if (kAllQueries > 4 * kTogether && first != warp) parts[i] = load_query(query);
      const float level = lay_out_query<kDim>(parts[i], query % kQueries, shared.fragments[query / kQueries]);
      if (lane == 0) shared.query_scales[query] = level * scale;
    }
  }
  const std::size_t score_list = layout.score_list(layer, place, kv_head);
  const int columns = layout.columns();
  const int first_tile = first_chunk / kTileChunks;
  float* const tile_max = layout.tile_max_of(score_list) + first_tile * columns;
  std::uint16_t* const levels = layout.score_levels_of(score_list) + static_cast<std::size_t>(first_tile * columns) * kTileChunks;
  wait_for_copies<Ring::kCommits>();  // the scales
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
  const bool swapped = Shape::kSwaps && lane_row % 2 != 0;
  const int first_part = lane_part * 16 ^ (swapped ? 64 : 0);
  const int last_part = (kParts - 1) * 64 + lane_part * 16 < kDim ? (kParts - 1) * 64 : 0;
  const int lane_from = lane_row * kDim;
  Softmax softmax[kQueryTiles];
  int stage = 0;
  std::uint32_t turn = 0;
  for (; unit < last_unit; ++unit) {
    const std::byte* const from = ring.wait(stage, turn) + lane_from;
    uint4 mean[kBlocks][kParts];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const int part = kDim % 64 != 0 && p == kParts - 1 ? last_part : p * 64;
        mean[b][p] = *reinterpret_cast<const uint4*>(from + 8 * b * kDim + (part ^ first_part));
      }
      if constexpr (Shape::kSwaps) {
#pragma unroll
        for (int p = 0; p < kParts; p += 2) exchange(mean[b][p], mean[b][p + 1], swapped);
      }
    }
    __syncwarp();  // all have read before the next one is copied there
    ring.start(stage, means + (unit + kStages) * Shape::kBytes, unit + kStages < last_unit ? Shape::kBytes : 0);
    if (++stage == kStages) {
      stage = 0;
      ++turn;
    }

    const int chunk = unit * Shape::kChunks + lane_part * 2;  // the lane's first; the others are behind it by 1, 8 and 9
    const bool whole = unit * Shape::kChunks >= begin && (unit + 1) * Shape::kChunks <= end;
    const float2 first_scales = *reinterpret_cast<const float2*>(shared.key_scales + chunk);
    const float2 last_scales = *reinterpret_cast<const float2*>(shared.key_scales + chunk + 8);
    const float key_scales[kLaneChunks] = {first_scales.x, first_scales.y, last_scales.x, last_scales.y};
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
          const int at_chunk = chunk + i / 2 * 8 + i % 2;
          if (at_chunk < begin || at_chunk >= end) score[i] = kLowest;
        }
      }
      float top = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      softmax[n].add(score, top);
      const int query = n * kQueries + lane_row;
      if (query < query_count) {
        const int at_tile = unit * columns + live.first * layout.group + query;
        reinterpret_cast<uint2*>(levels)[at_tile * 4 + lane_part] = {levels_below(top, score[0], score[1]),
                                                                     levels_below(top, score[2], score[3])};
        if (lane_part == 0) tile_max[at_tile] = top;
      }
    }
  }

  let_next_kernel_begin();
#pragma unroll
  for (int n = 0; n < kQueryTiles; ++n) {
    Softmax& total = softmax[n];
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      total.sum += __shfl_xor_sync(kAllLanes, total.sum, step);
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
  const ScoreCut cut = score_cut(layout, view.sequences);
  const dim3 grid(static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(view.sequences), static_cast<unsigned>(cut.pieces));
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
  check(launch_overlapped(kernel, grid, threads, bytes, stream, layout, cut, layer, view, queries,
                          1.0F / std::sqrt(static_cast<float>(kDim))),
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

ScoreCut score_cut(const StoreLayout& layout, int sequences) {
  constexpr int kPieceTiles = 32;        // of pieces that are all alike
  constexpr double kFewTiles = 24.0;     // for a block that runs all the time: then there is but one wave of blocks
  constexpr double kSmallest = 0.45;     // of graded pieces, relative to the largest
  constexpr double kGradedShare = 0.75;  // of the tiles, at most
  int device = 0;
  int processors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const int tiles = layout.max_chunks / kTileChunks;
  const int lists = sequences * layout.kv_heads;
  const int at_once = processors * (layout.columns() <= kQueries ? 7 : 6);  // blocks of the usual shapes
  const double mean = static_cast<double>(tiles) * lists / at_once;
  ScoreCut cut{.graded = 0, .first = 0, .growth = 0, .rest = kPieceTiles, .pieces = 0};
  if (mean >= kFewTiles) {
    const double largest = std::min<double>(mean, kMostPieceTiles);
    if (mean <= kMostPieceTiles) cut.rest = kPieceTiles / 2;
    cut.first = std::max(kLeastPieceTiles, static_cast<int>(kSmallest * largest));
    cut.graded = std::min(at_once / lists, static_cast<int>(kGradedShare * tiles / ((cut.first + largest) / 2)));
    if (cut.graded > 1) cut.growth = static_cast<int>((largest - cut.first) * 16.0 / (cut.graded - 1));
  }
  cut.pieces = cut.graded + (tiles - cut.begin(cut.graded) + cut.rest - 1) / cut.rest;
  return cut;
}

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
