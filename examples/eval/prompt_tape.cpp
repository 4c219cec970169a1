// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/prompt_tape.hpp"

#include <algorithm>
#include <utility>

namespace dualdecoder::examples {

PromptTape::Parts PromptTape::carve(Carver& carver, const Backend& backend, const ModelConfig& model, int tokens) {
  const std::size_t item = size_of(backend.activation_type());
  const std::size_t kv = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(model.kv_width()) * item;
  const std::size_t queries = static_cast<std::size_t>(KvStore::kCalibrationQueries) * static_cast<std::size_t>(model.q_width()) * item;
  Parts parts{.layers = {}, .hidden = carver.take<float>(static_cast<std::size_t>(model.hidden))};
  for (Layer layer = 0; layer < model.layers; ++layer) {
    Layers one{};
    one.keys = carver.take<std::byte>(kv);
    one.values = carver.take<std::byte>(kv);
    one.queries = carver.take<std::byte>(queries);
    parts.layers.push_back(one);
  }
  return parts;
}

std::size_t PromptTape::bytes(const Backend& backend, const ModelConfig& model, int tokens) {
  Carver counting;
  carve(counting, backend, model, tokens);
  return counting.bytes();
}

PromptTape::PromptTape(Backend& backend, const ModelConfig& model, int tokens)
    : tokens_(tokens), buffer_(backend.memory(MemoryKind::device), bytes(backend, model, tokens), backend.stream()) {
  Carver carver(buffer_.data());
  parts_ = carve(carver, backend, model, tokens);
}

/// A dense model that records or replays while its backend holds a tape. A prefill goes layer by layer and, within a layer, block by block.
class TapedDense final : public DenseModel {
 public:
  TapedDense(TapedBackend& backend, std::unique_ptr<DenseModel> inner) : backend_(backend), inner_(std::move(inner)) {}

  DataType activation_type() const noexcept override { return inner_->activation_type(); }
  void embed(const Token* tokens, Tensor hidden, StreamRef stream) override {
    first_ = 0;
    inner_->embed(tokens, hidden, stream);
  }
  void before_attention(Layer layer, ConstTensor hidden, const int* positions, Tensor q, Tensor k, Tensor v, StreamRef stream) override {
    if (!replays()) inner_->before_attention(layer, hidden, positions, q, k, v, stream);
    if (tape() != nullptr) pass_block(layer, q, k, v, stream);
  }
  void prefill_attention(ConstTensor q, ConstTensor keys, ConstTensor values, int offset, Tensor out, StreamRef stream) override {
    if (!replays()) inner_->prefill_attention(q, keys, values, offset, out, stream);
  }
  void after_attention(Layer layer, ConstTensor attention, Tensor hidden, StreamRef stream) override {
    if (!replays()) inner_->after_attention(layer, attention, hidden, stream);
    if (tape() == nullptr) return;
    first_ += static_cast<int>(hidden.dim(0));
    if (first_ < tape()->tokens_) return;
    first_ = 0;
    if (layer + 1 < static_cast<Layer>(tape()->parts_.layers.size())) return;
    const std::size_t row = static_cast<std::size_t>(hidden.dim(1)) * sizeof(float);
    pass(tape()->parts_.hidden, static_cast<std::byte*>(hidden.data) + hidden.bytes() - row, row, stream);
  }
  void head(ConstTensor hidden, Tensor logits, StreamRef stream) override { inner_->head(hidden, logits, stream); }
  void sample(Tensor logits, const SamplingView& sampling, Token* sampled, StreamRef stream) override {
    inner_->sample(logits, sampling, sampled, stream);
  }

 private:
  PromptTape* tape() const { return backend_.tape_; }
  bool replays() const { return tape() != nullptr && tape()->recorded_; }

  void pass(void* on_tape, void* in_work, std::size_t bytes, StreamRef stream) const {
    if (replays()) {
      backend_.copy(in_work, on_tape, bytes, stream);
    } else {
      backend_.copy(on_tape, in_work, bytes, stream);
    }
  }

  void pass_block(Layer layer, const Tensor& q, const Tensor& k, const Tensor& v, StreamRef stream) const {
    const PromptTape::Layers& kept = tape()->parts_.layers[static_cast<std::size_t>(layer)];
    const int rows = static_cast<int>(k.dim(0));
    const std::size_t kv_row = k.bytes() / static_cast<std::size_t>(rows);
    const std::size_t q_row = q.bytes() / static_cast<std::size_t>(rows);
    pass(kept.keys + static_cast<std::size_t>(first_) * kv_row, k.data, k.bytes(), stream);
    pass(kept.values + static_cast<std::size_t>(first_) * kv_row, v.data, v.bytes(), stream);
    const int queries_from = std::max(0, tape()->tokens_ - KvStore::kCalibrationQueries);
    const int from = std::max(first_, queries_from);
    const int end = first_ + rows;
    if (from >= end) return;
    pass(kept.queries + static_cast<std::size_t>(from - queries_from) * q_row,
         static_cast<std::byte*>(q.data) + static_cast<std::size_t>(from - first_) * q_row, static_cast<std::size_t>(end - from) * q_row,
         stream);
  }

  TapedBackend& backend_;
  std::unique_ptr<DenseModel> inner_;
  int first_ = 0;  // token of the block that runs
};

std::unique_ptr<DenseModel> TapedBackend::make_dense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits) {
  return std::make_unique<TapedDense>(*this, ForwardingBackend::make_dense(std::move(weights), limits));
}

void TapedBackend::with(PromptTape& tape, const std::function<void()>& prefill) {
  tape_ = &tape;
  try {
    prefill();
  } catch (...) {
    tape_ = nullptr;
    throw;
  }
  tape_ = nullptr;
  tape.recorded_ = true;
}

}  // namespace dualdecoder::examples
