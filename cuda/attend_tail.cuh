// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/attend_tokens.cuh"

/// The tail estimate: the warps of a block each sum up 16 tiles of 16 chunks, whose values have kValueGroup times fewer means: the weights
/// of the chunks of a value group are added before they meet its mean. Value levels are the 16 rows of an instruction, columns its 8.
namespace dualdecoder::cuda {

inline constexpr int kWarpTiles = kSplitChunks / kTileChunks / kAttendWarps;
inline constexpr int kWarpChunks = kWarpTiles * kTileChunks;

/// How a block of the tail cuts its shared memory.
template <int kDim, int kGroups, int kValueGroup>
struct TailShape {
  static constexpr int kColumns = kGroups * 8;
  static constexpr int kTileBytes = kTileChunks * kDim / 2;             // of values
  static constexpr int kTurnTiles = kValueGroup > 2 ? kValueGroup : 2;  // of scores, that a turn of a warp weighs
  static constexpr int kTurnBytes = kTurnTiles / kValueGroup * kTileBytes;
  static constexpr int kRingTiles = kDim <= 128 && kGroups == 1 ? 4 : 8;
  static constexpr int kRing = kRingTiles * kTileBytes / kTurnBytes;  // turns whose values are on their way
  // a warp's part: the ring, value scales, then tile maxima and score levels of all columns
  static constexpr int kScales = kRing * kTurnBytes;
  static constexpr int kScores = kScales + kWarpChunks / kValueGroup * 4;
  static constexpr int kTopBytes = kWarpTiles * 4;  // of a column
  static constexpr int kLevelBytes = kWarpChunks * 2;
  static constexpr int kExcludedBytes = 2 * kSplitChunks / 8;  // bits of two rows
  static constexpr int kTableBytes = kExcludedBytes;
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
  const int most = max(block.chosen_count[0], block.chosen_count[1]);
  const bool one_batch = most <= kBatch * share;
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
  static_assert(2 * kWords <= kAttendThreads);
  if (const int i = static_cast<int>(threadIdx.x); i < block.rows * kWords) {
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

/// Largest products of a value group's scale and weight in f16: 2^15 for the places 2t and 2t + 1 of a tile, whose levels arrive as level *
/// 2^-24, and 2^11 for 2t + 8 and 2t + 9, whose levels arrive as level * 2^-20.
inline constexpr float kWeightRange = 32768.0F;

/// Value scales of a lane's share of the warp's value groups, in the order of value_k().
template <int kValueGroup>
struct ValueScales {
  static constexpr int kEach = kWarpChunks / kValueGroup / 32;
  static constexpr float kRange = kWeightRange / kValueGroup;  // a group weighs as much as so many chunks
  float scale[kEach];
  static_assert(kEach == 8 || kEach == 4 || kEach == 2);

  __device__ static ValueScales load(const StoreLayout& layout, const TailBlock& block, int first) {
    const int all = layout.value_tile_count() * kTileChunks;
    const int own = min(first / kValueGroup + static_cast<int>(threadIdx.x % 32U) * kEach, all - kEach);
    const float* const from = layout.value_scales + block.list * static_cast<std::size_t>(all) + own;
    ValueScales out;
    if constexpr (kEach == 2) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      out.scale[0] = two.x;
      out.scale[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < kEach; i += 4) {
        const float4 four = reinterpret_cast<const float4*>(from)[i / 4];
        out.scale[i] = four.x;
        out.scale[i + 1] = four.y;
        out.scale[i + 2] = four.z;
        out.scale[i + 3] = four.w;
      }
    }
    return out;
  }
  /// Groups without a chunk in range: nobody has written their scales. Called when they are wanted, and not before: it waits for them.
  __device__ void clear_outside(const TailBlock& block, int first) {
    if (first >= block.begin && first + kWarpChunks <= block.end) return;
    const int own = static_cast<int>(threadIdx.x % 32U) * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int in_warp = (own + i) / kTileChunks * kTileChunks + value_group_at(kValueGroup, (own + i) % kTileChunks);
      const int chunk = first + in_warp * kValueGroup;
      if (chunk + kValueGroup <= block.begin || chunk >= block.end) scale[i] = 0.0F;
    }
  }
  /// Times kRange over the largest to `scales` in shared memory, a sixteenth of it for the groups whose levels arrive sixteen times as
  /// large. Returns what the products are to be multiplied by.
  __device__ float stage(float* scales) const {
    const int lane = static_cast<int>(threadIdx.x % 32U);
    float largest = 0.0F;
#pragma unroll
    for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, scale[i]);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    float factor = largest > 1e-30F ? __fdividef(kRange, largest) : 0.0F;  // smaller values are zero to any reader
    if (lane * kEach % kTileChunks >= 8) factor *= 0.0625F;
    float* const to = scales + lane * kEach;
    if constexpr (kEach == 2) {
      *reinterpret_cast<float2*>(to) = {scale[0] * factor, scale[1] * factor};
    } else {
#pragma unroll
      for (int i = 0; i < kEach; i += 4) {
        reinterpret_cast<float4*>(to)[i / 4] = {scale[i] * factor, scale[i + 1] * factor, scale[i + 2] * factor, scale[i + 3] * factor};
      }
    }
    __syncwarp();
    return largest * (16777216.0F / kRange);
  }
};

