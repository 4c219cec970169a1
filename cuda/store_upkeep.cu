// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/store_upkeep.hpp"

#include <cuda_bf16.h>

#include <algorithm>

#include "cuda/check.hpp"
#include "cuda/launch.hpp"
#include "cuda/summarise.cuh"

namespace dualdecoder::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void set_value(T* table, int slot, T value) {
  table[slot] = value;
}

__global__ void clear_kernel(int* counts, std::size_t size) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  const std::size_t at = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  if (at < size) counts[at] = 0;
}

/// A block for each slot list of a storage slot.
__global__ void forget_in_slots(StoreLayout layout, std::size_t first_list, int first_chunk) {
  const std::size_t list = first_list + blockIdx.x;
  int* const slot_of = layout.slot_of + list * static_cast<std::size_t>(layout.max_chunks);
  int* const chunk_of = layout.chunk_of + list * static_cast<std::size_t>(layout.slots);
  std::uint32_t* const used = layout.used + list * static_cast<std::size_t>(layout.slots);
  for (int s = static_cast<int>(threadIdx.x); s < layout.slots; s += static_cast<int>(blockDim.x)) {
    const int chunk = chunk_of[s];
    if (chunk < 0 || chunk < first_chunk) continue;
    slot_of[chunk] = -1;
    chunk_of[s] = -1;
    used[s] = 0;
  }
}

/// A block for each chunk of the window and list of a storage slot; chunks from `first` up to `end` were not in the window.
__global__ void copy_to_window(StoreLayout layout, int slot, int first, int end) {
  const int j = first + static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int layer = head / layout.kv_heads;
  const int kv_head = head % layout.kv_heads;
  if (j >= end) return;
  const auto* const from = reinterpret_cast<const uint4*>(layout.host_chunk(slot, layer, kv_head, j));
  auto* const to = reinterpret_cast<uint4*>(layout.near_chunk(layout.list(slot, layer, kv_head), j));
  for (unsigned i = threadIdx.x; i < layout.chunk_bytes / sizeof(uint4); i += blockDim.x) to[i] = from[i];
}

/// A warp for each list of a storage slot.
__global__ void summarise_cut_group(StoreLayout layout, int slot, int last) {
  const int layer = static_cast<int>(blockIdx.x) / layout.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % layout.kv_heads;
  summarise_values(layout, layout.list(slot, layer, kv_head), last,
                   values_at(layout, [&](int j) { return layout.host_chunk(slot, layer, kv_head, j); }));
}

__global__ void count_rows(int* lengths, StepView view) {
  for (int place = static_cast<int>(threadIdx.x); place < view.sequences; place += static_cast<int>(blockDim.x)) {
    if (row_is_live(view.mode[place], 0)) lengths[view.slot_of[place]] = view.position[place] + 1;
  }
}

__global__ void copy_rows(RowsIn source, std::size_t width, float* ring, int ring_rows, int at) {
  const std::size_t row = blockIdx.x;
  float* const to = ring + (static_cast<std::size_t>(at) + row) % static_cast<std::size_t>(ring_rows) * width;
  for (std::size_t i = threadIdx.x; i < width; i += blockDim.x) {
    to[i] = source.bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(source.data)[row * width + i])
                        : static_cast<const float*>(source.data)[row * width + i];
  }
}

std::size_t slot_lists(const StoreLayout& layout, int sequences) {
  return static_cast<std::size_t>(sequences) * static_cast<std::size_t>(layout.slot_layers) * static_cast<std::size_t>(layout.kv_heads);
}

void set_bytes(void* memory, int byte, std::size_t bytes, cudaStream_t stream) {
  check(cudaMemsetAsync(memory, byte, bytes, stream), "cudaMemsetAsync");
}

}  // namespace

