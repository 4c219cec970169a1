// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/attend_tokens.cuh"
#include "cuda/warp_ring.cuh"

/// The tail estimate: the warps of a block each sum up 16 tiles of 16 chunks. Value levels are the 16 rows of an instruction, columns
/// its 8.
namespace dualdecoder::cuda {

inline constexpr int kWarpTiles = kSplitChunks / kTileChunks / kAttendWarps;
inline constexpr int kWarpChunks = kWarpTiles * kTileChunks;

/// How a block of the tail cuts its shared memory.
template <int kDim, int kGroups>
struct TailShape {
  static constexpr int kColumns = kGroups * 8;
  static constexpr int kTileBytes = kTileChunks * kDim / 2;
  static constexpr int kPieceTiles = 2;
  static constexpr int kPieceBytes = kPieceTiles * kTileBytes;
  static constexpr int kRing = 4;  // pieces on their way
  // a warp's part: the ring, value scales, then tile maxima and score levels of all columns
  static constexpr int kScales = kRing * kPieceBytes;
  static constexpr int kScores = kScales + kWarpChunks * 4;
  static constexpr int kTopBytes = kWarpTiles * 4;  // of a column
  static constexpr int kLevelBytes = kWarpChunks * 2;
  static constexpr int kExcludedBytes = 2 * kSplitChunks / 8;  // bits of two rows
  static constexpr int kTableBytes = kExcludedBytes + kAttendWarps * kRing * 8;
  static constexpr int kSumBytes = 2 * kAttendWarps * kColumns * 4;
  static constexpr int kTiles = kTableBytes + kSumBytes;  // offset of the warps' parts
  static constexpr int kJoinStride = kDim + 4;
  static_assert(kTiles % 16 == 0 && kColumns * kJoinStride * 4 <= kScores + kColumns / 2 * (kTopBytes + kLevelBytes));

  DUALDECODER_HOST_DEVICE static int warp_bytes(int stored_columns) { return kScores + stored_columns * (kTopBytes + kLevelBytes); }
  DUALDECODER_HOST_DEVICE static int bytes(int stored_columns) { return kTiles + kAttendWarps * warp_bytes(stored_columns); }
};

/// What a block of the tail works on: `rows` rows of the sequence at `place` from its row `first_number` on.
struct TailBlock {
  std::size_t list;
  std::size_t slot_list;
  int slot;
  int kv_head;
  int place;
  int first_number;
  int rows;
  int first;  ///< chunk of the split
  int begin;  ///< choosable chunks of the split
  int end;
  unsigned live;         ///< bit r: row first_number + r
  const int* chosen[2];  ///< what row r attends to exactly, where it is resident
  int chosen_count[2];
};

/// Bits of the split's chunks that a row does not estimate: outside the range, or attended to exactly. [rows, kSplitChunks / 32]
/// `start_some` and `start_more` start copies of what is large, behind what this reads first and behind what follows from that: memory
/// answers in turn.
template <class StartSome, class StartMore>
__device__ void mark_excluded(const StoreLayout& layout, const TailBlock& block, std::uint32_t* excluded, StartSome start_some,
                              StartMore start_more) {
  constexpr int kWords = kSplitChunks / 32;
  constexpr int kBatch = 4;  // chunks of a thread that are looked up at a time
  const int* const slot_of = layout.slot_of + block.slot_list * static_cast<std::size_t>(layout.max_chunks);
  // both rows at once, each by its share of the threads
  const int share = block.rows == 2 ? kAttendThreads / 2 : kAttendThreads;
  const int r = static_cast<int>(threadIdx.x) < share ? 0 : 1;
  const int thread = static_cast<int>(threadIdx.x) - r * share;
  const int* const chosen = r == 0 ? block.chosen[0] : block.chosen[1];
  int from = 0;
  int to = r == 0 ? block.chosen_count[0] : block.chosen_count[1];
  const bool one_batch = max(block.chosen_count[0], block.chosen_count[1]) <= kBatch * share;
  int chunk[kBatch];
  int slot[kBatch];
  const auto read_chunks = [&](int base) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) chunk[k] = base + k * share < to ? chosen[base + k * share] : -1;
  };
  const auto read_slots = [&] {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) slot[k] = chunk[k] >= block.begin && chunk[k] < block.end ? slot_of[chunk[k]] : -1;
  };
  const auto set_bits = [&] {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (slot[k] >= 0) atomicOr(excluded + r * kWords + (chunk[k] - block.first) / 32, 1U << (chunk[k] % 32));
    }
  };
  if (one_batch) read_chunks(thread);
  for (int i = static_cast<int>(threadIdx.x); i < block.rows * kWords; i += kAttendThreads) {
    const int base = block.first + i % kWords * 32;
    const int below = min(max(block.begin - base, 0), 32);
    const int inside = min(max(block.end - base, 0), 32);
    const auto up_to = [](int bits) { return bits == 32 ? 0xFFFFFFFFU : (1U << bits) - 1U; };
    excluded[i] = ~(up_to(inside) & ~up_to(below));
  }
  start_some();
  if (one_batch) read_slots();
  start_more();
  __syncthreads();
  if (one_batch) {
    set_bits();
  } else {  // a long list is searched before it is read
    const int step = (to + share - 1) / share;
    const int at_step = thread * step < to ? chosen[thread * step] : block.end;
    int before[2];
    int inside[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      before[i] = __syncthreads_count(static_cast<int>(r == i && at_step < block.begin));
      inside[i] = __syncthreads_count(static_cast<int>(r == i && at_step < block.end));
    }
    from = max(0, ((r == 0 ? before[0] : before[1]) - 1) * step);
    to = min(to, (r == 0 ? inside[0] : inside[1]) * step);
#pragma unroll 1
    for (int base = from + thread; base < to; base += kBatch * share) {
      read_chunks(base);
      read_slots();
      set_bits();
    }
  }
  __syncthreads();
}

