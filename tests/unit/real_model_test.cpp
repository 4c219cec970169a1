// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The invariants of docs/concepts.md on the published SmolLM2 model. The full store, which the sparse ones must equal at a budget of the
// whole context, is compared with the transformers library in golden_test.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <vector>

#include "tests/catch.hpp"
#include "tests/unit/session_fixture.hpp"

using namespace dualdecoder;
using namespace dualdecoder::test;

namespace {

constexpr int kPrompt = 1000;
constexpr int kWanted = 12;

struct RealModel {
  std::shared_ptr<Backend> backend;
  std::shared_ptr<const ModelWeights> weights;
};

const RealModel* real_model() {
  static const RealModel model = [] {
    const char* folder = std::getenv("DUALDECODER_MODELS");
    const std::filesystem::path path =
        std::filesystem::path(folder != nullptr ? folder : DUALDECODER_MODEL_DIR) / "SmolLM2-135M-Instruct.Q4_1.gguf";
    if (!std::filesystem::exists(path)) return RealModel{};
    RealModel loaded{cpu::make_cpu_backend(), nullptr};
    loaded.weights = load_weights(path, *loaded.backend);
    return loaded;
  }();
  return model.weights ? &model : nullptr;
}

/// Runs of random tokens that come back, so that there is something to attend to.
std::vector<Token> prompt() {
  const std::vector<Token> passage = random_tokens(190, 3, 20000);
  std::vector<Token> tokens;
  for (std::uint64_t part = 0; tokens.size() < kPrompt; ++part) {
    const std::vector<Token> fresh = random_tokens(60, 40 + part, 20000);
    tokens.insert(tokens.end(), passage.begin(), passage.end());
    tokens.insert(tokens.end(), fresh.begin(), fresh.end());
  }
  tokens.resize(kPrompt);
  return tokens;
}

SessionOptions sparse_options() {
  SessionOptions options;
  options.store = StoreKind::resident;
  options.max_context = 1024;
  options.budget_tokens = 128;
  options.local_tokens = 64;
  return options;
}

std::vector<Text> run(const RealModel& model, const SessionOptions& options) {
  AddOptions add;
  add.max_new_tokens = kWanted;
  auto session = make_session(model.backend, model.weights, options);
  return generate(session, {prompt()}, add);
}

/// The front runner with the resident store, run once for all cases.
const std::vector<Text>& default_run(const RealModel& model) {
  static const std::vector<Text> texts = run(model, sparse_options());
  return texts;
}

void check_same_bits(const std::vector<Text>& got, const std::vector<Text>& want) {
  REQUIRE(want[0].tokens.size() == kWanted);
  CHECK(got[0].tokens == want[0].tokens);
  CHECK(got[0].logits == want[0].logits);
}

double largest_difference(const Text& a, const Text& b) {
  double largest = 0.0;
  for (std::size_t t = 0; t < std::min(a.logits.size(), b.logits.size()); ++t) {
    for (std::size_t i = 0; i < a.logits[t].size(); ++i) largest = std::max(largest, std::fabs(double(a.logits[t][i]) - b.logits[t][i]));
  }
  return largest;
}

const char* const kMissing = "no SmolLM2-135M-Instruct.Q4_1.gguf; scripts/get-model.sh fetches it";

}  // namespace

TEST_CASE("SmolLM2 under wait: the same bits as the published predictor with swapping buffers", "[session][real_model][slow]") {
  const RealModel* model = real_model();
  if (model == nullptr) DUALDECODER_SKIP(kMissing);
  SessionOptions options = sparse_options();
  options.predictor = PredictorKind::published_dual_row;
  options.store = StoreKind::ping_pong;
  check_same_bits(run(*model, options), default_run(*model));
}

TEST_CASE("SmolLM2 under wait: the same bits with random guesses, few slots and one slow lane", "[session][real_model][slow]") {
  const RealModel* model = real_model();
  if (model == nullptr) DUALDECODER_SKIP(kMissing);
  SessionOptions options = sparse_options();
  options.resync = Resync::never;
  options.random_guess_below = 1000;
  options.slots_per_budget = 1.0F;
  options.link_bytes_per_second = 2e8;
  options.single_lane = true;
  check_same_bits(run(*model, options), default_run(*model));
}

TEST_CASE("SmolLM2 under estimate: the same bits at any speed of the link", "[session][real_model][slow]") {
  const RealModel* model = real_model();
  if (model == nullptr) DUALDECODER_SKIP(kMissing);
  SessionOptions options = sparse_options();
  options.miss_policy = MissPolicy::estimate;
  options.slots_per_budget = 2.0F;
  const std::vector<Text> want = run(*model, options);
  options.link_bytes_per_second = 5e7;
  options.link_latency = std::chrono::microseconds(1);
  check_same_bits(run(*model, options), want);
}

TEST_CASE("SmolLM2 with a budget of the whole context gives what full attention gives", "[session][real_model][slow]") {
  const RealModel* model = real_model();
  if (model == nullptr) DUALDECODER_SKIP(kMissing);
  SessionOptions options = sparse_options();
  options.kv_type = DataType::f32;
  options.budget_tokens = options.max_context;
  const std::vector<Text> sparse = run(*model, options);
  options.store = StoreKind::full;
  const std::vector<Text> full = run(*model, options);
  CHECK(sparse[0].tokens == full[0].tokens);
  CHECK(largest_difference(sparse[0], full[0]) < 2e-3);  // logits of up to 30, sums in another order
}
