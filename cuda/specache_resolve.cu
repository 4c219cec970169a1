// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "cuda/block_tools.cuh"
#include "cuda/candidates.cuh"
#include "cuda/check.hpp"
#include "cuda/fragments.cuh"
#include "cuda/resolve_tools.cuh"
#include "cuda/shared_memory.hpp"
#include "cuda/slot_table.cuh"
#include "cuda/specache_layout.hpp"

namespace dualdecoder::cuda {
namespace {

/// Place of `value` among `count` ascending numbers, or -1.
__device__ int find(const int* sorted, int count, int value) {
  int low = 0;
  int high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (sorted[middle] < value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < count && sorted[low] == value ? low : -1;
}

/// The fetched tokens of a list as they were, in shared memory, and which of its slots are free.
struct HeldTokens {
  int* tokens;  // ascending
  int* slots;
  int* free;
  std::uint32_t* used;  // a bit for each slot
  int count;

  static std::size_t bytes(int selected) { return static_cast<std::size_t>(3 * selected + (selected + 31) / 32) * sizeof(int); }

  /// Called by the whole block, which synchronises before it looks.
  __device__ HeldTokens(const SpeCacheLayout& layout, std::size_t list) {
    const int room = layout.selected;
    tokens = reinterpret_cast<int*>(block_memory());
    slots = tokens + room;
    free = slots + room;
    used = reinterpret_cast<std::uint32_t*>(free + room);
    count = layout.fetched_count[list];
    const std::size_t first = list * static_cast<std::size_t>(room);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kSlotThreads) {
      tokens[i] = layout.fetched_token[first + static_cast<std::size_t>(i)];
      slots[i] = layout.fetched_slot[first + static_cast<std::size_t>(i)];
    }
    for (int i = static_cast<int>(threadIdx.x); i < (room + 31) / 32; i += kSlotThreads) used[i] = 0;
  }
  /// Slot of a token, or -1.
  __device__ int slot(int token) const {
    const int at = find(tokens, count, token);
    return at < 0 ? -1 : slots[at];
  }
};

/// Makes those of `count` ascending `wanted` tokens the fetched set of a list that are in it or for which `take(i)` holds. A new token gets
/// the first free slot: `load(i, slot, number)`, `number` counting the new ones. Called by the whole block.
template <class Take, class Load>
__device__ void replace_fetched(const SpeCacheLayout& layout, std::size_t list, const HeldTokens& held, const int* wanted, int count,
                                int* warp_sums, Take take, Load load) {
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  for (int i = thread; i < count; i += kSlotThreads) {
    const int slot = held.slot(wanted[i]);
    if (slot >= 0) set_bit(held.used, slot);
  }
  __syncthreads();
  int free = 0;
  for (int first = 0; first < layout.selected; first += kSlotThreads) {
    const int slot = first + thread;
    const bool is_free = slot < layout.selected && !test_bit(held.used, slot);
    int total;
    const int at = free + block_exclusive_sum<kSlotThreads>(is_free ? 1 : 0, warp_sums, total);
    if (is_free) held.free[at] = slot;
    free += total;
  }
  __syncthreads();
  int* const tokens = layout.fetched_token + list * static_cast<std::size_t>(layout.selected);
  int* const slots = layout.fetched_slot + list * static_cast<std::size_t>(layout.selected);
  int kept = 0;
  int fresh = 0;
  for (int first = 0; first < count; first += kSlotThreads) {
    const int i = first + thread;
    int slot = i < count ? held.slot(wanted[i]) : -1;
    const bool is_fresh = i < count && slot < 0 && take(i);
    const bool stays = slot >= 0 || is_fresh;
    int total;  // both counts are at most kSlotThreads
    const int before = block_exclusive_sum<kSlotThreads>((stays ? 1 : 0) | (is_fresh ? 1 << 16 : 0), warp_sums, total);
    if (is_fresh) {
      const int number = fresh + (before >> 16);
      slot = held.free[number];
      load(i, slot, number);
    }
    if (stays) {
      tokens[kept + (before & 0xFFFF)] = wanted[i];
      slots[kept + (before & 0xFFFF)] = slot;
    }
    kept += total & 0xFFFF;
    fresh += total >> 16;
  }
  if (thread == 0) layout.fetched_count[list] = kept;
}

struct NeededMemory {
  int hits;
  int predictable;
  int predicted_hits;
  int first_item;
  int warp_sums[kSlotThreads / 32];
};

/// One block for row 0 of one place and KV head. Grid: (KV heads, places).
__global__ void __launch_bounds__(kSlotThreads)
    needed_kernel(SpeCacheLayout layout, Layer layer, StepView view, Selection by_row, TransferList urgent) {
  __shared__ NeededMemory memory;
  const int kv_head = static_cast<int>(blockIdx.x);
  const int place = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  if (!row_is_live(view.mode[place], 0)) return;
  const int slot = view.slot_of[place];
  const std::size_t list = layout.list(slot, layer, kv_head);
  const ChunkList needed = list_of(by_row, place * view.rows_per_sequence, kv_head);
  const bool waits = place_waits(layout, view, place);
  if (thread == 0) {
    memory.hits = 0;
    memory.predictable = 0;
    memory.predicted_hits = 0;
  }
  const HeldTokens held(layout, list);
  const int* const predicted = layout.predicted + list * static_cast<std::size_t>(layout.selected);
  const int predicted_count = layout.predicted_count[list];
  const int limit = layout.predicted_limit[list];
  __syncthreads();
  int hits = 0;
  int predictable = 0;
  int predicted_hits = 0;
  for (int i = thread; i < needed.count; i += kSlotThreads) {
    const int token = needed.chunks[i];
    hits += held.slot(token) >= 0 ? 1 : 0;
    if (predicted_count < 0 || token >= limit) continue;  // left the window since, and nobody had to predict it
    ++predictable;
    predicted_hits += find(predicted, predicted_count, token) >= 0 ? 1 : 0;
  }
  sum_into(&memory.hits, hits);
  sum_into(&memory.predictable, predictable);
  sum_into(&memory.predicted_hits, predicted_hits);
  __syncthreads();
  const int missing = needed.count - memory.hits;
  if (thread == 0) {
    add_to(layout, Counter::needed, static_cast<std::uint64_t>(needed.count));
    add_to(layout, Counter::resident_hit, static_cast<std::uint64_t>(memory.hits));
    add_to(layout, Counter::predictable, static_cast<std::uint64_t>(memory.predictable));
    add_to(layout, Counter::predicted_hit, static_cast<std::uint64_t>(memory.predicted_hits));
    if (waits) {
      add_to(layout, Counter::urgent_bytes, static_cast<std::uint64_t>(missing) * layout.token_bytes);
      memory.first_item = atomicAdd(urgent.count, missing);
    } else {
      add_to(layout, Counter::estimated, static_cast<std::uint64_t>(missing));
    }
  }
  if (!waits) return;
  replace_fetched(
      layout, list, held, needed.chunks, needed.count, memory.warp_sums, [](int) { return true; },
      [&](int i, int to, int number) {
        urgent.items[memory.first_item + number] = {layout.host_token(slot, layer, kv_head, needed.chunks[i]),
                                                    layout.fetched_data(list, to), layout.token_bytes, 1.0F};
      });
}

/// What is predicted and not there, the best first. A block takes several places and KV heads.
__global__ void __launch_bounds__(kSlotThreads)
    list_kernel(SpeCacheLayout layout, Layer target, StepView view, Selection predicted, CandidateLists lists, TransferList prefetch) {
  __shared__ std::uint64_t sorted[kSortedInShared];
  __shared__ int missing;
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread == 0) *prefetch.count = 0;
  for (int item = static_cast<int>(blockIdx.x); item < view.sequences * layout.kv_heads; item += static_cast<int>(gridDim.x)) {
    const int place = item / layout.kv_heads;
    const int kv_head = item % layout.kv_heads;
    __syncthreads();  // the item before is done with shared memory
    if (view.mode[place] == RowMode::idle) {
      if (thread == 0) lists.count[item] = lists.placeable[item] = 0;
      continue;
    }
    const std::size_t list = layout.list(view.slot_of[place], target, kv_head);
    const HeldTokens held(layout, list);
    const ChunkList chosen = list_of(predicted, place, kv_head);
    const int count = min(chosen.count, layout.selected);
    int* const remembered = layout.predicted + list * static_cast<std::size_t>(layout.selected);
    std::uint64_t* const keys = lists.room <= kSortedInShared ? sorted : lists.of(item);
    if (thread == 0) missing = 0;
    __syncthreads();
    for (int i = thread; i < count; i += kSlotThreads) {
      const int token = chosen.chunks[i];
      remembered[i] = token;
      if (held.slot(token) < 0) keys[atomicAdd(&missing, 1)] = Candidate::make(false, chosen.scores[i], token, false);
    }
    __syncthreads();
    const int listed = missing;
    if (listed > 0) block_sort(keys, listed);
    if (keys == sorted) {
      for (int i = thread; i < listed; i += kSlotThreads) lists.of(item)[i] = keys[i];
    }
    if (thread == 0) {
      layout.predicted_count[list] = count;
      layout.predicted_limit[list] = layout.copied(view.position[place]);
      lists.count[item] = lists.placeable[item] = listed;  // there is a slot for each, as what was not predicted goes
    }
  }
}

struct PlaceMemory {
  int sum;
  int first_item;
  int warp_sums[kSlotThreads / 32];
};

/// Makes the predicted tokens the fetched set: what is there stays, of what is not the best within the bound are loaded.
__global__ void __launch_bounds__(kSlotThreads)
    place_kernel(SpeCacheLayout layout, Layer target, StepView view, Selection predicted, CandidateLists lists, TransferList prefetch) {
  __shared__ PlaceMemory memory;
  const int thread = static_cast<int>(threadIdx.x);
  for (int item = static_cast<int>(blockIdx.x); item < view.sequences * layout.kv_heads; item += static_cast<int>(gridDim.x)) {
    const int place = item / layout.kv_heads;
    const int kv_head = item % layout.kv_heads;
    if (view.mode[place] == RowMode::idle) continue;
    const int slot = view.slot_of[place];
    const std::size_t list = layout.list(slot, target, kv_head);
    __syncthreads();  // the item before is done with shared memory
    const HeldTokens held(layout, list);
    const std::uint64_t* const keys = lists.of(item);
    const int count = lists.count[item];
    const int bound = layout.prefetch_tokens_per_layer;
    const int taken = bound >= 0 ? count_within(&memory.sum, lists, view, layout.kv_heads, item, bound) : count;
    if (thread == 0) memory.first_item = atomicAdd(prefetch.count, taken);
    const ChunkList chosen = list_of(predicted, place, kv_head);
    const auto key_of = [&](int i) { return Candidate::make(false, chosen.scores[i], chosen.chunks[i], false); };
    replace_fetched(
        layout, list, held, chosen.chunks, min(chosen.count, layout.selected), memory.warp_sums,
        [&](int i) { return taken > 0 && key_of(i) <= keys[taken - 1]; },
        [&](int i, int to, int) {
          const std::uint64_t key = key_of(i);
          int rank = 0;  // of the key among those taken
          for (int high = taken; rank < high;) {
            const int middle = (rank + high) / 2;
            if (keys[middle] < key) {
              rank = middle + 1;
            } else {
              high = middle;
            }
          }
          prefetch.items[memory.first_item + rank] = {layout.host_token(slot, target, kv_head, chosen.chunks[i]),
                                                      layout.fetched_data(list, to), layout.token_bytes, chosen.scores[i]};
        });
    if (thread == 0) {
      add_to(layout, Counter::prefetch_bytes, static_cast<std::uint64_t>(taken) * layout.token_bytes);
      add_to(layout, Counter::prefetch_dropped, static_cast<std::uint64_t>(count - taken));
    }
  }
}

}  // namespace

