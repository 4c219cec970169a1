// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dualdecoder/memory.hpp"
#include "dualdecoder/model_weights.hpp"
#include "src/rope.hpp"
#include "src/simd/dense_simd.hpp"

namespace dualdecoder::cpu {

/// Rotary embedding of every position of the longest context, both ways. Threading: const members from any thread.
class RotationTable {
 public:
  /// Throws InvalidArgument naming the field of `rope` that is out of range.
  RotationTable(const RopeConfig& rope, int head_dim, int positions, const DenseKernels& kernels);

  /// Takes the table's memory from `carver`; called once with a counting carver for the size and once with memory, then fill().
  void carve(Carver& carver);
  void fill() noexcept;
  /// Turns a head's key or query [head_dim] at `position`.
  void rotate(float* head, int position) const noexcept;
  /// Undoes rotate().
  void unrotate(float* head, int position) const noexcept;

 private:
  RopeFrequencies rope_;
  int half_;
  int positions_;
  const DenseKernels& kernels_;
  float* cosine_ = nullptr;  // [positions, head_dim / 2], times the attention factor
  float* sine_ = nullptr;    // likewise
};

}  // namespace dualdecoder::cpu