void clear_counts(int* counts, std::size_t size, cudaStream_t stream) {
  if (size == 0) return;
  const auto blocks = static_cast<unsigned>((size + kThreads - 1) / kThreads);
  check(launch_overlapped(clear_kernel, dim3(blocks), dim3(kThreads), 0, stream, counts, size), "clear_counts");
}

void set_entry(int* table, int slot, int value, cudaStream_t stream) {
  set_value<<<1, 1, 0, stream>>>(table, slot, value);
  check_launch("set_entry");
}

void set_entry(std::byte** table, int slot, std::byte* value, cudaStream_t stream) {
  set_value<<<1, 1, 0, stream>>>(table, slot, value);
  check_launch("set_entry");
}

void clear_store(const StoreLayout& layout, cudaStream_t stream) {
  constexpr int kMinusOne = 0xFF;  // in every byte of an int
  const std::size_t lists = slot_lists(layout, layout.max_sequences);
  set_bytes(layout.slot_of, kMinusOne, lists * static_cast<std::size_t>(layout.max_chunks) * sizeof(int), stream);
  set_bytes(layout.chunk_of, kMinusOne, lists * static_cast<std::size_t>(layout.slots) * sizeof(int), stream);
  set_bytes(layout.used, 0, lists * static_cast<std::size_t>(layout.slots) * sizeof(std::uint32_t), stream);
  set_bytes(layout.predicted_count, kMinusOne, layout.list(layout.max_sequences, 0, 0) * sizeof(int), stream);
  set_bytes(layout.counters, 0, static_cast<std::size_t>(Counter::count) * sizeof(std::uint64_t), stream);
  set_value<<<1, 1, 0, stream>>>(layout.pass, 0, std::uint32_t{1});
  check_launch("clear_store");
}

void forget_chunks(const StoreLayout& layout, int slot, int first_chunk, cudaStream_t stream) {
  const std::size_t first_list = slot_lists(layout, slot);
  const std::size_t lists = slot_lists(layout, 1);
  forget_in_slots<<<static_cast<unsigned>(lists), kThreads, 0, stream>>>(layout, first_list, first_chunk);
  check_launch("forget_chunks");
  const std::size_t predictions = layout.list(1, 0, 0);
  set_bytes(layout.predicted_count + layout.list(slot, 0, 0), 0xFF, predictions * sizeof(int), stream);
}

void restore_window(const StoreLayout& layout, int slot, int tokens, int before, cudaStream_t stream) {
  const int whole = tokens / layout.chunk;
  const int cut_group = whole - whole % layout.value_group;  // its first chunk; commit_rows finds its values in the window
  const int first = std::max(layout.sink_chunks, std::min(layout.range_end(tokens), cut_group));
  const int last = (tokens - 1) / layout.chunk;
  const int end = std::min({last + 1, layout.range_end(before), before / layout.chunk});
  if (end <= first) return;
  const dim3 grid(static_cast<unsigned>(end - first), static_cast<unsigned>(layout.layers * layout.kv_heads));
  copy_to_window<<<grid, kThreads / 2, 0, stream>>>(layout, slot, first, end);
  check_launch("restore_window");
}

void restore_value_group(const StoreLayout& layout, int slot, int tokens, cudaStream_t stream) {
  const int whole = tokens / layout.chunk;
  if (whole % layout.value_group == 0) return;
  summarise_cut_group<<<static_cast<unsigned>(layout.layers * layout.kv_heads), kWarpLanes, 0, stream>>>(layout, slot, whole - 1);
  check_launch("restore_value_group");
}

void count_committed(int* lengths, const StepView& view, cudaStream_t stream) {
  count_rows<<<1, kThreads, 0, stream>>>(lengths, view);
  check_launch("count_committed");
}

void keep_rows(RowsIn source, int rows, std::size_t width, float* ring, int ring_rows, int at, cudaStream_t stream) {
  if (rows <= 0) return;
  copy_rows<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(source, width, ring, ring_rows, at);
  check_launch("keep_rows");
}

}  // namespace dualdecoder::cuda