std::size_t fetch_work_bytes(const SpeCacheLayout& layout) { return CandidateLists::bytes(layout); }

void fetch_needed(const SpeCacheLayout& layout, Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent,
                  cudaStream_t stream) {
  check(cudaMemsetAsync(urgent.count, 0, sizeof(int), stream), "fetch_needed: cudaMemsetAsync");
  if (view.sequences == 0 || layout.selected == 0) return;
  const dim3 grid(static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(view.sequences));
  const std::size_t bytes = HeldTokens::bytes(layout.selected);
  allow_shared_memory(needed_kernel, bytes, "fetch_needed: shared memory");
  needed_kernel<<<grid, kSlotThreads, bytes, stream>>>(layout, layer, view, by_row, urgent);
  check_launch("fetch_needed");
}

void fetch_predicted(const SpeCacheLayout& layout, Layer target, const StepView& view, const Selection& predicted,
                     const TransferList& prefetch, void* work, cudaStream_t stream) {
  const int items = view.sequences * layout.kv_heads;
  if (items == 0 || predicted.chunks == nullptr || layout.selected == 0) {
    check(cudaMemsetAsync(prefetch.count, 0, sizeof(int), stream), "fetch_predicted: cudaMemsetAsync");
    return;
  }
  const CandidateLists lists(layout, work);
  const auto blocks = static_cast<unsigned>(std::min(items, kPredictBlocks));
  const std::size_t bytes = HeldTokens::bytes(layout.selected);
  allow_shared_memory(list_kernel, bytes, "fetch_predicted: shared memory");
  allow_shared_memory(place_kernel, bytes, "fetch_predicted: shared memory");
  list_kernel<<<blocks, kSlotThreads, bytes, stream>>>(layout, target, view, predicted, lists, prefetch);
  check_launch("fetch_predicted: list");
  place_kernel<<<blocks, kSlotThreads, bytes, stream>>>(layout, target, view, predicted, lists, prefetch);
  check_launch("fetch_predicted: place");
}

}  // namespace dualdecoder::cuda
