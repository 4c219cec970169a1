// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/prompt.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "dualdecoder/error.hpp"

namespace dualdecoder::examples {

std::size_t largest_size(const std::function<std::size_t(std::size_t)>& tokens_at, std::size_t limit) {
  constexpr std::size_t kFirstSize = 16;
  std::size_t fits = 0;
  std::size_t fitting_tokens = tokens_at(0);
  const std::size_t close = limit / 200;
  std::size_t too_large = 0;  // 0: none known
  std::size_t too_many_tokens = 0;
  std::size_t size = kFirstSize;
  while ((too_large == 0 || too_large - fits > 1) && limit - fitting_tokens > close) {
    const std::size_t tokens = tokens_at(size);
    if (tokens <= limit) {
      fits = size;
      fitting_tokens = tokens;
    } else {
      too_large = size;
      too_many_tokens = tokens;
    }
    if (too_large == 0) {
      // aims a little past the limit, by the rate so far; a haystack grows by at least a token per piece
      const double rate = std::max(1.0, static_cast<double>(fitting_tokens) / static_cast<double>(fits));
      size = std::min(limit + 1, fits + 1 + static_cast<std::size_t>(1.02 * static_cast<double>(limit - fitting_tokens) / rate));
    } else {
      const double share = static_cast<double>(limit - fitting_tokens) / static_cast<double>(too_many_tokens - fitting_tokens);
      const auto step = static_cast<std::size_t>(share * static_cast<double>(too_large - fits));
      size = std::clamp(fits + step, fits + 1, too_large - 1);
    }
  }
  return fits;
}

PromptMaker::PromptMaker(const std::filesystem::path& model, Haystack essay)
    : tokenizer_(Tokenizer::load(model)), chat_(ChatTemplate::load(model)), essay_(std::move(essay)) {}

std::vector<Token> PromptMaker::encode(const Question& question) const {
  std::vector<Token> tokens = chat_.encode(tokenizer_, {{"user", question.text}});
  const std::vector<Token> head = tokenizer_.encode(question.answer_head);
  tokens.insert(tokens.end(), head.begin(), head.end());
  return tokens;
}

TaskRequest PromptMaker::request(const TaskKind& kind, int context, std::uint64_t seed) const {
  return {.size = 0, .seed = seed, .answer_tokens = answer_tokens(kind, context), .noise = &noise_, .essay = &essay_};
}

void PromptMaker::check(const TaskKind& kind, int context, std::uint64_t seed) const {
  const TaskRequest shortest = request(kind, context, seed);
  const std::size_t tokens = encode(kind.make(shortest)).size();
  if (tokens + static_cast<std::size_t>(shortest.answer_tokens) <= static_cast<std::size_t>(context)) return;
  throw InvalidArgument(
      fmt::format("context = {}: must be at least {} for task {}, whose shortest question has {} tokens and its answer {}", context,
                  tokens + static_cast<std::size_t>(shortest.answer_tokens), kind.name, tokens, shortest.answer_tokens));
}

Prompt PromptMaker::make(const TaskKind& kind, int context, std::uint64_t seed) const {
  check(kind, context, seed);
  TaskRequest asked = request(kind, context, seed);
  const auto limit = static_cast<std::size_t>(context - asked.answer_tokens);
  const auto question_of = [&](std::size_t size) {
    asked.size = size;
    return kind.make(asked);
  };
  const Question question = question_of(largest_size([&](std::size_t size) { return encode(question_of(size)).size(); }, limit));
  Prompt prompt{.tokens = encode(question), .answer_tokens = asked.answer_tokens, .answers = question.answers};
  return prompt;
}

}  // namespace dualdecoder::examples
