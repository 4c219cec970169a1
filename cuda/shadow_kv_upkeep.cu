// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/check.hpp"
#include "cuda/fragments.cuh"
#include "cuda/resolve_tools.cuh"
#include "cuda/rotate.cuh"
#include "cuda/shadow_kv_kernels.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/slot_table.cuh"
#include "cuda/tensor_core.cuh"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpRanks = 4;  // coefficients of every token that a warp sums up at once
constexpr int kBlockRanks = kThreads / 32 * kWarpRanks;
constexpr int kLaneDims = 8;  // head dimensions up to 256

/// The mean of a chunk: `keys` are those in the window.
__device__ void write_landmark(const ShadowLayout& layout, std::size_t list, int chunk, const std::uint32_t* keys) {
  const int pairs = layout.store.dim / 2;
  const int tokens = layout.store.chunk;
  auto* const to = reinterpret_cast<std::uint32_t*>(layout.landmark(list, chunk));
  for (int pair = static_cast<int>(threadIdx.x); pair < pairs; pair += kThreads) {
    float2 sum = {0.0F, 0.0F};
    for (int t = 0; t < tokens; ++t) {
      const float2 key = unpack_bf16(keys[t * pairs + pair]);
      sum.x += key.x;
      sum.y += key.y;
    }
    to[pair] = pack_bf16(__fdiv_rn(sum.x, static_cast<float>(tokens)), __fdiv_rn(sum.y, static_cast<float>(tokens)));
  }
}

/// One block projects the chunk that a commit completes on kBlockRanks directions of a layer, KV head by KV head; the first of a layer also
/// writes its landmarks and lists its values. Grid: (ranks, layers, places).
template <int kChunk>
__global__ void __launch_bounds__(kThreads)
    commit_kernel(const __grid_constant__ ShadowLayout layout, StepView view, TransferList write_back) {
  const StoreLayout& store = layout.store;
  const auto layer = static_cast<Layer>(blockIdx.y);
  const int place = static_cast<int>(blockIdx.z);
  if (!row_is_live(view.mode[place], 0)) return;
  const int length = view.position[place] + 1;
  if (length % kChunk != 0) return;
  const int chunk = length / kChunk - 1;
  const int slot = view.slot_of[place];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int dim = store.dim;
  const int half = dim / 2;
  const int first = static_cast<int>(blockIdx.x) * kBlockRanks + thread / 32 * kWarpRanks;
  auto* const rows = reinterpret_cast<float*>(block_memory());  // [chunk, dim]
  const float scale = 1.0F / layout.rotation_scale;
  float sums[kWarpRanks][kChunk] = {};
  for (int kv_head = 0; kv_head < store.kv_heads; ++kv_head) {
    const std::size_t list = store.list(slot, layer, kv_head);
    std::byte* const data = store.near_chunk(list, chunk);
    const auto* const keys = reinterpret_cast<const __nv_bfloat16*>(data);
    if (blockIdx.x == 0) {
      write_landmark(layout, list, chunk, reinterpret_cast<const std::uint32_t*>(data));
      if (thread == 0) {
        write_back.items[atomicAdd(write_back.count, 1)] = {data + store.load_offset, store.host_chunk(slot, layer, kv_head, chunk),
                                                            store.loaded_bytes(), 0.0F};
        add_to(store, Counter::write_back_bytes, store.loaded_bytes());
      }
    }
    __syncthreads();  // the head before is done with the rows
    for (int i = thread; i < kChunk * half; i += kThreads) {
      const int t = i / half;
      const int pair = i % half;
      float low = __bfloat162float(keys[t * dim + pair]);
      float high = __bfloat162float(keys[t * dim + pair + half]);
      Turn::of(chunk * kChunk + t, layout.inverse[pair], scale).turn_back(low, high);
      rows[t * dim + pair] = low;
      rows[t * dim + pair + half] = high;
    }
    __syncthreads();
    const __nv_bfloat16* const directions = layout.directions_of(list);
#pragma unroll
    for (int r = 0; r < kWarpRanks; ++r) {
      if (first + r >= layout.rank) continue;  // the same in a warp
      const __nv_bfloat16* const direction = directions + static_cast<std::size_t>(first + r) * static_cast<std::size_t>(dim);
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) {
        const int d = i * 32 + lane;
        if (d >= dim) continue;
        const float along = __bfloat162float(direction[d]);
#pragma unroll
        for (int t = 0; t < kChunk; ++t) sums[r][t] += along * rows[t * dim + d];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kWarpRanks; ++r) {
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sums[r][t] += __shfl_xor_sync(kAllLanes, sums[r][t], step);
      if (lane == 0 && first + r < layout.rank)
        layout.coefficients_of(slot, layer, chunk * kChunk + t)[first + r] = __float2bfloat16_rn(sums[r][t]);
    }
  }
}

