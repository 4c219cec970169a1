// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <string>

#include "cuda/block_tools.cuh"
#include "cuda/check.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/store_kernels.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr float kLowest = -INFINITY;

// -- scores ------------------------------------------------------------------------------------------------------------------------------

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

// -- choice ------------------------------------------------------------------------------------------------------------------------------

constexpr int kChooseThreads = 1024;
constexpr int kBuckets = 2 * kChooseThreads;
constexpr float kBucketsPerNat = 64.0F;  // of log share, from 0 down
constexpr int kCandidates = 4096;        // that may be chosen and are listed
constexpr int kFewMembers = 128;         // of the bucket where the choice ends, compared one with another
constexpr int kMaxGroup = 16;

/// Ranks in linear buckets, the best in bucket 0: a floating-point digit would put nearly all of them into a few.
__device__ int bucket_of(float rank) {
  return min(kBuckets - 1, static_cast<int>(fmaxf(-rank, 0.0F) * kBucketsPerNat));  // the conversion saturates
}

struct ChooseMemory {
  int histogram[kBuckets];
  int candidates[kCandidates];
  std::uint64_t members[kFewMembers];
  float log_sums[kMaxGroup];
  int warp_sums[32];
  int candidate_count;
  int member_count;
  int found_bucket;
  int found_before;
};

/// Bits of chunks: those chosen, and those at the threshold of which the first are chosen too.
struct ChooseBits {
  std::uint32_t* chosen;
  std::uint32_t* ties;
  __device__ static void set(std::uint32_t* bits, int chunk) { atomicOr(bits + chunk / 32, 1U << (chunk % 32)); }
};

/// The first bucket by whose end at least `wanted` are counted, and the count before it. Clears the histogram.
__device__ void find_bucket(ChooseMemory& memory, int wanted) {
  const int first = static_cast<int>(threadIdx.x) * 2;
  const int low = memory.histogram[first];
  const int high = memory.histogram[first + 1];
  int total;
  const int before = block_exclusive_sum<kChooseThreads>(low + high, memory.warp_sums, total);
  memory.histogram[first] = 0;
  memory.histogram[first + 1] = 0;
  if (before < wanted && wanted <= before + low + high) {
    const bool in_low = wanted <= before + low;
    memory.found_bucket = in_low ? first : first + 1;
    memory.found_before = in_low ? before : before + low;
  }
  __syncthreads();
}

/// log of the sum of exp(score) over the chunks of one query head; by one warp.
__device__ float log_sum_of(const float* largest, const float* sums, int splits, int group) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float top = kLowest;
  for (int s = lane; s < splits; s += 32) top = fmaxf(top, __ldg(largest + s * group));
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
  float sum = 0.0F;
  for (int s = lane; s < splits; s += 32) sum += __ldg(sums + s * group) * expf(__ldg(largest + s * group) - top);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return top + logf(sum);
}

__device__ float4 larger(const float4& a, const float4& score, float log_sum) {
  return {fmaxf(a.x, score.x - log_sum), fmaxf(a.y, score.y - log_sum), fmaxf(a.z, score.z - log_sum), fmaxf(a.w, score.w - log_sum)};
}

