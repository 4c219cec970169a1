// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/dequantize.hpp"

#include <array>
#include <bit>
#include <cstring>

// Block layouts follow the GGUF specification. A scale has 11 significant bits, the sub-block scale of a format with minima at most 6, its
// quants at most 5: their products are exact in f32 and only the subtraction rounds, so contraction to fused multiply-add cannot change a
// bit.

namespace dualdecoder::detail {
namespace {

static_assert(std::endian::native == std::endian::little, "weights are read as the little-endian files store them");

struct TypeEntry {
  std::uint32_t type;
  const char* name;
  BlockFormat format;
};

constexpr std::array kTypes = {
    TypeEntry{0, "F32", {1, 4}},       TypeEntry{1, "F16", {1, 2}},       TypeEntry{2, "Q4_0", {32, 18}},
    TypeEntry{3, "Q4_1", {32, 20}},    TypeEntry{6, "Q5_0", {32, 22}},    TypeEntry{7, "Q5_1", {32, 24}},
    TypeEntry{8, "Q8_0", {32, 34}},    TypeEntry{9, "Q8_1", {0, 0}},      TypeEntry{10, "Q2_K", {256, 84}},
    TypeEntry{11, "Q3_K", {256, 110}}, TypeEntry{12, "Q4_K", {256, 144}}, TypeEntry{13, "Q5_K", {256, 176}},
    TypeEntry{14, "Q6_K", {256, 210}}, TypeEntry{15, "Q8_K", {0, 0}},     TypeEntry{16, "IQ2_XXS", {0, 0}},
    TypeEntry{17, "IQ2_XS", {0, 0}},   TypeEntry{18, "IQ3_XXS", {0, 0}},  TypeEntry{19, "IQ1_S", {0, 0}},
    TypeEntry{20, "IQ4_NL", {0, 0}},   TypeEntry{21, "IQ3_S", {0, 0}},    TypeEntry{22, "IQ2_S", {0, 0}},
    TypeEntry{23, "IQ4_XS", {0, 0}},   TypeEntry{24, "I8", {0, 0}},       TypeEntry{25, "I16", {0, 0}},
    TypeEntry{26, "I32", {0, 0}},      TypeEntry{27, "I64", {0, 0}},      TypeEntry{28, "F64", {0, 0}},
    TypeEntry{29, "IQ1_M", {0, 0}},    TypeEntry{30, "BF16", {1, 2}},     TypeEntry{34, "TQ1_0", {0, 0}},
    TypeEntry{35, "TQ2_0", {0, 0}},    TypeEntry{39, "MXFP4", {0, 0}},    TypeEntry{40, "NVFP4", {0, 0}},
};

template <class T>
T load(const std::uint8_t* at) noexcept {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

float load_half(const std::uint8_t* at) noexcept { return half_to_float(load<std::uint16_t>(at)); }

template <class Block>
void for_blocks(const std::uint8_t* in, std::size_t count, FileType type, float* out, Block block) noexcept {
  const BlockFormat format = block_format(type);
  for (std::size_t i = 0; i < count; i += format.elements, in += format.bytes) block(in, out + i);
}

void q8_0(const std::uint8_t* in, float* out) noexcept {
  const float d = load_half(in);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<std::int8_t>(in[2 + i])) * d;
}

/// 32 four-bit quants, low halves of the bytes first; `fifth` holds another bit each.
template <class Value>
void nibbles(const std::uint8_t* in, std::uint32_t fifth, float* out, Value value) noexcept {
  for (int i = 0; i < 16; ++i) {
    out[i] = value(static_cast<float>((in[i] & 0xF) | static_cast<int>(fifth >> i & 1U) << 4));
    out[i + 16] = value(static_cast<float>(in[i] >> 4 | static_cast<int>(fifth >> (i + 16) & 1U) << 4));
  }
}

void q4_0(const std::uint8_t* in, float* out) noexcept {
  nibbles(in + 2, 0, out, [d = load_half(in)](float q) { return d * (q - 8.0F); });
}
void q4_1(const std::uint8_t* in, float* out) noexcept {
  nibbles(in + 4, 0, out, [d = load_half(in), m = load_half(in + 2)](float q) { return d * q + m; });
}
void q5_0(const std::uint8_t* in, float* out) noexcept {
  nibbles(in + 6, load<std::uint32_t>(in + 2), out, [d = load_half(in)](float q) { return d * (q - 16.0F); });
}
void q5_1(const std::uint8_t* in, float* out) noexcept {
  nibbles(in + 8, load<std::uint32_t>(in + 4), out, [d = load_half(in), m = load_half(in + 2)](float q) { return d * q + m; });
}

/// 16 sub-blocks of 16: scale and minimum nibbles [16], quants [64], d, dmin.
void q2_k(const std::uint8_t* in, float* out) noexcept {
  const std::uint8_t* quants = in + 16;
  const float d = load_half(in + 80);
  const float dmin = load_half(in + 82);
  for (int sub = 0; sub < 16; ++sub) {
    const float scale = d * static_cast<float>(in[sub] & 0xF);
    const float minimum = dmin * static_cast<float>(in[sub] >> 4);
    const int shift = sub % 8 / 2 * 2;
    const std::uint8_t* q = quants + sub / 8 * 32 + sub % 2 * 16;
    for (int i = 0; i < 16; ++i) out[sub * 16 + i] = scale * static_cast<float>(q[i] >> shift & 3) - minimum;
  }
}

/// 16 sub-blocks of 16: high bits [32] (set: no offset), low two bits [64], 6-bit scales [12], d.
void q3_k(const std::uint8_t* in, float* out) noexcept {
  const std::uint8_t* quants = in + 32;
  const std::uint8_t* scales = in + 96;
  const float d = load_half(in + 108);
  for (int sub = 0; sub < 16; ++sub) {
    const int low = scales[sub % 8] >> (sub / 8 * 4) & 0xF;
    const int high = scales[8 + sub % 4] >> (sub / 4 * 2) & 3;
    const float scale = d * static_cast<float>((low | high << 4) - 32);
    const int shift = sub % 8 / 2 * 2;
    const std::uint8_t* q = quants + sub / 8 * 32 + sub % 2 * 16;
    const std::uint8_t* mask = in + sub % 2 * 16;
    for (int i = 0; i < 16; ++i) {
      const int quant = (q[i] >> shift & 3) - ((mask[i] >> (sub / 2) & 1) != 0 ? 0 : 4);
      out[sub * 16 + i] = scale * static_cast<float>(quant);
    }
  }
}

struct ScaleMin {
  float scale;
  float minimum;
};

/// Sub-block `sub` of the 8 six-bit scales and minima that Q4_K and Q5_K pack into 12 bytes.
ScaleMin scale_min(const std::uint8_t* packed, int sub, float d, float dmin) noexcept {
  int scale = 0;
  int minimum = 0;
  if (sub < 4) {
    scale = packed[sub] & 0x3F;
    minimum = packed[sub + 4] & 0x3F;
  } else {
    scale = (packed[sub + 4] & 0xF) | (packed[sub - 4] >> 2 & 0x30);
    minimum = packed[sub + 4] >> 4 | (packed[sub] >> 2 & 0x30);
  }
  return {d * static_cast<float>(scale), dmin * static_cast<float>(minimum)};
}

/// 8 sub-blocks of 32: d, dmin, scales [12], quants [128].
void q4_k(const std::uint8_t* in, float* out) noexcept {
  const float d = load_half(in);
  const float dmin = load_half(in + 2);
  for (int sub = 0; sub < 8; ++sub) {
    const auto [scale, minimum] = scale_min(in + 4, sub, d, dmin);
    const std::uint8_t* q = in + 16 + sub / 2 * 32;
    const int shift = sub % 2 * 4;
    for (int i = 0; i < 32; ++i) out[sub * 32 + i] = scale * static_cast<float>(q[i] >> shift & 0xF) - minimum;
  }
}

/// 8 sub-blocks of 32: d, dmin, scales [12], fifth bits [32], quants [128].
void q5_k(const std::uint8_t* in, float* out) noexcept {
  const float d = load_half(in);
  const float dmin = load_half(in + 2);
  const std::uint8_t* high = in + 16;
  for (int sub = 0; sub < 8; ++sub) {
    const auto [scale, minimum] = scale_min(in + 4, sub, d, dmin);
    const std::uint8_t* q = in + 48 + sub / 2 * 32;
    const int shift = sub % 2 * 4;
    for (int i = 0; i < 32; ++i) {
      const int quant = (q[i] >> shift & 0xF) | (high[i] >> sub & 1) << 4;
      out[sub * 32 + i] = scale * static_cast<float>(quant) - minimum;
    }
  }
}

/// 16 sub-blocks of 16: low nibbles [128], high two bits [64], int8 scales [16], d.
void q6_k(const std::uint8_t* in, float* out) noexcept {
  const std::uint8_t* high = in + 128;
  const std::uint8_t* scales = in + 192;
  const float d = load_half(in + 208);
  for (int sub = 0; sub < 16; ++sub) {
    const float scale = d * static_cast<float>(static_cast<std::int8_t>(scales[sub]));
    const int half = sub / 8;       // 128 values: 64 bytes of nibbles, 32 of high bits
    const int group = sub % 8 / 2;  // 32 values
    const int within = sub % 2 * 16;
    const std::uint8_t* q = in + half * 64 + group % 2 * 32 + within;
    const std::uint8_t* h = high + half * 32 + within;
    for (int i = 0; i < 16; ++i) {
      const int quant = (q[i] >> (group / 2 * 4) & 0xF) | (h[i] >> (group * 2) & 3) << 4;
      out[sub * 16 + i] = scale * static_cast<float>(quant - 32);
    }
  }
}

}  // namespace

float half_to_float(std::uint16_t half) noexcept {
  const std::uint32_t sign = (half & 0x8000U) << 16U;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude >= 0x7C00U) return std::bit_cast<float>(sign | kInfinity | (magnitude & 0x3FFU) << 13U);
  if (magnitude >= 0x400U) return std::bit_cast<float>(sign | ((magnitude << 13U) + (112U << 23U)));
  // a subnormal is counted, so that no subnormal f32 is touched
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24F));
}

