// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/block_tools.cuh"
#include "cuda/store_layout.hpp"

namespace dualdecoder::cuda {

inline constexpr int kSlotThreads = 256;               ///< of a block that works on one slot list
inline constexpr int kVictimBatch = 1024;              ///< victims that are chosen at a time
inline constexpr std::uint32_t kPinned = 0xFFFFFFFFU;  ///< time of last use of what must stay

/// The slots of one KV head.
struct SlotTable {
  int* slot_of;         ///< [max_chunks] -1: in none
  int* chunk_of;        ///< [slots] -1: empty
  std::uint32_t* used;  ///< [slots]
  int slots;

  __device__ SlotTable(const StoreLayout& layout, std::size_t slot_list)
      : slot_of(layout.slot_of + slot_list * static_cast<std::size_t>(layout.max_chunks)),
        chunk_of(layout.chunk_of + slot_list * static_cast<std::size_t>(layout.slots)),
        used(layout.used + slot_list * static_cast<std::size_t>(layout.slots)),
        slots(layout.slots) {}
  __device__ void place(int slot, int chunk, std::uint32_t time) const {
    if (chunk_of[slot] >= 0) slot_of[chunk_of[slot]] = -1;
    chunk_of[slot] = chunk;
    slot_of[chunk] = slot;
    used[slot] = time;
  }
  __device__ void clear(int slot) const {
    if (chunk_of[slot] >= 0) slot_of[chunk_of[slot]] = -1;
    chunk_of[slot] = -1;
  }
};

struct VictimMemory {
  std::uint64_t victims[kVictimBatch];  ///< used << 32 | slot
  int histogram[kSlotThreads];
  int warp_sums[kSlotThreads / 32];
  std::uint32_t earliest;
  std::uint32_t latest;
  int eligible;
  int count;
  int digit;
  int before_digit;
};

__device__ inline int bits_of(std::uint32_t value) { return 32 - __clz(static_cast<int>(value)); }

/// Counts the slots last used before `before` and finds their earliest and latest use. By a block of kSlotThreads.
__device__ inline int count_eligible(VictimMemory& memory, const SlotTable& table, std::uint32_t before) {
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();  // the result of the call before is read by now
  if (thread == 0) {
    memory.earliest = kPinned;
    memory.latest = 0;
    memory.eligible = 0;
  }
  __syncthreads();
  std::uint32_t earliest = kPinned;
  std::uint32_t latest = 0;
  int eligible = 0;
  for (int s = thread; s < table.slots; s += kSlotThreads) {
    const std::uint32_t used = table.used[s];
    if (used >= before) continue;
    earliest = min(earliest, used);
    latest = max(latest, used);
    ++eligible;
  }
  earliest = __reduce_min_sync(0xFFFFFFFFU, earliest);
  latest = __reduce_max_sync(0xFFFFFFFFU, latest);
  eligible = __reduce_add_sync(0xFFFFFFFFU, eligible);
  if (thread % 32 == 0 && eligible > 0) {
    atomicMin(&memory.earliest, earliest);
    atomicMax(&memory.latest, latest);
    atomicAdd(&memory.eligible, eligible);
  }
  __syncthreads();
  return memory.eligible;
}

/// Leaves in memory.victims the `wanted` <= kVictimBatch least recently used slots among those last used before `before`, the least recent
/// first, among equals the lower slot; returns how many there are. By a block of kSlotThreads.
__device__ inline int choose_victims(VictimMemory& memory, const SlotTable& table, std::uint32_t before, int wanted) {
  const int thread = static_cast<int>(threadIdx.x);
  const int eligible = count_eligible(memory, table, before);
  if (eligible == 0 || wanted <= 0) return 0;
  const std::uint32_t earliest = memory.earliest;
  const int slot_bits = bits_of(static_cast<std::uint32_t>(table.slots - 1));
  // (use, slot) in as few bits as it takes: no two are equal, so a threshold takes exactly as many as are wanted
  const auto key_of = [&](int slot, std::uint32_t used) {
    return (std::uint64_t{used - earliest} << slot_bits) | static_cast<std::uint64_t>(slot);
  };
  int shift = bits_of(memory.latest - earliest) + slot_bits;
  std::uint64_t prefix = 0;  // the wanted ones have at most this above `shift`
  if (eligible > wanted) {
    for (int left = wanted;;) {
      const int width = min(8, shift);
      shift -= width;
      memory.histogram[thread] = 0;
      __syncthreads();
      for (int s = thread; s < table.slots; s += kSlotThreads) {
        const std::uint32_t used = table.used[s];
        if (used >= before) continue;
        const std::uint64_t key = key_of(s, used) >> shift;
        if ((key >> width) == prefix) atomicAdd(&memory.histogram[key & ((1U << width) - 1U)], 1);
      }
      __syncthreads();
      const int count = memory.histogram[thread];
      int total;
      const int before_digit = block_exclusive_sum<kSlotThreads>(count, memory.warp_sums, total);
      if (before_digit < left && left <= before_digit + count) {
        memory.digit = thread;
        memory.before_digit = before_digit;
      }
      __syncthreads();
      prefix = (prefix << width) | static_cast<std::uint64_t>(memory.digit);
      left -= memory.before_digit;
      if (memory.histogram[memory.digit] == left) break;  // at shift 0 at the latest
      __syncthreads();                                    // all have read before the next digit
    }
  }
  if (thread == 0) memory.count = 0;
  __syncthreads();
  for (int s = thread; s < table.slots; s += kSlotThreads) {
    const std::uint32_t used = table.used[s];
    if (used >= before || (key_of(s, used) >> shift) > prefix) continue;
    memory.victims[atomicAdd(&memory.count, 1)] = (std::uint64_t{used} << 32) | static_cast<std::uint64_t>(s);
  }
  __syncthreads();
  const int count = memory.count;
  block_sort(memory.victims, count);
  return count;
}

}  // namespace dualdecoder::cuda
