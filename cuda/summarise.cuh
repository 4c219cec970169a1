// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "cuda/store_layout.hpp"

namespace dualdecoder::cuda {

inline constexpr int kWarpLanes = 32;

namespace detail {

/// A lane's share of a head: elements d and d + 8 of its pairs, where pair p = (16-group p / 8, element p % 8), so that both levels of a
/// value pair belong in one word of a tile.
inline constexpr int kLanePairs = 4;  // dims up to 256
struct LaneMeans {
  float low[kLanePairs];
  float high[kLanePairs];
  float largest;  ///< magnitude over the whole head, the same in all lanes
};

__device__ inline int pair_dim(int pair) { return pair / 8 * 16 + pair % 8; }

/// Means over the tokens, added in the order of the tokens as the CPU store does.
template <class Load>
__device__ LaneMeans lane_means(int dim, int tokens, Load load) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  LaneMeans means;
  float largest = 0.0F;
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    means.low[i] = 0.0F;
    means.high[i] = 0.0F;
    const int pair = i * kWarpLanes + lane;
    if (pair >= dim / 2) continue;
    const int d = pair_dim(pair);
    for (int t = 0; t < tokens; ++t) {
      means.low[i] += load(t, d);
      means.high[i] += load(t, d + 8);
    }
    means.low[i] = __fdiv_rn(means.low[i], static_cast<float>(tokens));
    means.high[i] = __fdiv_rn(means.high[i], static_cast<float>(tokens));
    largest = fmaxf(largest, fmaxf(fabsf(means.low[i]), fabsf(means.high[i])));
  }
  means.largest = __uint_as_float(__reduce_max_sync(0xFFFFFFFFU, __float_as_uint(largest)));  // not negative: bits order like values
  return means;
}

__device__ inline int level_of(float mean, float scale, int largest) {
  if (!(scale > 0.0F)) return 0;
  const int level = __float2int_rn(__fdiv_rn(mean, scale));
  return max(-largest, min(largest, level));
}

}  // namespace detail

/// Writes the summaries of one whole chunk: keys int8 with scale max|mean| / 127, values int4 with scale max|mean| / 7, both rounded to the
/// nearest even level, equal to the CPU store's bit for bit. key(token, d) and value(token, d) give elements as floats. Called by a whole
/// warp; other warps may write other chunks of the same tile meanwhile.
template <class Key, class Value>
__device__ void summarise_chunk_with(const StoreLayout& layout, std::size_t list, int chunk, Key key, Value value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int dim = layout.dim;
  const std::size_t at = list * static_cast<std::size_t>(layout.max_chunks) + static_cast<std::size_t>(chunk);

  const detail::LaneMeans keys = detail::lane_means(dim, layout.chunk, key);
  const float key_scale = __fdiv_rn(keys.largest, 127.0F);
  std::int8_t* const key_row = layout.key_means + at * static_cast<std::size_t>(dim);
#pragma unroll
  for (int i = 0; i < detail::kLanePairs; ++i) {
    const int pair = i * kWarpLanes + lane;
    if (pair >= dim / 2) continue;
    const int d = detail::pair_dim(pair);
    key_row[d] = static_cast<std::int8_t>(detail::level_of(keys.low[i], key_scale, 127));
    key_row[d + 8] = static_cast<std::int8_t>(detail::level_of(keys.high[i], key_scale, 127));
  }

  const detail::LaneMeans values = detail::lane_means(dim, layout.chunk, value);
  const float value_scale = __fdiv_rn(values.largest, 7.0F);
  const int in_tile = chunk % kTileChunks;
  std::uint32_t* const tile = layout.value_tiles + (at / kTileChunks) * static_cast<std::size_t>(kTileChunks * dim / 8);
#pragma unroll
  for (int i = 0; i < detail::kLanePairs; ++i) {
    const int pair = i * kWarpLanes + lane;
    if (pair >= dim / 2) continue;
    const int d = detail::pair_dim(pair);
    const ValuePlace low = value_place(dim, in_tile, d);
    const ValuePlace high = value_place(dim, in_tile, d + 8);  // the same word
    const auto low_level = static_cast<std::uint32_t>(detail::level_of(values.low[i], value_scale, 7) + 8);
    const auto high_level = static_cast<std::uint32_t>(detail::level_of(values.high[i], value_scale, 7) + 8);
    const std::uint32_t mask = (0xFU << low.shift) | (0xFU << high.shift);
    const std::uint32_t levels = (low_level << low.shift) | (high_level << high.shift);
    // nobody else writes these two nibbles, so what is read of them stays true; the atomic keeps those of other chunks
    std::uint32_t* const word = tile + low.word;
    const std::uint32_t before = *static_cast<const volatile std::uint32_t*>(word);
    atomicXor(word, (before ^ levels) & mask);
  }
  if (lane == 0) {
    layout.key_scales[at] = key_scale;
    layout.value_scales[at] = value_scale;
  }
}

/// The same of the chunk-head at `data`, bf16 keys [chunk, dim], then values [chunk, dim].
__device__ inline void summarise_chunk(const StoreLayout& layout, std::size_t list, int chunk, const std::byte* data) {
  const auto* const keys = reinterpret_cast<const __nv_bfloat16*>(data);
  const __nv_bfloat16* const values = keys + layout.chunk * layout.dim;
  const int dim = layout.dim;
  summarise_chunk_with(
      layout, list, chunk, [=](int t, int d) { return __bfloat162float(keys[t * dim + d]); },
      [=](int t, int d) { return __bfloat162float(values[t * dim + d]); });
}

}  // namespace dualdecoder::cuda