BlockFormat block_format(std::uint32_t type) noexcept {
  for (const TypeEntry& entry : kTypes) {
    if (entry.type == type) return entry.format;
  }
  return {0, 0};
}

const char* file_type_name(std::uint32_t type) noexcept {
  for (const TypeEntry& entry : kTypes) {
    if (entry.type == type) return entry.name;
  }
  return "unknown";
}

void dequantize(FileType type, const std::byte* blocks, std::size_t count, float* out) noexcept {
  const auto* in = reinterpret_cast<const std::uint8_t*>(blocks);
  switch (type) {
    case FileType::f32: std::memcpy(out, in, count * sizeof(float)); return;
    case FileType::f16:
      for (std::size_t i = 0; i < count; ++i) out[i] = load_half(in + 2 * i);
      return;
    case FileType::bf16:
      for (std::size_t i = 0; i < count; ++i) {
        out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(load<std::uint16_t>(in + 2 * i)) << 16U);
      }
      return;
    case FileType::q4_0: return for_blocks(in, count, type, out, q4_0);
    case FileType::q4_1: return for_blocks(in, count, type, out, q4_1);
    case FileType::q5_0: return for_blocks(in, count, type, out, q5_0);
    case FileType::q5_1: return for_blocks(in, count, type, out, q5_1);
    case FileType::q8_0: return for_blocks(in, count, type, out, q8_0);
    case FileType::q2_k: return for_blocks(in, count, type, out, q2_k);
    case FileType::q3_k: return for_blocks(in, count, type, out, q3_k);
    case FileType::q4_k: return for_blocks(in, count, type, out, q4_k);
    case FileType::q5_k: return for_blocks(in, count, type, out, q5_k);
    case FileType::q6_k: return for_blocks(in, count, type, out, q6_k);
  }
}

void round_to_bf16(const float* values, std::size_t count, std::uint16_t* out) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    out[i] = static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U);
  }
}

std::size_t find_at_least(const float* values, std::size_t count, std::uint32_t limit) noexcept {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(values[i]) & 0x7FFFFFFFU;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest < limit) return count;
  std::size_t i = 0;
  while ((std::bit_cast<std::uint32_t>(values[i]) & 0x7FFFFFFFU) < limit) ++i;
  return i;
}

}  // namespace dualdecoder::detail
