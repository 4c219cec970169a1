// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/fragments.cuh"
#include "cuda/store_layout.hpp"
#include "cuda/tensor_core.cuh"

/// Attention of a few queries ("columns": the query heads of a group, of one row or of two) to many tokens, as the stores' kernels share
/// it. Products are transposed, tokens and dims being the 16 rows of an instruction and queries its 8 columns: decoding has few queries,
/// so half as many instructions and registers hold nothing. In what follows lane l of a warp has g = l / 4 and t = l % 4.
///
/// Every warp of a block is a pipeline of its own over every fourth tile of 16 tokens, so nothing but the end of the block waits for
/// another warp.
namespace dualdecoder::cuda {

inline constexpr int kAttendWarps = 4;
inline constexpr int kAttendThreads = kAttendWarps * 32;
inline constexpr int kTileTokens = 16;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;
inline constexpr float kLog2e = 1.4426950408889634F;

__device__ inline float lowest() { return -INFINITY; }

/// How a block's shared memory is cut. kGroups: of 8 columns. kHalves: halves of a tile, its keys or its values, that a warp has room for.
template <int kDim, int kGroups, int kHalves>
struct AttendShape {
  static constexpr int kColumns = kGroups * 8;
  /// Bytes between rows: an odd number of 16-byte pieces, so that the eight rows of a matrix lie in different banks.
  static constexpr int kStride = kDim * 2 + 16;
  static constexpr int kQueryBytes = kColumns * kStride;
  static constexpr int kHalfBytes = kTileTokens * kStride;
  static constexpr int kWarpBytes = kHalves * kHalfBytes;
  static constexpr int kTableBytes = 1088;                           // what the kind of block wants to look up
  static constexpr int kSumBytes = 2 * kAttendWarps * kColumns * 4;  // largest scores and sums of the warps
  static constexpr int kQueries = kTableBytes + kSumBytes;           // offsets
  static constexpr int kTiles = kQueries + 2 * kQueryBytes;          // queries in two parts
  static constexpr int kBytes = kTiles + kAttendWarps * kWarpBytes;
  static constexpr int kJoinStride = kDim + 4;  // floats between columns of the warps' results, which lie where the tiles were
  static_assert(kAttendWarps * kColumns * kJoinStride * 4 <= kAttendWarps * kWarpBytes);
  /// Queries stay in registers where these are few; with little room for tiles blocks are many, and registers scarce.
  static constexpr bool kQueriesInRegisters = kHalves > 3 && kDim / 16 * kGroups <= 8;
};

/// A warp's part of softmax(scores) * values: row m * 16 + g (+ 8) is a dim, column n * 8 + 2 * t (+ 1) a query. Scores are in units of
/// log 2.
template <int kDim, int kGroups>
struct WarpSums {
  float values[kDim / 16][kGroups][4];
  float largest[kGroups][2];
  float sum[kGroups][2];

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[m][n][i] = 0.0F;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        largest[n][i] = lowest();
        sum[n][i] = 0.0F;
      }
    }
  }
};

__device__ inline float2 load_pair(const RowsIn& rows, std::size_t element) {
  if (rows.bf16) return unpack_bf16(*reinterpret_cast<const std::uint32_t*>(static_cast<const std::uint16_t*>(rows.data) + element));
  return *reinterpret_cast<const float2*>(static_cast<const float*>(rows.data) + element);
}

/// One token's key and value as bf16 to where the store keeps them; called by a whole block.
__device__ inline void write_token(const RowsIn& keys, const RowsIn& values, std::size_t source, int dim, std::byte* key,
                                   std::byte* value) {
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kAttendThreads) {  // dim / 2 pairs of each
    const bool is_key = i < dim / 2;
    const int pair = is_key ? i : i - dim / 2;
    const float2 from = load_pair(is_key ? keys : values, source + static_cast<std::size_t>(2 * pair));
    reinterpret_cast<std::uint32_t*>(is_key ? key : value)[pair] = pack_bf16(from.x, from.y);
  }
}

