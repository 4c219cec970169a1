// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/tensor_core.cuh"

/// Hopper's bulk copies into shared memory and the barriers that they arrive at; PTX ISA sections "cp.async.bulk" and "mbarrier". They
/// exist from compute capability 9.0 on; elsewhere these functions do nothing.
namespace dualdecoder::cuda {

/// Whether code for this architecture has them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DUALDECODER_BULK_COPIES 1
#endif

/// A barrier in shared memory whose phase ends when `arrivals` threads have arrived and all bytes that they announced are there.
__device__ inline void start_barrier(std::uint64_t* barrier, unsigned arrivals) {
#ifdef DUALDECODER_BULK_COPIES
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}
/// Shows started barriers to bulk copies; ahead of the block's barrier.
__device__ inline void show_barriers() {
#ifdef DUALDECODER_BULK_COPIES
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ inline void arrive(std::uint64_t* barrier) {
#ifdef DUALDECODER_BULK_COPIES
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}
/// Arrives, and makes the phase wait for so many bytes of copies as well.
__device__ inline void arrive_and_expect(std::uint64_t* barrier, unsigned bytes) {
#ifdef DUALDECODER_BULK_COPIES
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}
/// Waits until the phase of this parity has ended: 0 for the first.
__device__ inline void wait_for_phase(std::uint64_t* barrier, unsigned parity) {
#ifdef DUALDECODER_BULK_COPIES
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}
/// Copies `bytes` from global to shared memory; both addresses and the count are multiples of 16.
__device__ inline void copy_bulk(std::uint32_t target, const void* source, unsigned bytes, std::uint64_t* barrier) {
#ifdef DUALDECODER_BULK_COPIES
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target), "l"(source),
               "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}
/// Asks for `bytes` of global memory to be brought into L2; address and count as above.
__device__ inline void prefetch_bulk(const void* source, unsigned bytes) {
#ifdef DUALDECODER_BULK_COPIES
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
#endif
}

}  // namespace dualdecoder::cuda
