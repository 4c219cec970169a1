// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/model_weights.hpp"

namespace dualdecoder::cuda {

/// Where a DenseModel works. The memory outlives the model.
struct DensePlace {
  MemoryResource& memory;  ///< of the device that is current when the model is made
  StreamRef stream;
};

/// The dense part on the device: products of bf16 weights and bf16 activations summed in f32, of few rows by kernels of our own where the
/// device has them (cuda/few_rows.hpp) and by cuBLAS otherwise, and kernels between them. Every call only enqueues, allocates nothing and
/// can be recorded in a graph once it has run outside of one (cuBLAS loads its kernels when they are first used). Throws InvalidArgument
/// (weights that are not bf16 or do not fit the configuration, shapes without kernels, limits), OutOfMemory, CudaError.
std::unique_ptr<DenseModel> make_cuda_dense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits,
                                            const DensePlace& place);

/// What make_cuda_dense allocates. Throws InvalidArgument for shapes without kernels and for limits.
MemoryPlan cuda_dense_plan(const ModelConfig& config, const DenseLimits& limits);

}  // namespace dualdecoder::cuda
