// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Greedy tokens and logits of real models against the transformers library, which reads the same GGUF files and dequantises them on its
// own. The values and the command that made them are in tests/data/golden_*.json (scripts/make_golden.py).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/load_weights.hpp"
#include "tests/catch.hpp"

using namespace dualdecoder;

namespace {

/// Both sides compute in f32 with another order of additions; the largest difference seen is 2.4e-4.
constexpr double kLogitBound = 2e-3;

std::filesystem::path model_file(const std::string& name) {
  const char* folder = std::getenv("DUALDECODER_MODELS");
  return std::filesystem::path(folder != nullptr ? folder : DUALDECODER_MODEL_DIR) / name;
}

struct Largest {
  double probe = 0.0;
  double best = 0.0;
  double log_sum = 0.0;
};

void check_case(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights, const nlohmann::json& golden,
                const nlohmann::json& test_case) {
  const auto prompt = test_case["prompt"].get<std::vector<Token>>();
  const auto tokens = test_case["tokens"].get<std::vector<Token>>();
  const auto probes = golden["probe_ids"].get<std::vector<std::size_t>>();
  SessionOptions options;
  options.max_context = static_cast<int>(prompt.size() + tokens.size());
  options.store = StoreKind::full;
  options.predictor = PredictorKind::none;
  options.kv_type = DataType::f32;
  auto session = make_session(backend, weights, options);
  Largest largest;
  std::size_t step = 0;
  AddOptions add;
  add.max_new_tokens = static_cast<int>(tokens.size());
  add.on_logits = [&](std::span<const float> logits) {
    const auto& want = test_case["steps"][step++];
    for (std::size_t i = 0; i < probes.size(); ++i) {
      largest.probe = std::max(largest.probe, std::fabs(double(logits[probes[i]]) - want["probes"][i].get<double>()));
    }
    for (std::size_t i = 0; i < want["top_ids"].size(); ++i) {
      const auto id = want["top_ids"][i].get<std::size_t>();
      largest.best = std::max(largest.best, std::fabs(double(logits[id]) - want["top_logits"][i].get<double>()));
    }
    double sum = 0.0;
    for (float logit : logits) sum += std::exp(double(logit));
    largest.log_sum = std::max(largest.log_sum, std::fabs(std::log(sum) - want["logsumexp"].get<double>()));
  };
  session.add(prompt, add);
  std::vector<Token> got;
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) got.push_back(event.token);
  }
  INFO("prompt of " << prompt.size() << " tokens: probes " << largest.probe << ", best " << largest.best << ", log sum "
                    << largest.log_sum);
  CHECK(got == tokens);
  CHECK(step == tokens.size());
  CHECK(largest.probe < kLogitBound);
  CHECK(largest.best < kLogitBound);
  CHECK(largest.log_sum < kLogitBound);
  WARN("prompt of " << prompt.size() << " tokens: largest difference of a probe logit " << largest.probe << ", of a best logit "
                    << largest.best << ", of the log sum " << largest.log_sum);
}

void check_golden(const char* data, std::size_t first, std::size_t count) {
  std::ifstream in(std::filesystem::path(DUALDECODER_TEST_DATA_DIR) / data);
  REQUIRE(in);
  const nlohmann::json golden = nlohmann::json::parse(in);
  const std::filesystem::path path = model_file(golden["file"].get<std::string>());
  if (!std::filesystem::exists(path)) DUALDECODER_SKIP("no " + path.filename().string() + "; scripts/get-model.sh fetches it");
  auto backend = cpu::make_cpu_backend();
  auto weights = load_weights(path, *backend, {.matrix_type = DataType::f32});
  for (std::size_t i = first; i < first + count; ++i) check_case(backend, weights, golden, golden["cases"].at(i));
}

}  // namespace

TEST_CASE("SmolLM2 generates what transformers generates, prompts of 10 and 500 tokens", "[golden][real_model]") {
  check_golden("golden_smollm2.json", 0, 2);
}

TEST_CASE("SmolLM2 generates what transformers generates, a prompt of 4,000 tokens", "[golden][real_model][slow]") {
  check_golden("golden_smollm2.json", 2, 1);
}

TEST_CASE("Qwen2.5-Coder-0.5B generates what transformers generates, prompts of 10 and 500 tokens", "[golden][real_model][slow]") {
  check_golden("golden_qwen2.5-coder-0.5b.json", 0, 2);
}

TEST_CASE("Qwen2.5-Coder-0.5B generates what transformers generates, a prompt of 4,000 tokens", "[golden][real_model][slow]") {
  check_golden("golden_qwen2.5-coder-0.5b.json", 2, 1);
}
