// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "dualdecoder/memory.hpp"
#include "dualdecoder/model_weights.hpp"
#include "tests/gpu/check.hpp"

namespace dualdecoder::test {

/// Tensors of a model, one behind the other in device memory in the order of their roles, as the loaders leave them, or with a gap after
/// each, as another implementer of ModelWeights may.
class DeviceWeights final : public ModelWeights {
 public:
  /// Copies a model of the host.
  DeviceWeights(const ModelWeights& source, bool gaps) : config_(source.config()) {
    carve([&](TensorRole role, Layer layer) { return source.tensor(role, layer); }, gaps);
    for (const auto& [key, tensor] : tensors_) {
      const ConstTensor from = source.tensor(key.first, key.second);
      cuda::check(cudaMemcpy(const_cast<void*>(tensor.data), from.data, from.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy of weights");
    }
    if (config_.tied_embeddings) tensors_[{TensorRole::head, 0}] = tensors_[{TensorRole::embedding, 0}];
  }

  const ModelConfig& config() const noexcept override { return config_; }
  ConstTensor tensor(TensorRole role, Layer layer) const noexcept override {
    const bool per_layer = role >= TensorRole::attention_norm;
    const auto found = tensors_.find({role, per_layer ? layer : 0});
    return found == tensors_.end() ? ConstTensor() : found->second;
  }
  MemoryPlan memory() const override {
    MemoryPlan plan;
    plan.add("weights", MemoryKind::device, buffer_.size());
    return plan;
  }

 private:
  template <class F>
  void carve(F&& tensor_of, bool gaps) {
    const auto each = [&](Carver& carver, bool keep) {
      for (Layer layer = 0; layer < config_.layers; ++layer) {
        for (int role = 0; role <= static_cast<int>(TensorRole::down); ++role) {
          const auto named = static_cast<TensorRole>(role);
          if (layer > 0 && named < TensorRole::attention_norm) continue;
          if (named == TensorRole::head && config_.tied_embeddings) continue;
          ConstTensor tensor = tensor_of(named, layer);
          if (tensor.count() == 0) continue;
          tensor.data = carver.take<std::byte>(tensor.bytes());
          if (gaps) carver.take<std::byte>(1);
          if (keep) tensors_[{named, layer}] = tensor;
        }
      }
    };
    Carver counting;
    each(counting, false);
    buffer_ = DeviceArray<std::byte>(counting.bytes());
    Carver carver(buffer_.data());
    each(carver, true);
  }

  ModelConfig config_;
  DeviceArray<std::byte> buffer_{0};
  std::map<std::pair<TensorRole, Layer>, ConstTensor> tensors_;
};

/// Device memory straight from the runtime, counted.
class DeviceMemory final : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, std::size_t, StreamRef) override {
    void* memory = nullptr;
    cuda::check(cudaMalloc(&memory, bytes), "cudaMalloc", bytes);
    live_bytes += bytes;
    ++allocations;
    return memory;
  }
  void deallocate(void* memory, std::size_t bytes, std::size_t, StreamRef) noexcept override {
    cudaFree(memory);
    live_bytes -= bytes;
  }

  std::size_t live_bytes = 0;
  int allocations = 0;
};

}  // namespace dualdecoder::test
