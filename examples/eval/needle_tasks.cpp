// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Needles in a haystack: sentences that give a name a value, hidden in other text or among other such sentences.
#include <fmt/core.h>

#include "examples/eval/tasks.hpp"
#include "examples/eval/words.hpp"

namespace dualdecoder::examples {
namespace {

constexpr int kNeedleAnswerTokens = 128;  // as RULER has it

enum class Hay : std::uint8_t { noise, essay, needles };
enum class Kind : std::uint8_t { word, number, uuid };

struct NeedleShape {
  Hay hay;
  Kind key = Kind::word;
  Kind value = Kind::number;
  std::size_t keys = 1;
  std::size_t values = 1;  // of every key
  std::size_t asked = 1;   // of the keys
};

std::string uuid(Random& random) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (const std::size_t count : {8, 4, 4, 4, 12}) out += (out.empty() ? "" : "-") + random.letters(kHex, count);
  return out;
}

std::string make_value(Random& random, Kind kind) {
  return kind == Kind::uuid ? uuid(random) : std::to_string(random.between(1000000, 9999999));
}

std::vector<std::string> make_keys(Random& random, Kind kind, std::size_t count) {
  if (kind == Kind::word) return distinct_keys(random, count);
  std::vector<std::string> keys;
  while (keys.size() < count) keys.push_back(uuid(random));
  return keys;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string out;
  for (std::size_t i = 0; i < parts.size(); ++i) out += (i == 0 ? "" : i + 1 == parts.size() ? " and " : ", ") + parts[i];
  return out;
}

Question make_needles(const std::string& name, const NeedleShape& shape, const TaskRequest& request) {
  Random random(request.seed, name);
  const bool all_needles = shape.hay == Hay::needles;
  const char* what = shape.value == Kind::uuid ? "secret code" : "secret number";
  const auto sentence = [&](const std::string& key, const std::string& value) {
    return fmt::format("The {} of {} is: {}.", what, key, value);
  };
  const auto keys = make_keys(random, shape.key, shape.keys + (all_needles ? request.size : 0));
  Question question;
  std::vector<std::string> needles;
  for (std::size_t k = 0; k < shape.keys; ++k) {
    for (std::size_t v = 0; v < shape.values; ++v) {
      const std::string value = make_value(random, shape.value);
      needles.push_back(sentence(keys[k], value));
      if (k < shape.asked) question.answers.push_back(value);
    }
  }
  std::string text;
  if (all_needles) {
    for (std::size_t k = shape.keys; k < keys.size(); ++k) needles.push_back(sentence(keys[k], make_value(random, shape.value)));
    random.shuffle(needles);
    for (const std::string& needle : needles) text += needle + '\n';
  } else {
    random.shuffle(needles);
    text = (shape.hay == Hay::noise ? request.noise : request.essay)->text(random, request.size, needles);
  }
  const std::string asked = joined({keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(shape.asked)});
  const bool many = question.answers.size() > 1;
  question.text = fmt::format("The text below hides {0}s. Keep them in mind, a question about them follows.\n\n{1}\n\n", what, text);
  question.text += many ? fmt::format("Which {0}s of {1} does the text give? Name all of them.", what, asked)
                        : fmt::format("Which {0} of {1} does the text give?", what, asked);
  question.answer_head = fmt::format("The {}{} of {} {}", what, many ? "s" : "", asked, many ? "are" : "is");
  return question;
}

TaskKind needle_task(const std::string& name, const NeedleShape& shape) {
  return {name, Match::all, kNeedleAnswerTokens, [name, shape](const TaskRequest& request) { return make_needles(name, shape, request); }};
}

}  // namespace

std::vector<TaskKind> needle_tasks() {
  return {needle_task("niah_single_1", {.hay = Hay::noise}),
          needle_task("niah_single_2", {.hay = Hay::essay}),
          needle_task("niah_single_3", {.hay = Hay::essay, .value = Kind::uuid}),
          needle_task("niah_multikey_1", {.hay = Hay::essay, .keys = 4}),
          needle_task("niah_multikey_2", {.hay = Hay::needles}),
          needle_task("niah_multikey_3", {.hay = Hay::needles, .key = Kind::uuid, .value = Kind::uuid}),
          needle_task("niah_multivalue", {.hay = Hay::essay, .values = 4}),
          needle_task("niah_multiquery", {.hay = Hay::essay, .keys = 4, .asked = 4})};
}

}  // namespace dualdecoder::examples