/// Brings queries to shared memory, f32 ones as the sum of two bf16 to 2^-17. `source(column)` is the first element of a column's query, or
/// negative for a column of zeros. Before they are used this thread's copies arrive and the block synchronises.
template <class Shape, int kDim, class Source>
__device__ void stage_queries(const RowsIn& queries, Source source) {
  std::byte* const memory = block_memory() + Shape::kQueries;
  if (queries.bf16) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kColumns * (kDim / 8); i += kAttendThreads) {
      const int column = i / (kDim / 8);
      const int piece = i % (kDim / 8);
      const std::ptrdiff_t first = source(column);
      const auto* const from = static_cast<const std::uint16_t*>(queries.data) + max(first, std::ptrdiff_t{0}) + piece * 8;
      copy_async(shared_address(memory + column * Shape::kStride + piece * 16), from, first >= 0);
    }
    commit_copies();
    return;
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kColumns * (kDim / 2); i += kAttendThreads) {
    const int column = i / (kDim / 2);
    const int pair = i % (kDim / 2);
    const std::ptrdiff_t first = source(column);
    const float2 query = first < 0 ? float2{0.0F, 0.0F} : load_pair(queries, static_cast<std::size_t>(first + 2 * pair));
    const std::uint32_t high = pack_bf16(query.x, query.y);
    const float2 taken = unpack_bf16(high);
    auto* const to = reinterpret_cast<std::uint32_t*>(memory + column * Shape::kStride) + pair;
    *to = high;
    to[Shape::kQueryBytes / 4] = pack_bf16(query.x - taken.x, query.y - taken.y);
  }
}

/// Query fragments of 8 columns, each of 32 dims: two words for 16 of them, then two for the others.
template <class Shape, int kDim, int kGroups>
struct Queries {
  static constexpr int kPairs = (kDim / 16 + 1) / 2;
  static constexpr int kKept = Shape::kQueriesInRegisters ? kPairs : 1;
  std::uint32_t kept[kKept][kGroups][4];
  bool whole;  ///< their lower parts are zero

  /// `part`: 0 or, of queries that are not whole, 1.
  __device__ static void load(std::uint32_t (&fragment)[4], int pair, int n, int part) {
    const int lane = static_cast<int>(threadIdx.x % 32U);
    const int matrix = kDim / 16 % 2 != 0 && pair == kPairs - 1 ? lane / 8 % 2 : lane / 8;  // the last pair may be half of one
    const std::byte* const row =
        block_memory() + Shape::kQueries + part * Shape::kQueryBytes + (n * 8 + lane % 8) * Shape::kStride + pair * 64 + matrix * 16;
    load_matrices(fragment, shared_address(row));
  }
  __device__ void keep() {
    if constexpr (Shape::kQueriesInRegisters) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int n = 0; n < kGroups; ++n) load(kept[pair][n], pair, n, 0);
      }
    }
  }
};

/// Adds products of the keys whose row this lane names, and one part of the queries, to one of two sums by turns, so that they do not wait
/// for one another.
template <class Shape, int kDim, int kGroups, bool kFromRegisters>
__device__ void multiply_keys(std::uint32_t key_row, const Queries<Shape, kDim, kGroups>& queries, int part, float (&sums)[2][kGroups][4]) {
  std::uint32_t loaded[kGroups][4];
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    std::uint32_t keys[4];
    load_matrices(keys, key_row + static_cast<std::uint32_t>(k * 32));
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      if constexpr (!kFromRegisters) {
        if (k % 2 == 0) queries.load(loaded[n], k / 2, n, part);
      }
      const std::uint32_t* const query = kFromRegisters ? queries.kept[k / 2 % queries.kKept][n] : loaded[n];
      multiply_add(sums[k % 2][n], keys, query[k % 2 * 2], query[k % 2 * 2 + 1]);
    }
  }
}

/// Which tokens of a tile a lane's columns do not see: bit n * 4 + i is of the score [n][i] of an instruction's sums, where the columns see
/// those before `limit`.
template <int kGroups>
struct HiddenBehind {
  int limit[kGroups][2];

