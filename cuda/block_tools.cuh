// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dualdecoder::cuda {

// What one block does together; every thread of the block calls these.

/// Sum of `value` over the threads before this one; `total` receives the sum over all. `warp_sums` is shared memory for one int a warp.
template <int kThreads>
__device__ int block_exclusive_sum(int value, int* warp_sums, int& total) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xFFFFFFFFU, sum, step);
    if (lane >= step) sum += before;
  }
  __syncthreads();  // warp_sums may still be read from the call before
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int prefix = lane < kWarps ? warp_sums[lane] : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xFFFFFFFFU, prefix, step);
    if (lane >= step) prefix += before;
  }
  total = __shfl_sync(0xFFFFFFFFU, prefix, kWarps - 1);
  const int before_warp = __shfl_sync(0xFFFFFFFFU, prefix, warp > 0 ? warp - 1 : 0);
  return (warp > 0 ? before_warp : 0) + sum - value;
}

/// Sorts keys[0 .. count) ascending; keys[count .. next power of two) is overwritten. Shared or global memory. What was written to it
/// before need not be visible yet; on return all of it is.
__device__ inline void block_sort(std::uint64_t* keys, int count) {
  int size = 1;
  while (size < count) size *= 2;
  for (int i = count + static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) keys[i] = ~std::uint64_t{0};
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += static_cast<int>(blockDim.x)) {
        const int low = 2 * i - (i & (step - 1));
        const int high = low + step;
        const std::uint64_t a = keys[low];
        const std::uint64_t b = keys[high];
        if ((a > b) == ((low & run) == 0)) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

/// Maps floats to integers of the same order; both zeros are equal.
__device__ inline std::uint32_t order_key(float value) {
  const std::uint32_t bits = __float_as_uint(value + 0.0F);
  return bits ^ ((bits >> 31) != 0 ? 0xFFFFFFFFU : 0x80000000U);
}

}  // namespace dualdecoder::cuda
