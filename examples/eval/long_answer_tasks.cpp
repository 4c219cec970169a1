// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Beyond RULER: a summary, a call in a repository, and sums worked out over thousands of tokens.
#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "examples/eval/tasks.hpp"
#include "examples/eval/words.hpp"

namespace dualdecoder::examples {
namespace {

/// A report with key findings in it; the summary must name each one's figure.
Question make_summary(const TaskRequest& request) {
  constexpr std::size_t kFindings = 8;
  Random random(request.seed, "summary");
  const auto subjects = distinct_keys(random, kFindings);
  Question question;
  std::vector<std::string> findings;
  for (const std::string& subject : subjects) {
    const std::string figure = std::to_string(random.between(10000, 99999));
    findings.push_back(fmt::format("Key finding: the {} project used {} working hours.", subject, figure));
    question.answers.push_back(figure);
  }
  question.text = fmt::format(
      "Summarise this report.\n\n{}\n\nSummarise the report above. The summary must state every key finding with its project and its "
      "figure.",
      request.essay->text(random, request.size, findings));
  question.answer_head = "Summary of the report with all its key findings:\n";
  return question;
}

/// Files full of functions whose names cannot be guessed; the call of one of them is to be completed from what its comment says.
Question make_completion(const TaskRequest& request) {
  constexpr std::array kActions = {"load", "merge", "check", "count", "store", "split", "trace", "print"};
  constexpr std::size_t kFunctionsPerFile = 6;
  constexpr std::size_t kFewest = 2;
  Random random(request.seed, "completion");
  const auto subjects = distinct_keys(random, kFewest + request.size);
  const std::size_t wanted = random.below(kFewest + request.size / 3);  // far above the call
  std::string code;
  Question question;
  std::string purpose;
  for (std::size_t i = 0; i < subjects.size(); ++i) {
    if (i % kFunctionsPerFile == 0) code += fmt::format("# file: lib/part_{}.py\n\n", i / kFunctionsPerFile + 1);
    const std::string action = random.pick(kActions);
    const std::string noun = any_noun(random);
    const std::string name = fmt::format("{}_{}_{}", action, noun, random.between(100, 999));
    const std::string does = fmt::format("{}s the {} of the {}", action, noun, subjects[i]);
    code += fmt::format(
        "def {0}({1}, limit={2}):\n    # {3}\n    rows = [row for row in {1} if row.{4}_size < limit]\n"
        "    return sum(row.weight for row in rows) % {5}\n\n",
        name, noun, random.between(10, 99), does, any_adjective(random), random.between(1000, 9999));
    if (i != wanted) continue;
    question.answers = {name};
    purpose = does;
  }
  question.text = fmt::format(
      "Complete the last line of this repository with the call of the function that is meant.\n\n{}# file: main.py\n\ndef main(data):\n"
      "    # {}\n    result = ",
      code, purpose);
  question.answer_head = "    result =";
  return question;
}

/// Entries of a ledger hidden in order; the balance after each is to be written down, and the last one counts.
Question make_reasoning(const TaskRequest& request) {
  constexpr int kTokensPerEntry = 20;  // "Entry 12: 437 + 37 = 474" and a line break, with some to spare
  constexpr int kWorkedOut = 3;        // lines that the answer begins with: without some a small model jumps to the end
  Random random(request.seed, "reasoning");
  const int count = std::max(2, request.answer_tokens / kTokensPerEntry);
  const int given = std::min(kWorkedOut, count - 1);
  int balance = random.between(100, 999);
  const int first = balance;
  std::vector<std::string> entries;
  std::string worked_out;
  for (int i = 1; i <= count; ++i) {
    const int amount = random.between(2, 99);
    const bool adds = balance < 500 || random.below(2) == 0;
    const int before = balance;
    balance += adds ? amount : -amount;
    if (i <= given) worked_out += fmt::format("Entry {}: {} {} {} = {}\n", i, before, adds ? '+' : '-', amount, balance);
    if (i == given + 1) worked_out += fmt::format("Entry {}: {}", i, before);
    entries.push_back(fmt::format("Entry {}: {} {}.", i, adds ? "add" : "subtract", amount));
  }
  Question question;
  question.text = fmt::format(
      "This text holds the {0} entries of a ledger.\n\n{1}\n\nThe balance is {2} at first. Go through all {0} entries in order and write "
      "one line for each, with the balance before it, what is added or subtracted, and the balance after it. After entry {0}, write "
      "\"Final balance: \" and the balance.",
      count, request.essay->text(random, request.size, entries), first);
  question.answer_head = worked_out;
  question.answers = {std::to_string(balance)};
  return question;
}

}  // namespace

std::vector<TaskKind> long_answer_tasks() {
  return {{"summary", Match::all, 512, make_summary},
          {"code_completion", Match::identifier, 48, make_completion},
          {"reasoning", Match::final_number, 2560, make_reasoning}};
}

}  // namespace dualdecoder::examples
