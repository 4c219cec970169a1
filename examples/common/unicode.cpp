// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/common/unicode.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <tuple>
#include <utility>
#include <vector>

namespace dualdecoder::examples {
namespace {

struct CombiningRun {
  char32_t first, last;
  std::uint8_t combining_class;
};
struct Decomposition {
  char32_t code_point, first, second;
};
struct Composition {
  char32_t first, second, composite;
};

#include "examples/common/nfc_tables.inc"

constexpr char32_t kReplacement = 0xFFFD;
constexpr char32_t kFirstNotNfc = 0x300;  // every code point below is its own NFC and composes with nothing before it

// Hangul syllables compose by arithmetic (Unicode, section 3.12).
constexpr char32_t kSyllableBase = 0xAC00, kLeadBase = 0x1100, kVowelBase = 0x1161, kTrailBase = 0x11A7;
constexpr char32_t kLeadCount = 19, kVowelCount = 21, kTrailCount = 28, kSyllableCount = kLeadCount * kVowelCount * kTrailCount;

std::uint8_t combining_class(char32_t c) {
  const auto* run = std::upper_bound(std::begin(kCombiningRuns), std::end(kCombiningRuns), c,
                                     [](char32_t value, const CombiningRun& r) { return value < r.first; });
  if (run == std::begin(kCombiningRuns)) return 0;
  --run;
  return c <= run->last ? run->combining_class : std::uint8_t{0};
}

void append_decomposed(std::vector<char32_t>& out, char32_t c) {
  if (c < 0xC0) {
    out.push_back(c);
    return;
  }
  if (c >= kSyllableBase && c < kSyllableBase + kSyllableCount) {
    const char32_t index = c - kSyllableBase;
    out.push_back(kLeadBase + index / (kVowelCount * kTrailCount));
    out.push_back(kVowelBase + index % (kVowelCount * kTrailCount) / kTrailCount);
    if (index % kTrailCount != 0) out.push_back(kTrailBase + index % kTrailCount);
    return;
  }
  const auto* found = std::lower_bound(std::begin(kDecompositions), std::end(kDecompositions), c,
                                       [](const Decomposition& d, char32_t value) { return d.code_point < value; });
  if (found == std::end(kDecompositions) || found->code_point != c) {
    out.push_back(c);
    return;
  }
  append_decomposed(out, found->first);
  if (found->second != 0) append_decomposed(out, found->second);
}

/// The composite of two code points, or 0.
char32_t compose(char32_t first, char32_t second) {
  if (first >= kLeadBase && first < kLeadBase + kLeadCount && second >= kVowelBase && second < kVowelBase + kVowelCount) {
    return kSyllableBase + ((first - kLeadBase) * kVowelCount + (second - kVowelBase)) * kTrailCount;
  }
  if (first >= kSyllableBase && first < kSyllableBase + kSyllableCount && (first - kSyllableBase) % kTrailCount == 0 &&
      second > kTrailBase && second < kTrailBase + kTrailCount) {
    return first + (second - kTrailBase);
  }
  const auto* found = std::lower_bound(std::begin(kCompositions), std::end(kCompositions), std::pair{first, second},
                                       [](const Composition& c, const auto& pair) {
                                         return std::pair{c.first, c.second} < pair;
                                       });
  if (found == std::end(kCompositions) || found->first != first || found->second != second) return 0;
  return found->composite;
}

void sort_marks(std::vector<char32_t>& text, std::vector<std::uint8_t>& classes) {
  std::vector<std::pair<std::uint8_t, char32_t>> run;
  for (std::size_t at = 0; at < text.size();) {
    if (classes[at] == 0) {
      ++at;
      continue;
    }
    std::size_t end = at;
    run.clear();
    while (end < text.size() && classes[end] != 0) {
      run.emplace_back(classes[end], text[end]);
      ++end;
    }
    std::stable_sort(run.begin(), run.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (std::size_t i = 0; i < run.size(); ++i) std::tie(classes[at + i], text[at + i]) = run[i];
    at = end;
  }
}

void compose_in_place(std::vector<char32_t>& text, const std::vector<std::uint8_t>& classes) {
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  std::size_t starter = kNone;  // where the last starter was written
  std::size_t written = 0;
  int last_class = -1;  // of what was written after the starter; -1: nothing
  for (std::size_t read = 0; read < text.size(); ++read) {
    const char32_t c = text[read];
    const int own_class = classes[read];
    const bool blocked = last_class != -1 && last_class >= own_class;
    if (starter != kNone && !blocked) {
      if (const char32_t composite = compose(text[starter], c); composite != 0) {
        text[starter] = composite;
        continue;
      }
    }
    if (own_class == 0) {
      starter = written;
      last_class = -1;
    } else {
      last_class = own_class;
    }
    text[written++] = c;
  }
  text.resize(written);
}

}  // namespace

Utf8Unit decode_utf8(std::string_view bytes) noexcept {
  const auto lead = static_cast<unsigned char>(bytes[0]);
  if (lead < 0x80) return {.code_point = lead, .bytes = 1};
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4) return {.code_point = kReplacement, .bytes = 1, .well_formed = false};
  char32_t value = lead & (0x7FU >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {.code_point = kReplacement, .bytes = i, .well_formed = false, .truncated = true};
    const auto next = static_cast<unsigned char>(bytes[i]);
    unsigned char low = 0x80;
    unsigned char high = 0xBF;
    if (i == 1) {  // overlong forms, surrogates and values past U+10FFFF show in the second byte
      if (lead == 0xE0) low = 0xA0;
      if (lead == 0xED) high = 0x9F;
      if (lead == 0xF0) low = 0x90;
      if (lead == 0xF4) high = 0x8F;
    }
    if (next < low || next > high) return {.code_point = kReplacement, .bytes = i, .well_formed = false};
    value = (value << 6) | (next & 0x3FU);
  }
  return {.code_point = value, .bytes = length};
}

void append_utf8(std::string& out, char32_t c) {
  if ((c >= 0xD800 && c <= 0xDFFF) || c > 0x10FFFF) c = kReplacement;
  const auto put = [&out](char32_t byte) { out.push_back(static_cast<char>(static_cast<unsigned char>(byte))); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | (c >> 6));
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | (c >> 12));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | (c >> 18));
    put(0x80 | ((c >> 12) & 0x3F));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

std::string to_well_formed_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Unit unit = decode_utf8(text);
    if (unit.well_formed) {
      out.append(text.substr(0, unit.bytes));
    } else {
      append_utf8(out, kReplacement);
    }
    text.remove_prefix(unit.bytes);
  }
  return out;
}

std::string to_nfc(std::string_view text) {
  std::vector<char32_t> points;
  bool may_change = false;
  for (std::string_view rest = text; !rest.empty();) {
    const Utf8Unit unit = decode_utf8(rest);
    may_change = may_change || unit.code_point >= kFirstNotNfc;
    if (may_change) break;
    rest.remove_prefix(unit.bytes);
  }
  if (!may_change) return std::string(text);
  for (std::string_view rest = text; !rest.empty();) {
    const Utf8Unit unit = decode_utf8(rest);
    append_decomposed(points, unit.code_point);
    rest.remove_prefix(unit.bytes);
  }
  std::vector<std::uint8_t> classes(points.size());
  std::transform(points.begin(), points.end(), classes.begin(), combining_class);
  sort_marks(points, classes);
  compose_in_place(points, classes);
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : points) append_utf8(out, c);
  return out;
}

}  // namespace dualdecoder::examples