/// A lane's words of a tile.
template <int kDim>
__device__ void load_levels(const std::byte* tile, std::uint32_t (&words)[kDim / 16]) {
  const int lane = static_cast<int>(threadIdx.x % 32U);
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
  const int lane = static_cast<int>(threadIdx.x % 32U);
  const int columns = layout.columns();
  const auto* const from_tops = reinterpret_cast<const std::byte*>(layout.tile_max_of(score_list) + first_tile * columns);
  const auto* const from_levels =
      reinterpret_cast<const std::byte*>(layout.score_levels_of(score_list) + static_cast<std::size_t>(first_tile * columns) * kTileChunks);
  const int tile_bytes = columns * kTileChunks * 2;
#pragma unroll 1
  for (int i = begin * tile_bytes + lane * 16; i < end * tile_bytes; i += 512) {
    copy_async(shared_address(levels) + static_cast<std::uint32_t>(i), from_levels + i, true);
  }
#pragma unroll 1
  for (int i = lane * 16; i < kWarpTiles * columns * 4; i += 512) {  // those out of range exist as well
    copy_async(shared_address(tops) + static_cast<std::uint32_t>(i), from_tops + i, true);
  }
  commit_copies();
}

/// The least of the 16 levels of a tile without what is excluded.
__device__ inline std::uint32_t least_level(const std::byte* levels, std::uint32_t excluded) {
  std::uint32_t least = 0xFFFFFFFFU;
  const std::uint32_t pairs_excluded = (excluded & 0x5555U) | (excluded & 0xAAAAU) << 15;  // chunks 2k and 2k + 1 at bits 2k and 2k + 16
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 eight = reinterpret_cast<const uint4*>(levels)[half];
    const std::uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = half * 4 + i / 2 * 2 + i % 2 * 8;  // see score_place()
      least = __vminu2(least, pairs[i] | (pairs_excluded >> first & 0x00010001U) * 0xFFFFU);
    }
  }
  return min(least & 0xFFFFU, least >> 16);
}

/// 2^11, at which floats are 1 / kScoreLevels apart.
inline constexpr float kLevelBase = 2048.0F;
static_assert(kScoreLevels == 4096.0F);

