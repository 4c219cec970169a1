// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "dualdecoder/memory.hpp"
#include "dualdecoder/testing/forwarding.hpp"

namespace dualdecoder::examples {

/// What the dense part of a prompt's prefill gives to a store and to the head: keys and values of every layer, the last queries of each,
/// and the hidden state of the last token. Every policy prefills densely, so that one tape serves them all.
class PromptTape {
 public:
  /// Takes the memory, of the backend's device; throws OutOfMemory.
  PromptTape(Backend& backend, const ModelConfig& model, int tokens);

  static std::size_t bytes(const Backend& backend, const ModelConfig& model, int tokens);

 private:
  friend class TapedBackend;
  friend class TapedDense;

  /// Rows of one layer.
  struct Layers {
    std::byte* keys;     // [tokens, kv_heads, head_dim]
    std::byte* values;   // the same
    std::byte* queries;  // [kCalibrationQueries, heads, head_dim] those of the last tokens
  };
  struct Parts {
    std::vector<Layers> layers;
    float* hidden;  // [hidden] of the last token
  };
  static Parts carve(Carver& carver, const Backend& backend, const ModelConfig& model, int tokens);

  int tokens_;
  Buffer buffer_;
  Parts parts_;
  bool recorded_ = false;
};

/// Hands every call to another backend, but keeps the dense part of a prefill and gives it again for another store, bit for bit. Threading:
/// one thread at a time.
class TapedBackend final : public testing::ForwardingBackend {
 public:
  explicit TapedBackend(std::shared_ptr<Backend> inner) : ForwardingBackend(std::move(inner)) {}

  std::unique_ptr<DenseModel> make_dense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits) override;

  /// Runs `prefill`, which prefills one prompt of as many tokens as the tape has, in a session of this backend or of one that forwards to
  /// it, and decodes nothing. The first time records, later ones replay. Rethrows what `prefill` throws; a recording is then void.
  void with(PromptTape& tape, const std::function<void()>& prefill);

 private:
  friend class TapedDense;

  PromptTape* tape_ = nullptr;  // while a prefill runs
};

}  // namespace dualdecoder::examples
