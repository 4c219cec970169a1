// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dualdecoder/predictors/front_runner.hpp"

namespace dualdecoder {

/// Two rows as DualDecoder publishes them (arXiv 2607.26475): row 1 attends to row 0's chunks, and a wrong guess is not mended. It still
/// names the next step's chunks with its own queries.
class PublishedDualRow final : public RetrievalPredictor {
 public:
  explicit PublishedDualRow(DualRowOptions options = {.resync = Resync::never}) : rows_(options) {}

  PredictorTraits traits() const noexcept override {
    return {.name = "published-dual-row", .rows_per_sequence = 2, .row1_set = Row1Set::row0};
  }
  RowMode first_mode() const noexcept override { return rows_.first_mode(); }
  void predict(Layer layer, const StepView& view, const Selection& by_row, const Selection& ahead, Prediction& prediction,
               StepKernels& kernels, StreamRef stream) override {
    rows_.predict(layer, view, by_row, ahead, prediction, kernels, stream);
  }
  void observe(const StepState& state, const Outcome& outcome, int active, StepKernels& kernels, StreamRef stream) override {
    rows_.observe(state, outcome, active, kernels, stream);
  }

 private:
  FrontRunner rows_;
};

}  // namespace dualdecoder