/// Looks at a column's tiles begin .. end-1 with the four lanes of the column. Returns its largest score without what is excluded, in units
/// of log 2, and turns the tiles' maxima into what weigh_chunks() takes. `tops` and `levels` are the column's first; `excluded` are
/// bits of its row.
__device__ inline float prepare_column(float* tops, const std::byte* levels, int columns, bool live, int begin, int end,
                                       const std::uint32_t* excluded) {
  const int t = static_cast<int>(threadIdx.x % 4U);
  const int from = max(begin, 4 * t);
  const int to = live ? min(end, 4 * t + 4) : from;  // a column that is none would look at what another's lanes change
  float largest = lowest();
#pragma unroll 1
  for (int i = from; i < to; ++i) {
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
  largest *= kLog2e;
  const float shift = kLevelBase * kLog2e - (largest == lowest() ? 0.0F : largest);
#pragma unroll 1
  for (int i = from; i < to; ++i) tops[i * columns] = fmaf(tops[i * columns], kLog2e, shift);
  return largest;
}

/// Weights of a lane's four chunks of a tile, relative to the largest of the column: exp2(shift - ...) of their levels, 0 where excluded
/// (bits 0, 1, 8, 9). `shift` is rounded to 2^-12, which changes a weight by 8.5e-5 of itself, less than the levels' steps do.
__device__ inline void weigh_chunks(uint2 levels, float shift, std::uint32_t excluded, float (&weight)[4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    // kLevelBase + level / kScoreLevels, whose low bits are the level
    const std::uint32_t bits = __byte_perm(k < 2 ? levels.x : levels.y, 0x45000000U, k % 2 == 0 ? 0x7610 : 0x7632);
    weight[k] = power_of_two(fmaf(__uint_as_float(bits), -kLog2e, shift));
  }
  if ((excluded & 0x0303U) == 0) return;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if ((excluded >> (k % 2 + k / 2 * 8) & 1U) != 0) weight[k] = 0.0F;
  }
}

/// Adds up the weights of a lane's chunks by value groups: `chunk` are those of tile i of the kValueGroup tiles of scores that a tile of
/// values stands for, `group` what the lane has at the end of them, see value_k().
template <int kValueGroup>
__device__ inline void add_to_groups(int i, const float (&chunk)[4], float (&group)[4]) {
  if constexpr (kValueGroup == 1) {
#pragma unroll
    for (int k = 0; k < 4; ++k) group[k] = chunk[k];
  } else {
    const float low = chunk[0] + chunk[1];
    const float high = chunk[2] + chunk[3];
    if constexpr (kValueGroup == 2) {
      group[2 * i] = low;
      group[2 * i + 1] = high;
    } else {
      const bool odd = threadIdx.x % 2U != 0;
      group[i] = (odd ? high : low) + __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
    }
  }
}

