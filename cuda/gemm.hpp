// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cublas_v2.h>
#include <cuda_bf16.h>

#include <cstddef>

#include "dualdecoder/tensor.hpp"

namespace dualdecoder::cuda {

/// Where the rows of a product go: out[r, n] at data + r * stride + n.
struct GemmOut {
  void* data = nullptr;
  DataType type = DataType::f32;  // f32 or bf16
  int stride = 0;                 // elements
};

/// cuBLAS on work space of ours, so that it allocates nothing inside a pass and can be recorded in a graph. Rows are multiplied in bf16 and
/// summed in f32. Belongs to the device that was current when it was made, which must be current in every call.
class Gemm {
 public:
  static constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20U;

  /// `workspace`: kWorkspaceBytes of device memory at 256 bytes, which outlives this. Throws CudaError.
  Gemm(void* workspace, cudaStream_t stream);
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  ~Gemm();

  /// out[r, n] = (add ? out[r, n] : 0) + sum_k x[r, k] * weights[n, k]; x: [rows, inner], weights: [outputs, inner].
  void multiply(const __nv_bfloat16* x, int rows, const __nv_bfloat16* weights, int inner, int outputs, const GemmOut& out, bool add,
                cudaStream_t stream);

 private:
  void use(cudaStream_t stream);

  cublasHandle_t handle_ = nullptr;
  void* workspace_;
  cudaStream_t stream_ = nullptr;  // the one that the handle works on
};

}  // namespace dualdecoder::cuda
