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

/// Means over the tokens of `chunks` chunks from `first` on, added in the order of the tokens as the CPU store does. tokens_of(j) gives
/// what gives the elements of chunk j as floats: element(token, d).
template <class TokensOf>
__device__ LaneMeans lane_means(const StoreLayout& layout, int first, int chunks, TokensOf tokens_of) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  LaneMeans means;
  float largest = 0.0F;
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    means.low[i] = 0.0F;
    means.high[i] = 0.0F;
    const int pair = i * kWarpLanes + lane;
    if (pair >= layout.dim / 2) continue;
    const int d = pair_dim(pair);
    for (int j = first; j < first + chunks; ++j) {
      const auto element = tokens_of(j);
      for (int t = 0; t < layout.chunk; ++t) {
        means.low[i] += element(t, d);
        means.high[i] += element(t, d + 8);
      }
    }
    const auto tokens = static_cast<float>(chunks * layout.chunk);
    means.low[i] = __fdiv_rn(means.low[i], tokens);
    means.high[i] = __fdiv_rn(means.high[i], tokens);
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

/// Writes the mean of a whole chunk's keys, int8 with scale max|mean| / 127 and rounded to the nearest even level, equal to the CPU store's
/// bit for bit. `tokens_of` as of detail::lane_means(). Called by a whole warp.
template <class TokensOf>
__device__ void summarise_keys(const StoreLayout& layout, std::size_t list, int chunk, TokensOf tokens_of) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const std::size_t at = list * static_cast<std::size_t>(layout.max_chunks) + static_cast<std::size_t>(chunk);
  const detail::LaneMeans keys = detail::lane_means(layout, chunk, 1, tokens_of);
  const float scale = __fdiv_rn(keys.largest, 127.0F);
  std::int8_t* const row = layout.key_means + at * static_cast<std::size_t>(layout.dim);
#pragma unroll
  for (int i = 0; i < detail::kLanePairs; ++i) {
    const int pair = i * kWarpLanes + lane;
    if (pair >= layout.dim / 2) continue;
    const int d = detail::pair_dim(pair);
    row[d] = static_cast<std::int8_t>(detail::level_of(keys.low[i], scale, 127));
    row[d + 8] = static_cast<std::int8_t>(detail::level_of(keys.high[i], scale, 127));
  }
  if (lane == 0) layout.key_scales[at] = scale;
}

/// The same of the values of a group up to its last whole chunk, `chunk`: int4 with scale max|mean| / 7. Other warps may write other groups
/// of the tile meanwhile.
template <class TokensOf>
__device__ void summarise_values(const StoreLayout& layout, std::size_t list, int chunk, TokensOf tokens_of) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int dim = layout.dim;
  const int group = chunk / layout.value_group;
  const int k = value_k(layout.value_group, group % kTileChunks);
  const std::size_t at = list * static_cast<std::size_t>(layout.value_tile_count()) + static_cast<std::size_t>(group / kTileChunks);
  const int first = group * layout.value_group;
  const detail::LaneMeans values = detail::lane_means(layout, first, chunk - first + 1, tokens_of);
  const float scale = __fdiv_rn(values.largest, 7.0F);
  std::uint32_t* const tile = layout.value_tiles + at * static_cast<std::size_t>(kTileChunks * dim / 8);
#pragma unroll
  for (int i = 0; i < detail::kLanePairs; ++i) {
    const int pair = i * kWarpLanes + lane;
    if (pair >= dim / 2) continue;
    const int d = detail::pair_dim(pair);
    const ValuePlace low = value_place(dim, k, d);
    const ValuePlace high = value_place(dim, k, d + 8);  // the same word
    const auto low_level = static_cast<std::uint32_t>(detail::level_of(values.low[i], scale, 7) + 8);
    const auto high_level = static_cast<std::uint32_t>(detail::level_of(values.high[i], scale, 7) + 8);
    const std::uint32_t mask = (0xFU << low.shift) | (0xFU << high.shift);
    const std::uint32_t levels = (low_level << low.shift) | (high_level << high.shift);
    // nobody else writes these two nibbles, so what is read of them stays true; the atomic keeps those of other groups
    std::uint32_t* const word = tile + low.word;
    const std::uint32_t before = *static_cast<const volatile std::uint32_t*>(word);
    atomicXor(word, (before ^ levels) & mask);
  }
  if (lane == 0) layout.value_scales[at * kTileChunks + static_cast<std::size_t>(k)] = scale;
}

/// Elements of the tokens of chunk-heads, bf16 keys [chunk, dim], then values [chunk, dim]; at(j) is where chunk j lies.
template <class At>
__device__ auto keys_at(const StoreLayout& layout, At at) {
  return [dim = layout.dim, at](int j) {
    return [dim, keys = reinterpret_cast<const __nv_bfloat16*>(at(j))](int t, int d) { return __bfloat162float(keys[t * dim + d]); };
  };
}
template <class At>
__device__ auto values_at(const StoreLayout& layout, At at) {
  return keys_at(layout, [half = layout.chunk_bytes / 2, at](int j) { return at(j) + half; });
}

}  // namespace dualdecoder::cuda
