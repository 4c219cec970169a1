// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// How well predictors name the next step's chunks on a real model, with bounds that leave room for another text; docs/performance.md has
// the figures. The prompt is that of tests/data/golden_smollm2.json.
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/load_weights.hpp"
#include "tests/catch.hpp"

using namespace dualdecoder;

namespace {

constexpr std::size_t kPromptTokens = 1500;
constexpr int kGenerated = 48;

struct Run {
  std::vector<Token> tokens;
  double hit = 0.0;  ///< share of the needed chunks that were predicted
};

Run predict_with(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                 const std::vector<Token>& prompt, SessionOptions options) {
  options.max_context = static_cast<int>(prompt.size()) + kGenerated;
  options.budget_tokens = 256;
  auto session = make_session(backend, weights, options);
  AddOptions add;
  add.max_new_tokens = kGenerated;
  session.add(prompt, add);
  Run result;
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) result.tokens.push_back(event.token);
  }
  const StoreStatistics statistics = session.store_statistics();
  REQUIRE(statistics.predictable > 0);
  result.hit = static_cast<double>(statistics.predicted_hit) / static_cast<double>(statistics.predictable);
  return result;
}

}  // namespace

TEST_CASE("The front runner predicts better than the published dual row, and that better from a true guess",
          "[prediction][real_model][slow]") {
  std::ifstream in(std::filesystem::path(DUALDECODER_TEST_DATA_DIR) / "golden_smollm2.json");
  REQUIRE(in);
  const nlohmann::json golden = nlohmann::json::parse(in);
  const char* folder = std::getenv("DUALDECODER_MODELS");
  const auto path = std::filesystem::path(folder != nullptr ? folder : DUALDECODER_MODEL_DIR) / golden["file"].get<std::string>();
  if (!std::filesystem::exists(path)) DUALDECODER_SKIP("no " + path.filename().string() + "; scripts/get-model.sh fetches it");
  auto prompt = golden["cases"].at(2)["prompt"].get<std::vector<Token>>();
  prompt.erase(prompt.begin(), prompt.end() - static_cast<std::ptrdiff_t>(kPromptTokens));
  auto backend = cpu::make_cpu_backend();
  auto weights = load_weights(path, *backend);

  SessionOptions options;
  options.store = StoreKind::resident;
  options.predictor = PredictorKind::front_runner;
  options.resync = Resync::always;
  const Run front = predict_with(backend, weights, prompt, options);
  options.predictor = PredictorKind::published_dual_row;
  options.resync = Resync::never;
  const Run published = predict_with(backend, weights, prompt, options);
  options.random_guess_below = weights->config().vocabulary;
  const Run random = predict_with(backend, weights, prompt, options);
  options.random_guess_below = 0;
  options.predictor = PredictorKind::previous_step;
  const Run previous = predict_with(backend, weights, prompt, options);

  WARN("mean hit: front runner " << front.hit << ", published dual row " << published.hit << ", with a random first guess " << random.hit
                                 << ", previous step " << previous.hit);
  CHECK(front.hit >= 0.93);
  CHECK(published.hit < front.hit);
  CHECK(random.hit < published.hit);
  CHECK(previous.hit < front.hit);
}
