// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/check.hpp"
#include "cuda/fragments.cuh"
#include "cuda/launch.hpp"
#include "cuda/rotate.cuh"
#include "cuda/shadow_kv_kernels.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/tensor_core.cuh"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kTokens = kWarps * 16;      // that one block rebuilds, 16 a warp
constexpr int kMostChunks = kTokens / 4;  // of them
constexpr int kRanks = 32;                // of the factors that are multiplied at a time
constexpr int kStages = 4;                // of which three are on their way

/// How a block's shared memory is cut: stages of coefficients [tokens, kRanks] and directions [kRanks, dim], bf16, rows an odd number of
/// 16-byte pieces apart, so that the eight rows of a matrix lie in different banks.
template <int kDim>
struct Shape {
  static constexpr int kCoefficientStride = kRanks * 2 + 16;
  static constexpr int kDirectionStride = kDim * 2 + 16;
  static constexpr int kCoefficientBytes = kTokens * kCoefficientStride;
  static constexpr int kStageBytes = kCoefficientBytes + kRanks * kDirectionStride;
  static constexpr int kBytes = kStages * kStageBytes;
};

/// What a block is to rebuild.
struct RebuildList {
  std::byte* targets[kMostChunks];
  int chunks[kMostChunks];
  int count;
};

/// Of one KV head of a storage slot.
struct Head {
  int slot;
  Layer layer;
  int kv_head;
};

/// Chosen chunks whose slots hold others' keys, of one row and KV head. Grid: (parts, KV heads, rows).
struct ChosenKeys {
  ShadowLayout layout;
  Layer layer;
  StepView view;
  Selection by_row;

  /// Fills the list by the first warp; false where there is nothing to do.
  __device__ bool list(RebuildList& found, Head& head) const {
    const StoreLayout& store = layout.store;
    const int row = static_cast<int>(blockIdx.z);
    const int place = row / view.rows_per_sequence;
    head = {view.slot_of[place], layer, static_cast<int>(blockIdx.y)};
    if (!row_is_live(view.mode[place], row % view.rows_per_sequence)) return false;
    const int each = kTokens / store.chunk;
    const int first = static_cast<int>(blockIdx.x) * each;
    const int count = min(by_row.count_of(row, head.kv_head) - first, each);
    if (count <= 0) return false;
    if (threadIdx.x < 32) {
      const int lane = static_cast<int>(threadIdx.x);
      const std::size_t list = store.list(head.slot, layer, head.kv_head);
      int* const keys_of = layout.keys_of + list * static_cast<std::size_t>(store.slots);
      const int chunk = lane < count ? by_row.chunks_of(row, head.kv_head)[first + lane] : 0;
      const int slot =
          lane < count ? store.slot_of[list * static_cast<std::size_t>(store.max_chunks) + static_cast<std::size_t>(chunk)] : -1;
      // two rows may want the same: both rebuild it, to the same bits, or one finds it done by a block whose end attention waits for
      const bool missing = slot >= 0 && keys_of[slot] != chunk;
      const unsigned lanes = __ballot_sync(kAllLanes, static_cast<int>(missing));
      if (missing) {
        const int at = __popc(lanes & ((1U << lane) - 1U));
        found.chunks[at] = chunk;
        found.targets[at] = store.slot_data(list, slot);
        keys_of[slot] = chunk;
      }
      if (lane == 0) found.count = __popc(lanes);
    }
    return true;
  }
};

/// Chunks that a shorter sequence has in its window. Grid: (parts, KV heads, layers).
struct WindowKeys {
  ShadowLayout layout;
  int slot;
  int first;
  int end;

  __device__ bool list(RebuildList& found, Head& head) const {
    const StoreLayout& store = layout.store;
    head = {slot, static_cast<Layer>(blockIdx.z), static_cast<int>(blockIdx.y)};
    const std::size_t list = store.list(slot, head.layer, head.kv_head);
    const std::uint32_t* const marks = layout.outlier_bits_of(list);
    const int each = kTokens / store.chunk;
    const int chunk = first + static_cast<int>(blockIdx.x) * each + static_cast<int>(threadIdx.x);
    if (threadIdx.x < 32) {
      const int lane = static_cast<int>(threadIdx.x);
      const bool missing = lane < each && chunk < end && (marks[chunk / 32] >> (chunk % 32) & 1U) == 0;
      const unsigned lanes = __ballot_sync(kAllLanes, static_cast<int>(missing));
      const int at = __popc(lanes & ((1U << lane) - 1U));
      if (missing) found.chunks[at] = chunk;
      if (missing) found.targets[at] = store.near_chunk(list, chunk);
      if (lane == 0) found.count = __popc(lanes);
    }
    return true;
  }
};

