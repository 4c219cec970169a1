// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/cell.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace dualdecoder::examples {
namespace {

using Clock = std::chrono::steady_clock;

// Shares of a cell's work that come before decoding starts. Only the progress bar and its time left depend on them.
constexpr double kPrefillShare = 0.8;
constexpr double kForcedShare = 0.5;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double hit_rate(const StoreStatistics& to, const StoreStatistics& from) {
  const std::uint64_t predictable = to.predictable - from.predictable;
  return predictable == 0 ? 0.0 : static_cast<double>(to.predicted_hit - from.predicted_hit) / static_cast<double>(predictable);
}

}  // namespace

QuestionRun::QuestionRun(const Laboratory& laboratory, Prompt prompt, Match match, int context)
    : laboratory_(laboratory), prompt_(std::move(prompt)), match_(match), context_(context) {}

/// Generates until the model ends its answer or the answer's room is used up; progress goes from `from` to `to`.
AddOptions QuestionRun::free_options(double from, double to) const {
  const auto& ends = laboratory_.tokenizer->end_tokens();
  AddOptions add{.max_new_tokens = prompt_.answer_tokens, .stop_tokens = {ends.begin(), ends.end()}};
  const double decode_from = from + kPrefillShare * (to - from);
  add.on_prefill = [this, from, decode_from](std::size_t done, std::size_t total) {
    laboratory_.on_progress(from + (decode_from - from) * static_cast<double>(done) / static_cast<double>(total));
  };
  add.on_logits = [this, decode_from, to, done = 0](std::span<const float>) mutable {
    laboratory_.on_progress(decode_from + (to - decode_from) * ++done / prompt_.answer_tokens);
  };
  return add;
}

std::size_t QuestionRun::device_bytes() const { return laboratory_.device_memory != nullptr ? laboratory_.device_memory->live_bytes() : 0; }

std::string QuestionRun::text_of(const std::vector<Token>& tokens) const { return laboratory_.tokenizer->decode(tokens); }

void QuestionRun::make_full() {
  if (full_) return;
  const auto begin = Clock::now();
  SessionOptions options = full_attention({});
  options.max_context = context_;
  const std::size_t before = device_bytes();
  AddOptions add = free_options(0.0, 1.0);
  add.on_logits = [this, before, then = std::move(add.on_logits)](std::span<const float> logits) {
    then(logits);
    full_result_.measured_device_bytes = device_bytes() - before;
  };
  full_ = make_reference(laboratory_.backend, laboratory_.weights, options, prompt_.tokens, std::move(add));
  full_result_.answer = text_of(full_->tokens);
  full_result_.score = score(match_, full_result_.answer, prompt_.answers);
  full_result_.session = full_->session;
  full_result_.seconds = seconds_since(begin);
}

double QuestionRun::full_score() {
  make_full();
  return full_result_.score;
}

CellResult QuestionRun::run_full(const SessionOptions& options) {
  make_full();
  CellResult result = full_result_;
  const std::size_t compared = full_->tokens.size() - 1;
  result.fidelity = {.tokens = compared, .agreement = 1.0};
  result.thirds.fill({.agreement = 1.0});
  result.first_divergence = compared;
  result.plan = memory_plan(*laboratory_.backend, laboratory_.weights->config(), options);
  return result;
}

void QuestionRun::run_forced(const SessionOptions& options, const std::shared_ptr<Backend>& backend, CellResult& result,
                             FidelityMeter& meter) const {
  const std::size_t before = device_bytes();
  AddOptions add = free_options(0.0, kForcedShare);
  add.stop_tokens.clear();
  add.max_new_tokens = static_cast<int>(full_->tokens.size());
  add.forced = full_->tokens;
  add.on_logits = [&, then = std::move(add.on_logits)](std::span<const float> logits) {
    then(logits);
    meter.add(full_->log_probabilities.row(meter.size()), log_probabilities(logits));
  };
  DecodeSession session = make_session(backend, laboratory_.weights, options);
  session.add(prompt_.tokens, std::move(add));
  const std::size_t count = full_->tokens.size();
  std::size_t third = 1;
  StoreStatistics last;
  while (session.active() > 0) {
    session.step();
    for (; third <= CellResult::kThirds && meter.size() >= 1 + third * (count - 1) / CellResult::kThirds; ++third) {
      const StoreStatistics now = session.store_statistics();
      result.hits[third - 1] = hit_rate(now, last);
      last = now;
    }
  }
  result.session = session.statistics();
  result.store = session.store_statistics();
  result.measured_device_bytes = device_bytes() - before;
}

std::vector<Token> QuestionRun::run_free(const SessionOptions& options, const std::shared_ptr<Backend>& backend, double from,
                                         double to) const {
  std::vector<Token> tokens;
  DecodeSession session = make_session(backend, laboratory_.weights, options);
  session.add(prompt_.tokens, free_options(from, to));
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) tokens.push_back(event.token);
  }
  return tokens;
}

CellResult QuestionRun::run(const SessionOptions& options, const std::shared_ptr<Backend>& backend) {
  make_full();
  const auto begin = Clock::now();
  CellResult result;
  result.plan = memory_plan(*backend, laboratory_.weights->config(), options);
  FidelityMeter meter;
  run_forced(options, backend, result, meter);
  const std::size_t compared = meter.size() - 1;  // the first token comes from the prefill, which is dense for every method
  const auto third = [&](std::size_t i) { return 1 + i * compared / CellResult::kThirds; };
  result.fidelity = meter.over(1, meter.size());
  for (std::size_t i = 0; i < CellResult::kThirds; ++i) result.thirds[i] = meter.over(third(i), third(i + 1));
  result.first_divergence = meter.first_divergence(1);
  // a method that chooses every token as full attention does would say the same when left alone
  const bool same = meter.first_divergence(0) == meter.size();
  result.answer = same ? full_result_.answer : text_of(run_free(options, backend, kForcedShare, 1.0));
  result.score = score(match_, result.answer, prompt_.answers);
  result.seconds = seconds_since(begin);
  return result;
}

}  // namespace dualdecoder::examples
