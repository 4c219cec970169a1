// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/summary.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace dualdecoder::cpu {
namespace {

float widen(std::uint16_t bits) noexcept { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

std::uint16_t narrow(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);  // stays a NaN
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

/// Adds the tokens of a whole chunk's keys or values, which begin at element `first` of `base`, to sum [dim].
void add_tokens(const void* base, std::size_t first, const SegmentLayout& layout, float* sum) {
  for (std::size_t t = 0; t < layout.chunk; ++t) {
    for (std::size_t d = 0; d < layout.dim; ++d) sum[d] += element(base, first + t * layout.dim + d, layout.bf16);
  }
}

float largest_of(const float* values, std::size_t count) {
  float largest = 0.0F;
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
  return largest;
}

}  // namespace

float element(const void* data, std::size_t i, bool bf16) noexcept {
  return bf16 ? widen(static_cast<const std::uint16_t*>(data)[i]) : static_cast<const float*>(data)[i];
}

void widen_elements(const void* data, std::size_t first, std::size_t count, bool bf16, float* out) noexcept {
  if (!bf16) {
    std::memcpy(out, static_cast<const float*>(data) + first, count * sizeof(float));
    return;
  }
  const auto* from = static_cast<const std::uint16_t*>(data) + first;
  for (std::size_t i = 0; i < count; ++i) out[i] = widen(from[i]);
}

void read_elements(const ConstTensor& tensor, std::size_t first, std::size_t count, float* out) noexcept {
  widen_elements(tensor.data, first, count, tensor.type != DataType::f32, out);
}

void write_elements(const float* values, std::size_t count, void* data, std::size_t first, bool bf16) noexcept {
  if (!bf16) {
    std::memcpy(static_cast<float*>(data) + first, values, count * sizeof(float));
    return;
  }
  auto* to = static_cast<std::uint16_t*>(data) + first;
  for (std::size_t i = 0; i < count; ++i) to[i] = narrow(values[i]);
}

void mean_of(const void* base, std::size_t first, const SegmentLayout& layout, float* mean) {
  std::fill_n(mean, layout.dim, 0.0F);
  add_tokens(base, first, layout, mean);
  for (std::size_t d = 0; d < layout.dim; ++d) mean[d] /= static_cast<float>(layout.chunk);
}

void summarise_keys(const void* base, const SegmentLayout& layout, float* mean, const KeySummary& summary) {
  mean_of(base, 0, layout, mean);
  const float scale = largest_of(mean, layout.dim) / 127.0F;
  *summary.scale = scale;
  for (std::size_t d = 0; d < layout.dim; ++d) {
    summary.mean[d] = static_cast<std::int8_t>(scale > 0.0F ? std::nearbyint(mean[d] / scale) : 0.0F);
  }
}

void summarise_values(std::span<const void* const> chunks, const SegmentLayout& layout, float* mean, const ValueSummary& summary) {
  std::fill_n(mean, layout.dim, 0.0F);
  for (const void* base : chunks) add_tokens(base, layout.chunk * layout.dim, layout, mean);
  for (std::size_t d = 0; d < layout.dim; ++d) mean[d] /= static_cast<float>(chunks.size() * layout.chunk);
  const float scale = largest_of(mean, layout.dim) / 7.0F;
  *summary.scale = scale;
  const auto nibble = [&](std::size_t d) {
    const float level = scale > 0.0F ? std::nearbyint(mean[d] / scale) : 0.0F;
    return static_cast<unsigned>(static_cast<int>(std::clamp(level, -7.0F, 7.0F)) + 8);
  };
  const std::size_t half = layout.dim / 2;
  for (std::size_t d = 0; d < half; ++d) summary.mean[d] = static_cast<std::uint8_t>(nibble(d) | (nibble(d + half) << 4));
}

}  // namespace dualdecoder::cpu
