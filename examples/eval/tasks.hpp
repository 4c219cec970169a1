// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "examples/eval/haystack.hpp"

namespace dualdecoder::examples {

/// How an answer is scored, in 0 .. 1.
enum class Match : std::uint8_t {
  all,           ///< share of the right answers that stand in it, case ignored (RULER's string_match_all)
  any,           ///< 1 when one of them does (RULER's string_match_part)
  identifier,    ///< 1 when one of them stands in it as a whole identifier, case counts
  final_number,  ///< 1 when the last number in it is the right one
  none,          ///< there is no right answer; NaN
};

/// A question about a long text.
struct Question {
  std::string text;         ///< the user's message, haystack included
  std::string answer_head;  ///< how the answer begins, given to the model; may be empty
  std::vector<std::string> answers;
};

/// What a question is made from. The same request gives the same question on every machine.
struct TaskRequest {
  std::size_t size;  ///< how much of whatever makes the task long; the text grows with it
  std::uint64_t seed;
  int answer_tokens;
  const Haystack* noise;
  const Haystack* essay;
};

struct TaskKind {
  std::string name;
  Match match;
  int answer_tokens;  ///< at most; see answer_tokens()
  std::function<Question(const TaskRequest&)> make;
};

/// All kinds: RULER's thirteen (Hsieh and others 2024, arXiv 2404.06654, section 3), the three with long answers or code, then the five
/// texts for robustness. See docs/evaluation.md for each.
const std::vector<TaskKind>& task_kinds();
/// Null for an unknown name.
const TaskKind* find_task(std::string_view name);
/// "niah_single_1, niah_single_2, ..."
std::string task_names();

/// Tokens that an answer may take in a context: the kind's, but half of the context at most.
int answer_tokens(const TaskKind& kind, int context);

/// The score of an answer.
double score(Match match, std::string_view answer, const std::vector<std::string>& right);

// The kinds by family; task_kinds() joins them.
std::vector<TaskKind> needle_tasks();
std::vector<TaskKind> counting_tasks();
std::vector<TaskKind> fact_tasks();
std::vector<TaskKind> long_answer_tasks();
std::vector<TaskKind> robustness_tasks();

}  // namespace dualdecoder::examples