/// Attends to what the block's rows estimate of a split, as far as it is the warp's.
template <int kDim, int kGroups, int kValueGroup>
__device__ void attend_to_tail(const StoreLayout& layout, Layer layer, const TailBlock& block, WarpSums<kDim, kGroups>& sums) {
  using Shape = TailShape<kDim, kGroups, kValueGroup>;
  const int lane = static_cast<int>(threadIdx.x % 32U);
  const int t = lane % 4;
  const int warp = static_cast<int>(threadIdx.x / 32U);
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
  ValueScales value_scales = ValueScales<kValueGroup>::load(layout, block, first);
  float bias[kGroups];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const int head = block.kv_head * layout.group + tail_column(layout, block, n * 8 + lane / 4).head;
    bias[n] =
        layout.bias[(static_cast<std::size_t>(block.slot) * static_cast<std::size_t>(layout.layers) + static_cast<std::size_t>(layer)) *
                        static_cast<std::size_t>(layout.heads) +
                    static_cast<std::size_t>(head)];
  }
  const std::byte* const tiles =
      reinterpret_cast<const std::byte*>(layout.value_tiles) +
      (block.list * static_cast<std::size_t>(layout.value_tile_count()) + static_cast<std::size_t>(first / (kTileChunks * kValueGroup))) *
          Shape::kTileBytes;
  const int first_turn = begin / Shape::kTurnTiles * Shape::kTurnTiles;
  const std::byte* next = tiles + first_turn / kValueGroup * Shape::kTileBytes + lane * 16;
  int left = ((end + kValueGroup - 1) / kValueGroup - first_turn / kValueGroup) * Shape::kTileBytes - lane * 16;
  // the next turn's, as far as there is one; where tiles are whole words of lanes, these copy what they read
  const auto start = [&](int stage) {
    const std::uint32_t to = shared_address(own + stage * Shape::kTurnBytes + lane * 16);
#pragma unroll
    for (int i = 0; i < Shape::kTurnBytes; i += 512) {
      if (i < left && (i + 512 <= Shape::kTurnBytes || lane * 16 + i < Shape::kTurnBytes)) {
        copy_async(to + static_cast<std::uint32_t>(i), next + i, true);
      }
    }
    commit_copies();
    next += Shape::kTurnBytes;
    left -= Shape::kTurnBytes;
  };
  const auto start_first = [&](int from, int to) {
#pragma unroll 1
    for (int stage = from; stage < to; ++stage) start(stage);
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
  value_scales.clear_outside(block, first);
  const float unit = value_scales.stage(scales);
  wait_for_copies<Shape::kRing>();
  __syncwarp();

  constexpr int kBitWords = Shape::kTurnTiles / 2;  // of a turn
  const std::uint32_t* bits_of[kGroups];            // of the warp's chunks, 32 a word
  const float* shifts_of[kGroups];
  const std::byte* levels_of[kGroups];
  float largest[kGroups];
  float sum[kGroups];
  float offset[kGroups][4] = {};  // what the bias of 8 in the nibbles adds to every product
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const TailColumn column = tail_column(layout, block, n * 8 + lane / 4);
    const int stored = (block.first_number + column.row) * layout.group + column.head;
    float* const tops = reinterpret_cast<float*>(all_tops) + stored;
    const std::byte* const levels = all_levels + stored * (kTileChunks * 2);
    bits_of[n] = excluded + column.row * (kSplitChunks / 32) + warp * (kWarpChunks / 32);
    largest[n] = prepare_column(tops, levels, columns, column.live, begin, end, bits_of[n]);
    sum[n] = 0.0F;
    shifts_of[n] = tops + first_turn * columns;
    levels_of[n] = levels + first_turn * columns * (kTileChunks * 2) + t * 8;
  }
  __syncwarp();  // columns that are none look at others' scores, and nobody at what becomes of theirs
  sums.clear();
  const float* scales_of = scales + first_turn / kValueGroup * kTileChunks + 2 * t;
  // tile i of values of a turn
  const auto add_tile = [&](int i, const std::uint32_t(&bits)[kGroups][kBitWords], const std::uint32_t(&words)[kDim / 16]) {
    const float2 low_scale = *reinterpret_cast<const float2*>(scales_of + i * kTileChunks);
    const float2 high_scale = *reinterpret_cast<const float2*>(scales_of + i * kTileChunks + 8);
    std::uint32_t weights[kGroups][2];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      float weight[4];
#pragma unroll
      for (int j = 0; j < kValueGroup; ++j) {
        const int tile = i * kValueGroup + j;  // of scores
        float chunk[4];
        weigh_chunks(*reinterpret_cast<const uint2*>(levels_of[n] + tile * columns * (kTileChunks * 2)), shifts_of[n][tile * columns],
                     bits[n][tile / 2] >> (tile % 2 * 16), chunk);
        add_to_groups<kValueGroup>(j, chunk, weight);
      }
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
  int stage = 0;
#pragma unroll 1
  for (int turn = first_turn; turn < end; turn += Shape::kTurnTiles) {
    wait_for_copies<Shape::kRing - 1>();
    if constexpr (kDim % 64 != 0) __syncwarp();
    const std::byte* const piece = own + stage * Shape::kTurnBytes;
    std::uint32_t bits[kGroups][kBitWords];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int w = 0; w < kBitWords; ++w) bits[n][w] = bits_of[n][turn / 2 + w] >> (2 * t);
    }
    std::uint32_t words[kDim / 16];
    load_levels<kDim>(piece, words);
    if constexpr (kValueGroup == 1) {
      add_tile(0, bits, words);
      if (turn + 1 == end) break;
      load_levels<kDim>(piece + Shape::kTileBytes, words);
    }
    if constexpr (kDim % 64 != 0) __syncwarp();  // all have read before the next turn's are copied there
    start(stage);
    stage = stage == Shape::kRing - 1 ? 0 : stage + 1;
    add_tile(kValueGroup == 1 ? 1 : 0, bits, words);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      shifts_of[n] += Shape::kTurnTiles * columns;
      levels_of[n] += Shape::kTurnTiles * columns * (kTileChunks * 2);
    }
    scales_of += Shape::kTurnTiles / kValueGroup * kTileChunks;
  }
  wait_for_copies<0>();
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    // a chunk stands for so many tokens, calibrated
    const float tokens = static_cast<float>(layout.chunk_shift()) + layout.bias_scale * bias[n] * kLog2e;
    const float shifted = largest[n] == lowest() ? lowest() : largest[n] + tokens;
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
