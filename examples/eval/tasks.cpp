// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/tasks.hpp"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <limits>

namespace dualdecoder::examples {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }
bool in_identifier(char c) { return c == '_' || std::isalnum(static_cast<unsigned char>(c)) != 0; }

bool holds_identifier(std::string_view text, std::string_view name) {
  for (std::size_t at = text.find(name); at != std::string_view::npos; at = text.find(name, at + 1)) {
    const bool begins = at == 0 || !in_identifier(text[at - 1]);
    const bool ends = at + name.size() == text.size() || !in_identifier(text[at + name.size()]);
    if (begins && ends) return true;
  }
  return false;
}

/// The last run of digits, with the minus before it; commas between groups of digits are passed over. Empty without one.
std::string last_number(std::string_view text) {
  std::string digits;
  for (std::size_t i = text.size(); i-- > 0;) {
    const bool group = text[i] == ',' && !digits.empty() && i > 0 && is_digit(text[i - 1]);
    if (is_digit(text[i])) {
      digits.insert(digits.begin(), text[i]);
    } else if (!group && !digits.empty()) {
      return text[i] == '-' ? "-" + digits : digits;
    }
  }
  return digits;
}

std::size_t count_held(std::string_view answer, const std::vector<std::string>& right) {
  const std::string text = lower(answer);
  return static_cast<std::size_t>(
      std::count_if(right.begin(), right.end(), [&](const std::string& one) { return text.find(lower(one)) != std::string::npos; }));
}

}  // namespace

const std::vector<TaskKind>& task_kinds() {
  static const std::vector<TaskKind> kinds = [] {
    std::vector<TaskKind> all;
    for (auto family : {needle_tasks(), counting_tasks(), fact_tasks(), long_answer_tasks(), robustness_tasks()}) {
      std::move(family.begin(), family.end(), std::back_inserter(all));
    }
    return all;
  }();
  return kinds;
}

const TaskKind* find_task(std::string_view name) {
  const auto& kinds = task_kinds();
  const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const TaskKind& kind) { return kind.name == name; });
  return found == kinds.end() ? nullptr : &*found;
}

std::string task_names() {
  std::string names;
  for (const TaskKind& kind : task_kinds()) names += (names.empty() ? "" : ", ") + kind.name;
  return names;
}

int answer_tokens(const TaskKind& kind, int context) { return std::min(kind.answer_tokens, context / 2); }

double score(Match match, std::string_view answer, const std::vector<std::string>& right) {
  switch (match) {
    case Match::all: return static_cast<double>(count_held(answer, right)) / static_cast<double>(right.size());
    case Match::any: return count_held(answer, right) > 0 ? 1.0 : 0.0;
    case Match::identifier:
      return std::any_of(right.begin(), right.end(), [&](const std::string& name) { return holds_identifier(answer, name); }) ? 1.0 : 0.0;
    case Match::final_number: return std::count(right.begin(), right.end(), last_number(answer)) > 0 ? 1.0 : 0.0;
    case Match::none: break;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace dualdecoder::examples