/// Largest weights of value products in f16: 2^15 for the chunks 2t and 2t + 1 of a tile, whose levels arrive as level * 2^-24, and 2^11
/// for 2t + 8 and 2t + 9, whose levels arrive as level * 2^-20.
inline constexpr float kWeightRange = 32768.0F;

/// Value scales of a lane's eight of the warp's chunks; of chunks outside the range 0.
struct ValueScales {
  static constexpr int kEach = kWarpChunks / 32;
  float scale[kEach];
  static_assert(kEach == 8);

  __device__ static ValueScales load(const StoreLayout& layout, const TailBlock& block, int first) {
    const int own = first + static_cast<int>(threadIdx.x) % 32 * kEach;
    ValueScales out = {};
    if (own >= block.end || own + kEach <= block.begin) return out;  // max_chunks is a multiple of 16, so else all eight exist
    const auto* const from =
        reinterpret_cast<const float4*>(layout.value_scales + block.list * static_cast<std::size_t>(layout.max_chunks) + own);
    const float4 low = from[0];
    const float4 high = from[1];
    const float all[kEach] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kEach; ++i) out.scale[i] = own + i >= block.begin && own + i < block.end ? all[i] : 0.0F;
    return out;
  }
  /// Times kWeightRange over the largest to `scales` in shared memory, a sixteenth of it for the chunks whose levels arrive sixteen times
  /// as large. Returns what the products are to be multiplied by.
  __device__ float stage(float* scales) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float largest = 0.0F;
#pragma unroll
    for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, scale[i]);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    float factor = largest > 1e-30F ? kWeightRange / largest : 0.0F;  // smaller values are zero to any reader
    if (lane % 2 != 0) factor *= 0.0625F;
    auto* const to = reinterpret_cast<float4*>(scales + lane * kEach);
    to[0] = {scale[0] * factor, scale[1] * factor, scale[2] * factor, scale[3] * factor};
    to[1] = {scale[4] * factor, scale[5] * factor, scale[6] * factor, scale[7] * factor};
    __syncwarp();
    return largest * (16777216.0F / kWeightRange);
  }
};

