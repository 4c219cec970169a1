// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "dualdecoder/memory.hpp"
#include "src/simd/attention_simd.hpp"

namespace dualdecoder::cpu {

/// Whether this build has LAPACK (CMake's DUALDECODER_LAPACK), without which LowRankFactor cannot solve.
bool has_lapack() noexcept;

/// Truncated singular value decomposition of a tall matrix that is given in blocks of rows: the right singular vectors are the eigenvectors
/// of its Gram matrix, which is summed in double precision and decomposed by LAPACK (dsyevd). Deterministic: the same blocks give the same
/// bits. One object is the work space of one thread.
class LowRankFactor {
 public:
  struct Shape {
    int width = 0;  ///< columns, a multiple of 8
    int block = 0;  ///< most rows of one add()
  };

  LowRankFactor(const Shape& shape, const AttentionKernels& kernels) : shape_(shape), kernels_(kernels) {}

  /// Takes the work space from `carver`; called once with a counting carver for the size and once with memory.
  void carve(Carver& carver);
  /// Forgets all rows.
  void clear() noexcept;
  /// Adds `count` rows [count, width].
  void add(const float* rows, int count) noexcept;
  /// Writes the `rank` leading right singular vectors [rank, width], the strongest first; orthonormal also where the rows span less. Throws
  /// Error where there is no LAPACK or it does not converge. The object is then as after clear().
  void solve(int rank, float* vectors);

 private:
  Shape shape_;
  const AttentionKernels& kernels_;
  double* gram_ = nullptr;         // [width, width]
  double* eigenvalues_ = nullptr;  // [width]
  double* work_ = nullptr;         // of LAPACK
  int* int_work_ = nullptr;        // of LAPACK
  float* product_ = nullptr;       // [width, width] of one block
  float* columns_ = nullptr;       // [width, block] the block's transpose
};

}  // namespace dualdecoder::cpu
