// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/simd/dispatch.hpp"

namespace dualdecoder::cpu {

/// A group of tokens of one KV head in few bits, as one piece of memory; offsets are in bytes from its begin. An element is
/// zero + scale * code, with zero and scale in IEEE binary16. Code i of a row stands at bit i * bits of it, lowest first.
struct LowBitLayout {
  int bits = 0;                  ///< of a code, 1 or 2
  std::size_t tokens = 0;        ///< of a group
  std::size_t dim = 0;           ///< head_dim
  std::size_t channels = 0;      ///< of a value that share zero and scale
  std::size_t value_groups = 0;  ///< of a value, the last may have fewer channels
  std::size_t row_bytes = 0;     ///< of a token's codes
  std::size_t key_zeros = 0;     ///< [dim], after the codes of the keys [tokens, row_bytes]
  std::size_t key_scales = 0;    ///< [dim]
  std::size_t value_codes = 0;   ///< [tokens, row_bytes]
  std::size_t value_zeros = 0;   ///< [tokens, value_groups]
  std::size_t value_scales = 0;  ///< [tokens, value_groups]
  std::size_t bytes = 0;         ///< of the group
};

/// Vector kernels that read groups. They allocate nothing and keep no state.
struct LowBitKernels {
  /// out = all keys of the group at `data`. out: [tokens, dim].
  void (*keys)(const std::byte* data, const LowBitLayout& layout, float* out);
  /// out = all values of the group at `data`. out: [tokens, dim].
  void (*values)(const std::byte* data, const LowBitLayout& layout, float* out);
};

/// The kernels for an instruction set that the machine has.
const LowBitKernels& low_bit_kernels(Isa isa) noexcept;

}  // namespace dualdecoder::cpu
