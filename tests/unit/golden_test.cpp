// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Greedy tokens and logits of real models against the transformers library, which reads the same GGUF files and dequantises them on its
// own. The values and the command that made them are in tests/data/golden_*.json (scripts/make_golden.py).
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/load_weights.hpp"
#include "tests/catch.hpp"
#include "tests/golden.hpp"

using namespace dualdecoder;

namespace {

/// Both sides compute in f32 with another order of additions; the largest difference seen is 2.4e-4.
constexpr double kLogitBound = 2e-3;

std::filesystem::path model_file(const std::string& name) {
  const char* folder = std::getenv("DUALDECODER_MODELS");
  return std::filesystem::path(folder != nullptr ? folder : DUALDECODER_MODEL_DIR) / name;
}

void check_case(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights, const nlohmann::json& golden,
                const nlohmann::json& test_case) {
  const test::GoldenDifference found = test::compare_golden(backend, weights, golden, test_case, DataType::f32, 2 * kLogitBound);
  INFO("prompt of " << test_case["prompt"].size() << " tokens");
  CHECK(found.steps == test_case["tokens"].size());
  CHECK(found.decided > 0);
  CHECK(found.wrong == 0);
  CHECK(found.largest < kLogitBound);
  CHECK(found.log_sum < kLogitBound);
  WARN("prompt of " << test_case["prompt"].size() << " tokens: " << found.equal << " of " << found.steps
                    << " tokens are the same; largest difference of a logit " << found.largest << ", of the log sum " << found.log_sum);
}

/// Cases of a file, from `first` on.
void check_golden(const std::filesystem::path& file, std::size_t first, std::size_t count) {
  const nlohmann::json golden = test::read_golden(file);
  const std::filesystem::path path = model_file(golden["file"].get<std::string>());
  if (!std::filesystem::exists(path)) DUALDECODER_SKIP("no " + path.filename().string() + "; scripts/get-model.sh fetches it");
  auto backend = cpu::make_cpu_backend();
  auto weights = load_weights(path, *backend, {.matrix_type = DataType::f32, .yarn_factor = golden.value("yarn_factor", 0.0F)});
  const std::size_t last = std::min(first + std::min(count, golden["cases"].size()), golden["cases"].size());
  for (std::size_t i = first; i < last; ++i) check_case(backend, weights, golden, golden["cases"].at(i));
}

void check_committed(const char* file, std::size_t first, std::size_t count) {
  check_golden(std::filesystem::path(DUALDECODER_TEST_DATA_DIR) / file, first, count);
}

}  // namespace

TEST_CASE("SmolLM2 generates what transformers generates, prompts of 10 and 500 tokens", "[golden][real_model]") {
  check_committed("golden_smollm2.json", 0, 2);
}

TEST_CASE("SmolLM2 generates what transformers generates, a prompt of 4,000 tokens", "[golden][real_model][slow]") {
  check_committed("golden_smollm2.json", 2, 1);
}

TEST_CASE("Qwen2.5-Coder-0.5B generates what transformers generates, prompts of 10 and 500 tokens", "[golden][real_model][slow]") {
  check_committed("golden_qwen2.5-coder-0.5b.json", 0, 2);
}

TEST_CASE("Qwen2.5-Coder-0.5B generates what transformers generates, a prompt of 4,000 tokens", "[golden][real_model][slow]") {
  check_committed("golden_qwen2.5-coder-0.5b.json", 2, 1);
}

TEST_CASE("the files that DUALDECODER_GOLDEN names hold what we generate", "[golden][real_model]") {
  const auto files = test::golden_files_asked_for();
  if (files.empty()) DUALDECODER_SKIP("DUALDECODER_GOLDEN names no file; scripts/make_golden.py writes them");
  for (const auto& file : files) check_golden(file, 0, std::string::npos);
}
