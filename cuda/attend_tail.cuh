// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attend_tokens.cuh"

/// The tail estimate: the warps of a block each sum up 16 tiles of 16 chunks. Value levels are the 16 rows of an instruction, columns
/// its 8.
namespace dualdecoder::cuda {

inline constexpr int kWarpTiles = kSplitChunks / kTileChunks / kAttendWarps;
inline constexpr int kWarpChunks = kWarpTiles * kTileChunks;

/// What a block of the tail works on: rows first_row .. first_row+rows-1, which are of one sequence.
struct TailBlock {
  std::size_t list;
  std::size_t slot_list;
  int slot;
  int kv_head;
  int first_row;
  int rows;
  int first;  ///< chunk of the split
  int begin;  ///< choosable chunks of the split
  int end;
  unsigned live;         ///< bit r: row first_row + r
  const int* chosen[2];  ///< what row r attends to exactly, where it is resident
  int chosen_count[2];
};

/// Bits of the split's chunks that a row does not estimate: outside the range, or attended to exactly. [rows, kSplitChunks / 32]
__device__ inline void mark_excluded(const StoreLayout& layout, const TailBlock& block, std::uint32_t* excluded) {
  constexpr int kWords = kSplitChunks / 32;
  for (int i = static_cast<int>(threadIdx.x); i < block.rows * kWords; i += kAttendThreads) {
    const int base = block.first + i % kWords * 32;
    const int below = min(max(block.begin - base, 0), 32);
    const int inside = min(max(block.end - base, 0), 32);
    const auto up_to = [](int bits) { return bits == 32 ? 0xFFFFFFFFU : (1U << bits) - 1U; };
    excluded[i] = ~(up_to(inside) & ~up_to(below));
  }
  __syncthreads();
  const int* const slot_of = layout.slot_of + block.slot_list * static_cast<std::size_t>(layout.max_chunks);
  // both rows at once, each by its share of the threads
  const int share = block.rows == 2 ? kAttendThreads / 2 : kAttendThreads;
  const int r = static_cast<int>(threadIdx.x) < share ? 0 : 1;
  const int thread = static_cast<int>(threadIdx.x) - r * share;
  const int* const chosen = r == 0 ? block.chosen[0] : block.chosen[1];
  int from = 0;
  int to = r == 0 ? block.chosen_count[0] : block.chosen_count[1];
  if (max(block.chosen_count[0], block.chosen_count[1]) > 4 * share) {  // a long list is searched before it is read
    const int step = (to + share - 1) / share;
    const int chunk = thread * step < to ? chosen[thread * step] : block.end;
    int before[2];
    int inside[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      before[i] = __syncthreads_count(static_cast<int>(r == i && chunk < block.begin));
      inside[i] = __syncthreads_count(static_cast<int>(r == i && chunk < block.end));
    }
    from = max(0, ((r == 0 ? before[0] : before[1]) - 1) * step);
    to = min(to, (r == 0 ? inside[0] : inside[1]) * step);
  }
  constexpr int kBatch = 4;  // chunks of a thread that are looked up at a time
  for (int base = from + thread; base < to; base += kBatch * share) {
    int chunk[kBatch];
    int slot[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) chunk[k] = base + k * share < to ? chosen[base + k * share] : -1;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) slot[k] = chunk[k] >= block.begin && chunk[k] < block.end ? slot_of[chunk[k]] : -1;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (slot[k] >= 0) atomicOr(excluded + r * kWords + (chunk[k] - block.first) / 32, 1U << (chunk[k] % 32));
    }
  }
  __syncthreads();
}

/// Largest weights of value products in f16: 2^15 for the chunks 2t and 2t + 1 of a tile, whose levels arrive as level * 2^-24, and 2^11
/// for 2t + 8 and 2t + 9, whose levels arrive as level * 2^-20.
inline constexpr float kWeightRange = 32768.0F;

/// Value scales of the warp's chunks, times kWeightRange over the largest, to `scales` in shared memory; chunks outside the range count
/// as 0. Returns what the products are to be multiplied by.
__device__ inline float stage_value_scales(const StoreLayout& layout, const TailBlock& block, int first, float* scales) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kEach = kWarpChunks / 32;
  static_assert(kEach == 8);
  const int own = first + lane * kEach;
  float scale[kEach] = {};
  if (own < block.end && own + kEach > block.begin) {  // max_chunks is a multiple of 16, so all eight exist
    const auto* const from =
        reinterpret_cast<const float4*>(layout.value_scales + block.list * static_cast<std::size_t>(layout.max_chunks) + own);
    const float4 low = from[0];
    const float4 high = from[1];
    const float all[kEach] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kEach; ++i) scale[i] = own + i >= block.begin && own + i < block.end ? all[i] : 0.0F;
  }
  float largest = 0.0F;
