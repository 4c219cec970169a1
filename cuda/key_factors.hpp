// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "dualdecoder/memory.hpp"

namespace dualdecoder::cuda {

/// Whether this build has cuSOLVER (CMake's DUALDECODER_CUSOLVER), without which KeyFactors cannot be made.
bool has_cusolver() noexcept;

/// Truncated singular value decomposition of tall matrices that are given in blocks of rows, one after the other: the right singular
/// vectors are the eigenvectors of the Gram matrix, which cuBLAS sums in f32 and cuSOLVER (syevd) decomposes. The same blocks give the same
/// bits. Belongs to the device that was current when it was made, which must be current in every call; not used while a step is recorded.
class KeyFactors {
 public:
  struct Shape {
    int width = 0;     ///< columns
    int rank = 0;      ///< singular vectors that are asked for, at most `width`
    int block = 0;     ///< most rows of one call
    int matrices = 0;  ///< most solve() calls between two require_converged()
  };
  /// Device memory of one decomposition after the other.
  struct Work {
    std::byte* blas;     // first, for it asks for 256 bytes of alignment
    float* rows;         // [block, width]
    float* products;     // [block, rank]
    float* gram;         // [width, width], then eigenvectors, which ascend by strength
    float* eigenvalues;  // [width]
    float* vectors;      // [rank, width]
    std::byte* solver;   // [solver_bytes]
    int* outcomes;       // [matrices]
    std::size_t solver_bytes;
  };

  /// Throws CudaError.
  explicit KeyFactors(const Shape& shape);
  KeyFactors(const KeyFactors&) = delete;
  KeyFactors& operator=(const KeyFactors&) = delete;
  ~KeyFactors();

  /// Called once with a counting carver for the size and once with memory. Needs no device.
  static Work carve(const Shape& shape, Carver& carver);

  /// Begins a matrix on work.gram.
  void clear(const Work& work, cudaStream_t stream);
  /// Adds the first `count` of work.rows.
  void add(const Work& work, int count, cudaStream_t stream);
  /// Leaves the eigenvectors in work.gram, and in work.outcomes[matrix] whether it could. May wait for `stream`. Takes from `memory` for
  /// the time of the call what cuSOLVER asks for beyond work.solver. Throws OutOfMemory, CudaError.
  void solve(const Work& work, int matrix, MemoryResource& memory, cudaStream_t stream);
  /// products[r, i] = the first `count` rows r times vector i.
  void project(const Work& work, int count, cudaStream_t stream);
  /// Waits for `stream` and throws Error unless the first `matrices` solve() calls converged.
  static void require_converged(const Work& work, int matrices, cudaStream_t stream);

 private:
  struct Handles;

  void use(const Work& work, cudaStream_t stream);

  Shape shape_;
  std::unique_ptr<Handles> handles_;
};

}  // namespace dualdecoder::cuda
