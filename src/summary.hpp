// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "dualdecoder/tensor.hpp"
#include "src/simd/attention_simd.hpp"

namespace dualdecoder::cpu {

/// Quantised mean of a chunk-head's keys (docs/concepts.md, "Selection"): int8 with scale max|mean| / 127.
struct KeySummary {
  std::int8_t* mean;  ///< [dim]
  float* scale;       ///< [1]
};
/// Quantised mean of the values of one or more chunk-heads: int4 with scale max|mean| / 7.
struct ValueSummary {
  std::uint8_t* mean;  ///< [dim / 2], dimension d in the low nibble of byte d, d + dim / 2 in the high one, biased by 8
  float* scale;        ///< [1]
};

/// Mean [dim] over the tokens of a whole chunk's keys or values, which begin at element `first` of `base`.
void mean_of(const void* base, std::size_t first, const SegmentLayout& layout, float* mean);
/// Summarises the keys of the whole chunk at `base`. `mean` is work space for layout.dim floats.
void summarise_keys(const void* base, const SegmentLayout& layout, float* mean, const KeySummary& summary);
/// Summarises the values of whole chunks: the mean over all of their tokens, added in the order of `chunks`.
void summarise_values(std::span<const void* const> chunks, const SegmentLayout& layout, float* mean, const ValueSummary& summary);

/// Element `i` of f32 or bf16 memory.
float element(const void* data, std::size_t i, bool bf16) noexcept;
/// Copies `count` elements of f32 or bf16 memory from `first` on into f32.
void widen_elements(const void* data, std::size_t first, std::size_t count, bool bf16, float* out) noexcept;
/// Copies `count` elements of a tensor from `first` on into f32.
void read_elements(const ConstTensor& tensor, std::size_t first, std::size_t count, float* out) noexcept;
/// Writes f32 values as f32 or bf16 (round to nearest even).
void write_elements(const float* values, std::size_t count, void* data, std::size_t first, bool bf16) noexcept;

}  // namespace dualdecoder::cpu