#pragma unroll
  for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, scale[i]);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  const float factor = largest > 1e-30F ? kWeightRange / largest : 0.0F;  // smaller values are zero to any reader
  auto* const to = reinterpret_cast<float4*>(scales + lane * kEach);
  to[0] = {scale[0] * factor, scale[1] * factor, scale[2] * factor, scale[3] * factor};
  to[1] = {scale[4] * factor, scale[5] * factor, scale[6] * factor, scale[7] * factor};
  __syncwarp();
  return largest * (16777216.0F / kWeightRange);
}

/// A lane's weights of 16 tiles for column n * 8 + g, in the order of the B operand.
struct ColumnWeights {
  std::uint32_t pair[kWarpTiles][2];
  float largest;
  float sum;
  float level_offset;  ///< what the bias of 8 in the nibbles adds to every product
};

/// A lane's scores of 16 tiles: chunks 2t, 2t + 1, 2t + 8 and 2t + 9 of each, of a column.
using ColumnScores = float[kWarpTiles][4];

/// Reads `chunks` scores; what is behind them counts as excluded.
__device__ inline void load_scores(const float* scores, int chunks, ColumnScores& score) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < kWarpTiles; ++i) {
    float2 first = {0.0F, 0.0F};
    float2 second = first;
    if (i * kTileChunks < chunks) {
      first = *reinterpret_cast<const float2*>(scores + i * kTileChunks + 2 * t);
      second = *reinterpret_cast<const float2*>(scores + i * kTileChunks + 2 * t + 8);
    }
    score[i][0] = first.x;
    score[i][1] = first.y;
    score[i][2] = second.x;
    score[i][3] = second.y;
  }
}

/// Turns the scores of a column into weights. `excluded` are the bits of the warp's first 32 chunks on.
__device__ inline ColumnWeights weigh_column(ColumnScores& score, bool live, float shift, const std::uint32_t* excluded,
                                             const float* scales) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  float largest = lowest();
#pragma unroll
  for (int i = 0; i < kWarpTiles; ++i) {
    const std::uint32_t bits = excluded[i / 2] >> (i % 2 * 16 + 2 * t);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const bool counts = live && (bits >> (k % 2 + k / 2 * 8) & 1U) == 0;
      score[i][k] = counts ? score[i][k] : lowest();
      largest = fmaxf(largest, score[i][k]);
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  const float reference = largest == lowest() ? 0.0F : largest * kLog2e;
  ColumnWeights weights;
  weights.largest = largest == lowest() ? lowest() : reference + shift;
  weights.sum = 0.0F;
  weights.level_offset = 0.0F;
#pragma unroll
  for (int i = 0; i < kWarpTiles; ++i) {
    const float2 low_scale = *reinterpret_cast<const float2*>(scales + i * kTileChunks + 2 * t);
    const float2 high_scale = *reinterpret_cast<const float2*>(scales + i * kTileChunks + 2 * t + 8);
    float weight[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      weight[k] = power_of_two(score[i][k] * kLog2e - reference);
      weights.sum += weight[k];
    }
    weights.pair[i][0] = pack_f16(weight[0] * low_scale.x, weight[1] * low_scale.y);
    weights.pair[i][1] = pack_f16(weight[2] * high_scale.x * 0.0625F, weight[3] * high_scale.y * 0.0625F);
    const float2 low = unpack_f16(weights.pair[i][0]);
    const float2 high = unpack_f16(weights.pair[i][1]);
    weights.level_offset += (low.x + low.y) + (high.x + high.y) * 16.0F;
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    weights.sum += __shfl_xor_sync(kAllLanes, weights.sum, step);
    weights.level_offset += __shfl_xor_sync(kAllLanes, weights.level_offset, step);
  }
  weights.level_offset *= 8.0F / 16777216.0F;
  return weights;
}

/// A lane's words of a tile.
template <int kDim>
__device__ void load_levels(const std::byte* tile, std::uint32_t (&words)[kDim / 16]) {
  const std::byte* const own = tile + static_cast<int>(threadIdx.x) % 32 * (kDim / 4);
  if constexpr (kDim % 64 == 0) {
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(own)[i];
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) words[i] = reinterpret_cast<const std::uint32_t*>(own)[i];
  }
}

/// What a lane's column n * 8 + g stands for.
struct TailColumn {
  int row;  ///< of the block
  bool live;
  std::size_t scores;      ///< of StoreLayout::scores, at chunk 0
  std::size_t query_head;  ///< of StoreLayout::bias
};

