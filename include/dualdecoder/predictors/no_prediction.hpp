// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dualdecoder/retrieval_predictor.hpp"

namespace dualdecoder {

/// One row, nothing predicted: every chunk that is not resident is a miss.
class NoPrediction final : public RetrievalPredictor {
 public:
  PredictorTraits traits() const noexcept override { return {.name = "none", .rows_per_sequence = 1}; }
  RowMode first_mode() const noexcept override { return RowMode::single; }
  void predict(Layer layer, const StepView&, const Selection&, const Selection&, Prediction& prediction, StepKernels&, StreamRef) override {
    prediction.layer = layer;
    prediction.chunks = Selection{};
  }
  void observe(const StepState& state, const Outcome& outcome, int, StepKernels& kernels, StreamRef stream) override {
    kernels.advance(state, outcome, AdvanceRule{}, stream);
  }
};

}  // namespace dualdecoder
