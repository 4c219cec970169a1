// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "cuda/block_tools.cuh"
#include "cuda/candidates.cuh"
#include "cuda/check.hpp"
#include "cuda/resolve_tools.cuh"
#include "cuda/slot_table.cuh"
#include "cuda/store_kernels.hpp"

namespace dualdecoder::cuda {
namespace {

struct ListMemory {
  std::uint64_t keys[kSortedInShared];
};

/// Remembers the prediction for layer `of`, empties the buffer of the run that `ahead` names and lists what it is to be loaded with.
__global__ void __launch_bounds__(kSlotThreads)
    list_buffer_kernel(StoreLayout layout, Layer of, Layer ahead, StepView view, Selection predicted, CandidateLists lists,
                       float* pending_scores, TransferList prefetch) {
  __shared__ ListMemory memory;
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread == 0) *prefetch.count = 0;
  const std::uint32_t pass = *layout.pass;
  for (int item = static_cast<int>(blockIdx.x); item < view.sequences * layout.kv_heads; item += static_cast<int>(gridDim.x)) {
    const int place = item / layout.kv_heads;
    const int kv_head = item % layout.kv_heads;
    int count = 0;
    if (view.mode[place] != RowMode::idle) {
      const int storage = view.slot_of[place];
      if (predicted.chunks != nullptr) {
        const ChunkList chosen = list_of(predicted, place, kv_head);
        const std::size_t list = layout.list(storage, of, kv_head);
        const std::size_t first = list * static_cast<std::size_t>(layout.selected);
        const int kept = min(chosen.count, layout.selected);
        for (int i = thread; i < kept; i += kSlotThreads) {
          layout.predicted[first + static_cast<std::size_t>(i)] = chosen.chunks[i];
          pending_scores[first + static_cast<std::size_t>(i)] = chosen.scores[i];
        }
        if (thread == 0) {
          layout.predicted_count[list] = kept;
          layout.predicted_limit[list] = layout.range_end(view.position[place]);
        }
      }
      const SlotTable table(layout, layout.slot_list(storage, ahead, kv_head, pass));
      for (int s = thread; s < table.slots; s += kSlotThreads) table.clear(s);
      __syncthreads();
      const std::size_t list = layout.list(storage, ahead % layout.layers, kv_head);
      const std::size_t first = list * static_cast<std::size_t>(layout.selected);
      count = max(layout.predicted_count[list], 0);
      std::uint64_t* const keys = lists.room <= kSortedInShared ? memory.keys : lists.of(item);
      for (int i = thread; i < count; i += kSlotThreads) {
        keys[i] = Candidate::make(false, pending_scores[first + static_cast<std::size_t>(i)],
                                  layout.predicted[first + static_cast<std::size_t>(i)], false);
      }
      block_sort(keys, count);
      if (keys == memory.keys) {
        for (int i = thread; i < count; i += kSlotThreads) lists.of(item)[i] = keys[i];
      }
      __syncthreads();  // before the next item's keys
    }
    if (thread == 0) lists.count[item] = count;
    if (thread == 0) lists.placeable[item] = min(count, layout.slots);
  }
}

/// Gives the listed chunks slots of the empty buffer and loads, the best of all within the bound.
__global__ void __launch_bounds__(kSlotThreads)
    fill_buffer_kernel(StoreLayout layout, Layer ahead, StepView view, CandidateLists lists, TransferList prefetch) {
  __shared__ int sum;
  __shared__ int first_item;
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint32_t pass = *layout.pass;
  const std::uint32_t run = pass * static_cast<std::uint32_t>(layout.layers) + static_cast<std::uint32_t>(ahead);
  for (int item = static_cast<int>(blockIdx.x); item < view.sequences * layout.kv_heads; item += static_cast<int>(gridDim.x)) {
    const int count = lists.count[item];
    if (count == 0) continue;
    const int kv_head = item % layout.kv_heads;
    const int storage = view.slot_of[item / layout.kv_heads];
    const std::size_t slot_list = layout.slot_list(storage, ahead, kv_head, pass);
    const SlotTable table(layout, slot_list);
    const std::uint64_t* const keys = lists.of(item);
    const int bound = layout.prefetch_chunks_per_layer;
    const int taken = bound > 0 ? count_within(&sum, lists, view, layout.kv_heads, item, bound) : lists.placeable[item];
    if (thread == 0) {
      first_item = atomicAdd(prefetch.count, taken);
      add_to(layout, Counter::prefetch_bytes, static_cast<std::uint64_t>(taken) * layout.chunk_bytes);
      add_to(layout, Counter::prefetch_dropped, static_cast<std::uint64_t>(count - taken));
    }
    __syncthreads();
    for (int i = thread; i < taken; i += kSlotThreads) {
      const int chunk = Candidate::chunk(keys[i]);
      table.place(i, chunk, run);
      prefetch.items[first_item + i] = {layout.host_chunk(storage, ahead % layout.layers, kv_head, chunk), layout.slot_data(slot_list, i),
                                        layout.chunk_bytes, Candidate::score(keys[i])};
    }
    __syncthreads();
  }
}

}  // namespace

void load_buffer(const StoreLayout& layout, Layer of, Layer ahead, const StepView& view, const Selection& predicted,
                 const TransferList& prefetch, void* work, cudaStream_t stream) {
  const int items = view.sequences * layout.kv_heads;
  if (items == 0) {
    check(cudaMemsetAsync(prefetch.count, 0, sizeof(int), stream), "load_buffer: cudaMemsetAsync");
    return;
  }
  const CandidateLists lists(layout, work);
  auto* const pending_scores = reinterpret_cast<float*>(static_cast<std::byte*>(work) + CandidateLists::bytes(layout));
  const auto blocks = static_cast<unsigned>(std::min(items, kPredictBlocks));
  list_buffer_kernel<<<blocks, kSlotThreads, 0, stream>>>(layout, of, ahead, view, predicted, lists, pending_scores, prefetch);
  check_launch("load_buffer: list");
  fill_buffer_kernel<<<blocks, kSlotThreads, 0, stream>>>(layout, ahead, view, lists, prefetch);
  check_launch("load_buffer: fill");
}

}  // namespace dualdecoder::cuda
