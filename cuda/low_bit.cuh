// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "cuda/low_bit.hpp"

namespace dualdecoder::cuda {

/// How codes of kBits become bf16 without arithmetic: as the highest bits of a mantissa, 1 + code / kStep.
template <int kBits>
struct CodeBits {
  static_assert(kBits == 1 || kBits == 2);
  static constexpr float kStep = kBits == 1 ? 2.0F : 4.0F;
  static constexpr int kPairs = 16 / kBits;  ///< of a word
  static constexpr std::uint32_t kMask = kBits == 1 ? 0x00400040U : 0x00600060U;

  /// Pair `pair` of a word as two bf16.
  __device__ static std::uint32_t widen(std::uint32_t word, int pair) {
    const int shift = kBits * pair - (7 - kBits);
    return ((shift < 0 ? word << -shift : word >> shift) & kMask) | 0x3F803F80U;
  }
};

/// The codes of a unit of 32 tokens that a lane of a warp has.
template <int kDim, int kBits>
struct UnitCodes {
  static constexpr int kWords = LowBitGroup::words(kDim, kBits);
  static constexpr int kVector = LowBitGroup::vector(kWords);
  std::uint32_t words[kWords];

  /// From a group's codes; what is read once needs no place in L1.
  __device__ void load(const std::byte* codes, int unit, int lane) {
    const auto* const from = reinterpret_cast<const std::uint32_t*>(codes) + unit * kWords * 32 + lane * kVector;
#pragma unroll
    for (int i = 0; i < kWords / kVector; ++i) {
      const std::uint32_t* const at = from + i * 32 * kVector;
      if constexpr (kVector == 4) {
        const uint4 four = __ldcs(reinterpret_cast<const uint4*>(at));
        words[i * 4] = four.x;
        words[i * 4 + 1] = four.y;
        words[i * 4 + 2] = four.z;
        words[i * 4 + 3] = four.w;
      } else if constexpr (kVector == 2) {
        const uint2 two = __ldcs(reinterpret_cast<const uint2*>(at));
        words[i * 2] = two.x;
        words[i * 2 + 1] = two.y;
      } else {
        words[i] = __ldcs(at);
      }
    }
  }
  /// The 16 x 16 elements j of one of the two tiles, as mma.m16n8k16 takes its first operand: 1 + code / kStep.
  __device__ void widen(int j, int tile, std::uint32_t (&fragment)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int pair = (j * 2 + tile) * 4 + r;
      fragment[r] = CodeBits<kBits>::widen(words[pair / CodeBits<kBits>::kPairs], pair % CodeBits<kBits>::kPairs);
    }
  }
};

/// Two neighbouring f16 of a group.
__device__ inline float2 load_halves(const std::byte* halves, int first) {
  return __half22float2(__ldg(reinterpret_cast<const __half2*>(reinterpret_cast<const __half*>(halves) + first)));
}

}  // namespace dualdecoder::cuda