  __device__ unsigned operator()(int tile) const {
    const int token = tile * kTileTokens + static_cast<int>(threadIdx.x % 32U / 4U);
    unsigned hidden = 0;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) hidden |= static_cast<unsigned>(token + i / 2 * 8 >= limit[n][i % 2]) << (n * 4 + i);
    }
    return hidden;
  }
};

/// Scores the keys of 16 tokens at `tile` in shared memory, makes room for them in `sums` and leaves their weights as add_values() takes
/// them. `hidden` as of HiddenBehind.
template <class Shape, int kDim, int kGroups>
__device__ void weigh_tile(std::uint32_t tile, const Queries<Shape, kDim, kGroups>& queries, float scale, unsigned hidden,
                           WarpSums<kDim, kGroups>& sums, std::uint32_t (&weights)[kGroups][2]) {
  const int lane = static_cast<int>(threadIdx.x % 32U);
  float products[2][kGroups][4] = {};
  const std::uint32_t key_row = tile + static_cast<std::uint32_t>(lane % 16 * Shape::kStride + lane / 16 * 16);
  multiply_keys<Shape, kDim, kGroups, Shape::kQueriesInRegisters>(key_row, queries, 0, products);
  if (!queries.whole) multiply_keys<Shape, kDim, kGroups, false>(key_row, queries, 1, products);
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    float factor[2];
    float weight[4];
    float score[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] = (products[0][n][i] + products[1][n][i]) * scale;
    if (hidden != 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((hidden >> (n * 4 + i) & 1U) != 0) score[i] = lowest();
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = fmaxf(score[i], score[i + 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
      largest = fmaxf(largest, sums.largest[n][i]);
      const float reference = largest == lowest() ? 0.0F : largest;
      factor[i] = power_of_two(sums.largest[n][i] - reference);
      sums.largest[n][i] = largest;
      weight[i] = power_of_two(score[i] - reference);
      weight[i + 2] = power_of_two(score[i + 2] - reference);
    }
    const std::uint32_t first = pack_bf16(weight[0], weight[1]);   // tokens g
    const std::uint32_t second = pack_bf16(weight[2], weight[3]);  // tokens g + 8
    // the sum is of the weights as they are used, so that rounding them does not shift the mean
    const float2 first_used = unpack_bf16(first);
    const float2 second_used = unpack_bf16(second);
    sums.sum[n][0] = sums.sum[n][0] * factor[0] + (first_used.x + second_used.x);
    sums.sum[n][1] = sums.sum[n][1] * factor[1] + (first_used.y + second_used.y);
    weights[n][0] = transposed(first);
    weights[n][1] = transposed(second);
#pragma unroll
    for (int m = 0; m < kDim / 16; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.values[m][n][i] *= factor[i % 2];
    }
  }
}

/// Adds the values of 16 tokens at `tile` in shared memory.
template <class Shape, int kDim, int kGroups>
__device__ void add_values(std::uint32_t tile, const std::uint32_t (&weights)[kGroups][2], WarpSums<kDim, kGroups>& sums) {
  const int lane = static_cast<int>(threadIdx.x % 32U);
  const std::uint32_t value_row = tile + static_cast<std::uint32_t>((lane % 8 + lane / 16 * 8) * Shape::kStride + lane / 8 % 2 * 16);
#pragma unroll
  for (int m = 0; m < kDim / 16; ++m) {
    std::uint32_t values[4];
    load_matrices_transposed(values, value_row + static_cast<std::uint32_t>(m * 32));
#pragma unroll
    for (int n = 0; n < kGroups; ++n) multiply_add(sums.values[m][n], values, weights[n][0], weights[n][1]);
  }
}

/// Attends to tokens 0 .. count-1 of a block; `hidden(tile)` says which of a tile the lane's columns do not see, as HiddenBehind does.
/// `rows` says where they lie: key(i) points to token i's key in global memory, value_offset bytes before its value; from a
/// multiple of Rows::kRun on so many keys are one piece where in_runs(). Queries have been staged; `whole` ones were bf16.
template <class Shape, int kDim, int kGroups, int kHalves, class Rows, class Hidden>
__device__ void attend_to_tokens(const Rows& rows, int count, const Hidden& hidden, bool whole, WarpSums<kDim, kGroups>& sums) {
  constexpr unsigned kPieces = kDim / 8;
  constexpr int kAhead = kHalves - 1;  // halves that are on their way while the warp works on one
  const float scale = kLog2e * rsqrtf(static_cast<float>(kDim));
  const int warp = static_cast<int>(threadIdx.x / 32U);
  const std::uint32_t memory = shared_address(block_memory() + Shape::kTiles + warp * Shape::kWarpBytes);
  const int tiles = (count + kTileTokens - 1) / kTileTokens;
  const unsigned lane = threadIdx.x % 32U;
  constexpr bool kWholeRows = 32 % kPieces == 0 && Rows::kRun * static_cast<int>(kPieces) >= 32;  // a copy of all lanes is some of them
  const auto bring_runs = [&](int tile, std::uint32_t to, std::uint32_t offset) {
    constexpr int kRowsEach = kWholeRows ? static_cast<int>(32 / kPieces) : 1;
    const std::uint32_t own = to + lane / kPieces * static_cast<unsigned>(Shape::kStride) + lane % kPieces * 16U;
#pragma unroll
    for (int first = 0; first < kTileTokens; first += Rows::kRun) {
      const std::byte* const from = rows.key(tile * kTileTokens + first) + offset + lane * 16U;
#pragma unroll
      for (int row = 0; row < Rows::kRun; row += kRowsEach) {
        copy_async(own + static_cast<std::uint32_t>((first + row) * Shape::kStride), from + row * kDim * 2, true);
      }
    }
  };
  const auto bring_rows = [&](int tile, std::uint32_t to, std::uint32_t offset) {
#pragma unroll
    for (int i = 0; i < kTileTokens * kDim / 256; ++i) {
      const unsigned index = static_cast<unsigned>(i) * 32U + lane;
      const unsigned row = index / kPieces;
      const std::byte* const from = rows.key(tile * kTileTokens + static_cast<int>(row)) + offset + index % kPieces * 16U;
      copy_async(to + row * static_cast<unsigned>(Shape::kStride) + index % kPieces * 16U, from, true);
    }
  };
  const auto bring_whole = [&](int tile, std::uint32_t to, std::uint32_t offset) {
    if (kWholeRows && rows.in_runs()) {
      bring_runs(tile, to, offset);
    } else {
      bring_rows(tile, to, offset);
    }
  };
  // with zeros behind the end: a weight of zero must not meet a NaN
  const auto bring_ragged = [&](int tile, std::uint32_t to, std::uint32_t offset) {
#pragma unroll 1
    for (unsigned index = lane; index < kTileTokens * kPieces; index += 32U) {
      const unsigned row = index / kPieces;
      const int token = tile * kTileTokens + static_cast<int>(row);
      const std::byte* const from = rows.key(min(token, count - 1)) + offset + index % kPieces * 16U;
      copy_async(to + row * static_cast<unsigned>(Shape::kStride) + index % kPieces * 16U, from, token < count);
    }
  };
  // half h of a warp: keys of its tile h / 2 where h is even, else values
  const auto bring = [&](int tile, bool values, int place) {
    const std::uint32_t to = memory + static_cast<std::uint32_t>(place * Shape::kHalfBytes);
    const std::uint32_t offset = values ? rows.value_offset : 0;
    if ((tile + 1) * kTileTokens <= count) {
      bring_whole(tile, to, offset);
    } else if (tile < tiles) {
      bring_ragged(tile, to, offset);
    }
    commit_copies();
  };
  Queries<Shape, kDim, kGroups> queries;
  sums.clear();
#pragma unroll(Rows::kRun == kTileTokens ? kAhead : 1)
  for (int h = 0; h < kAhead; ++h) bring(warp + h / 2 * kAttendWarps, h % 2 == 1, h);
  queries.whole = whole;
  queries.keep();
  int place = 0;
  int freed = kAhead;  // where the half before lay
  const auto next_half = [&](int tile, int half) {
    wait_for_copies<kAhead - 1>();
    __syncwarp();  // the copies of all lanes have arrived, and all lanes are done with the half before
    bring(tile + (half + kAhead) / 2 * kAttendWarps, (half + kAhead) % 2 == 1, freed);
    freed = place;
    place = place == kHalves - 1 ? 0 : place + 1;
    return memory + static_cast<std::uint32_t>(freed * Shape::kHalfBytes);
  };
  for (int tile = warp; tile < tiles; tile += kAttendWarps) {
    std::uint32_t weights[kGroups][2];
    weigh_tile<Shape, kDim, kGroups>(next_half(tile, 0), queries, scale, hidden(tile), sums, weights);
    add_values<Shape, kDim, kGroups>(next_half(tile, 1), weights, sums);
  }
  wait_for_copies<0>();
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sums.sum[n][i] += __shfl_xor_sync(kAllLanes, sums.sum[n][i], step);
    }
  }
}

