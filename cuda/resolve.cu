// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "cuda/block_tools.cuh"
#include "cuda/candidates.cuh"
#include "cuda/check.hpp"
#include "cuda/launch.hpp"
#include "cuda/resolve_tools.cuh"
#include "cuda/shared_memory.hpp"
#include "cuda/slot_table.cuh"
#include "cuda/store_kernels.hpp"
#include "cuda/summarise.cuh"

namespace dualdecoder::cuda {
namespace {

// -- needed ------------------------------------------------------------------------------------------------------------------------------

struct NeededMemory {
  VictimMemory victims;
  int missing[kVictimBatch];
  int hits;
  int predictable;
  int predicted_hits;
  int first_item;
};

/// One KV head of a storage slot.
struct NeededList {
  int storage;
  Layer layer;
  int kv_head;
  std::size_t slot_list;
};

/// The first of the needed chunks that are in no slot, at most kVictimBatch, ascending.
__device__ int list_missing(NeededMemory& memory, const SlotTable& table, const ChunkList& needed) {
  int found = 0;
  for (int first = 0; first < needed.count && found < kVictimBatch; first += kSlotThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const bool missing = i < needed.count && table.slot_of[needed.chunks[i]] < 0;
    int total;
    const int at = found + block_exclusive_sum<kSlotThreads>(missing ? 1 : 0, memory.victims.warp_sums, total);
    if (missing && at < kVictimBatch) memory.missing[at] = needed.chunks[i];
    found += total;
  }
  __syncthreads();
  return min(found, kVictimBatch);
}

/// Gives every missing chunk the least recently used slot outside the needed set, and an urgent load.
__device__ void load_missing(NeededMemory& memory, const StoreLayout& layout, const NeededList& at, const ChunkList& needed, int missing,
                             const TransferList& urgent, std::uint32_t now) {
  const int thread = static_cast<int>(threadIdx.x);
  const SlotTable table(layout, at.slot_list);
  while (missing > 0) {
    const int listed = list_missing(memory, table, needed);
    // a budget never exceeds the slots, so there is a victim for every miss
    const int count = min(listed, choose_victims(memory.victims, table, kPinned, listed));
    if (count == 0) break;
    if (thread == 0) memory.first_item = atomicAdd(urgent.count, count);
    __syncthreads();
    for (int i = thread; i < count; i += kSlotThreads) {
      const int slot = static_cast<int>(memory.victims.victims[i] & 0xFFFFFFFFU);
      table.place(slot, memory.missing[i], kPinned);
      urgent.items[memory.first_item + i] = {layout.host_chunk(at.storage, at.layer, at.kv_head, memory.missing[i]),
                                             layout.slot_data(at.slot_list, slot) + layout.load_offset, layout.loaded_bytes(), 1.0F};
    }
    missing -= count;
    __syncthreads();
  }
  for (int i = thread; i < needed.count; i += kSlotThreads) {
    const int slot = table.slot_of[needed.chunks[i]];
    if (slot >= 0) table.used[slot] = now;
  }
}

/// One block resolves row 0 of one place and KV head.
template <bool kCanWait>
__global__ void __launch_bounds__(kSlotThreads)
    needed_kernel(StoreLayout layout, Layer layer, StepView view, Selection by_row, TransferList urgent) {
  extern __shared__ std::uint32_t predicted_bits[];
  __shared__ NeededMemory memory;
  const int kv_head = static_cast<int>(blockIdx.x);
  const int place = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  if (!kCanWait && kv_head == 0 && place == 0 && thread == 0) *urgent.count = 0;
  const RowMode mode = view.mode[place];
  if (mode == RowMode::idle) return;
  const int storage = view.slot_of[place];
  const std::uint32_t pass = *layout.pass;
  const std::uint32_t run = pass * static_cast<std::uint32_t>(layout.layers) + static_cast<std::uint32_t>(layer);
  const std::uint32_t now = layout.swaps ? run : 2 * pass + 1;
  const std::size_t list = layout.list(storage, layer, kv_head);
  const std::size_t slot_list = layout.slot_list(storage, layer, kv_head, pass);
  const SlotTable table(layout, slot_list);
  const ChunkList needed = list_of(by_row, place * view.rows_per_sequence, kv_head);
  const bool waits = kCanWait && place_waits(layout, view, place);
  const int predicted = layout.predicted_count[list];
  const int predicted_limit = layout.predicted_limit[list];

  if (thread == 0) {
    memory.hits = 0;
    memory.predictable = 0;
    memory.predicted_hits = 0;
  }
  if (layout.swaps) {  // what a buffer was not loaded with for this run is of another layer
    for (int s = thread; s < table.slots; s += kSlotThreads) {
      if (table.used[s] != run) table.clear(s);
    }
  }
  if (!row_is_live(mode, 0)) return;  // a resync row needs nothing, but must not see another layer's chunks
  if (predicted >= 0) {
    for (int w = thread; w < bitmap_words(layout); w += kSlotThreads) predicted_bits[w] = 0;
    __syncthreads();
    const int* const chunks = layout.predicted + list * static_cast<std::size_t>(layout.selected);
    for (int i = thread; i < predicted; i += kSlotThreads) set_bit(predicted_bits, chunks[i]);
  }
  __syncthreads();

  int hits = 0;
  int predictable = 0;
  int predicted_hits = 0;
  for (int i = thread; i < needed.count; i += kSlotThreads) {
    const int chunk = needed.chunks[i];
    const int slot = table.slot_of[chunk];
    if (slot >= 0) {
      table.used[slot] = waits ? kPinned : now;
      ++hits;
    }
    if (predicted >= 0 && chunk < predicted_limit) {  // else it left the window since, and nobody had to predict it
      ++predictable;
      if (test_bit(predicted_bits, chunk)) ++predicted_hits;
    }
  }
  sum_into(&memory.hits, hits);
  sum_into(&memory.predictable, predictable);
  sum_into(&memory.predicted_hits, predicted_hits);
  __syncthreads();
  if (thread == 0) {
    add_to(layout, Counter::needed, static_cast<std::uint64_t>(needed.count));
    add_to(layout, Counter::resident_hit, static_cast<std::uint64_t>(memory.hits));
    add_to(layout, Counter::predictable, static_cast<std::uint64_t>(memory.predictable));
    add_to(layout, Counter::predicted_hit, static_cast<std::uint64_t>(memory.predicted_hits));
    if (waits) {
      add_to(layout, Counter::urgent_bytes, static_cast<std::uint64_t>(needed.count - memory.hits) * layout.loaded_bytes());
    } else {
      add_to(layout, Counter::estimated, static_cast<std::uint64_t>(needed.count - memory.hits));
    }
  }
  if constexpr (kCanWait) {
    if (waits) load_missing(memory, layout, {storage, layer, kv_head, slot_list}, needed, needed.count - memory.hits, urgent, now);
  }
}

// -- predicted ---------------------------------------------------------------------------------------------------------------------------

struct ListMemory {
  VictimMemory victims;
  std::uint64_t keys[kSortedInShared];
  int count;
};

/// Marks what is predicted and resident as used, remembers the prediction, lists what is to be loaded.
__global__ void __launch_bounds__(kSlotThreads) list_kernel(StoreLayout layout, Layer target, StepView view, Selection predicted,
                                                            Selection missed, CandidateLists lists, TransferList prefetch) {
  extern __shared__ std::uint32_t missed_bits[];
  __shared__ ListMemory memory;
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread == 0) *prefetch.count = 0;
  const std::uint32_t pass = *layout.pass;
  const std::uint32_t predicted_time = 2 * pass + 2;
  for (int item = static_cast<int>(blockIdx.x); item < view.sequences * layout.kv_heads; item += static_cast<int>(gridDim.x)) {
    const int place = item / layout.kv_heads;
    const int kv_head = item % layout.kv_heads;
    const RowMode mode = view.mode[place];
    if (mode == RowMode::idle) {
      if (thread == 0) lists.count[item] = 0;
      if (thread == 0) lists.placeable[item] = 0;
      continue;
    }
    const int storage = view.slot_of[place];
    const std::size_t list = layout.list(storage, target, kv_head);
    const SlotTable table(layout, layout.slot_list(storage, target, kv_head, pass));
    std::uint64_t* const keys = lists.room <= kSortedInShared ? memory.keys : lists.of(item);
    const bool takes_missed = missed.chunks != nullptr && row_is_live(mode, 0) && !place_waits(layout, view, place);
    ChunkList needed{};
    __syncthreads();  // the item before is done with shared memory
    if (thread == 0) memory.count = 0;
    for (int w = thread; w < bitmap_words(layout); w += kSlotThreads) missed_bits[w] = 0;
    __syncthreads();
    if (takes_missed) {
      needed = list_of(missed, place * view.rows_per_sequence, kv_head);
      for (int i = thread; i < needed.count; i += kSlotThreads) {
        if (table.slot_of[needed.chunks[i]] < 0) set_bit(missed_bits, needed.chunks[i]);
      }
      __syncthreads();
    }
    if (predicted.chunks != nullptr) {
      const ChunkList chosen = list_of(predicted, place, kv_head);
      const int count = min(chosen.count, layout.selected);
      int* const remembered = layout.predicted + list * static_cast<std::size_t>(layout.selected);
      for (int i = thread; i < count; i += kSlotThreads) {
        const int chunk = chosen.chunks[i];
        remembered[i] = chunk;
        const int slot = table.slot_of[chunk];
        if (slot >= 0) {
          table.used[slot] = predicted_time;
          continue;
        }
        const bool missed_too = takes_missed && clear_bit(missed_bits, chunk);
        keys[atomicAdd(&memory.count, 1)] = Candidate::make(false, chosen.scores[i], chunk, missed_too);
      }
      if (thread == 0) {
        layout.predicted_count[list] = count;
        layout.predicted_limit[list] = layout.range_end(view.position[place]);
      }
    }
    __syncthreads();
    for (int i = thread; i < needed.count; i += kSlotThreads) {
      const int chunk = needed.chunks[i];
      if (test_bit(missed_bits, chunk)) keys[atomicAdd(&memory.count, 1)] = Candidate::make(true, needed.scores[i], chunk, false);
    }
    __syncthreads();
    const int count = memory.count;
    int placeable = 0;
    if (count > 0) {
      block_sort(keys, count);
      if (keys == memory.keys) {
        for (int i = thread; i < count; i += kSlotThreads) lists.of(item)[i] = keys[i];
      }
      placeable = min(count, count_eligible(memory.victims, table, predicted_time));
    }
    if (thread == 0) lists.count[item] = count;
    if (thread == 0) lists.placeable[item] = placeable;
  }
}

struct PlaceMemory {
  VictimMemory victims;
  int sum;
  int first_item;
};

/// Gives the listed chunks slots and loads, the best of all within the bound.
__global__ void __launch_bounds__(kSlotThreads)
    place_kernel(StoreLayout layout, Layer target, StepView view, CandidateLists lists, TransferList prefetch) {
  __shared__ PlaceMemory memory;
  wait_for_earlier_kernels();
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint32_t pass = *layout.pass;
  const std::uint32_t predicted_time = 2 * pass + 2;
  for (int item = static_cast<int>(blockIdx.x); item < view.sequences * layout.kv_heads; item += static_cast<int>(gridDim.x)) {
    const int count = lists.count[item];
    if (count == 0) continue;
    const int kv_head = item % layout.kv_heads;
    const int storage = view.slot_of[item / layout.kv_heads];
    const std::size_t slot_list = layout.slot_list(storage, target, kv_head, pass);
    const SlotTable table(layout, slot_list);
    const std::uint64_t* const keys = lists.of(item);
    const int bound = layout.prefetch_chunks_per_layer;
    const int taken = bound > 0 ? count_within(&memory.sum, lists, view, layout.kv_heads, item, bound) : lists.placeable[item];
    for (int first = 0; first < taken; first += kVictimBatch) {
      const int victims = choose_victims(memory.victims, table, predicted_time, min(taken - first, kVictimBatch));
      if (thread == 0) memory.first_item = atomicAdd(prefetch.count, victims);
      __syncthreads();
      for (int i = thread; i < victims; i += kSlotThreads) {
        const int slot = static_cast<int>(memory.victims.victims[i] & 0xFFFFFFFFU);
        const std::uint64_t key = keys[first + i];
        const int chunk = Candidate::chunk(key);
        table.place(slot, chunk, predicted_time);
        prefetch.items[memory.first_item + i] = {layout.host_chunk(storage, target, kv_head, chunk),
                                                 layout.slot_data(slot_list, slot) + layout.load_offset, layout.loaded_bytes(),
                                                 Candidate::score(key)};
      }
      __syncthreads();
    }
    int dropped = 0;
    for (int i = taken + thread; i < count; i += kSlotThreads) dropped += 1 + Candidate::missed_too(keys[i]);
    dropped = block_sum(&memory.sum, dropped);
    if (thread == 0) {
      add_to(layout, Counter::prefetch_bytes, static_cast<std::uint64_t>(taken) * layout.loaded_bytes());
      add_to(layout, Counter::prefetch_dropped, static_cast<std::uint64_t>(dropped));
    }
  }
}

// -- commit ------------------------------------------------------------------------------------------------------------------------------

constexpr int kCommitThreads = 128;

/// The least recently used slot among those last used before `before`, as used << 32 | slot; all ones where there is none.
__device__ std::uint64_t oldest_slot(const SlotTable& table, std::uint32_t before, std::uint64_t* by_warp) {
  const int thread = static_cast<int>(threadIdx.x);
  std::uint64_t oldest = ~std::uint64_t{0};
  for (int s = thread; s < table.slots; s += kCommitThreads) {
    const std::uint32_t used = table.used[s];
    if (used < before) oldest = min(oldest, (std::uint64_t{used} << 32) | static_cast<std::uint64_t>(s));
  }
  for (int step = 16; step > 0; step /= 2) oldest = min(oldest, __shfl_xor_sync(kAllLanes, oldest, step));
  __syncthreads();
  if (thread % 32 == 0) by_warp[thread / 32] = oldest;
  __syncthreads();
  for (int w = 0; w < kCommitThreads / 32; ++w) oldest = min(oldest, by_warp[w]);
  return oldest;
}

/// One block commits one token of one list: a layer's KV head of a place.
__global__ void __launch_bounds__(kCommitThreads) commit_kernel(StoreLayout layout, StepView view, TransferList write_back) {
  __shared__ std::uint64_t by_warp[kCommitThreads / 32];
  const int place = static_cast<int>(blockIdx.y);
  const int layer = static_cast<int>(blockIdx.x) / layout.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % layout.kv_heads;
  const int thread = static_cast<int>(threadIdx.x);
  if (!row_is_live(view.mode[place], 0)) return;
  const int before = view.position[place];
  const int length = before + 1;
  const int storage = view.slot_of[place];
  const std::size_t list = layout.list(storage, layer, kv_head);

  if (length % layout.chunk == 0 && thread < kWarpLanes) {
    const int chunk = length / layout.chunk - 1;
    const std::byte* const data = layout.near_chunk(list, chunk);
    if (chunk < layout.max_chunks) {
      const auto near = [&](int j) { return layout.near_chunk(list, j); };
      summarise_keys(layout, list, chunk, keys_at(layout, near));
      summarise_values(layout, list, chunk, values_at(layout, near));
    }
    if (thread == 0) {
      write_back.items[atomicAdd(write_back.count, 1)] = {data, layout.host_chunk(storage, layer, kv_head, chunk), layout.chunk_bytes,
                                                          0.0F};
      add_to(layout, Counter::write_back_bytes, layout.chunk_bytes);
    }
  }
  if (layout.swaps) return;  // buffers that swap keep nothing
  const std::uint32_t predicted_time = 2 * *layout.pass + 2;
  const std::size_t slot_list = layout.slot_list(storage, layer, kv_head, 0);
  const SlotTable table(layout, slot_list);
  for (int chunk = layout.range_end(before); chunk < layout.range_end(length); ++chunk) {  // leaves the window
    const bool resident = table.slot_of[chunk] >= 0;
    const std::uint64_t oldest = oldest_slot(table, predicted_time, by_warp);
    if (resident || oldest == ~std::uint64_t{0}) continue;  // or every slot holds what the next step is expected to need
    const int slot = static_cast<int>(oldest & 0xFFFFFFFFU);
    __syncthreads();  // all have looked before the table changes
    if (thread == 0) table.place(slot, chunk, predicted_time);
    const auto* const from = reinterpret_cast<const uint4*>(layout.near_chunk(list, chunk));
    auto* const to = reinterpret_cast<uint4*>(layout.slot_data(slot_list, slot));
    for (std::uint32_t i = static_cast<std::uint32_t>(thread); i < layout.chunk_bytes / sizeof(uint4); i += kCommitThreads) to[i] = from[i];
    __syncthreads();
  }
}

__global__ void count_pass_kernel(std::uint32_t* pass) { ++*pass; }

}  // namespace

