// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace dualdecoder::cuda {

/// Whether the driver describes tensors to the copy engine.
bool can_describe() noexcept;

/// Rows of `heads` vectors of `head_dim` bf16 each: [rows, heads, head_dim], at 16 bytes; head_dim a multiple of 8.
struct HeadRowsTensor {
  const void* data = nullptr;
  int rows = 0;
  int heads = 0;
  int head_dim = 0;
};

/// Describes such a tensor to Hopper's copy engine, which then brings 64 columns of `box_rows` rows of a head to shared memory as a tile of
/// warpgroup.cuh; coordinates are column, head, row, and columns and rows beyond the last become zeros. Fails where the driver has no such
/// call.
cudaError_t describe(const HeadRowsTensor& tensor, int box_rows, CUtensorMap& map);

/// A matrix of bf16: [rows, columns], at 16 bytes; columns a multiple of 8.
struct MatrixTensor {
  const void* data = nullptr;
  int rows = 0;
  int columns = 0;
};

/// The same for a matrix: coordinates are column, row.
cudaError_t describe(const MatrixTensor& tensor, int box_rows, CUtensorMap& map);

}  // namespace dualdecoder::cuda
