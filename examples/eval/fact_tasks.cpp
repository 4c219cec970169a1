// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Questions over many documents: each is a piece of the essay text with a made-up fact in it, so that no model knows the answer beforehand.
#include <fmt/core.h>

#include <array>

#include "examples/eval/tasks.hpp"
#include "examples/eval/words.hpp"

namespace dualdecoder::examples {
namespace {

constexpr int kFactAnswerTokens = 32;    // as RULER has it
constexpr std::size_t kPieces = 3;       // of the essay in a document
constexpr std::size_t kFewestFacts = 2;  // so that a wrong one is there
constexpr std::array kBuildings = {"observatory", "lighthouse", "town hall", "concert hall", "botanical garden", "harbour bridge"};

/// The documents under running numbers.
std::string documents(Random& random, const Haystack& essay, const std::vector<std::string>& facts) {
  std::string out;
  for (std::size_t i = 0; i < facts.size(); ++i) {
    out += fmt::format("Document {}:\n{}\n\n", i + 1, essay.text(random, kPieces, {facts[i]}));
  }
  return out;
}

std::string ask(const std::string& text, const std::string& question) {
  return fmt::format(
      "Answer the question from the documents. Give only the answer.\n\n{}Answer the question from the documents. Give only "
      "the answer.\n\nQuestion: {}",
      text, question);
}

/// One document tells who built what, and is asked for.
Question make_one_hop(const TaskRequest& request) {
  Random random(request.seed, "one hop");
  const std::size_t count = kFewestFacts + request.size;
  const auto towns = distinct_towns(random, count);
  const auto people = distinct_people(random, count);
  const std::string building = random.pick(kBuildings);
  std::vector<std::string> facts;
  for (std::size_t i = 0; i < count; ++i) {
    facts.push_back(fmt::format("The {} of {} was designed by {}.", i == 0 ? building : random.pick(kBuildings), towns[i], people[i]));
  }
  random.shuffle(facts);
  return {.text = ask(documents(random, *request.essay, facts), fmt::format("Who designed the {} of {}?", building, towns.front())),
          .answer_head = "Answer:",
          .answers = {people.front()}};
}

/// One document tells who built what, another where that person was born.
Question make_two_hops(const TaskRequest& request) {
  Random random(request.seed, "two hops");
  const std::size_t count = kFewestFacts + request.size / 2;
  const auto towns = distinct_towns(random, 2 * count);
  const auto people = distinct_people(random, count);
  const std::string building = random.pick(kBuildings);
  std::vector<std::string> facts;
  for (std::size_t i = 0; i < count; ++i) {
    facts.push_back(fmt::format("The {} of {} was designed by {}.", i == 0 ? building : random.pick(kBuildings), towns[i], people[i]));
    facts.push_back(fmt::format("{} was born in {}.", people[i], towns[count + i]));
  }
  random.shuffle(facts);
  return {.text = ask(documents(random, *request.essay, facts),
                      fmt::format("In which town was the designer of the {} of {} born?", building, towns.front())),
          .answer_head = "Answer:",
          .answers = {towns[count]}};
}

}  // namespace

std::vector<TaskKind> fact_tasks() {
  return {{"qa_1", Match::any, kFactAnswerTokens, make_one_hop}, {"qa_2", Match::any, kFactAnswerTokens, make_two_hops}};
}

}  // namespace dualdecoder::examples
