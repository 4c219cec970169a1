// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace dualdecoder::examples {

namespace patterns {
/// `\s` as Unicode's White_Space. PCRE2's own class also holds U+180E, which is none since Unicode 6.3.
inline constexpr std::string_view kWhiteSpace =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
inline constexpr std::string_view kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
inline constexpr std::string_view kEachDigit = R"(\p{N})";
inline constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
}  // namespace patterns

/// Cuts text into the pieces that byte-pair merges never cross. Immutable, so one object serves any number of threads.
class PreTokenizer {
 public:
  /// Each pattern, in PCRE2 syntax with `\s` read as White_Space, splits the pieces that the one before left: every match is a piece,
  /// and so is what lies between matches. Throws FormatError for a pattern that does not compile.
  explicit PreTokenizer(const std::vector<std::string>& patterns);
  PreTokenizer(PreTokenizer&&) noexcept;
  PreTokenizer& operator=(PreTokenizer&&) noexcept;
  ~PreTokenizer();

  /// Views into `text`, which must be well-formed UTF-8; together they are the whole text. Throws Error past the matcher's limits.
  std::vector<std::string_view> split(std::string_view text) const;

 private:
  struct Pattern;
  std::vector<Pattern> patterns_;
};

}  // namespace dualdecoder::examples
