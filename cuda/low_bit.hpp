// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "cuda/store_layout.hpp"

namespace dualdecoder::cuda {

/// A group of tokens of one KV head in few bits, as one piece of device memory: what quantise() of src/low_bit.hpp makes, in the order in
/// which mma.m16n8k16 takes it. An element is zero + scale * code. Codes lie in units of 32 tokens: of keys, then of values. A unit has
/// words() words for each of 32 lanes, vectors of the first words of all lanes together, then of the second ones. A word holds pairs of
/// codes that one register of a fragment takes, the first of a pair in its low half: pair (j * 2 + tile) * 4 + r, counted on over the
/// words, is register r of the 16 x 16 elements j, tile. For keys j counts dims and rows are tokens, for values j counts dims and rows are
/// dims.
struct LowBitGroup {
  int bits;          ///< of a code, 1 or 2
  int tokens;        ///< of the group, 32 or 64
  int dim;           ///< of a head, a multiple of 16
  int channels;      ///< of a value that share zero and scale
  int value_groups;  ///< of a value, the last may have fewer channels
  int key_zeros;     ///< [dim] f16, after the codes of the keys; offsets in bytes
  int key_scales;    ///< [dim] f16
  int value_codes;
  int value_zeros;   ///< [value_groups, tokens] f16
  int value_scales;  ///< [value_groups, tokens] f16
  int bytes;         ///< of the group, a multiple of 16

  static constexpr int kUnit = 32;  ///< tokens

  DUALDECODER_HOST_DEVICE static constexpr int words(int dim, int bits) {
    const int pairs = dim / 16 * 8;
    const int each = 16 / bits;
    return (pairs + each - 1) / each;
  }
  /// Words of a lane that lie together.
  DUALDECODER_HOST_DEVICE static constexpr int vector(int words) { return words % 4 == 0 ? 4 : (words % 2 == 0 ? 2 : 1); }
};

inline LowBitGroup low_bit_group(int bits, int tokens, int dim) {
  constexpr int kHalf = 2;  // bytes
  LowBitGroup group{};
  group.bits = bits;
  group.tokens = tokens;
  group.dim = dim;
  group.channels = tokens < dim ? tokens : dim;
  group.value_groups = (dim + group.channels - 1) / group.channels;
  const int codes = tokens / LowBitGroup::kUnit * LowBitGroup::words(dim, bits) * 32 * 4;
  group.key_zeros = codes;
  group.key_scales = group.key_zeros + dim * kHalf;
  group.value_codes = group.key_scales + dim * kHalf;
  group.value_zeros = group.value_codes + codes;
  group.value_scales = group.value_zeros + group.value_groups * tokens * kHalf;
  group.bytes = group.value_scales + group.value_groups * tokens * kHalf;
  return group;
}

/// Where a code stands among those of a group's keys or values.
struct CodePlace {
  int word;
  int shift;
};
DUALDECODER_HOST_DEVICE inline CodePlace code_place(const LowBitGroup& group, int unit, int j, int tile, int row, int column) {
  const int lane = row % 8 * 4 + column % 8 / 2;
  const int pair = (j * 2 + tile) * 4 + column / 8 * 2 + row / 8;
  const int each = 16 / group.bits;
  const int words = LowBitGroup::words(group.dim, group.bits);
  const int vector = LowBitGroup::vector(words);
  const int word = pair / each;
  return {unit * words * 32 + (word / vector * 32 + lane) * vector + word % vector, group.bits * (pair % each) + column % 2 * 16};
}
DUALDECODER_HOST_DEVICE inline CodePlace key_code_place(const LowBitGroup& group, int token, int d) {
  return code_place(group, token / 32, d / 16, token % 32 / 16, token % 16, d % 16);
}
DUALDECODER_HOST_DEVICE inline CodePlace value_code_place(const LowBitGroup& group, int token, int d) {
  return code_place(group, token / 32, d / 16, token % 32 / 16, d % 16, token % 16);
}

}  // namespace dualdecoder::cuda
