// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend's lanes honour TransferScheduler, and every predictor honours RetrievalPredictor on its step kernels. The suites are
// those that the CPU backend passes.
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dualdecoder/cuda/backend.hpp"
#include "dualdecoder/predictors/front_runner.hpp"
#include "dualdecoder/predictors/layer_ahead.hpp"
#include "dualdecoder/predictors/no_prediction.hpp"
#include "dualdecoder/predictors/oracle.hpp"
#include "dualdecoder/predictors/previous_step.hpp"
#include "dualdecoder/predictors/published_dual_row.hpp"
#include "dualdecoder/testing/predictor_conformance.hpp"
#include "dualdecoder/testing/scheduler_conformance.hpp"
#include "tests/gpu/check.hpp"

namespace dualdecoder::test {
namespace {

void expect_none(const std::string& subject, const std::vector<std::string>& findings) {
  for (const std::string& finding : findings) DUALDECODER_EXPECT(false, "%s: %s", subject.c_str(), finding.c_str());
  if (findings.empty()) std::printf("%s: as promised\n", subject.c_str());
}

void test_schedulers(Backend& backend) {
  for (const bool single_lane : {false, true}) {
    for (const bool concurrent : {false, true}) {
      // urgent loads and prefetches run at once on the device, so nothing of one layer overtakes another layer's
      const auto make = [&](SchedulerOptions options) {
        options.single_lane = single_lane;
        options.concurrent_prefetch = concurrent;
        return backend.make_scheduler(options);
      };
      expect_none(std::string(single_lane ? "a single lane" : "the lanes") + (concurrent ? ", concurrent prefetch" : ""),
                  testing::check_transfer_scheduler({make, testing::workplace_of(backend), !small_run(), false}));
    }
  }
}

void test_predictors(Backend& backend) {
  const auto check = [&](const char* name, std::function<std::unique_ptr<RetrievalPredictor>()> make) {
    expect_none(name, testing::check_retrieval_predictor({std::move(make), &backend.kernels(), testing::workplace_of(backend)}));
  };
  for (const Resync resync : {Resync::never, Resync::always, Resync::automatic}) {
    for (const int random_guess_below : {0, 100}) {
      check("the front runner", [=] { return std::make_unique<FrontRunner>(DualRowOptions{resync, random_guess_below, 9}); });
    }
  }
  check("the published dual row", [] { return std::make_unique<PublishedDualRow>(); });
  check("no prediction", [] { return std::make_unique<NoPrediction>(); });
  check("the previous step", [] { return std::make_unique<PreviousStep>(); });
  check("layer ahead", [] { return std::make_unique<LayerAhead>(); });
  SelectionTrace trace;
  check("the recorder", [&] { return std::make_unique<SelectionRecorder>(std::make_unique<FrontRunner>(), trace); });
  SelectionTrace nothing;
  check("the oracle without a trace", [&] { return std::make_unique<Oracle>(nothing); });
}

}  // namespace
}  // namespace dualdecoder::test

int main() {
  return dualdecoder::test::run_on_device([] {
    const auto backend = dualdecoder::cuda::make_cuda_backend();
    dualdecoder::test::test_schedulers(*backend);
    dualdecoder::test::test_predictors(*backend);
  });
}