/// Products of coefficients and directions on tensor cores, turned to their positions: keys [chunk, dim] of every listed chunk.
template <int kDim, class Keys>
__global__ void __launch_bounds__(kThreads) rebuild_kernel(const __grid_constant__ Keys keys) {
  using Cut = Shape<kDim>;
  constexpr int kPieces = kDim / 8;
  __shared__ RebuildList found;
  wait_for_earlier_kernels();
  const ShadowLayout& layout = keys.layout;
  const StoreLayout& store = layout.store;
  Head head;
  if (!keys.list(found, head)) return;
  __syncthreads();
  const int tokens = found.count * store.chunk;
  if (tokens == 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int shift = __ffs(store.chunk) - 1;
  const std::uint32_t memory = shared_address(block_memory());
  const __nv_bfloat16* const coefficients = layout.coefficients_of(head.slot, head.layer, 0);
  const __nv_bfloat16* const directions = layout.directions_of(store.list(head.slot, head.layer, head.kv_head));
  const auto position_of = [&](int token) { return (found.chunks[token >> shift] << shift) + (token & (store.chunk - 1)); };
  const int steps = (layout.rank + kRanks - 1) / kRanks;
  const auto bring = [&](int step) {  // zeros behind the rank and the last token
    const int first = step * kRanks;
    const std::uint32_t to = memory + static_cast<std::uint32_t>(step % kStages * Cut::kStageBytes);
    if (step < steps) {
      for (int i = thread; i < kTokens * (kRanks / 8); i += kThreads) {
        const int token = i / (kRanks / 8);
        const int piece = i % (kRanks / 8) * 8;
        const bool present = token < tokens && first + piece < layout.rank;
        const std::size_t from = present ? static_cast<std::size_t>(position_of(token)) * static_cast<std::size_t>(layout.rank) +
                                               static_cast<std::size_t>(first + piece)
                                         : 0;
        copy_async(to + static_cast<std::uint32_t>(token * Cut::kCoefficientStride + piece * 2), coefficients + from, present);
      }
      for (int i = thread; i < kRanks * kPieces; i += kThreads) {
        const int r = i / kPieces;
        const bool present = first + r < layout.rank;
        const std::size_t from = present ? static_cast<std::size_t>(first + r) * kDim + static_cast<std::size_t>(i % kPieces * 8) : 0;
        copy_async(to + static_cast<std::uint32_t>(Cut::kCoefficientBytes + r * Cut::kDirectionStride + i % kPieces * 16),
                   directions + from, present);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) bring(step);
  float sums[kDim / 8][4] = {};
  const bool works = warp * 16 < tokens;
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // everybody's copies have arrived, and all are done with the stage before
    bring(step + kStages - 1);
    if (!works) continue;
    const std::uint32_t stage = memory + static_cast<std::uint32_t>(step % kStages * Cut::kStageBytes);
    const std::uint32_t row = stage + static_cast<std::uint32_t>((warp * 16 + lane % 16) * Cut::kCoefficientStride + lane / 16 * 16);
    const std::uint32_t direction =
        stage + static_cast<std::uint32_t>(Cut::kCoefficientBytes + lane % 16 * Cut::kDirectionStride + lane / 16 * 16);
#pragma unroll
    for (int k = 0; k < kRanks / 16; ++k) {
      std::uint32_t of_tokens[4];
      load_matrices(of_tokens, row + static_cast<std::uint32_t>(k * 32));
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        std::uint32_t of_dims[4];
        load_matrices_transposed(of_dims, direction + static_cast<std::uint32_t>(k * 16 * Cut::kDirectionStride + n * 16));
        multiply_add(sums[n], of_tokens, of_dims[0], of_dims[1]);
        multiply_add(sums[n + 1], of_tokens, of_dims[2], of_dims[3]);
      }
    }
  }
  wait_for_copies<0>();
  if (!works) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = warp * 16 + half * 8 + lane / 4;
    if (token >= tokens) continue;
    const int position = position_of(token);
    auto* const to = reinterpret_cast<std::uint32_t*>(found.targets[token >> shift] + (token & (store.chunk - 1)) * (kDim * 2));
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {  // dims n * 8 + 2 * (lane % 4) and the next, with those half a head behind
      float low[2] = {sums[n][half * 2], sums[n][half * 2 + 1]};
      float high[2] = {sums[n + kDim / 16][half * 2], sums[n + kDim / 16][half * 2 + 1]};
      const int d = n * 8 + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) Turn::of(position, layout.inverse[d + i], layout.rotation_scale).turn(low[i], high[i]);
      to[d / 2] = pack_bf16(low[0], low[1]);
      to[(d + kDim / 2) / 2] = pack_bf16(high[0], high[1]);
    }
  }
}

