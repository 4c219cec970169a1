// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/tensor_core.cuh"

namespace dualdecoder::cuda {

/// As copy_bulk(), of what is read once: the first to leave L2, where other data is to stay.
__device__ inline void copy_bulk_once(std::uint32_t target, const void* source, unsigned bytes, std::uint64_t* barrier) {
#ifdef DUALDECODER_BULK_COPIES
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(target),
               "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
#endif
}

/// A warp's ring of kStages pieces of up to kBytes in shared memory, of which it works on one while the others arrive. Pieces are started
/// in the order in which they are waited for: one instruction of one lane each, or on devices before compute capability 9.0 copies of all
/// lanes, with a commit for each piece that is not there, too.
template <int kBytes, int kStages>
class WarpRing {
 public:
#ifdef DUALDECODER_BULK_COPIES
  static constexpr int kCommits = 0;  ///< of this thread that may be newer than a copy ahead of the first pieces
#else
  static constexpr int kCommits = kStages;
#endif

  /// `memory`: kStages * kBytes; `barriers`: kStages. Both of the warp; nothing was copied yet.
  __device__ WarpRing(std::byte* memory, std::uint64_t* barriers) : memory_(memory), barriers_(barriers) {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) start_barrier(barriers + stage, 1);
      show_barriers();
    }
    __syncwarp();
  }

  /// Starts the next piece, into `stage`, which all lanes are done with: `bytes` of it, a multiple of 16, or none.
  __device__ void start(int stage, const void* from, int bytes) {
#ifdef DUALDECODER_BULK_COPIES
    if (threadIdx.x % 32 != 0 || bytes <= 0) return;
    arrive_and_expect(barriers_ + stage, static_cast<unsigned>(bytes));
    copy_bulk_once(shared_address(memory_ + stage * kBytes), from, static_cast<unsigned>(bytes), barriers_ + stage);
#else
    for (int i = static_cast<int>(threadIdx.x) % 32 * 16; i < bytes; i += 512) {
      copy_async(shared_address(memory_ + stage * kBytes + i), static_cast<const std::byte*>(from) + i, true);
    }
    commit_copies();
#endif
  }
  /// Returns the piece in `stage` when it is there; `phase` counts the turns of the ring, and its parity matters.
  __device__ const std::byte* wait(int stage, std::uint32_t phase) {
#ifdef DUALDECODER_BULK_COPIES
    wait_for_phase(barriers_ + stage, phase & 1U);
#else
    wait_for_copies<kStages - 1>();
    __syncwarp();  // what other lanes copied is there too
#endif
    return memory_ + stage * kBytes;
  }

 private:
  std::byte* memory_;
  std::uint64_t* barriers_;
};

}  // namespace dualdecoder::cuda