/// Ranks of four chunks at a time, several reads in flight, staged for later; returns the largest rank that this thread saw.
template <bool kStaged>
__device__ float rank_all(const float* scores, const StoreLayout& layout, int begin, int end, const float* log_sums, float* ranks) {
  constexpr int kTogether = 2;
  const float4* const fours = reinterpret_cast<const float4*>(scores);
  const int stride = layout.max_chunks / 4;
  const int quads = (end + 3) / 4;
  float top = kLowest;
  for (int q = begin / 4 + static_cast<int>(threadIdx.x); q < quads; q += kTogether * kChooseThreads) {
    float4 rank[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) rank[u] = {kLowest, kLowest, kLowest, kLowest};
    for (int first = 0; first < layout.group; first += 4) {
      float4 score[kTogether][4];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          if (first + g < layout.group && q + u * kChooseThreads < quads) {
            score[u][g] = __ldcg(fours + static_cast<std::size_t>(first + g) * static_cast<std::size_t>(stride) + q + u * kChooseThreads);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          if (first + g < layout.group) rank[u] = larger(rank[u], score[u][g], log_sums[first + g]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int chunk = (q + u * kChooseThreads) * 4;
      if (chunk >= end) continue;
      if constexpr (kStaged) reinterpret_cast<float4*>(ranks)[chunk / 4] = rank[u];
      const float four[4] = {rank[u].x, rank[u].y, rank[u].z, rank[u].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (chunk + i >= begin && chunk + i < end) top = fmaxf(top, four[i]);
      }
    }
  }
  return top;
}

/// The key of the wanted-th best of the members of a bucket, digit by digit; `visit(f)` calls f(chunk, key) for each member. Returns the
/// key, and in `ties` how many of those with this very key are wanted.
template <class Visit>
__device__ std::uint32_t find_key(ChooseMemory& memory, int wanted, Visit visit, int& ties) {
  std::uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    visit([&](int, std::uint32_t key) {
      if (shift < 24 && (key >> (shift + 8)) != (prefix >> (shift + 8))) return;
      const int digit = 255 - static_cast<int>((key >> shift) & 255U);  // the best first
      const unsigned peers = __match_any_sync(__activemask(), digit);
      if (static_cast<int>(threadIdx.x) % 32 == __ffs(static_cast<int>(peers)) - 1) atomicAdd(&memory.histogram[digit], __popc(peers));
    });
    __syncthreads();
    find_bucket(memory, wanted);
    prefix |= static_cast<std::uint32_t>(255 - memory.found_bucket) << shift;
    wanted -= memory.found_before;
    __syncthreads();  // before the next digit's result
  }
  ties = wanted;
  return prefix;
}

/// Marks the `wanted` best of the chunks begin .. end; `top` is the largest rank of those that this thread saw. Returns how many of
/// bits.ties belong to them.
template <class RankOf>
__device__ int mark_best(ChooseMemory& memory, const ChooseBits& bits, int begin, int end, int wanted, float top, RankOf rank_of) {
  const int thread = static_cast<int>(threadIdx.x);
  // As many threads as are wanted saw a chunk of this bucket or a better one, so no worse one is chosen.
  int bound = kBuckets - 1;
  const int quads = (end + 3) / 4 - begin / 4;
  const bool bounded = wanted <= min(quads, kChooseThreads);
  if (bounded) {
    if (thread < quads) atomicAdd(&memory.histogram[bucket_of(top)], 1);
    __syncthreads();
    find_bucket(memory, wanted);
    bound = memory.found_bucket;
  }
  for (int chunk = begin + thread; chunk < end; chunk += kChooseThreads) {
    const int bucket = bucket_of(rank_of(chunk));
    if (bucket > bound) continue;
    atomicAdd(&memory.histogram[bucket], 1);
    if (!bounded) continue;
    const int place = atomicAdd(&memory.candidate_count, 1);
    if (place < kCandidates) memory.candidates[place] = chunk;
  }
  __syncthreads();
  const int candidates = memory.candidate_count;
  const bool listed = bounded && candidates <= kCandidates;
  const auto visit = [&](auto f) {
    const int count = listed ? candidates : end - begin;
    for (int i = thread; i < count; i += kChooseThreads) {
      const int chunk = listed ? memory.candidates[i] : begin + i;
      f(chunk, rank_of(chunk));
    }
  };

  find_bucket(memory, wanted);
  const int last = memory.found_bucket;
  const int rest = wanted - memory.found_before;  // wanted of the last bucket
  visit([&](int chunk, float rank) {
    const int bucket = bucket_of(rank);
    if (bucket < last) bits.set(bits.chosen, chunk);
    if (bucket != last) return;
    const int place = atomicAdd(&memory.member_count, 1);
    // among equals the lower chunk is the better one
    if (place < kFewMembers) {
      memory.members[place] = (std::uint64_t{order_key(rank)} << 32) | (0xFFFFFFFFU - static_cast<std::uint32_t>(chunk));
    }
  });
  __syncthreads();
  const int members = memory.member_count;
  if (members <= kFewMembers) {
    if (thread < members) {
      const std::uint64_t mine = memory.members[thread];
      int better = 0;
      for (int i = 0; i < members; ++i) better += memory.members[i] > mine ? 1 : 0;
      if (better < rest) bits.set(bits.chosen, static_cast<int>(0xFFFFFFFFU - static_cast<std::uint32_t>(mine)));
    }
    __syncthreads();
    return 0;
  }
  const auto visit_members = [&](auto f) {
    visit([&](int chunk, float rank) {
      if (bucket_of(rank) == last) f(chunk, order_key(rank));
    });
  };
  int ties = 0;
  const std::uint32_t threshold = find_key(memory, rest, visit_members, ties);
  visit_members([&](int chunk, std::uint32_t key) {
    if (key > threshold) bits.set(bits.chosen, chunk);
    if (key == threshold) bits.set(bits.ties, chunk);
  });
  __syncthreads();
  return ties;
}

/// Adds the first `ties` chunks of bits.ties and writes what is chosen in ascending order.
template <class RankOf>
__device__ void write_chosen(ChooseMemory& memory, const ChooseBits& bits, int begin, int end, int ties, int* chunks, float* shares,
                             RankOf rank_of) {
  const int first_word = begin / 32;
  const int words = (end + 31) / 32 - first_word;
  const int each = (words + kChooseThreads - 1) / kChooseThreads;
  const int my_first = first_word + min(words, static_cast<int>(threadIdx.x) * each);
  const int my_last = first_word + min(words, static_cast<int>(threadIdx.x) * each + each);
  int total;
  if (ties > 0) {
    int count = 0;
    for (int w = my_first; w < my_last; ++w) count += __popc(bits.ties[w]);
    int left = ties - block_exclusive_sum<kChooseThreads>(count, memory.warp_sums, total);
    for (int w = my_first; w < my_last; ++w) {
      for (std::uint32_t rest = bits.ties[w]; rest != 0 && left > 0; rest &= rest - 1, --left) bits.chosen[w] |= rest & (0U - rest);
    }
  }
  int count = 0;
  for (int w = my_first; w < my_last; ++w) count += __popc(bits.chosen[w]);
  int to = block_exclusive_sum<kChooseThreads>(count, memory.warp_sums, total);
  for (int w = my_first; w < my_last; ++w) {
    for (std::uint32_t rest = bits.chosen[w]; rest != 0; rest &= rest - 1, ++to) {
      const int chunk = w * 32 + __ffs(static_cast<int>(rest)) - 1;
      chunks[to] = chunk;
      shares[to] = expf(rank_of(chunk));
    }
  }
}

/// One block chooses for one row and KV head.
template <bool kStaged>
__global__ void __launch_bounds__(kChooseThreads, 1) choose_kernel(StoreLayout layout, Layer layer, StepView view, Selection by_row) {
  extern __shared__ uint4 dynamic[];
  __shared__ ChooseMemory memory;
  const int kv_head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const int place = row / view.rows_per_sequence;
  const int thread = static_cast<int>(threadIdx.x);
  const int begin = layout.range_begin();
  const int end = row_is_live(view.mode[place], row % view.rows_per_sequence) ? layout.range_end(view.position[place]) : begin;
  const int wanted = min(min(by_row.capacity, layout.selected), end - begin);
  const std::size_t list = static_cast<std::size_t>(row) * static_cast<std::size_t>(by_row.kv_heads) + static_cast<std::size_t>(kv_head);
  if (thread == 0) by_row.count[list] = max(wanted, 0);
  if (wanted <= 0) return;

  const int words = (end + 31) / 32;
  const int all_words = (layout.max_chunks + 31) / 32;
  ChooseBits bits;
  bits.chosen = reinterpret_cast<std::uint32_t*>(dynamic);
  bits.ties = bits.chosen + all_words;
  float* const ranks = reinterpret_cast<float*>(dynamic + (2 * all_words + 3) / 4);
  const std::size_t work = layout.work_list(layer, row, kv_head);
  const std::size_t statistics = work * static_cast<std::size_t>(layout.splits) * static_cast<std::size_t>(layout.group);
  if (thread / 32 < layout.group) {
    const int g = thread / 32;
    const int splits = (end + kSplitChunks - 1) / kSplitChunks;
    const float log_sum = log_sum_of(layout.score_max + statistics + g, layout.score_sum + statistics + g, splits, layout.group);
    if (thread % 32 == 0) memory.log_sums[g] = log_sum;
  }
  for (int w = thread; w < words; w += kChooseThreads) {
    bits.chosen[w] = 0;
    bits.ties[w] = 0;
  }
  memory.histogram[thread] = 0;
  memory.histogram[kChooseThreads + thread] = 0;
  if (thread == 0) {
    memory.candidate_count = 0;
    memory.member_count = 0;
  }
  __syncthreads();

  const float* const scores = layout.scores + work * static_cast<std::size_t>(layout.group) * static_cast<std::size_t>(layout.max_chunks);
  const float top = rank_all<kStaged>(scores, layout, begin, end, memory.log_sums, ranks);
  const auto rank_of = [&](int chunk) {
    if constexpr (kStaged) return ranks[chunk];
    float rank = kLowest;
    for (int g = 0; g < layout.group; ++g) {
      rank = fmaxf(rank, scores[static_cast<std::size_t>(g) * static_cast<std::size_t>(layout.max_chunks) + chunk] - memory.log_sums[g]);
    }
    return rank;
  };
  __syncthreads();

  const std::size_t to = list * static_cast<std::size_t>(by_row.capacity);
  if (wanted == end - begin) {
    for (int i = thread; i < wanted; i += kChooseThreads) {
      by_row.chunks[to + i] = begin + i;
      by_row.scores[to + i] = expf(rank_of(begin + i));
    }
    return;
  }
  const int ties = mark_best(memory, bits, begin, end, wanted, top, rank_of);
  write_chosen(memory, bits, begin, end, ties, by_row.chunks + to, by_row.scores + to, rank_of);
}

/// Dynamic shared memory of the choice: two bits a chunk, and where they are staged its rank.
std::size_t choice_bytes(const StoreLayout& layout, bool staged) {
  const std::size_t words = (static_cast<std::size_t>(layout.max_chunks) + 31) / 32;
  return (2 * words + 3) / 4 * 16 + (staged ? static_cast<std::size_t>(layout.max_chunks) * sizeof(float) : 0);
}

template <bool kStaged>
void launch_choice(const StoreLayout& layout, Layer layer, const StepView& view, const Selection& by_row, cudaStream_t stream) {
  const std::size_t bytes = choice_bytes(layout, kStaged);
  allow_shared_memory(choose_kernel<kStaged>, bytes, "choose_chunks: shared memory");
  const dim3 grid(static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(view.rows()));
  choose_kernel<kStaged><<<grid, kChooseThreads, bytes, stream>>>(layout, layer, view, by_row);
  check_launch("choose_chunks");
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

void choose_chunks(const StoreLayout& layout, Layer layer, const StepView& view, const Selection& by_row, cudaStream_t stream) {
  if (view.sequences == 0) return;
  const bool staged = choice_bytes(layout, true) + sizeof(ChooseMemory) <= offered_shared_memory();
  if (staged) return launch_choice<true>(layout, layer, view, by_row, stream);
  launch_choice<false>(layout, layer, view, by_row, stream);
}

}  // namespace dualdecoder::cuda