/// A lane's words of a tile.
template <int kDim>
__device__ void load_levels(const std::byte* tile, std::uint32_t (&words)[kDim / 16]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (kDim % 64 == 0) {
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(tile)[i * 32 + lane];
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) words[i] = reinterpret_cast<const std::uint32_t*>(tile)[lane * (kDim / 16) + i];
  }
}

/// What column c stands for: head c % group of row c / group.
struct TailColumn {
  int row;   ///< of the block
  int head;  ///< of the group, 0 for a column that is none
  bool live;
};

__device__ inline TailColumn tail_column(const StoreLayout& layout, const TailBlock& block, int column) {
  TailColumn out;
  out.row = column >= layout.group && block.rows == 2 ? 1 : 0;
  const int head = column - out.row * layout.group;
  out.live = head < layout.group && (block.live >> out.row & 1U) != 0;
  out.head = out.live ? head : 0;
  return out;
}

/// Starts copying the scores of tiles begin .. end-1 of the warp's, all columns of the sequence, to shared memory: tile by tile, maxima in
/// `tops` and levels in `levels`.
__device__ inline void bring_scores(const StoreLayout& layout, std::size_t score_list, int first_tile, int begin, int end, std::byte* tops,
                                    std::byte* levels) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int columns = layout.columns();
  const auto* const from_tops = reinterpret_cast<const std::byte*>(layout.tile_max_of(score_list) + first_tile * columns);
  const auto* const from_levels =
      reinterpret_cast<const std::byte*>(layout.score_levels_of(score_list) + static_cast<std::size_t>(first_tile * columns) * kTileChunks);
  const int tile_bytes = columns * kTileChunks * 2;
#pragma unroll 4
  for (int i = begin * tile_bytes + lane * 16; i < end * tile_bytes; i += 512) {
    copy_async(shared_address(levels) + static_cast<std::uint32_t>(i), from_levels + i, true);
  }
  for (int i = lane * 16; i < kWarpTiles * columns * 4; i += 512) {  // those out of range exist as well
    copy_async(shared_address(tops) + static_cast<std::uint32_t>(i), from_tops + i, true);
  }
  commit_copies();
}

/// The least of the 16 levels of a tile without what is excluded.
__device__ inline std::uint32_t least_level(const std::byte* levels, std::uint32_t excluded) {
  std::uint32_t least = 0xFFFFFFFFU;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 eight = reinterpret_cast<const uint4*>(levels)[half];
    const std::uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t bits = excluded >> (half * 4 + i / 2 * 2 + i % 2 * 8);  // see score_place()
      least = __vminu2(least, pairs[i] | (bits & 1U) * 0xFFFFU | (bits >> 1 & 1U) * 0xFFFF0000U);
    }
  }
  return min(least & 0xFFFFU, least >> 16);
}

/// Largest score of a column over the tiles begin .. end-1 without what is excluded, in units of log 2; by the four lanes of a column, each
/// of which looks at four tiles. `tops` and `levels` are the column's first; `excluded` are bits of its row.
__device__ inline float largest_score(const float* tops, const std::byte* levels, int columns, bool live, int begin, int end,
                                      const std::uint32_t* excluded) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  float largest = lowest();
#pragma unroll 1
  for (int i = max(begin, 4 * t); i < min(end, 4 * t + 4); ++i) {
    const std::uint32_t bits = excluded[i / 2] >> (i % 2 * 16) & 0xFFFFU;
    if (bits == 0xFFFFU) continue;
    float score = tops[i * columns];
    if (bits != 0) {
      score -= static_cast<float>(least_level(levels + i * columns * (kTileChunks * 2), bits)) * (1.0F / kScoreLevels);
    }
    largest = fmaxf(largest, score);
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  return live ? largest * kLog2e : lowest();
}

