// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/low_bit.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "src/dequantize.hpp"

namespace dualdecoder::cpu {
namespace {

/// Nearest IEEE binary16, ties to even; magnitudes that would become infinite become the largest finite one.
std::uint16_t to_half(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint32_t>(bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7BFFU);  // 65520 and more would round to infinity
  if (magnitude < 0x38800000U) {  // below the smallest normal: adding 0.5 leaves steps of 2^-24 in the low bits
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U));
  }
  const std::uint32_t rounded = magnitude + 0xFFFU + (magnitude >> 13 & 1U);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

/// `count` elements, `stride` apart, with one zero point and scale: codes go to `code(i, value)`.
template <class Code>
void quantise_run(const float* from, std::size_t stride, std::size_t count, int bits, std::byte* zero_at, std::byte* scale_at, Code code) {
  float least = from[0];
  float most = from[0];
  for (std::size_t i = 1; i < count; ++i) {
    least = std::min(least, from[i * stride]);
    most = std::max(most, from[i * stride]);
  }
  const std::uint16_t zero_bits = to_half(bits == 1 ? 0.75F * least + 0.25F * most : least);
  const std::uint16_t scale_bits = to_half(bits == 1 ? 0.5F * most - 0.5F * least : (most - least) / 3.0F);
  std::memcpy(zero_at, &zero_bits, sizeof zero_bits);
  std::memcpy(scale_at, &scale_bits, sizeof scale_bits);
  // nearest to what is stored, not to what was meant
  const float zero = detail::half_to_float(zero_bits);
  const float scale = detail::half_to_float(scale_bits);
  const float last = bits == 1 ? 1.0F : 3.0F;
  for (std::size_t i = 0; i < count; ++i) {
    const float level = scale > 0.0F ? std::nearbyint((from[i * stride] - zero) / scale) : 0.0F;
    code(i, static_cast<unsigned>(std::clamp(level, 0.0F, last)));
  }
}

}  // namespace

LowBitLayout low_bit_layout(const SpeCacheOptions& options, int head_dim) {
  LowBitLayout layout;
  layout.bits = options.bits;
  layout.tokens = static_cast<std::size_t>(options.group);
  layout.dim = static_cast<std::size_t>(head_dim);
  layout.channels = std::min(layout.tokens, layout.dim);
  layout.value_groups = (layout.dim + layout.channels - 1) / layout.channels;
  layout.row_bytes = layout.dim * static_cast<std::size_t>(options.bits) / 8;
  constexpr std::size_t kHalf = sizeof(std::uint16_t);
  layout.key_zeros = layout.tokens * layout.row_bytes;
  layout.key_scales = layout.key_zeros + layout.dim * kHalf;
  layout.value_codes = layout.key_scales + layout.dim * kHalf;
  layout.value_zeros = layout.value_codes + layout.tokens * layout.row_bytes;
  layout.value_scales = layout.value_zeros + layout.tokens * layout.value_groups * kHalf;
  layout.bytes = layout.value_scales + layout.tokens * layout.value_groups * kHalf;
  return layout;
}

void quantise(const float* keys, const float* values, const LowBitLayout& layout, std::byte* data) {
  constexpr std::size_t kHalf = sizeof(std::uint16_t);
  std::memset(data, 0, layout.tokens * layout.row_bytes);
  std::memset(data + layout.value_codes, 0, layout.tokens * layout.row_bytes);
  const auto put = [&](std::byte* row, std::size_t i, unsigned code) {
    const std::size_t bit = i * static_cast<std::size_t>(layout.bits);
    row[bit / 8] |= static_cast<std::byte>(code << bit % 8);
  };
  for (std::size_t d = 0; d < layout.dim; ++d) {
    quantise_run(keys + d, layout.dim, layout.tokens, layout.bits, data + layout.key_zeros + d * kHalf,
                 data + layout.key_scales + d * kHalf, [&](std::size_t t, unsigned code) { put(data + t * layout.row_bytes, d, code); });
  }
  for (std::size_t t = 0; t < layout.tokens; ++t) {
    std::byte* row = data + layout.value_codes + t * layout.row_bytes;
    for (std::size_t v = 0; v < layout.value_groups; ++v) {
      const std::size_t first = v * layout.channels;
      const std::size_t at = (t * layout.value_groups + v) * kHalf;
      quantise_run(values + t * layout.dim + first, 1, std::min(layout.channels, layout.dim - first), layout.bits,
                   data + layout.value_zeros + at, data + layout.value_scales + at,
                   [&](std::size_t i, unsigned code) { put(row, first + i, code); });
    }
  }
}

}  // namespace dualdecoder::cpu
