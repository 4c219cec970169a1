// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "dualdecoder/store_options.hpp"
#include "src/simd/low_bit_simd.hpp"

namespace dualdecoder::cpu {

/// Where the parts of a group lie.
LowBitLayout low_bit_layout(const SpeCacheOptions& options, int head_dim);

/// Writes the group at `data`: keys quantised per channel over its tokens, values per token over groups of channels (KIVI,
/// arXiv 2402.02750). Between the smallest and the largest element of a group 2 bits have their levels at both ends and the thirds, 1 bit
/// at the quarters: zero point (3 min + max) / 4, scale (max - min) / 2 (SpeCache). A code is the nearest level. keys, values:
/// [tokens, dim], finite; beyond binary16's range levels are cut to it.
void quantise(const float* keys, const float* values, const LowBitLayout& layout, std::byte* data);

}  // namespace dualdecoder::cpu