__device__ inline TailColumn tail_column(const StoreLayout& layout, Layer layer, const TailBlock& block, int n) {
  const int column = n * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
  TailColumn out;
  out.row = column >= layout.group && block.rows == 2 ? 1 : 0;
  const int own = column - out.row * layout.group;
  out.live = own < layout.group && (block.live >> out.row & 1U) != 0;
  const auto head = static_cast<std::size_t>(out.live ? own : 0);
  out.scores = (layout.work_list(layer, block.first_row + out.row, block.kv_head) * static_cast<std::size_t>(layout.group) + head) *
               static_cast<std::size_t>(layout.max_chunks);
  out.query_head = (static_cast<std::size_t>(block.slot) * static_cast<std::size_t>(layout.layers) + static_cast<std::size_t>(layer)) *
                       static_cast<std::size_t>(layout.heads) +
                   static_cast<std::size_t>(block.kv_head * layout.group) + head;
  return out;
}

/// Attends to what the block's rows estimate of a split. Column c is head c % group of row c / group. `excluded` is shared memory of the
/// block, `scales` and `landing`, where kRing tiles at a time arrive, of the warp.
template <int kDim, int kGroups, int kRing>
__device__ void attend_to_tail(const StoreLayout& layout, Layer layer, const TailBlock& block, std::uint32_t* excluded, float* scales,
                               std::byte* landing, WarpSums<kDim, kGroups>& sums) {
  static_assert(kRing >= 2);
  constexpr int kTileBytes = kDim * kTileChunks / 2;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first = block.first + warp * kWarpChunks;
  const std::byte* const tiles =
      reinterpret_cast<const std::byte*>(layout.value_tiles) +
      (block.list * static_cast<std::size_t>(layout.max_chunks / kTileChunks) + static_cast<std::size_t>(first / kTileChunks)) * kTileBytes;
  constexpr int kPieces = kTileBytes / 16;
  const std::byte* const source = tiles + lane * 16;
  const std::uint32_t target = shared_address(landing) + static_cast<std::uint32_t>(lane * 16);
  const int range_begin = block.begin - first - kTileChunks;
  const int range_end = block.end - first;
  // a tile outside the range is not read; whatever then lies where it would arrive has no weight
  const auto bring = [&](int i) {
    if (i < kWarpTiles && i * kTileChunks > range_begin && i * kTileChunks < range_end) {
#pragma unroll
      for (int piece = 0; piece < kPieces; piece += 32) {
        if (piece + 32 > kPieces && piece + lane >= kPieces) break;
        copy_async(target + static_cast<std::uint32_t>(i % kRing * kTileBytes + piece * 16), source + i * kTileBytes + piece * 16, true);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kRing; ++i) bring(i);  // before anything is known of their weights, so that they arrive meanwhile
  ColumnWeights weights[kGroups];
  float unit = 0.0F;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const TailColumn column = tail_column(layout, layer, block, n);
    ColumnScores scores;
    load_scores(layout.scores + column.scores + first, column.live ? block.end - first : 0, scores);
    const float shift = (logf(static_cast<float>(layout.chunk)) + layout.bias_scale * layout.bias[column.query_head]) * kLog2e;
    if (n == 0) {  // while the first scores are on their way
      unit = stage_value_scales(layout, block, first, scales);
      mark_excluded(layout, block, excluded);
    }
    weights[n] = weigh_column(scores, column.live, shift, excluded + column.row * (kSplitChunks / 32) + warp * (kWarpChunks / 32), scales);
  }
  sums.clear();
#pragma unroll
  for (int i = 0; i < kWarpTiles; ++i) {
    wait_for_copies<kRing - 2>();
    __syncwarp();  // the copies of all lanes have arrived, and all lanes are done with the tile before
    if (i > 0) bring(i - 1 + kRing);
    std::uint32_t words[kDim / 16];
    load_levels<kDim>(landing + i % kRing * kTileBytes, words);
#pragma unroll
    for (int m = 0; m < kDim / 16; ++m) {
      // nibbles as f16 subnormals: (level + 8) * 2^-24, or 2^-20 where they stay four bits up
      const std::uint32_t upper = words[m] >> 8;
      const std::uint32_t levels[4] = {words[m] & 0x000F000FU, upper & 0x000F000FU, words[m] & 0x00F000F0U, upper & 0x00F000F0U};
#pragma unroll
      for (int n = 0; n < kGroups; ++n) multiply_add_f16(sums.values[m][n], levels, weights[n].pair[i][0], weights[n].pair[i][1]);
    }
  }
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = lane % 4 * 8 + i * 4;  // a lane whose g is column 2t + i
      sums.largest[n][i] = __shfl_sync(kAllLanes, weights[n].largest, from);
      sums.sum[n][i] = __shfl_sync(kAllLanes, weights[n].sum, from);
      const float offset = __shfl_sync(kAllLanes, weights[n].level_offset, from);
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) {
        sums.values[m][n][i] = (sums.values[m][n][i] - offset) * unit;
        sums.values[m][n][i + 2] = (sums.values[m][n][i + 2] - offset) * unit;
      }
    }
  }
}

}  // namespace dualdecoder::cuda
