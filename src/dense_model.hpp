// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/model_weights.hpp"
#include "src/simd/dispatch.hpp"
#include "src/thread_pool.hpp"

namespace dualdecoder::cpu {

/// Where a DenseModel works. All of it outlives the model.
struct DensePlace {
  MemoryResource& memory;
  StreamRef stream;
  ThreadPool& pool;
  Isa isa = detected_isa();
};

/// The dense part on the host. A row's result depends on nothing but the row and on whether the pass has more than kStreamedRows rows.
/// Throws InvalidArgument (weights that do not fit the configuration, limits), OutOfMemory.
std::unique_ptr<DenseModel> make_cpu_dense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits, const DensePlace& place);

/// What make_cpu_dense allocates.
MemoryPlan cpu_dense_plan(const ModelConfig& config, const DenseLimits& limits, int threads, Isa isa);

}  // namespace dualdecoder::cpu
