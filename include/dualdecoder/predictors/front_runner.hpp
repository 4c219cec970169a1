// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "dualdecoder/retrieval_predictor.hpp"

namespace dualdecoder {

/// Options of the two dual-row predictors.
struct DualRowOptions {
  Resync resync = Resync::always;
  /// > 0: the first guess, and every guess that a resync would otherwise make, is a seeded random token below this number
  int random_guess_below = 0;
  std::uint64_t seed = 0;
};

/// Two rows: the true token and the guess behind it, whose queries name the chunks of the next step. Row 1 attends to its own chunks where
/// they are resident and estimates the others, so it does not drift (docs/concepts.md, "Front runner"). After a wrong guess it
/// takes a resync.
class FrontRunner final : public RetrievalPredictor {
 public:
  explicit FrontRunner(DualRowOptions options = {}) : options_(options) {}

  PredictorTraits traits() const noexcept override {
    return {.name = "front-runner", .rows_per_sequence = 2, .row1_set = Row1Set::own_resident};
  }
  RowMode first_mode() const noexcept override { return options_.random_guess_below > 0 ? RowMode::single : RowMode::resync; }
  void predict(Layer layer, const StepView& view, const Selection& by_row, const Selection&, Prediction& prediction, StepKernels& kernels,
               StreamRef stream) override {
    prediction.layer = layer;
    kernels.copy_row(view, by_row, 1, prediction.chunks, stream);
  }
  void observe(const StepState& state, const Outcome& outcome, int active, StepKernels& kernels, StreamRef stream) override {
    kernels.advance(state, outcome,
                    AdvanceRule{.dual = true,
                                .resync = options_.resync,
                                .lone_sequence = active == 1,
                                .random_guess_below = options_.random_guess_below,
                                .seed = options_.seed},
                    stream);
  }

 private:
  DualRowOptions options_;
};

}  // namespace dualdecoder