void resolve_needed(const StoreLayout& layout, Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent,
                    cudaStream_t stream) {
  const bool can_wait = layout.wait_policy || view.waits != nullptr;
  if (can_wait || view.sequences == 0) check(cudaMemsetAsync(urgent.count, 0, sizeof(int), stream), "resolve_needed: cudaMemsetAsync");
  if (view.sequences == 0) return;
  const dim3 grid(static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(view.sequences));
  const std::size_t bytes = static_cast<std::size_t>(bitmap_words(layout)) * sizeof(std::uint32_t);
  const auto kernel = can_wait ? needed_kernel<true> : needed_kernel<false>;
  allow_shared_memory(kernel, bytes, "resolve_needed: shared memory");
  kernel<<<grid, kSlotThreads, bytes, stream>>>(layout, layer, view, by_row, urgent);
  check_launch("resolve_needed");
}

std::size_t resolve_work_bytes(const StoreLayout& layout) {
  const std::size_t pending = layout.swaps ? layout.list(layout.max_sequences, 0, 0) * static_cast<std::size_t>(layout.selected) : 0;
  return CandidateLists::bytes(layout) + pending * sizeof(float);
}

void resolve_predicted(const StoreLayout& layout, Layer target, const StepView& view, const Selection& predicted, const Selection* missed,
                       const TransferList& prefetch, void* work, cudaStream_t stream) {
  const int items = view.sequences * layout.kv_heads;
  if (items == 0 || (predicted.chunks == nullptr && missed == nullptr)) {
    check(cudaMemsetAsync(prefetch.count, 0, sizeof(int), stream), "resolve_predicted: cudaMemsetAsync");
    return;
  }
  const CandidateLists lists(layout, work);
  const auto blocks = static_cast<unsigned>(std::min(items, kPredictBlocks));
  const std::size_t bytes = static_cast<std::size_t>(bitmap_words(layout)) * sizeof(std::uint32_t);
  allow_shared_memory(list_kernel, bytes, "resolve_predicted: shared memory");
  list_kernel<<<blocks, kSlotThreads, bytes, stream>>>(layout, target, view, predicted, missed != nullptr ? *missed : Selection{}, lists,
                                                       prefetch);
  check_launch("resolve_predicted: list");
  check(launch_overlapped(place_kernel, blocks, kSlotThreads, 0, stream, layout, target, view, lists, prefetch),
        "resolve_predicted: place");
}

void commit_rows(const StoreLayout& layout, const StepView& view, const TransferList& write_back, cudaStream_t stream) {
  check(cudaMemsetAsync(write_back.count, 0, sizeof(int), stream), "commit_rows: cudaMemsetAsync");
  if (view.sequences > 0) {
    const dim3 grid(static_cast<unsigned>(layout.layers * layout.kv_heads), static_cast<unsigned>(view.sequences));
    commit_kernel<<<grid, kCommitThreads, 0, stream>>>(layout, view, write_back);
    check_launch("commit_rows");
  }
  count_pass_kernel<<<1, 1, 0, stream>>>(layout.pass);
  check_launch("commit_rows: pass");
}

}  // namespace dualdecoder::cuda
