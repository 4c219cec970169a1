// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/attend_tokens.cuh"
#include "cuda/check.hpp"
#include "cuda/rotate.cuh"
#include "cuda/shadow_kv_kernels.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/top_chunks.cuh"

namespace dualdecoder::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // bf16 elements of a 16-byte access
constexpr int kMostBlocks = 132 * 8;
constexpr int kSummaryWarps = 4;

unsigned blocks_for(std::size_t threads) {
  return static_cast<unsigned>(std::clamp<std::size_t>((threads + kThreads - 1) / kThreads, 1, kMostBlocks));
}

__device__ std::size_t first_index() { return blockIdx.x * static_cast<std::size_t>(kThreads) + threadIdx.x; }
__device__ std::size_t index_step() { return gridDim.x * static_cast<std::size_t>(kThreads); }

/// Eight elements as bf16.
__device__ uint4 load_vector(const RowsIn& rows, std::size_t element) {
  if (rows.bf16) return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(rows.data) + element);
  uint4 vector;
  std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(&vector);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = load_pair(rows, element + static_cast<std::size_t>(2 * i));
    words[i] = pack_bf16(pair.x, pair.y);
  }
  return vector;
}

/// Grid: (blocks, KV heads).
__global__ void __launch_bounds__(kThreads)
    append_kernel(ShadowLayout layout, PromptKeys prompt, Layer layer, int slot, int first, int count, RowsIn keys, RowsIn values) {
  const StoreLayout& store = layout.store;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int vectors = store.dim / kVector;  // of a head
  std::byte* const to_values = store.host_chunk(slot, layer, kv_head, 0);
  for (std::size_t i = first_index(); i < static_cast<std::size_t>(count) * static_cast<std::size_t>(vectors); i += index_step()) {
    const auto token = static_cast<int>(i / static_cast<std::size_t>(vectors));
    const auto d = static_cast<std::size_t>(i % static_cast<std::size_t>(vectors)) * kVector;
    const std::size_t source =
        (static_cast<std::size_t>(token) * static_cast<std::size_t>(store.kv_heads) + static_cast<std::size_t>(kv_head)) *
            static_cast<std::size_t>(store.dim) +
        d;
    __nv_bfloat16* const to_keys = prompt.row(layout, layer, first + token) + static_cast<std::size_t>(kv_head * store.dim) + d;
    *reinterpret_cast<uint4*>(to_keys) = load_vector(keys, source);
    const std::size_t at = static_cast<std::size_t>(first + token) * static_cast<std::size_t>(store.dim) + d;
    reinterpret_cast<uint4*>(to_values)[at / kVector] = load_vector(values, source);
  }
}