__global__ void count_pass_kernel(std::uint32_t* pass) { ++*pass; }

template <int kChunk>
void launch_commit(const ShadowLayout& layout, const StepView& view, const TransferList& write_back, cudaStream_t stream) {
  const std::size_t bytes = static_cast<std::size_t>(kChunk * layout.store.dim) * sizeof(float);
  const auto kernel = commit_kernel<kChunk>;
  allow_shared_memory(kernel, bytes, "commit_shadow: shared memory");
  const dim3 grid(static_cast<unsigned>((layout.rank + kBlockRanks - 1) / kBlockRanks), static_cast<unsigned>(layout.store.layers),
                  static_cast<unsigned>(view.sequences));
  kernel<<<grid, kThreads, bytes, stream>>>(layout, view, write_back);
  check_launch("commit_shadow");
}

/// Grid: (KV heads, places).
__global__ void __launch_bounds__(kThreads) empty_kernel(ShadowLayout layout, Layer layer, StepView view) {
  const int place = static_cast<int>(blockIdx.y);
  if (view.mode[place] == RowMode::idle) return;
  const std::size_t list = layout.store.list(view.slot_of[place], layer, static_cast<int>(blockIdx.x));
  const SlotTable table(layout.store, list);
  for (int s = static_cast<int>(threadIdx.x); s < table.slots; s += kThreads) {
    table.clear(s);
    table.used[s] = 0;
    layout.keys_of[list * static_cast<std::size_t>(table.slots) + static_cast<std::size_t>(s)] = -1;
  }
}

/// A block for each list of a sequence.
__global__ void __launch_bounds__(kThreads) forget_kernel(ShadowLayout layout, std::size_t first_list, int first_chunk) {
  const std::size_t list = first_list + blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int slots = layout.store.slots;
  int* const keys_of = layout.keys_of + list * static_cast<std::size_t>(slots);
  for (int s = thread; s < slots; s += kThreads) {
    if (keys_of[s] >= first_chunk) keys_of[s] = -1;
  }
  const int* const chunks = layout.outlier_chunks_of(list);
  std::uint32_t* const marks = layout.outlier_bits_of(list);
  const int count = layout.outlier_count[list];
  __syncthreads();  // all have read the count
  for (int number = thread; number < count; number += kThreads) {
    if (chunks[number] < first_chunk) continue;
    clear_bit(marks, chunks[number]);
    if (number == 0 || chunks[number - 1] < first_chunk) layout.outlier_count[list] = number;
  }
}

}  // namespace

void commit_shadow(const ShadowLayout& layout, const StepView& view, const TransferList& write_back, cudaStream_t stream) {
  check(cudaMemsetAsync(write_back.count, 0, sizeof(int), stream), "commit_shadow: cudaMemsetAsync");
  if (view.sequences > 0) {
    switch (layout.store.chunk) {
      case 4: launch_commit<4>(layout, view, write_back, stream); break;
      case 8: launch_commit<8>(layout, view, write_back, stream); break;
      case 16: launch_commit<16>(layout, view, write_back, stream); break;
      case 32: launch_commit<32>(layout, view, write_back, stream); break;
      default: dualdecoder::detail::require(false, "chunk_tokens", layout.store.chunk, "4, 8, 16 or 32 for the store shadow_kv");
    }
  }
  count_pass_kernel<<<1, 1, 0, stream>>>(layout.store.pass);
  check_launch("commit_shadow: pass");
}

void empty_slots(const ShadowLayout& layout, Layer layer, const StepView& view, cudaStream_t stream) {
  if (view.sequences == 0) return;
  empty_kernel<<<dim3(static_cast<unsigned>(layout.store.kv_heads), static_cast<unsigned>(view.sequences)), kThreads, 0, stream>>>(
      layout, layer, view);
  check_launch("empty_slots");
}

void forget_shadow(const ShadowLayout& layout, int slot, int first_chunk, cudaStream_t stream) {
  const auto lists = static_cast<unsigned>(layout.store.list(1, 0, 0));
  forget_kernel<<<lists, kThreads, 0, stream>>>(layout, layout.store.list(slot, 0, 0), first_chunk);
  check_launch("forget_shadow");
}

}  // namespace dualdecoder::cuda
