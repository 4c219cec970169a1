// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "dualdecoder/types.hpp"
#include "examples/common/chat.hpp"
#include "examples/common/tokenizer.hpp"
#include "examples/eval/tasks.hpp"

namespace dualdecoder::examples {

/// A question as the model reads it, and how its answer is scored.
struct Prompt {
  std::vector<Token> tokens;
  int answer_tokens = 0;
  std::vector<std::string> answers;
};

/// Writes questions in a model's own form.
class PromptMaker {
 public:
  /// Throws as Tokenizer::load and ChatTemplate::load.
  PromptMaker(const std::filesystem::path& model, Haystack essay);

  /// The longest question of the kind that leaves room for its answer in `context` tokens. Throws InvalidArgument when even the shortest
  /// one does not.
  Prompt make(const TaskKind& kind, int context, std::uint64_t seed) const;

  /// Throws as make() would.
  void check(const TaskKind& kind, int context, std::uint64_t seed) const;

  const Tokenizer& tokenizer() const { return tokenizer_; }
  const std::string& text_name() const { return essay_.name(); }

 private:
  TaskRequest request(const TaskKind& kind, int context, std::uint64_t seed) const;
  std::vector<Token> encode(const Question& question) const;

  Tokenizer tokenizer_;
  ChatTemplate chat_;
  Haystack noise_ = Haystack::noise();
  Haystack essay_;
};

/// The largest size, to within half a percent of the limit, at which `tokens_at(size)` is at most `limit`; tokens_at grows about evenly
/// with the size, which is at most `limit` at 0.
std::size_t largest_size(const std::function<std::size_t(std::size_t)>& tokens_at, std::size_t limit);

}  // namespace dualdecoder::examples