/// Weights of a lane's four chunks of a tile, relative to the column's reference: exp2(log2 of the largest - ...) of levels below it, 0
/// where excluded (bits 0, 1, 8, 9).
__device__ inline void weigh_chunks(uint2 levels, float shift, std::uint32_t excluded, float (&weight)[4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    // 2^23 + level, whose low bits are the level
    const std::uint32_t bits = __byte_perm(k < 2 ? levels.x : levels.y, 0x4B000000U, k % 2 == 0 ? 0x7610 : 0x7632);
    weight[k] = power_of_two(fmaf(__uint_as_float(bits) - 8388608.0F, -kLog2e / kScoreLevels, shift));
  }
  if ((excluded & 0x0303U) == 0) return;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if ((excluded >> (k % 2 + k / 2 * 8) & 1U) != 0) weight[k] = 0.0F;
  }
}

/// Attends to what the block's rows estimate of a split, as far as it is the warp's.
template <int kDim, int kGroups>
__device__ void attend_to_tail(const StoreLayout& layout, Layer layer, const TailBlock& block, WarpSums<kDim, kGroups>& sums) {
  using Shape = TailShape<kDim, kGroups>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int t = lane % 4;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  auto* const excluded = reinterpret_cast<std::uint32_t*>(block_memory());
  const int columns = layout.columns();
  std::byte* const own = block_memory() + Shape::kTiles + warp * Shape::warp_bytes(columns);
  auto* const scales = reinterpret_cast<float*>(own + Shape::kScales);
  std::byte* const all_tops = own + Shape::kScores;
  std::byte* const all_levels = all_tops + columns * Shape::kTopBytes;
  const int first = block.first + warp * kWarpChunks;
  // the warp's tiles in range
  const int begin = max(0, (block.begin - first) / kTileChunks);
  const int end = min(kWarpTiles, (block.end - first + kTileChunks - 1) / kTileChunks);
  const ValueScales value_scales = ValueScales::load(layout, block, first);
  float bias[kGroups];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const int head = block.kv_head * layout.group + tail_column(layout, block, n * 8 + lane / 4).head;
    bias[n] =
        layout.bias[(static_cast<std::size_t>(block.slot) * static_cast<std::size_t>(layout.layers) + static_cast<std::size_t>(layer)) *
                        static_cast<std::size_t>(layout.heads) +
                    static_cast<std::size_t>(head)];
  }
  using Ring = WarpRing<Shape::kPieceBytes, Shape::kRing>;
  Ring ring(own, reinterpret_cast<std::uint64_t*>(block_memory() + Shape::kExcludedBytes) + warp * Shape::kRing);
  const std::byte* const tiles =
      reinterpret_cast<const std::byte*>(layout.value_tiles) +
      (block.list * static_cast<std::size_t>(layout.max_chunks / kTileChunks) + static_cast<std::size_t>(first / kTileChunks)) *
          Shape::kTileBytes;
  const auto start = [&](int stage, int tile) {
    ring.start(stage, tiles + tile * Shape::kTileBytes, min(Shape::kPieceTiles, end - tile) * Shape::kTileBytes);
  };
  const auto start_first = [&](int from, int to) {
#pragma unroll 1
    for (int stage = from; stage < to; ++stage) start(stage, begin + stage * Shape::kPieceTiles);
  };
  constexpr int kFirst = Shape::kRing / 2;
  mark_excluded(
      layout, block, excluded,
      [&] {
        if (begin < end) {
          bring_scores(layout, layout.score_list(layer, block.place, block.kv_head), first / kTileChunks, begin, end, all_tops, all_levels);
        }
        start_first(0, kFirst);
      },
      [&] { start_first(kFirst, Shape::kRing); });
  const float unit = value_scales.stage(scales);
  wait_for_copies<Ring::kCommits>();
  __syncwarp();

  const std::uint32_t* bits_of[kGroups];  // of the warp's chunks, 32 a word
  const float* tops_of[kGroups];
  const std::byte* levels_of[kGroups];
  bool live[kGroups];
  float reference[kGroups];
  float largest[kGroups];
  float sum[kGroups];
  float shift_of[kGroups];        // how many tokens a chunk stands for, calibrated
  float offset[kGroups][4] = {};  // what the bias of 8 in the nibbles adds to every product
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const TailColumn column = tail_column(layout, block, n * 8 + lane / 4);
    const int stored = (block.first_number + column.row) * layout.group + column.head;
    tops_of[n] = reinterpret_cast<const float*>(all_tops) + stored;
    levels_of[n] = all_levels + stored * (kTileChunks * 2);
    shift_of[n] = (logf(static_cast<float>(layout.chunk)) + layout.bias_scale * bias[n]) * kLog2e;
    bits_of[n] = excluded + column.row * (kSplitChunks / 32) + warp * (kWarpChunks / 32);
    live[n] = column.live;
    largest[n] = largest_score(tops_of[n], levels_of[n], columns, column.live, begin, end, bits_of[n]);
    reference[n] = largest[n] == lowest() ? 0.0F : largest[n];
    sum[n] = 0.0F;
  }
  sums.clear();
  int stage = 0;
  std::uint32_t turn = 0;
  const int tile_levels = columns * (kTileChunks * 2);  // bytes
  const auto add_tile = [&](int i, const std::uint32_t(&words)[kDim / 16]) {
    const float2 low_scale = *reinterpret_cast<const float2*>(scales + i * kTileChunks + 2 * t);
    const float2 high_scale = *reinterpret_cast<const float2*>(scales + i * kTileChunks + 2 * t + 8);
    std::uint32_t weights[kGroups][2];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float shift = live[n] ? tops_of[n][i * columns] * kLog2e - reference[n] : lowest();
      float weight[4];
      weigh_chunks(*reinterpret_cast<const uint2*>(levels_of[n] + i * tile_levels + t * 8), shift,
                   bits_of[n][i / 2] >> (i % 2 * 16 + 2 * t), weight);
      sum[n] += (weight[0] + weight[1]) + (weight[2] + weight[3]);
      weights[n][0] = pack_f16(weight[0] * low_scale.x, weight[1] * low_scale.y);
      weights[n][1] = pack_f16(weight[2] * high_scale.x, weight[3] * high_scale.y);
      constexpr std::uint32_t kEights[4] = {0x00080008U, 0x00080008U, 0x00800080U, 0x00800080U};
      multiply_add_f16(offset[n], kEights, weights[n][0], weights[n][1]);
    }
