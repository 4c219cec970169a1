// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Expected scores are worked out by hand from the definitions of RULER (arXiv 2404.06654): the mean over the right answers of whether each
// stands in the output, or whether any does, case ignored.
#include "examples/eval/tasks.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <set>
#include <sstream>

#include "examples/eval/prompt.hpp"
#include "tests/catch.hpp"

namespace dualdecoder::examples {
namespace {

const Haystack& noise() {
  static const Haystack haystack = Haystack::noise();
  return haystack;
}
const Haystack& essay() {
  static const Haystack haystack = Haystack::essay({});
  return haystack;
}

Question question_of(const TaskKind& kind, std::size_t size, std::uint64_t seed, int answer_tokens = 2048) {
  return kind.make({.size = size, .seed = seed, .answer_tokens = answer_tokens, .noise = &noise(), .essay = &essay()});
}

std::size_t times_in(const std::string& text, const std::string& part) {
  std::size_t times = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++times;
  return times;
}

/// The words of a text, without the marks behind them.
std::map<std::string, int> word_counts(const std::string& text) {
  std::map<std::string, int> counts;
  std::istringstream in(text);
  for (std::string word; in >> word;) ++counts[word.substr(0, word.find_last_not_of(".,?:") + 1)];
  return counts;
}

}  // namespace

TEST_CASE("the kinds are RULER's thirteen, three more, and five for robustness") {
  std::vector<std::string> names;
  for (const TaskKind& kind : task_kinds()) names.push_back(kind.name);
  CHECK(names == std::vector<std::string>{"niah_single_1",
                                          "niah_single_2",
                                          "niah_single_3",
                                          "niah_multikey_1",
                                          "niah_multikey_2",
                                          "niah_multikey_3",
                                          "niah_multivalue",
                                          "niah_multiquery",
                                          "vt",
                                          "cwe",
                                          "fwe",
                                          "qa_1",
                                          "qa_2",
                                          "summary",
                                          "code_completion",
                                          "reasoning",
                                          "languages",
                                          "random_text",
                                          "repeated",
                                          "topics",
                                          "equal"});
  CHECK(find_task("qa_2") == &task_kinds()[12]);
  CHECK(find_task("qa") == nullptr);
}

TEST_CASE("a question depends on its seed and size alone, and holds what it asks for") {
  for (const TaskKind& kind : task_kinds()) {
    INFO(kind.name);
    const Question question = question_of(kind, 200, 7);
    CHECK(question_of(kind, 200, 7).text == question.text);
    CHECK(question_of(kind, 200, 8).text != question.text);
    CHECK(question_of(kind, 400, 7).text.size() > question.text.size());
    CHECK(question.answers.empty() == (kind.match == Match::none));
    for (const std::string& answer : question.answers) {
      if (kind.match == Match::final_number) continue;  // worked out, below
      CHECK(question.text.find(answer) != std::string::npos);
    }
  }
}

TEST_CASE("needles: as many as RULER hides, each once") {
  const auto needles = [](const char* task) { return times_in(question_of(*find_task(task), 50, 3).text, " is: "); };
  CHECK(needles("niah_single_1") == 1);
  CHECK(needles("niah_single_3") == 1);
  CHECK(needles("niah_multikey_1") == 4);
  CHECK(needles("niah_multikey_2") == 51);
  CHECK(needles("niah_multivalue") == 4);
  CHECK(needles("niah_multiquery") == 4);
  const Question multiquery = question_of(*find_task("niah_multiquery"), 50, 3);
  CHECK(std::set(multiquery.answers.begin(), multiquery.answers.end()).size() == 4);
  for (const std::string& value : multiquery.answers) CHECK(times_in(multiquery.text, value) == 1);
}

TEST_CASE("variable tracking: every variable of the answer leads to the value") {
  const Question question = question_of(*find_task("vt"), 100, 5);
  CHECK(question.answers.size() == 5);
  for (std::size_t i = 1; i < 5; ++i) {
    CHECK(question.text.find("VAR " + question.answers[i] + " = VAR " + question.answers[i - 1] + ".") != std::string::npos);
  }
}

TEST_CASE("common and frequent words: counted, the answers come most often") {
  const Question common = question_of(*find_task("cwe"), 100, 5);
  const std::string list = common.text.substr(common.text.rfind("\n\n1. "));
  CHECK(common.answers.size() == 10);
  auto counts = word_counts(list);
  for (const std::string& word : common.answers) {
    CHECK(counts[word] == 30);
    counts.erase(word);
  }
  std::erase_if(counts, [](const auto& entry) { return std::isdigit(static_cast<unsigned char>(entry.first.front())) != 0; });
  CHECK(std::all_of(counts.begin(), counts.end(), [](const auto& entry) { return entry.second <= 3; }));

  const Question frequent = question_of(*find_task("fwe"), 400, 5);
  CHECK(frequent.answers.size() == 3);
  auto frequencies = word_counts(frequent.text);
  const int least = std::min({frequencies[frequent.answers[0]], frequencies[frequent.answers[1]], frequencies[frequent.answers[2]]});
  for (const std::string& word : frequent.answers) frequencies.erase(word);
  CHECK(std::all_of(frequencies.begin(), frequencies.end(), [&](const auto& entry) { return entry.second < least; }));
}

TEST_CASE("reasoning: the ledger adds up to the answer, whose first lines are given") {
  for (const std::uint64_t seed : {1, 2, 3}) {
    const Question question = question_of(*find_task("reasoning"), 100, seed, 800);
    const std::size_t at = question.text.find("The balance is ");
    int balance = std::stoi(question.text.substr(at + 15));
    int entries = 0;
    std::string worked_out;
    for (int i = 1;; ++i, ++entries) {
      const std::string entry = "Entry " + std::to_string(i) + ": ";
      const std::size_t place =
          question.text.find(entry + (question.text.find(entry + "add ") != std::string::npos ? "add " : "subtract "));
      if (place == std::string::npos) break;
      const bool adds = question.text.compare(place + entry.size(), 4, "add ") == 0;
      const int amount = std::stoi(question.text.substr(place + entry.size() + (adds ? 4 : 9)));
      if (i <= 4) worked_out += entry + std::to_string(balance);
      balance += adds ? amount : -amount;
      if (i <= 3) worked_out += (adds ? " + " : " - ") + std::to_string(amount) + " = " + std::to_string(balance) + "\n";
    }
    CHECK(question.answer_head == worked_out);
    CHECK(entries == 40);
    CHECK(question.answers == std::vector{std::to_string(balance)});
  }
}

TEST_CASE("answers are scored as RULER scores") {
  CHECK(score(Match::all, "the numbers are 12 and 34", {"12", "34", "56", "78"}) == 0.5);
  CHECK(score(Match::all, "ABCDE, fghij", {"abcde", "FGHIJ"}) == 1.0);
  CHECK(score(Match::all, "", {"1"}) == 0.0);
  CHECK(score(Match::any, "it was Ada Bremal.", {"ada bremal", "Bremal, Ada"}) == 1.0);
  CHECK(score(Match::any, "nobody", {"Ada Bremal"}) == 0.0);
  CHECK(score(Match::identifier, " load_oak_12(data)", {"load_oak_12"}) == 1.0);
  CHECK(score(Match::identifier, "load_oak_123(data)", {"load_oak_12"}) == 0.0);
  CHECK(score(Match::identifier, "Load_oak_12(data)", {"load_oak_12"}) == 0.0);
  CHECK(score(Match::final_number, "Entry 2: 5 + 3 = 8\nFinal balance: 1,208.", {"1208"}) == 1.0);
  CHECK(score(Match::final_number, "Final balance: -12", {"-12"}) == 1.0);
  CHECK(score(Match::final_number, "1208, then 9", {"1208"}) == 0.0);
  CHECK(score(Match::final_number, "none", {"1208"}) == 0.0);
  CHECK(std::isnan(score(Match::none, "anything", {})));
}

TEST_CASE("a haystack is its text in order, with what is hidden in it") {
  const std::string text = "One. Two! Three?\n\nFour has no end\n\n" + std::string(900, 'x') + " y";
  std::string joined;
  for (const std::string& piece : Haystack::split(text)) joined += piece;
  CHECK(joined == text + " ");
  CHECK(Haystack::split("One. Two! Three") == std::vector<std::string>{"One. ", "Two! ", "Three "});

  Random random(4, "test");
  const std::string hidden = noise().text(random, 12, {"<first>", "<second>"});
  CHECK(hidden.find("<first>") < hidden.find("<second>"));
  CHECK(hidden.find("<second>") != std::string::npos);
}

TEST_CASE("the largest size that fits is found to within half a percent") {
  // twin: counting up one by one
  for (const std::size_t limit : {64, 100, 1000, 4096, 120000}) {
    for (const std::size_t rate : {1, 7, 31}) {
      const auto tokens = [&](std::size_t size) { return 40 + rate * size + size % 3; };
      std::size_t best = 0;
      while (tokens(best + 1) <= limit) ++best;
      const std::size_t found = largest_size(tokens, limit);
      INFO(limit << " " << rate);
      CHECK(tokens(found) <= limit);
      CHECK(tokens(found) + limit / 200 + rate + 2 >= tokens(best));
    }
  }
}

}  // namespace dualdecoder::examples
