// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>
#include <vector>

#include "dualdecoder/host_step_kernels.hpp"
#include "dualdecoder/predictors/front_runner.hpp"
#include "dualdecoder/predictors/layer_ahead.hpp"
#include "dualdecoder/predictors/no_prediction.hpp"
#include "dualdecoder/predictors/oracle.hpp"
#include "dualdecoder/predictors/previous_step.hpp"
#include "dualdecoder/predictors/published_dual_row.hpp"
#include "dualdecoder/testing/predictor_conformance.hpp"
#include "tests/catch.hpp"

namespace dualdecoder {
namespace {

std::vector<std::string> findings_of(std::function<std::unique_ptr<RetrievalPredictor>()> make) {
  testing::HeapMemory memory;
  HostStepKernels kernels;
  return testing::check_retrieval_predictor({std::move(make), &kernels, testing::host_workplace(memory)});
}

void check(std::function<std::unique_ptr<RetrievalPredictor>()> make) {
  for (const std::string& finding : findings_of(std::move(make))) FAIL_CHECK(finding);
  SUCCEED();
}

/// Of every mistake that the checks are there for, one.
class Careless final : public RetrievalPredictor {
 public:
  PredictorTraits traits() const noexcept override { return {.name = "", .rows_per_sequence = 1}; }
  RowMode first_mode() const noexcept override { return RowMode::dual; }
  void predict(Layer layer, const StepView&, const Selection& by_row, const Selection&, Prediction& prediction, StepKernels&,
               StreamRef) override {
    prediction.layer = layer;
    prediction.this_step = true;
    for (int place = 0; place < 5; ++place) {
      for (int head = 0; head < by_row.kv_heads; ++head) {
        prediction.chunks.count_of(place, head) = 2;
        prediction.chunks.chunks_of(place, head)[0] = 3;
        prediction.chunks.chunks_of(place, head)[1] = 3;
      }
    }
    by_row.count_of(0, 0) = 0;
  }
  void observe(const StepState& state, const Outcome&, int, StepKernels&, StreamRef) override {
    for (int place = 0; place < state.sequences; ++place) state.mode[place] = RowMode::dual;
  }
};

}  // namespace

TEST_CASE("the front runner honours RetrievalPredictor", "[conformance]") {
  for (const Resync resync : {Resync::never, Resync::always, Resync::automatic}) {
    for (const int random_guess_below : {0, 100}) {
      check([=] { return std::make_unique<FrontRunner>(DualRowOptions{resync, random_guess_below, 9}); });
    }
  }
}

TEST_CASE("the published dual row honours RetrievalPredictor", "[conformance]") {
  check([] { return std::make_unique<PublishedDualRow>(); });
  check([] { return std::make_unique<PublishedDualRow>(DualRowOptions{Resync::always, 0, 0}); });
}

TEST_CASE("predictors of one row honour RetrievalPredictor", "[conformance]") {
  check([] { return std::make_unique<NoPrediction>(); });
  check([] { return std::make_unique<PreviousStep>(); });
  check([] { return std::make_unique<LayerAhead>(); });
}

TEST_CASE("the oracle and the recorder honour RetrievalPredictor", "[conformance]") {
  SelectionTrace recorded;
  for (int slot = 0; slot < 5; ++slot) {
    for (int position = 400; position < 502; ++position) {
      for (int list = 0; list < 6; ++list) {
        // lists longer than a prediction holds as well
        std::vector<int> chunks;
        for (int chunk = slot; chunk < slot + position % 12; ++chunk) chunks.push_back(chunk);
        recorded.record({slot, position, list / 2, list % 2}, chunks);
      }
    }
  }
  check([&] { return std::make_unique<Oracle>(recorded); });
  SelectionTrace nothing;
  check([&] { return std::make_unique<Oracle>(nothing); });
  SelectionTrace trace;
  check([&] { return std::make_unique<SelectionRecorder>(std::make_unique<FrontRunner>(), trace); });
  check([&] { return std::make_unique<SelectionRecorder>(std::make_unique<LayerAhead>(), trace); });
}

TEST_CASE("the checks of RetrievalPredictor notice a careless one", "[conformance]") {
  CHECK(findings_of([] { return std::make_unique<Careless>(); }).size() >= 8);
}

}  // namespace dualdecoder