/// Joins what the warps found, in their order, and writes each column's partial result: values, then largest score and sum.
/// `target(column)` is where it goes, null for a column that is none. Called by the whole block; all copies have arrived.
template <class Shape, int kDim, int kGroups, class Target>
__device__ void store_partial(const WarpSums<kDim, kGroups>& sums, int columns, Target target) {
  const int lane = static_cast<int>(threadIdx.x % 32U);
  const int warp = static_cast<int>(threadIdx.x / 32U);
  auto* const largest = reinterpret_cast<float*>(block_memory() + Shape::kTableBytes);
  float* const sum = largest + kAttendWarps * Shape::kColumns;
  auto* const values = reinterpret_cast<float*>(block_memory() + Shape::kTiles);
  __syncthreads();  // every warp is done with its tiles
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = warp * Shape::kColumns + n * 8 + lane % 4 * 2 + i % 2;
      if (i < 2 && lane < 4) {
        largest[column] = sums.largest[n][i];
        sum[column] = sums.sum[n][i];
      }
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) values[column * Shape::kJoinStride + m * 16 + i / 2 * 8 + lane / 4] = sums.values[m][n][i];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < columns * (kDim / 4); i += kAttendThreads) {
    const int column = i / (kDim / 4);
    const int four = i % (kDim / 4);
    float* const to = target(column);
    if (to == nullptr) continue;
    float top = lowest();
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) top = fmaxf(top, largest[w * Shape::kColumns + column]);
    float4 value = {0.0F, 0.0F, 0.0F, 0.0F};
    float total = 0.0F;
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      const int at = w * Shape::kColumns + column;
      const float factor = top == lowest() ? 0.0F : power_of_two(largest[at] - top);
      const float4 part = *reinterpret_cast<const float4*>(values + at * Shape::kJoinStride + 4 * four);
      value.x += factor * part.x;
      value.y += factor * part.y;
      value.z += factor * part.z;
      value.w += factor * part.w;
      total += factor * sum[at];
    }
    auto* const pairs = reinterpret_cast<float2*>(to);  // partial results lie at multiples of eight bytes
    pairs[2 * four] = {value.x, value.y};
    pairs[2 * four + 1] = {value.z, value.w};
    if (four == 0) pairs[kDim / 2] = {top, total};
  }
}

/// A partial result of nothing.
template <class Target>
__device__ void store_empty_partial(int dim, int columns, Target target) {
  for (int column = static_cast<int>(threadIdx.x); column < columns; column += kAttendThreads) {
    float* const to = target(column);
    if (to != nullptr) reinterpret_cast<float2*>(to)[dim / 2] = {lowest(), 0.0F};
  }
}

}  // namespace dualdecoder::cuda