#pragma unroll
    for (int m = 0; m < kDim / 16; ++m) {
      // nibbles as f16 subnormals: (level + 8) * 2^-24, or 2^-20 where they stay four bits up
      const std::uint32_t upper = words[m] >> 8;
      const std::uint32_t of_rows[4] = {words[m] & 0x000F000FU, upper & 0x000F000FU, words[m] & 0x00F000F0U, upper & 0x00F000F0U};
#pragma unroll
      for (int n = 0; n < kGroups; ++n) multiply_add_f16(sums.values[m][n], of_rows, weights[n][0], weights[n][1]);
    }
  };
  static_assert(Shape::kPieceTiles == 2);
#pragma unroll 1
  for (int i = begin; i < end; i += 2) {
    const std::byte* const piece = ring.wait(stage, turn);
    std::uint32_t words[kDim / 16];
    load_levels<kDim>(piece, words);
    add_tile(i, words);
    if (i + 1 == end) break;
    load_levels<kDim>(piece + Shape::kTileBytes, words);
    __syncwarp();  // all have read before the next one is copied there
    start(stage, i + 2 * Shape::kRing);
    if (++stage == Shape::kRing) {
      stage = 0;
      ++turn;
    }
    add_tile(i + 1, words);
  }
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const float shifted = largest[n] == lowest() ? lowest() : largest[n] + shift_of[n];
#pragma unroll
    for (int step = 1; step < 4; step *= 2) sum[n] += __shfl_xor_sync(kAllLanes, sum[n], step);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = lane % 4 * 8 + i * 4;  // a lane whose g is column 2t + i
      sums.largest[n][i] = __shfl_sync(kAllLanes, shifted, from);
      sums.sum[n][i] = __shfl_sync(kAllLanes, sum[n], from);
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) {
        sums.values[m][n][i] = (sums.values[m][n][i] - offset[n][i]) * unit;
        sums.values[m][n][i + 2] = (sums.values[m][n][i + 2] - offset[n][i]) * unit;
      }
    }
  }
}

}  // namespace dualdecoder::cuda
