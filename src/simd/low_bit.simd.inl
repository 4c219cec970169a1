// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>

#include "src/simd/low_bit_simd.hpp"

namespace dualdecoder::cpu::DUALDECODER_SIMD_NAMESPACE {
namespace {

#include "src/simd/vector.inl"

constexpr std::size_t kMaxDim = 512;
constexpr std::size_t kMaxScales = 64 * 16;  // of values: tokens times groups of 32 channels

/// Binary16 in the low halves of the lanes. The product moves the exponent to binary32's bias and makes subnormals right as well.
inline __attribute__((always_inline)) Vector from_half(BitVector half) {
  const Vector magnitude = (Vector)((half & 0x7FFFU) << 13) * 0x1p112F;
  return (Vector)((BitVector)magnitude | ((half & 0x8000U) << 16));
}

void widen_halves(const std::byte* from, std::size_t count, float* out) {
  const auto* halves = reinterpret_cast<const std::uint16_t*>(from);
  const std::size_t whole = count / kStep * kStep;
  for (std::size_t i = 0; i < whole; i += kStep) store(out + i, from_half((BitVector)load(halves + i) >> 16));
  for (std::size_t i = whole; i < count; ++i) out[i] = from_half(BitVector{} + halves[i])[0];
}

/// Codes first .. first + kLanes - 1 of a row; `first` is a multiple of kLanes.
template <int Bits>
inline __attribute__((always_inline)) Vector codes(const std::uint8_t* row, std::size_t first) {
  constexpr int kWidth = kLanes * Bits;  // 4 .. 32 bits
  const std::uint8_t* at = row + first * Bits / 8;
  std::uint32_t word = 0;
  if constexpr (kWidth >= 8) {
    __builtin_memcpy(&word, at, kWidth / 8);
  } else {
    word = static_cast<std::uint32_t>(*at) >> (first * Bits % 8);
  }
  BitVector shift;
  for (int l = 0; l < kLanes; ++l) shift[l] = static_cast<std::uint32_t>(l * Bits);
  return __builtin_convertvector((IntVector)(((BitVector{} + word) >> shift) & ((1U << Bits) - 1U)), Vector);
}

template <int Bits>
inline __attribute__((always_inline)) float code(const std::uint8_t* row, std::size_t i) {
  return static_cast<float>(static_cast<std::uint32_t>(row[i * Bits / 8]) >> (i * Bits % 8) & ((1U << Bits) - 1U));
}

template <int Bits>
void keys_of(const std::byte* data, const LowBitLayout& layout, float* out) {
  float zeros[kMaxDim];
  float scales[kMaxDim];
  widen_halves(data + layout.key_zeros, layout.dim, zeros);
  widen_halves(data + layout.key_scales, layout.dim, scales);
  const auto* rows = reinterpret_cast<const std::uint8_t*>(data);
  const std::size_t whole = layout.dim / kStep * kStep;
  for (std::size_t d = 0; d < whole; d += kStep) {
    const Vector zero = load(zeros + d);
    const Vector scale = load(scales + d);
    for (std::size_t t = 0; t < layout.tokens; ++t) {
      store(out + t * layout.dim + d, zero + scale * codes<Bits>(rows + t * layout.row_bytes, d));
    }
  }
  for (std::size_t d = whole; d < layout.dim; ++d) {
    for (std::size_t t = 0; t < layout.tokens; ++t) {
      out[t * layout.dim + d] = zeros[d] + scales[d] * code<Bits>(rows + t * layout.row_bytes, d);
    }
  }
}

template <int Bits>
void values_of(const std::byte* data, const LowBitLayout& layout, float* out) {
  float zeros[kMaxScales];
  float scales[kMaxScales];
  widen_halves(data + layout.value_zeros, layout.tokens * layout.value_groups, zeros);
  widen_halves(data + layout.value_scales, layout.tokens * layout.value_groups, scales);
  const auto* row = reinterpret_cast<const std::uint8_t*>(data) + layout.value_codes;
  for (std::size_t t = 0; t < layout.tokens; ++t, row += layout.row_bytes, out += layout.dim) {
    for (std::size_t v = 0; v < layout.value_groups; ++v) {
      const float zero = zeros[t * layout.value_groups + v];
      const float scale = scales[t * layout.value_groups + v];
      std::size_t d = v * layout.channels;
      const std::size_t end = d + layout.channels < layout.dim ? d + layout.channels : layout.dim;
      for (; d + kStep <= end; d += kStep) store(out + d, splat(zero) + splat(scale) * codes<Bits>(row, d));
      for (; d < end; ++d) out[d] = zero + scale * code<Bits>(row, d);
    }
  }
}

void keys(const std::byte* data, const LowBitLayout& layout, float* out) {
  layout.bits == 1 ? keys_of<1>(data, layout, out) : keys_of<2>(data, layout, out);
}

void values(const std::byte* data, const LowBitLayout& layout, float* out) {
  layout.bits == 1 ? values_of<1>(data, layout, out) : values_of<2>(data, layout, out);
}

}  // namespace

extern const LowBitKernels low_bit_kernels;
const LowBitKernels low_bit_kernels{keys, values};

}  // namespace dualdecoder::cpu::DUALDECODER_SIMD_NAMESPACE
