// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The listings of docs/extending.md.
#include <dualdecoder/decode_session.hpp>
#include <dualdecoder/predictors/previous_step.hpp>
#include <dualdecoder/testing/predictor_conformance.hpp>
#include <functional>
#include <memory>
#include <string>

namespace listings {

using MyPredictor = dualdecoder::PreviousStep;

void decode(std::shared_ptr<dualdecoder::Backend> backend, std::shared_ptr<const dualdecoder::ModelWeights> weights,
            const dualdecoder::SessionOptions& options) {
  //! [session]
  dualdecoder::DecodeSession session(backend, weights, options, std::make_unique<MyPredictor>());
  //! [session]
  while (session.active() > 0) session.step();
}

void check(const std::shared_ptr<dualdecoder::Backend>& backend, const std::function<void(const std::string&)>& report) {
  //! [check]
  for (const std::string& finding : dualdecoder::testing::check_retrieval_predictor(
           {[] { return std::make_unique<MyPredictor>(); }, &backend->kernels(), dualdecoder::testing::workplace_of(*backend)})) {
    report(finding);
  }
  //! [check]
}

}  // namespace listings
