// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

/// Further to tensor_core.cuh, what only attention over stores takes.
namespace dualdecoder::cuda {

/// The shared memory of a block, as large as its launch asked for.
__device__ inline std::byte* block_memory() {
  extern __shared__ uint4 dualdecoder_block_memory[];
  return reinterpret_cast<std::byte*>(dualdecoder_block_memory);
}

/// Transposes an 8x8 matrix of 16-bit elements that lies in the registers of a warp, row l / 4, columns 2 * (l % 4) and the next in lane l.
__device__ inline std::uint32_t transposed(std::uint32_t pair) {
  std::uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

/// sum += a * b for a: 16x16, b: 16x8 in f16, subnormals included, and sums in f32.
__device__ inline void multiply_add_f16(float (&sum)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two floats as f16 in one word, the first in the low half.
__device__ inline std::uint32_t pack_f16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ inline float2 unpack_f16(std::uint32_t pair) { return __half22float2(reinterpret_cast<const __half2&>(pair)); }

/// The two bf16 of a word as floats.
__device__ inline float2 unpack_bf16(std::uint32_t pair) { return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U)}; }

}  // namespace dualdecoder::cuda
