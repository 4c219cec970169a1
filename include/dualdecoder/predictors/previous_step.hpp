// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dualdecoder/retrieval_predictor.hpp"

namespace dualdecoder {

/// One row; the next step is expected to need what this one needed (the reuse of ShadowKV and FreeKV).
class PreviousStep final : public RetrievalPredictor {
 public:
  PredictorTraits traits() const noexcept override { return {.name = "previous-step", .rows_per_sequence = 1}; }
  RowMode first_mode() const noexcept override { return RowMode::single; }
  void predict(Layer layer, const StepView& view, const Selection& by_row, const Selection&, Prediction& prediction, StepKernels& kernels,
               StreamRef stream) override {
    prediction.layer = layer;
    kernels.copy_row(view, by_row, 0, prediction.chunks, stream);
  }
  void observe(const StepState& state, const Outcome& outcome, int, StepKernels& kernels, StreamRef stream) override {
    kernels.advance(state, outcome, AdvanceRule{}, stream);
  }
};

}  // namespace dualdecoder
