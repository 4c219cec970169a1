// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm.hpp"

#include <mutex>

#include "cuda/check_cublas.hpp"
#include "cuda/step_graph.hpp"

namespace dualdecoder::cuda {
namespace {

void destroy(cublasHandle_t handle) noexcept {
  const std::lock_guard no_recording(recordings());
  cublasDestroy(handle);
}

}  // namespace

Gemm::Gemm(void* workspace, cudaStream_t stream) : workspace_(workspace) {
  {
    const std::lock_guard no_recording(recordings());
    check(cublasCreate(&handle_), "cublasCreate");
  }
  try {
    // partial sums of a product that is split over k stay f32 even where the result is bf16
    const auto mode = static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    check(cublasSetMathMode(handle_, mode), "cublasSetMathMode");
    use(stream);
  } catch (...) {
    destroy(handle_);
    throw;
  }
}

Gemm::~Gemm() { destroy(handle_); }

void Gemm::use(cudaStream_t stream) {
  // a new stream puts the handle back on work space of its own
  check(cublasSetStream(handle_, stream), "cublasSetStream");
  check(cublasSetWorkspace(handle_, workspace_, kWorkspaceBytes), "cublasSetWorkspace");
  stream_ = stream;
}

void Gemm::multiply(const __nv_bfloat16* x, int rows, const __nv_bfloat16* weights, int inner, int outputs, const GemmOut& out, bool add,
                    cudaStream_t stream) {
  if (stream != stream_) use(stream);
  const float one = 1.0F;
  const float kept = add ? 1.0F : 0.0F;
  const cudaDataType type = out.type == DataType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
  // in column-major words: out [outputs, rows] = weights [inner, outputs], transposed, times x [inner, rows]
  check(cublasGemmEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, outputs, rows, inner, &one, weights, CUDA_R_16BF, inner, x, CUDA_R_16BF, inner,
                     &kept, out.data, type, out.stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
}

}  // namespace dualdecoder::cuda
