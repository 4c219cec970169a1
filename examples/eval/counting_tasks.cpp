// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Variable tracking, common words and frequent words: answers that no single place of the text holds.
#include <fmt/core.h>

#include <cmath>

#include "examples/eval/tasks.hpp"
#include "examples/eval/words.hpp"

namespace dualdecoder::examples {
namespace {

constexpr std::string_view kCapitals = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
constexpr std::string_view kSmall = "abcdefghijklmnopqrstuvwxyz";

std::string listed(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : ", ") + word;
  return out;
}

/// A small question of the same form with its answer, as RULER shows one before the real question.
std::string with_example(const Question& example, const Question& question) {
  return fmt::format("{}\n{} {}\n\n\n{}", example.text, example.answer_head, listed(example.answers), question.text);
}

/// One chain of assignments, its lines hidden in order; every variable of it is asked for.
Question track_variables(Random& random, const Haystack& noise, std::size_t size) {
  constexpr std::size_t kVariables = 5;  // RULER: one chain of four hops
  Question question;
  while (question.answers.size() < kVariables) question.answers.push_back(random.letters(kCapitals, 5));
  const std::string value = std::to_string(random.between(10000, 99999));
  std::vector<std::string> lines{fmt::format("VAR {} = {}.", question.answers.front(), value)};
  for (std::size_t i = 1; i < kVariables; ++i) {
    lines.push_back(fmt::format("VAR {} = VAR {}.", question.answers[i], question.answers[i - 1]));
  }
  question.text = fmt::format(
      "Follow the assignments of variables that are hidden in this text.\n\n{}\n\nWhich variables hold the value {}, directly or through "
      "others? Name all {}.",
      noise.text(random, size, lines), value, kVariables);
  question.answer_head = fmt::format("The variables that hold the value {} are:", value);
  return question;
}

Question make_variable_tracking(const TaskRequest& request) {
  Random random(request.seed, "variables");
  const Question example = track_variables(random, *request.noise, 5);
  Question question = track_variables(random, *request.noise, request.size);
  question.text = with_example(example, question);
  return question;
}

struct WordCounts {
  std::size_t common = 10;
  std::size_t times_common = 30;
  std::size_t times_other = 3;
  std::size_t others = 1;
};

/// A numbered list in which few words come often and all others seldom.
Question count_words(Random& random, const WordCounts& counts) {
  const auto words = distinct_words(random, counts.common + counts.others);
  std::vector<std::string> list;
  for (std::size_t w = 0; w < words.size(); ++w) {
    list.insert(list.end(), w < counts.common ? counts.times_common : counts.times_other, words[w]);
  }
  random.shuffle(list);
  std::string text;
  for (std::size_t i = 0; i < list.size(); ++i) text += fmt::format("{}{}. {}", i == 0 ? "" : " ", i + 1, list[i]);
  return {.text = fmt::format("Some words of this numbered list come more often than the others.\n\n{}\n\nWhich {} words come most often?",
                              text, counts.common),
          .answer_head = fmt::format("The {} words that come most often are:", counts.common),
          .answers = {words.begin(), words.begin() + static_cast<std::ptrdiff_t>(counts.common)}};
}

Question make_common_words(const TaskRequest& request) {
  Random random(request.seed, "common words");
  const Question example = count_words(random, {.common = 10, .times_common = 3, .times_other = 1, .others = 10});
  Question question = count_words(random, {.others = request.size});
  question.text = with_example(example, question);
  return question;
}

/// Made-up words whose frequencies fall as 1 / rank^2 (RULER: a zeta distribution with exponent 2); the first three are asked for.
Question make_frequent_words(const TaskRequest& request) {
  constexpr std::size_t kAsked = 3;
  constexpr std::size_t kFewest = 40;
  constexpr double kZetaOf2 = 1.6449340668482264;
  Random random(request.seed, "frequent words");
  const std::size_t total = kFewest + request.size;
  std::vector<std::string> list;
  Question question;
  for (std::size_t rank = 1; list.size() < total; ++rank) {
    const std::string word = random.letters(kSmall, 6);
    const auto share = static_cast<double>(total) / (kZetaOf2 * static_cast<double>(rank * rank));
    const auto times = std::max<std::size_t>(1, static_cast<std::size_t>(std::lround(share)));
    list.insert(list.end(), std::min(times, total - list.size()), word);
    if (rank <= kAsked) question.answers.push_back(word);
  }
  random.shuffle(list);
  std::string text;
  for (const std::string& word : list) text += word + " ";
  question.text =
      fmt::format("This coded text is made of words that come more or less often.\n\n{}\n\nWhich three coded words come most often?", text);
  question.answer_head = "The three coded words that come most often are:";
  return question;
}

}  // namespace

std::vector<TaskKind> counting_tasks() {
  return {{"vt", Match::all, 30, make_variable_tracking},
          {"cwe", Match::all, 120, make_common_words},
          {"fwe", Match::all, 50, make_frequent_words}};
}

}  // namespace dualdecoder::examples
