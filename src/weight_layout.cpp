// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/weight_layout.hpp"

namespace dualdecoder::detail {
namespace {

constexpr std::size_t kModelRoles = static_cast<std::size_t>(TensorRole::attention_norm);
constexpr std::size_t kLayerRoles = static_cast<std::size_t>(TensorRole::down) + 1 - kModelRoles;

/// Calls f(entry, memory) for every tensor, with memory carved in order; null while counting.
template <class F>
void carve(Carver& carver, const ModelConfig& config, DataType matrix_type, F&& f) {
  for (const WeightEntry& entry : weight_entries(config)) {
    const auto count = static_cast<std::size_t>(entry.rows * entry.columns);
    const bool f32 = !entry.matrix || matrix_type == DataType::f32;
    f(entry, f32 ? static_cast<void*>(carver.take<float>(count)) : carver.take<std::uint16_t>(count));
  }
}

}  // namespace

std::vector<WeightEntry> weight_entries(const ModelConfig& config) {
  std::vector<WeightEntry> entries;
  const auto matrix = [&](TensorRole role, Layer layer, int rows, int columns) { entries.push_back({role, layer, rows, columns, true}); };
  const auto vector = [&](TensorRole role, Layer layer, int count) { entries.push_back({role, layer, 1, count, false}); };
  matrix(TensorRole::embedding, 0, config.vocabulary, config.hidden);
  for (Layer layer = 0; layer < config.layers; ++layer) {
    vector(TensorRole::attention_norm, layer, config.hidden);
    matrix(TensorRole::query, layer, config.q_width(), config.hidden);
    matrix(TensorRole::key, layer, config.kv_width(), config.hidden);
    matrix(TensorRole::value, layer, config.kv_width(), config.hidden);
    if (config.attention_bias) {
      vector(TensorRole::query_bias, layer, config.q_width());
      vector(TensorRole::key_bias, layer, config.kv_width());
      vector(TensorRole::value_bias, layer, config.kv_width());
    }
    if (config.qk_norm) {
      vector(TensorRole::query_norm, layer, config.head_dim);
      vector(TensorRole::key_norm, layer, config.head_dim);
    }
    matrix(TensorRole::attention_out, layer, config.hidden, config.q_width());
    vector(TensorRole::mlp_norm, layer, config.hidden);
    matrix(TensorRole::gate, layer, config.intermediate, config.hidden);
    matrix(TensorRole::up, layer, config.intermediate, config.hidden);
    matrix(TensorRole::down, layer, config.hidden, config.intermediate);
  }
  vector(TensorRole::output_norm, 0, config.hidden);
  if (!config.tied_embeddings) matrix(TensorRole::head, 0, config.vocabulary, config.hidden);
  return entries;
}

std::size_t weight_bytes(const ModelConfig& config, DataType matrix_type) {
  Carver counting;
  carve(counting, config, matrix_type, [](const WeightEntry&, void*) {});
  return counting.bytes();
}

std::size_t PackedWeights::index_of(TensorRole role, Layer layer) noexcept {
  const auto number = static_cast<std::size_t>(role);
  return number < kModelRoles ? number : number + static_cast<std::size_t>(layer) * kLayerRoles;
}

PackedWeights::PackedWeights(const ModelConfig& config, DataType matrix_type, Backend& backend)
    : config_(config),
      buffer_(backend.memory(MemoryKind::device), weight_bytes(config, matrix_type), backend.stream()),
      tensors_(kModelRoles + kLayerRoles * static_cast<std::size_t>(config.layers)) {
  Carver carver(buffer_.data());
  carve(carver, config, matrix_type, [&](const WeightEntry& entry, void* memory) {
    Tensor& tensor = tensors_[index_of(entry.role, entry.layer)];
    tensor = entry.matrix ? Tensor(memory, matrix_type, {entry.rows, entry.columns}) : Tensor(memory, DataType::f32, {entry.columns});
  });
  if (config.tied_embeddings) tensors_[index_of(TensorRole::head, 0)] = tensors_[index_of(TensorRole::embedding, 0)];
}

ConstTensor PackedWeights::tensor(TensorRole role, Layer layer) const noexcept {
  const bool per_layer = static_cast<std::size_t>(role) >= kModelRoles;
  if (per_layer && (layer < 0 || layer >= config_.layers)) return {};
  return tensors_[index_of(role, layer)];
}

MemoryPlan PackedWeights::memory() const {
  MemoryPlan plan;
  plan.add("weights", MemoryKind::device, buffer_.bytes());
  return plan;
}

}  // namespace dualdecoder::detail
