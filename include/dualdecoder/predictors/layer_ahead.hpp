// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dualdecoder/retrieval_predictor.hpp"

namespace dualdecoder {

/// One row; the next layer's query, rehearsed from this layer's input, names the chunks of that layer in the same step (InfiniGen's idea
/// without its skewed weights). Its loads have the time of one layer, and that layer waits for them under either miss policy.
class LayerAhead final : public RetrievalPredictor {
 public:
  PredictorTraits traits() const noexcept override { return {.name = "layer-ahead", .rows_per_sequence = 1, .layer_ahead = true}; }
  RowMode first_mode() const noexcept override { return RowMode::single; }
  void predict(Layer layer, const StepView& view, const Selection&, const Selection& ahead, Prediction& prediction, StepKernels& kernels,
               StreamRef stream) override {
    if (ahead.chunks == nullptr) {
      prediction.layer = layer;
      prediction.chunks = Selection{};
      return;
    }
    prediction.layer = layer + 1;
    prediction.this_step = true;
    kernels.copy_row(view, ahead, 0, prediction.chunks, stream);
  }
  void observe(const StepState& state, const Outcome& outcome, int, StepKernels& kernels, StreamRef stream) override {
    kernels.advance(state, outcome, AdvanceRule{}, stream);
  }
};

}  // namespace dualdecoder
