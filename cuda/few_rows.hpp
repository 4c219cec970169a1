// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <limits>
#include <span>

/// Products of few rows with matrices of weights, which take as long as the weights take to be read: from compute capability 9.0 on.
/// docs/adr/0010-own-products-for-few-rows.md says what they gain over cuBLAS.
namespace dualdecoder::cuda {

/// Most rows that launch_few_rows() multiplies.
inline constexpr int kMostFewRows = 32;
/// Most matrices that are multiplied at once.
inline constexpr int kMostWeightMatrices = 3;

/// [outputs, inner], at 16 bytes.
struct WeightMatrix {
  const __nv_bfloat16* data = nullptr;
  int outputs = 0;
};

/// How blocks share matrices that are multiplied by the same rows: in tiles of outputs, of which a block takes whole ones. It depends on
/// shapes and the number of multiprocessors alone, and with it the order in which the terms of an output are summed.
struct WeightTiles {
  CUtensorMap map[kMostWeightMatrices] = {};
  int outputs[kMostWeightMatrices] = {};  // of a matrix
  int inner = 0;
  int slices = 0;      // of a tile: 16 outputs each, or 8 of both matrices
  int processors = 0;  // blocks that run at once
  bool gated = false;
};

/// Whether the current device, with its shared memory, and this build have such products.
bool has_few_rows() noexcept;

/// Lets the kernels have the shared memory that they take on the current device; ahead of the first launch.
cudaError_t prepare_few_rows();

/// Cuts one to three matrices of `inner` columns, a multiple of 8, or, for products with a gate, two with as many outputs each: gate and
/// up. Fails where the driver does not describe tensors.
cudaError_t cut_weights(std::span<const WeightMatrix> matrices, int inner, bool gated, WeightTiles& tiles);

/// Rows and what becomes of their products.
struct FewRows {
  const __nv_bfloat16* x = nullptr;               // [rows, inner], at 16 bytes
  int rows = 0;                                   // 1 .. kMostFewRows
  void* out = nullptr;                            // [rows, stride] f32, or bf16 of products with a gate
  int stride = 0;                                 // elements
  bool add = false;                               // to what `out` holds; not with a gate
  int outputs = std::numeric_limits<int>::max();  // the first so many, or all
};

/// out[r, n] = (add ? out[r, n] : 0) + sum_k x[r, k] * weights[n, k], outputs of a matrix behind those of the one before it; with a gate
/// out[r, n] = silu(sum_k x[r, k] * gate[n, k]) * sum_k x[r, k] * up[n, k], rounded to bf16. Sums are f32. An output has the same bits
/// whatever the other rows are and however many. Overlaps with the kernel ahead (cuda/launch.hpp) and lets the one behind begin before it
/// has waited itself: that one may read ahead of its own wait nothing but what no kernel of the step writes. No kernel that is under way
/// writes weights.
cudaError_t launch_few_rows(const WeightTiles& weights, const FewRows& job, cudaStream_t stream);

}  // namespace dualdecoder::cuda