/// A thread turns eight pairs.
__global__ void __launch_bounds__(kThreads)
    unrotate_kernel(ShadowLayout layout, PromptKeys prompt, Layer layer, int first, int count, float* rows) {
  const StoreLayout& store = layout.store;
  const int half = store.dim / 2;
  const int each = half / kVector;  // of a head
  const int of_token = store.kv_heads * each;
  const float scale = 1.0F / layout.rotation_scale;
  for (std::size_t i = first_index(); i < static_cast<std::size_t>(count) * static_cast<std::size_t>(of_token); i += index_step()) {
    const auto token = static_cast<int>(i / static_cast<std::size_t>(of_token));
    const auto rest = static_cast<int>(i % static_cast<std::size_t>(of_token));
    const int pair = rest % each * kVector;
    const int column = rest / each * store.dim + pair;
    const __nv_bfloat16* const from = prompt.row(layout, layer, first + token) + column;
    const uint4 lows = *reinterpret_cast<const uint4*>(from);
    const uint4 highs = *reinterpret_cast<const uint4*>(from + half);
    const std::uint32_t low_words[4] = {lows.x, lows.y, lows.z, lows.w};
    const std::uint32_t high_words[4] = {highs.x, highs.y, highs.z, highs.w};
    float low[kVector];
    float high[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float2 two_low = unpack_bf16(low_words[j / 2]);
      const float2 two_high = unpack_bf16(high_words[j / 2]);
      low[j] = j % 2 == 0 ? two_low.x : two_low.y;
      high[j] = j % 2 == 0 ? two_high.x : two_high.y;
      Turn::of(first + token, layout.inverse[pair + j], scale).turn_back(low[j], high[j]);
    }
    float* const to = rows + static_cast<std::size_t>(token) * static_cast<std::size_t>(layout.width()) + column;
#pragma unroll
    for (int j = 0; j < kVector; j += 4) {
      *reinterpret_cast<float4*>(to + j) = {low[j], low[j + 1], low[j + 2], low[j + 3]};
      *reinterpret_cast<float4*>(to + half + j) = {high[j], high[j + 1], high[j + 2], high[j + 3]};
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    directions_kernel(ShadowLayout layout, Layer layer, int slot, const float* eigenvectors, float* vectors) {
  const StoreLayout& store = layout.store;
  const auto width = static_cast<std::size_t>(layout.width());
  const std::size_t first_list = store.list(slot, layer, 0);
  for (std::size_t i = first_index(); i < static_cast<std::size_t>(layout.rank) * width; i += index_step()) {
    const std::size_t r = i / width;
    const auto column = static_cast<int>(i % width);
    const __nv_bfloat16 rounded = __float2bfloat16_rn(eigenvectors[(width - 1 - r) * width + static_cast<std::size_t>(column)]);
    __nv_bfloat16* const of_head = layout.directions_of(first_list + static_cast<std::size_t>(column / store.dim));
    of_head[r * static_cast<std::size_t>(store.dim) + static_cast<std::size_t>(column % store.dim)] = rounded;
    vectors[i] = __bfloat162float(rounded);
  }
}

__global__ void __launch_bounds__(kThreads) round_kernel(const float* from, std::size_t count, __nv_bfloat16* to) {
  for (std::size_t i = first_index(); i < count; i += index_step()) to[i] = __float2bfloat16_rn(from[i]);
}

/// A warp finds a chunk's mean and how far its worst token points away from it: rank 16 (-1 - cosine), the higher the further.
/// Grid: (blocks of chunks, KV heads).
__global__ void __launch_bounds__(kSummaryWarps * 32)
    landmark_kernel(ShadowLayout layout, PromptKeys prompt, Layer layer, int slot, int chunks) {
  const StoreLayout& store = layout.store;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int chunk = static_cast<int>(blockIdx.x) * kSummaryWarps + warp;
  const int kv_head = static_cast<int>(blockIdx.y);
  if (chunk >= chunks) return;
  const int dim = store.dim;
  const int vectors = dim / kVector;
  auto* const keys = reinterpret_cast<std::uint32_t*>(block_memory()) + warp * store.chunk * dim / 2;  // [chunk, dim / 2] pairs
  for (int i = lane; i < store.chunk * vectors; i += 32) {
    const __nv_bfloat16* const row = prompt.row(layout, layer, chunk * store.chunk + i / vectors) + kv_head * dim;
    reinterpret_cast<uint4*>(keys)[i] = *reinterpret_cast<const uint4*>(row + i % vectors * kVector);
  }
  __syncwarp();
  constexpr int kLanePairs = 4;  // dims up to 256
  float2 mean[kLanePairs] = {};
  float square = 0.0F;
  auto* const landmark = reinterpret_cast<std::uint32_t*>(layout.landmark(store.list(slot, layer, kv_head), chunk));
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    const int pair = i * 32 + lane;
    if (pair >= dim / 2) continue;
    for (int t = 0; t < store.chunk; ++t) {
      const float2 key = unpack_bf16(keys[t * dim / 2 + pair]);
      mean[i].x += key.x;
      mean[i].y += key.y;
    }
    mean[i].x = __fdiv_rn(mean[i].x, static_cast<float>(store.chunk));
    mean[i].y = __fdiv_rn(mean[i].y, static_cast<float>(store.chunk));
    square += mean[i].x * mean[i].x + mean[i].y * mean[i].y;
    landmark[pair] = pack_bf16(mean[i].x, mean[i].y);
  }
  const auto warp_sum = [](float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
    return value;
  };
  const float mean_norm = sqrtf(warp_sum(square));
  float worst = 1.0F;
  for (int t = 0; t < store.chunk; ++t) {
    float product = 0.0F;
    square = 0.0F;
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = i * 32 + lane;
      if (pair >= dim / 2) continue;
      const float2 key = unpack_bf16(keys[t * dim / 2 + pair]);
      product += key.x * mean[i].x + key.y * mean[i].y;
      square += key.x * key.x + key.y * key.y;
    }
    const float norm = mean_norm * sqrtf(warp_sum(square));
    product = warp_sum(product);
    worst = fminf(worst, norm > 0.0F ? product / norm : 0.0F);
  }
  if (lane == 0) layout.ranks_of(static_cast<std::size_t>(kv_head))[chunk] = -16.0F * (fmaxf(worst, -1.0F) + 1.0F);
}

/// A block chooses a KV head's outliers among the chunks before the window.
__global__ void __launch_bounds__(kTopThreads) outlier_kernel(ShadowLayout layout, Layer layer, int slot, int chunks) {
  __shared__ TopMemory memory;
  const int kv_head = static_cast<int>(blockIdx.x);
  const std::size_t list = layout.store.list(slot, layer, kv_head);
  const int wanted = min(layout.outlier_slots, chunks);
  std::uint32_t* const marks = layout.outlier_bits_of(list);
  for (int word = static_cast<int>(threadIdx.x); word < layout.bit_words(); word += kTopThreads) marks[word] = 0;
  if (threadIdx.x == 0) layout.outlier_count[list] = wanted;
  if (wanted <= 0) return;
  __syncthreads();
  int* const chosen = layout.outlier_chunks_of(list);
  choose_top(memory, layout.ranks_of(static_cast<std::size_t>(kv_head)), chunks, wanted, reinterpret_cast<std::uint32_t*>(block_memory()),
             [=](int place, int chunk, float) {
               chosen[place] = chunk;
               atomicOr(marks + chunk / 32, 1U << (chunk % 32));
             });
}

/// Copies outliers and the window, a block for each of their chunks and KV heads.
__global__ void __launch_bounds__(kThreads)
    keep_whole_kernel(ShadowLayout layout, PromptKeys prompt, Layer layer, int slot, int first_window, int length) {
  const StoreLayout& store = layout.store;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int number = static_cast<int>(blockIdx.x);
  const std::size_t list = store.list(slot, layer, kv_head);
  const bool is_outlier = number < layout.outlier_slots;
  if (is_outlier && number >= layout.outlier_count[list]) return;
  const int chunk = is_outlier ? layout.outlier_chunks_of(list)[number] : first_window + number - layout.outlier_slots;
  const int tokens = min(store.chunk, length - chunk * store.chunk);
  std::byte* const to = is_outlier ? layout.outlier(list, number) : store.near_chunk(list, chunk);
  const int vectors = store.dim / kVector;
  const auto* const values = reinterpret_cast<const uint4*>(store.host_chunk(slot, layer, kv_head, chunk));
  auto* const to_keys = reinterpret_cast<uint4*>(to);
  auto* const to_values = reinterpret_cast<uint4*>(to + store.load_offset);
  for (int i = static_cast<int>(threadIdx.x); i < tokens * vectors; i += kThreads) {
    const __nv_bfloat16* const row = prompt.row(layout, layer, chunk * store.chunk + i / vectors) + kv_head * store.dim;
    to_keys[i] = *reinterpret_cast<const uint4*>(row + i % vectors * kVector);
    to_values[i] = values[i];
  }
}

void finish_layer(const ShadowLayout& layout, const PromptKeys& prompt, Layer layer, int slot, int length, cudaStream_t stream) {
  const StoreLayout& store = layout.store;
  const auto heads = static_cast<unsigned>(store.kv_heads);
  const int chunks = length / store.chunk;
  if (chunks > 0) {
    const auto blocks = static_cast<unsigned>((chunks + kSummaryWarps - 1) / kSummaryWarps);
    const std::size_t bytes = static_cast<std::size_t>(kSummaryWarps * store.chunk * store.dim) * sizeof(__nv_bfloat16);
    allow_shared_memory(landmark_kernel, bytes, "finish_prompt: shared memory of landmarks");
    landmark_kernel<<<dim3(blocks, heads), kSummaryWarps * 32, bytes, stream>>>(layout, prompt, layer, slot, chunks);
    check_launch("finish_prompt: landmarks");
  }
  const int begin = store.range_end(length);
  const std::size_t bits = static_cast<std::size_t>(layout.bit_words()) * sizeof(std::uint32_t);
  allow_shared_memory(outlier_kernel, bits, "finish_prompt: shared memory of outliers");
  outlier_kernel<<<heads, kTopThreads, bits, stream>>>(layout, layer, slot, begin);
  check_launch("finish_prompt: outliers");
  const int window = (length + store.chunk - 1) / store.chunk - begin;
  keep_whole_kernel<<<dim3(static_cast<unsigned>(layout.outlier_slots + window), heads), kThreads, 0, stream>>>(layout, prompt, layer, slot,
                                                                                                                begin, length);
  check_launch("finish_prompt: whole chunks");
}

}  // namespace

