// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/load_weights.hpp"

namespace dualdecoder::test {

/// A model of random weights, small enough for hundreds of runs.
inline ModelConfig tiny_config() {
  ModelConfig config;
  config.architecture = "llama";
  config.layers = 3;
  config.hidden = 64;
  config.intermediate = 128;
  config.heads = 8;
  config.kv_heads = 2;
  config.head_dim = 16;
  config.vocabulary = 128;
  config.context = 2048;
  return config;
}

struct SessionModel {
  std::shared_ptr<Backend> backend = cpu::make_cpu_backend({.threads = 2});
  std::shared_ptr<const ModelWeights> weights;

  explicit SessionModel(DataType matrices = DataType::f32)
      : weights(make_synthetic_weights(tiny_config(), 7, *backend, {.matrix_type = matrices, .threads = 1})) {}
};

/// One for all tests of a program.
inline const SessionModel& tiny() {
  static const SessionModel model;
  return model;
}

inline AddOptions tokens_wanted(int count) {
  AddOptions add;
  add.max_new_tokens = count;
  return add;
}

/// A budget far below the context, so that every policy has something to decide.
inline SessionOptions tiny_options() {
  SessionOptions options;
  options.store = StoreKind::resident;
  options.max_context = 512;
  options.budget_tokens = 48;
  options.chunk_tokens = 4;
  options.sink_tokens = 8;
  options.local_tokens = 24;
  options.kv_type = DataType::f32;
  options.prefill_block = 64;
  return options;
}

inline std::vector<Token> random_tokens(int count, std::uint64_t seed, int vocabulary = 128) {
  std::vector<Token> tokens;
  std::uint64_t state = seed * 0x9E3779B97F4A7C15U + 1;
  for (int i = 0; i < count; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    tokens.push_back(static_cast<Token>((state >> 33U) % static_cast<std::uint64_t>(vocabulary)));
  }
  return tokens;
}

/// What came out of one sequence.
struct Text {
  std::vector<Token> tokens;
  std::vector<std::vector<float>> logits;  // row 0's, one per token
  FinishReason reason = FinishReason::none;
};

/// Runs all prompts in one batch to their ends.
inline std::vector<Text> generate(DecodeSession& session, const std::vector<std::vector<Token>>& prompts, const AddOptions& add) {
  std::vector<Text> texts(prompts.size());
  std::vector<SequenceId> ids;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    AddOptions mine = add;
    mine.on_logits = [&texts, i](std::span<const float> logits) { texts[i].logits.emplace_back(logits.begin(), logits.end()); };
    ids.push_back(session.add(prompts[i], mine));
  }
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) {
      for (std::size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] != event.sequence) continue;
        texts[i].tokens.push_back(event.token);
        if (event.finished) texts[i].reason = event.reason;
      }
    }
  }
  return texts;
}

inline std::vector<Text> generate(const SessionModel& model, const SessionOptions& options, std::unique_ptr<RetrievalPredictor> predictor,
                                  const std::vector<std::vector<Token>>& prompts, const AddOptions& add) {
  DecodeSession session(model.backend, model.weights, options, std::move(predictor));
  return generate(session, prompts, add);
}

inline std::vector<Text> generate(const SessionModel& model, const SessionOptions& options, const std::vector<std::vector<Token>>& prompts,
                                  const AddOptions& add) {
  return generate(model, options, make_predictor(options), prompts, add);
}

}  // namespace dualdecoder::test
