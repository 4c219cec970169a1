// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/model_weights.hpp"

namespace dualdecoder::detail {

/// One tensor that a model of some configuration has. Vectors have one row.
struct WeightEntry {
  TensorRole role = TensorRole::embedding;
  Layer layer = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool matrix = false;
};

/// Every tensor of a model in the order in which it is stored; absent ones (biases, norms, the head of tied embeddings) are left out.
std::vector<WeightEntry> weight_entries(const ModelConfig& config);

/// Bytes that a model takes in device memory.
std::size_t weight_bytes(const ModelConfig& config, DataType matrix_type);

/// Weights in one buffer of a backend's device memory. Writable until it is handed out as const.
class PackedWeights final : public ModelWeights {
 public:
  /// Allocates without initialising. Throws OutOfMemory.
  PackedWeights(const ModelConfig& config, DataType matrix_type, Backend& backend);

  const ModelConfig& config() const noexcept override { return config_; }
  ConstTensor tensor(TensorRole role, Layer layer) const noexcept override;
  MemoryPlan memory() const override;

  /// The memory of a tensor, for the loader.
  Tensor writable(const WeightEntry& entry) noexcept { return tensors_[index_of(entry.role, entry.layer)]; }

 private:
  static std::size_t index_of(TensorRole role, Layer layer) noexcept;

  ModelConfig config_;
  Buffer buffer_;
  std::vector<Tensor> tensors_;  // by index_of
};

}  // namespace dualdecoder::detail