void append_shadow(const ShadowLayout& layout, const PromptKeys& prompt, Layer layer, int slot, int first, int count, RowsIn keys,
                   RowsIn values, cudaStream_t stream) {
  if (count <= 0) return;
  const std::size_t vectors = static_cast<std::size_t>(count) * static_cast<std::size_t>(layout.store.dim / kVector);
  append_kernel<<<dim3(blocks_for(vectors), static_cast<unsigned>(layout.store.kv_heads)), kThreads, 0, stream>>>(
      layout, prompt, layer, slot, first, count, keys, values);
  check_launch("append_shadow");
}

void unrotate_rows(const ShadowLayout& layout, const PromptKeys& prompt, Layer layer, int first, int count, float* rows,
                   cudaStream_t stream) {
  const std::size_t threads = static_cast<std::size_t>(count) * static_cast<std::size_t>(layout.width() / (2 * kVector));
  unrotate_kernel<<<blocks_for(threads), kThreads, 0, stream>>>(layout, prompt, layer, first, count, rows);
  check_launch("unrotate_rows");
}

void keep_directions(const ShadowLayout& layout, Layer layer, int slot, const float* eigenvectors, float* vectors, cudaStream_t stream) {
  const std::size_t elements = static_cast<std::size_t>(layout.rank) * static_cast<std::size_t>(layout.width());
  directions_kernel<<<blocks_for(elements), kThreads, 0, stream>>>(layout, layer, slot, eigenvectors, vectors);
  check_launch("keep_directions");
}

void keep_coefficients(const ShadowLayout& layout, Layer layer, int slot, int first, int count, const float* coefficients,
                       cudaStream_t stream) {
  const std::size_t elements = static_cast<std::size_t>(count) * static_cast<std::size_t>(layout.rank);
  round_kernel<<<blocks_for(elements), kThreads, 0, stream>>>(coefficients, elements, layout.coefficients_of(slot, layer, first));
  check_launch("keep_coefficients");
}

void finish_prompt(const ShadowLayout& layout, const PromptKeys& prompt, int slot, int length, cudaStream_t stream) {
  for (Layer layer = 0; layer < layout.store.layers; ++layer) finish_layer(layout, prompt, layer, slot, length, stream);
}

}  // namespace dualdecoder::cuda
