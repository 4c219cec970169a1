// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "examples/common/fidelity.hpp"
#include "examples/eval/prompt.hpp"
#include "examples/eval/prompt_tape.hpp"

namespace dualdecoder::examples {

/// What one method made of one question.
struct CellResult {
  static constexpr std::size_t kThirds = 3;

  double score = 0.0;  ///< NaN where the task has no right answer
  std::string answer;
  Fidelity fidelity;                       ///< against full attention, forced on its text, from the second token on
  std::array<Fidelity, kThirds> thirds{};  ///< of those tokens
  std::size_t first_divergence = 0;        ///< tokens before the first that differs; all of them when none does
  MemoryPlan plan;                         ///< for one sequence
  // of the questions that were answered side by side, together:
  int batch = 1;
  std::array<double, kThirds> hits{};  ///< hit rate by thirds of the longest answer
  SessionStatistics session;
  StoreStatistics store;
  std::size_t measured_device_bytes = 0;  ///< of the session while it ran, weights left out
  double seconds = 0.0;                   ///< for all of this
};

/// Where and with what questions are answered.
struct Laboratory {
  std::shared_ptr<TapedBackend> backend;
  std::shared_ptr<const ModelWeights> weights;
  const Tokenizer* tokenizer = nullptr;
  const testing::CountingResource* device_memory = nullptr;  ///< the backend's; null: not measured
  /// Told how much of a run is done, in 0 .. 1; what it throws ends the run.
  std::function<void(double)> on_progress;
};

/// Questions of one kind, answered side by side by one method after the other. Full attention's answers are made once, when they are first
/// needed, and are what the others are forced on and compared with; the dense part of its prefills serves all methods.
class QuestionBatch {
 public:
  QuestionBatch(const Laboratory& laboratory, std::vector<Prompt> prompts, Match match, int context);

  /// Full attention itself, on all questions.
  std::vector<CellResult> run_full(const SessionOptions& options);
  /// Any other method, on the backend that it needs, which forwards to the laboratory's, on the questions of these numbers. `options` are
  /// those of one sequence.
  std::vector<CellResult> run(const SessionOptions& options, const std::shared_ptr<Backend>& backend,
                              std::span<const std::size_t> questions);
  /// The score of full attention.
  double full_score(std::size_t question);
  std::size_t prompt_tokens(std::size_t question) const { return prompts_[question].tokens.size(); }

 private:
  /// Full attention's own text of one question, with the distributions behind it.
  struct Full {
    std::vector<Token> tokens;
    LogProbabilities log_probabilities;
    CellResult result;
  };
  struct Forced;

  std::size_t device_bytes() const;  // in use now; 0 when that is not measured
  SequenceId add(DecodeSession& session, std::size_t question, AddOptions options);
  AddOptions free_options(std::size_t question) const;
  void make_full();
  double score_of(std::size_t question, const std::string& answer) const;
  std::string text_of(std::span<const Token> tokens) const { return laboratory_.tokenizer->decode(tokens); }
  void run_forced(DecodeSession& session, std::vector<Forced>& forced, CellResult& together);
  void run_free(DecodeSession& session, std::vector<Forced>& forced);

  const Laboratory& laboratory_;
  std::vector<Prompt> prompts_;
  Match match_;
  int context_;
  std::vector<PromptTape> tapes_;
  std::vector<Full> full_;
};

}  // namespace dualdecoder::examples
