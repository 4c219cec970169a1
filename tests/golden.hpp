// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "dualdecoder/decode_session.hpp"

/// Files that scripts/make_golden.py writes: logits of the transformers library in f32, on the same GGUF file, and in some also with the
/// CUDA backend's roundings.
namespace dualdecoder::test {

inline nlohmann::json read_golden(const std::filesystem::path& path) {
  std::ifstream in(path);
  if (!in) throw std::runtime_error(path.string() + ": cannot be read");
  return nlohmann::json::parse(in);
}

/// Files that the environment variable DUALDECODER_GOLDEN names, with colons between them.
inline std::vector<std::filesystem::path> golden_files_asked_for() {
  std::vector<std::filesystem::path> files;
  const char* const list = std::getenv("DUALDECODER_GOLDEN");
  std::istringstream in(list == nullptr ? "" : list);
  for (std::string file; std::getline(in, file, ':');) files.emplace_back(file);
  return files;
}

/// How a session's logits differ from those of one case, teacher-forced on its greedy tokens.
struct GoldenDifference {
  double largest = 0.0;  ///< of the probe tokens' logits and the best tokens'
  double rms = 0.0;
  double rounded_largest = 0.0;  ///< the same of the logits with the CUDA backend's roundings, where the file has them
  double rounded_rms = 0.0;
  double log_sum = 0.0;  ///< largest difference of log(sum(exp(logits)))
  std::size_t steps = 0;
  std::size_t equal = 0;    ///< steps with the same likeliest token
  std::size_t decided = 0;  ///< steps whose best two logits are further apart than `gap`
  std::size_t wrong = 0;    ///< of those: another likeliest token
};

/// Full attention over the case's prompt.
inline GoldenDifference compare_golden(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                                       const nlohmann::json& golden, const nlohmann::json& test_case, DataType kv_type, double gap) {
  const auto prompt = test_case["prompt"].get<std::vector<Token>>();
  const auto tokens = test_case["tokens"].get<std::vector<Token>>();
  const auto probes = golden["probe_ids"].get<std::vector<std::size_t>>();
  SessionOptions options;
  options.max_context = static_cast<int>(prompt.size() + tokens.size());
  options.store = StoreKind::full;
  options.predictor = PredictorKind::none;
  options.kv_type = kv_type;
  auto session = make_session(backend, weights, options);
  GoldenDifference found;
  const bool has_rounded = test_case.contains("rounded");
  double squares = 0.0;
  double rounded_squares = 0.0;
  std::size_t compared = 0;
  AddOptions add;
  add.forced = tokens;
  add.on_logits = [&](std::span<const float> logits) {
    const auto& want = test_case["steps"][found.steps];
    const auto compare = [&](std::size_t id, const char* kind, std::size_t i) {
      const auto note = [&](const nlohmann::json& step, double& largest, double& sum_of_squares) {
        const double difference = std::fabs(static_cast<double>(logits[id]) - step[kind][i].get<double>());
        largest = std::max(largest, difference);
        sum_of_squares += difference * difference;
      };
      note(want, found.largest, squares);
      if (has_rounded) note(test_case["rounded"]["steps"][found.steps], found.rounded_largest, rounded_squares);
      ++compared;
    };
    for (std::size_t i = 0; i < probes.size(); ++i) compare(probes[i], "probes", i);
    for (std::size_t i = 0; i < want["top_ids"].size(); ++i) compare(want["top_ids"][i].get<std::size_t>(), "top_logits", i);
    double sum = 0.0;
    for (float logit : logits) sum += std::exp(static_cast<double>(logit));
    found.log_sum = std::max(found.log_sum, std::fabs(std::log(sum) - want["logsumexp"].get<double>()));
    const bool same = std::max_element(logits.begin(), logits.end()) - logits.begin() == tokens[found.steps];
    const bool decides = want["top_logits"][0].get<double>() - want["top_logits"][1].get<double>() > gap;
    found.equal += same ? 1 : 0;
    found.decided += decides ? 1 : 0;
    found.wrong += decides && !same ? 1 : 0;
    ++found.steps;
  };
  session.add(prompt, add);
  while (session.active() > 0) session.step();
  const auto count = static_cast<double>(std::max<std::size_t>(compared, 1));
  found.rms = std::sqrt(squares / count);
  found.rounded_rms = std::sqrt(rounded_squares / count);
  return found;
}

}  // namespace dualdecoder::test
