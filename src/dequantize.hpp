// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dualdecoder::detail {

/// Element formats of weights in files that are read; the numbers are those of GGUF.
enum class FileType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30,
};

/// Values are stored in blocks of `elements`, each `bytes` long.
struct BlockFormat {
  std::uint32_t elements;
  std::uint32_t bytes;
};

inline constexpr const char* kSupportedFileTypes = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K or Q6_K";

/// The block format of a GGUF type number; {0, 0} when weights of that type are not read.
BlockFormat block_format(std::uint32_t type) noexcept;
inline BlockFormat block_format(FileType type) noexcept { return block_format(static_cast<std::uint32_t>(type)); }

/// The format's own name for a GGUF type number, also of types that are not read; "unknown" for numbers it does not define.
const char* file_type_name(std::uint32_t type) noexcept;

/// `count` values, a multiple of the block's, as f32: the values of the `gguf` Python package, bit for bit. `blocks` needs no alignment.
void dequantize(FileType type, const std::byte* blocks, std::size_t count, float* out) noexcept;

/// Widens IEEE binary16.
float half_to_float(std::uint16_t half) noexcept;

/// Nearest bf16, ties to even. For finite values; those from kBf16Overflow on would become infinite.
void round_to_bf16(const float* values, std::size_t count, std::uint16_t* out) noexcept;

/// Bits of the smallest magnitude that does not fit bf16, and of infinity.
inline constexpr std::uint32_t kBf16Overflow = 0x7F7F8000U;
inline constexpr std::uint32_t kInfinity = 0x7F800000U;

/// Index of the first value whose magnitude has bits >= `limit`; `count` if there is none.
std::size_t find_at_least(const float* values, std::size_t count, std::uint32_t limit) noexcept;

}  // namespace dualdecoder::detail
