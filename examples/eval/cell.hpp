// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "examples/common/fidelity.hpp"
#include "examples/eval/prompt.hpp"

namespace dualdecoder::examples {

/// What one method made of one question.
struct CellResult {
  static constexpr std::size_t kThirds = 3;

  double score = 0.0;
  std::string answer;
  Fidelity fidelity;                       ///< against full attention, forced on its text, from the second token on
  std::array<Fidelity, kThirds> thirds{};  ///< of those tokens
  std::size_t first_divergence = 0;        ///< tokens before the first that differs; all of them when none does
  std::array<double, kThirds> hits{};      ///< hit rate by thirds
  SessionStatistics session;
  StoreStatistics store;
  MemoryPlan plan;
  std::size_t measured_device_bytes = 0;  ///< of the session while it ran, weights left out
  double seconds = 0.0;                   ///< for all of this
};

/// Where and with what questions are answered.
struct Laboratory {
  std::shared_ptr<Backend> backend;
  std::shared_ptr<const ModelWeights> weights;
  const Tokenizer* tokenizer = nullptr;
  const testing::CountingResource* device_memory = nullptr;  ///< the backend's; null: not measured
  /// Told how much of a cell is done, in 0 .. 1; what it throws ends the cell.
  std::function<void(double)> on_progress;
};

/// One question, answered by one method after the other. Full attention's answer is made once, when it is first needed, and is what the
/// others are forced on and compared with.
class QuestionRun {
 public:
  QuestionRun(const Laboratory& laboratory, Prompt prompt, Match match, int context);

  /// Full attention itself.
  CellResult run_full(const SessionOptions& options);
  /// Any other method, on the backend that it needs.
  CellResult run(const SessionOptions& options, const std::shared_ptr<Backend>& backend);
  /// The score of full attention.
  double full_score();
  std::size_t prompt_tokens() const { return prompt_.tokens.size(); }

 private:
  std::size_t device_bytes() const;  // in use now; 0 when that is not measured
  AddOptions free_options(double from, double to) const;
  void make_full();
  std::string text_of(const std::vector<Token>& tokens) const;
  std::vector<Token> run_free(const SessionOptions& options, const std::shared_ptr<Backend>& backend, double from, double to) const;
  void run_forced(const SessionOptions& options, const std::shared_ptr<Backend>& backend, CellResult& result, FidelityMeter& meter) const;

  const Laboratory& laboratory_;
  Prompt prompt_;
  Match match_;
  int context_;
  std::optional<Reference> full_;
  CellResult full_result_;
};

}  // namespace dualdecoder::examples
