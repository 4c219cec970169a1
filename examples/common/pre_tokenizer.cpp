// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/common/pre_tokenizer.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <new>
#include <utility>

#include "dualdecoder/error.hpp"
#include "examples/common/unicode.hpp"

namespace dualdecoder::examples {
namespace {

struct Free {
  void operator()(pcre2_code* p) const noexcept { pcre2_code_free(p); }
  void operator()(pcre2_match_data* p) const noexcept { pcre2_match_data_free(p); }
  void operator()(pcre2_match_context* p) const noexcept { pcre2_match_context_free(p); }
  void operator()(pcre2_jit_stack* p) const noexcept { pcre2_jit_stack_free(p); }
};
template <class T>
using Owned = std::unique_ptr<T, Free>;

template <class T>
Owned<T> owned(T* made) {
  if (made == nullptr) throw std::bad_alloc();
  return Owned<T>(made);
}

std::string message_of(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

/// `pattern` with `\s` and `\S` spelled out; `\S` inside a bracket is left to PCRE2.
std::string spell_out_white_space(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char escaped = pattern[++i];
      if (escaped == 's') {
        out.append(in_class ? "" : "[").append(patterns::kWhiteSpace).append(in_class ? "" : "]");
      } else if (escaped == 'S' && !in_class) {
        out.append("[^").append(patterns::kWhiteSpace).append("]");
      } else {
        out.append({c, escaped});
      }
      continue;
    }
    if (c == '[' && !in_class) {
      in_class = true;
      out.push_back(c);
      if (i + 1 < pattern.size() && pattern[i + 1] == '^') out.push_back(pattern[++i]);
      if (i + 1 < pattern.size() && pattern[i + 1] == ']') out.push_back(pattern[++i]);
      continue;
    }
    if (c == ']') in_class = false;
    out.push_back(c);
  }
  return out;
}

}  // namespace

struct PreTokenizer::Pattern {
  Owned<pcre2_code> code;

  explicit Pattern(const std::string& source) {
    const std::string spelled = spell_out_white_space(source);
    int error = 0;
    PCRE2_SIZE offset = 0;
    code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(spelled.data()), spelled.size(), PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,
                             &error, &offset, nullptr));
    if (!code) throw FormatError("tokenizer: pattern '" + source + "' does not compile: " + message_of(error));
    pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // without it the interpreter is used
  }

  void split(std::string_view text, std::vector<std::string_view>& out, pcre2_match_data* match, pcre2_match_context* context) const {
    std::size_t piece = 0;  // where the piece begins that no match has claimed yet
    std::size_t search = 0;
    while (search < text.size()) {
      const int found =
          pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), search, PCRE2_NO_UTF_CHECK, match, context);
      if (found == PCRE2_ERROR_NOMATCH) break;
      if (found < 0) throw Error("tokenizer: pre-tokeniser pattern failed: " + message_of(found));
      const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(match);
      const std::size_t begin = range[0];
      const std::size_t end = range[1];
      if (end <= begin) {  // an empty match claims nothing
        if (begin >= text.size()) break;
        search = begin + decode_utf8(text.substr(begin)).bytes;
        continue;
      }
      if (begin > piece) out.push_back(text.substr(piece, begin - piece));
      out.push_back(text.substr(begin, end - begin));
      piece = search = end;
    }
    if (piece < text.size()) out.push_back(text.substr(piece));
  }
};

PreTokenizer::PreTokenizer(const std::vector<std::string>& patterns) {
  patterns_.reserve(patterns.size());
  for (const std::string& pattern : patterns) patterns_.emplace_back(pattern);
}
PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;
PreTokenizer& PreTokenizer::operator=(PreTokenizer&&) noexcept = default;
PreTokenizer::~PreTokenizer() = default;

std::vector<std::string_view> PreTokenizer::split(std::string_view text) const {
  constexpr std::size_t kJitStackStartBytes = 32U << 10;
  constexpr std::size_t kJitStackMostBytes = 8U << 20;
  const auto match = owned(pcre2_match_data_create(1, nullptr));
  const auto context = owned(pcre2_match_context_create(nullptr));
  const auto stack = owned(pcre2_jit_stack_create(kJitStackStartBytes, kJitStackMostBytes, nullptr));
  pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  std::vector<std::string_view> pieces;
  if (!text.empty()) pieces.push_back(text);
  std::vector<std::string_view> next;
  for (const Pattern& pattern : patterns_) {
    next.clear();
    for (const std::string_view piece : pieces) pattern.split(piece, next, match.get(), context.get());
    pieces.swap(next);
  }
  return pieces;
}

}  // namespace dualdecoder::examples