template <int kDim, class Keys>
void launch(const Keys& keys, dim3 grid, cudaStream_t stream) {
  const auto kernel = rebuild_kernel<kDim, Keys>;
  allow_shared_memory(kernel, Shape<kDim>::kBytes, "rebuilding keys: shared memory of a block for this head_dim");
  check(launch_overlapped(kernel, grid, kThreads, Shape<kDim>::kBytes, stream, keys), "rebuilding keys");
}

template <class Keys>
void launch(const Keys& keys, dim3 grid, cudaStream_t stream) {
  switch (keys.layout.store.dim) {
    case 64: return launch<64>(keys, grid, stream);
    case 80: return launch<80>(keys, grid, stream);
    case 96: return launch<96>(keys, grid, stream);
    case 128: return launch<128>(keys, grid, stream);
    case 256: return launch<256>(keys, grid, stream);
    default: throw InvalidArgument("head_dim = " + std::to_string(keys.layout.store.dim) + ": must be 64, 80, 96, 128 or 256");
  }
}

unsigned parts_of(const StoreLayout& store, int chunks) {
  const int each = kTokens / store.chunk;
  return static_cast<unsigned>((chunks + each - 1) / each);
}

/// Outliers whole, values of the others. A block for each chunk, list by list.
__global__ void __launch_bounds__(kThreads) restore_kernel(ShadowLayout layout, int slot, int first, int end) {
  const StoreLayout& store = layout.store;
  const int chunk = first + static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const auto layer = static_cast<Layer>(blockIdx.z);
  if (chunk >= end) return;
  const std::size_t list = store.list(slot, layer, kv_head);
  const int* const outliers = layout.outlier_chunks_of(list);
  const bool is_outlier = (layout.outlier_bits_of(list)[chunk / 32] >> (chunk % 32) & 1U) != 0;
  int number = 0;
  if (is_outlier) {
    while (outliers[number] != chunk) ++number;
  }
  const std::byte* const from = is_outlier ? layout.outlier(list, number) : store.host_chunk(slot, layer, kv_head, chunk);
  std::byte* const to = store.near_chunk(list, chunk) + (is_outlier ? 0 : store.load_offset);
  const unsigned vectors = (is_outlier ? store.chunk_bytes : store.loaded_bytes()) / static_cast<unsigned>(sizeof(uint4));
  for (unsigned i = threadIdx.x; i < vectors; i += kThreads) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
}

}  // namespace

void rebuild_chosen(const ShadowLayout& layout, Layer layer, const StepView& view, const Selection& by_row, cudaStream_t stream) {
  if (view.rows() == 0) return;
  const dim3 grid(parts_of(layout.store, std::min(layout.store.selected, by_row.capacity)), static_cast<unsigned>(layout.store.kv_heads),
                  static_cast<unsigned>(view.rows()));
  launch(ChosenKeys{layout, layer, view, by_row}, grid, stream);
}

void restore_shadow_window(const ShadowLayout& layout, int slot, int tokens, int before, cudaStream_t stream) {
  const StoreLayout& store = layout.store;
  const int first = store.range_end(tokens);
  const int end = std::min((tokens + store.chunk - 1) / store.chunk, store.range_end(before));
  if (end <= first) return;
  const auto heads = static_cast<unsigned>(store.kv_heads);
  const auto layers = static_cast<unsigned>(store.layers);
  restore_kernel<<<dim3(static_cast<unsigned>(end - first), heads, layers), kThreads, 0, stream>>>(layout, slot, first, end);
  check_launch("restore_shadow_window");
  launch(WindowKeys{layout, slot, first, end}, dim3(parts_of(store, end - first), heads, layers), stream);
}

}  // namespace dualdecoder::cuda
