// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/key_factors.hpp"

#ifdef DUALDECODER_HAS_CUSOLVER
#include <cusolverDn.h>
#endif

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/check_cublas.hpp"
#include "cuda/gemm.hpp"
#include "cuda/step_graph.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

std::size_t at(int index) noexcept { return static_cast<std::size_t>(index); }

/// Planned without a device to ask: more than LAPACK's syevd wants. solve() asks, and takes more where that is not enough.
std::size_t solver_bytes(int width) { return (4 * at(width) * at(width) + 256 * at(width)) * sizeof(float) + (std::size_t{1} << 20U); }

#ifdef DUALDECODER_HAS_CUSOLVER
void check(cusolverStatus_t status, const char* what) {
  if (status == CUSOLVER_STATUS_SUCCESS) return;
  cudaGetLastError();
  throw CudaError(std::string(what) + " failed: cuSOLVER status " + std::to_string(static_cast<int>(status)));
}
#endif

}  // namespace

bool has_cusolver() noexcept {
#ifdef DUALDECODER_HAS_CUSOLVER
  return true;
#else
  return false;
#endif
}

// Making and destroying the handles waits for the whole device.
struct KeyFactors::Handles {
  cublasHandle_t blas = nullptr;
#ifdef DUALDECODER_HAS_CUSOLVER
  cusolverDnHandle_t solver = nullptr;
#endif

  ~Handles() {
    const std::lock_guard no_recording(recordings());
#ifdef DUALDECODER_HAS_CUSOLVER
    if (solver != nullptr) cusolverDnDestroy(solver);
#endif
    if (blas != nullptr) cublasDestroy(blas);
  }
};

KeyFactors::KeyFactors(const Shape& shape) : shape_(shape), handles_(std::make_unique<Handles>()) {
  const std::lock_guard no_recording(recordings());
  check(cublasCreate(&handles_->blas), "cublasCreate");
#ifdef DUALDECODER_HAS_CUSOLVER
  check(cusolverDnCreate(&handles_->solver), "cusolverDnCreate");
#endif
}

KeyFactors::~KeyFactors() = default;

KeyFactors::Work KeyFactors::carve(const Shape& shape, Carver& carver) {
  const std::size_t width = at(shape.width);
  Work work{};
  work.blas = carver.take<std::byte>(Gemm::kWorkspaceBytes);
  work.rows = carver.take<float>(at(shape.block) * width);
  work.products = carver.take<float>(at(shape.block) * at(shape.rank));
  work.gram = carver.take<float>(width * width);
  work.eigenvalues = carver.take<float>(width);
  work.vectors = carver.take<float>(at(shape.rank) * width);
  work.solver_bytes = solver_bytes(shape.width);
  work.solver = carver.take<std::byte>(work.solver_bytes);
  work.outcomes = carver.take<int>(at(shape.matrices));
  return work;
}

void KeyFactors::use(const Work& work, cudaStream_t stream) {
  // a new stream puts the handle back on work space of its own
  check(cublasSetStream(handles_->blas, stream), "cublasSetStream");
  check(cublasSetWorkspace(handles_->blas, work.blas, Gemm::kWorkspaceBytes), "cublasSetWorkspace");
}

void KeyFactors::clear(const Work& work, cudaStream_t stream) {
  check(cudaMemsetAsync(work.gram, 0, at(shape_.width) * at(shape_.width) * sizeof(float), stream), "cudaMemsetAsync");
}

void KeyFactors::add(const Work& work, int count, cudaStream_t stream) {
  use(work, stream);
  const float one = 1.0F;
  const int width = shape_.width;
  // in column-major words: gram [width, width] += rows [width, count] times rows, transposed
  check(cublasSgemm(handles_->blas, CUBLAS_OP_N, CUBLAS_OP_T, width, width, count, &one, work.rows, width, work.rows, width, &one,
                    work.gram, width),
        "cublasSgemm");
}

void KeyFactors::project(const Work& work, int count, cudaStream_t stream) {
  use(work, stream);
  const float one = 1.0F;
  const float zero = 0.0F;
  const int width = shape_.width;
  // products [rank, count] = vectors [width, rank], transposed, times rows [width, count]
  check(cublasSgemm(handles_->blas, CUBLAS_OP_T, CUBLAS_OP_N, shape_.rank, count, width, &one, work.vectors, width, work.rows, width, &zero,
                    work.products, shape_.rank),
        "cublasSgemm");
}

void KeyFactors::solve(const Work& work, int matrix, MemoryResource& memory, cudaStream_t stream) {
#ifdef DUALDECODER_HAS_CUSOLVER
  const std::lock_guard no_recording(recordings());  // it may wait for the device
  const int width = shape_.width;
  constexpr auto kVectors = CUSOLVER_EIG_MODE_VECTOR;
  constexpr auto kLower = CUBLAS_FILL_MODE_LOWER;
  check(cusolverDnSetStream(handles_->solver, stream), "cusolverDnSetStream");
  int floats = 0;
  check(cusolverDnSsyevd_bufferSize(handles_->solver, kVectors, kLower, width, work.gram, width, work.eigenvalues, &floats),
        "cusolverDnSsyevd_bufferSize");
  const std::size_t bytes = at(floats) * sizeof(float);
  const Buffer larger = bytes > work.solver_bytes ? Buffer(memory, bytes, stream) : Buffer();
  auto* const space = reinterpret_cast<float*>(larger.bytes() > 0 ? larger.data() : work.solver);
  check(cusolverDnSsyevd(handles_->solver, kVectors, kLower, width, work.gram, width, work.eigenvalues, space, floats,
                         work.outcomes + matrix),
        "cusolverDnSsyevd");
#else
  static_cast<void>(work);
  static_cast<void>(matrix);
  static_cast<void>(memory);
  static_cast<void>(stream);
  throw Error("low-rank keys: this build has no cuSOLVER (DUALDECODER_CUSOLVER)");
#endif
}

void KeyFactors::require_converged(const Work& work, int matrices, cudaStream_t stream) {
  std::vector<int> outcomes(at(matrices));
  check(cudaMemcpyAsync(outcomes.data(), work.outcomes, outcomes.size() * sizeof(int), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const auto failed = std::find_if(outcomes.begin(), outcomes.end(), [](int outcome) { return outcome != 0; });
  if (failed == outcomes.end()) return;
  throw Error("low-rank keys: cusolverDnSsyevd did not converge (info = " + std::to_string(*failed) + ")");
}

}  // namespace dualdecoder::cuda
