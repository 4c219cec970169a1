// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/memory.hpp"

namespace dualdecoder::examples {

/// How a run compares with full attention over the same tokens.
struct Comparison {
  int tokens = 0;
  double agreement = 0.0;  ///< share of tokens whose likeliest successor is the same
  double mean_kl = 0.0;    ///< KL(full || this run), nats per token
  double max_kl = 0.0;
  double full_tokens_per_second = 0.0;
};

/// Everything that the closing report says.
struct Report {
  std::string model;
  std::string predictor;
  std::string finish;  ///< "stop_token", "max_tokens", "context_full" or "interrupted"
  SessionOptions options;
  int prompt_tokens = 0;
  double load_seconds = 0.0;
  SessionStatistics session;
  StoreStatistics store;
  LaneStatistics urgent, prefetch, write_back;
  MemoryPlan plan;  ///< of the session
  MemoryPlan weights;
  std::optional<Comparison> comparison;

  double prefill_tokens_per_second() const;
  double tokens_per_second() const;
  double hit_rate() const;       ///< of the chunks needed in steps that had a prediction: predicted
  double resident_rate() const;  ///< of the chunks needed: in a slot before their layer ran
  double stall_seconds() const;  ///< compute stood still for loads
};

std::string to_text(const Report& report);
std::string to_json(const Report& report);  ///< one line
std::string to_text(const MemoryPlan& plan);
std::string to_json(const MemoryPlan& plan);  ///< one line

}  // namespace dualdecoder::examples
