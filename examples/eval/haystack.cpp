// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/haystack.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "dualdecoder/error.hpp"
#include "examples/eval/words.hpp"

namespace dualdecoder::examples {
namespace {

constexpr std::size_t kLongestPiece = 400;
constexpr std::size_t kMadeUpSentences = 4000;

bool is_blank(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in || std::filesystem::is_directory(path)) throw IoError(path.string() + ": cannot be read");
  return {std::istreambuf_iterator<char>(in), {}};
}

/// Where the piece that begins the text ends: behind a sentence or an empty line, or at a blank when it grows too long.
std::size_t piece_length(std::string_view text) {
  std::size_t last_blank = 0;
  for (std::size_t i = 0; i + 1 < text.size(); ++i) {
    const bool blank_next = is_blank(text[i + 1]);
    const bool sentence = (text[i] == '.' || text[i] == '!' || text[i] == '?') && blank_next;
    const bool paragraph = text[i] == '\n' && text[i + 1] == '\n';
    if (sentence || paragraph) {
      std::size_t end = i + 1;
      while (end < text.size() && is_blank(text[end])) ++end;
      return end;
    }
    if (blank_next) last_blank = i + 2;
    if (i + 2 >= kLongestPiece && last_blank > 0) return last_blank;
  }
  return text.size();
}

}  // namespace

std::vector<std::string> Haystack::split(std::string_view text) {
  std::vector<std::string> pieces;
  while (!text.empty()) {
    const std::size_t length = piece_length(text);
    std::string piece(text.substr(0, length));
    text.remove_prefix(length);
    if (std::all_of(piece.begin(), piece.end(), is_blank)) continue;
    if (!is_blank(piece.back())) piece += ' ';
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

Haystack Haystack::noise() {
  return {"noise",
          {"The morning is clear. ", "Water runs down to the sea. ", "A bird sits on the fence. ", "One day follows the other. ",
           "The road goes on and comes back. "}};
}

Haystack Haystack::essay(const std::vector<std::filesystem::path>& files) {
  if (files.empty()) return {"made up", made_up_prose(kMadeUpSentences)};
  std::string name;
  std::vector<std::string> pieces;
  std::uint64_t checksum = 0;
  for (const auto& file : files) {
    const std::string text = read_file(file);
    for (const char c : text) checksum = dualdecoder::detail::counter_random(checksum, static_cast<unsigned char>(c));
    const auto more = split(text);
    pieces.insert(pieces.end(), more.begin(), more.end());
    if (!name.empty()) name += "+";
    name += file.stem().string();
  }
  if (pieces.empty()) throw InvalidArgument("--text: the files hold no text");
  return {fmt::format("{}:{:08x}", name, checksum >> 32U), std::move(pieces)};
}

std::string Haystack::text(Random& random, std::size_t count, const std::vector<std::string>& hidden) const {
  const std::size_t start = random.below(pieces_.size());
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < hidden.size(); ++i) places.push_back(random.below(count + 1));
  std::sort(places.begin(), places.end());
  std::string out;
  std::size_t next = 0;
  for (std::size_t i = 0; i <= count; ++i) {
    for (; next < places.size() && places[next] == i; ++next) out += hidden[next] + ' ';
    if (i < count) out += pieces_[(start + i) % pieces_.size()];
  }
  return out;
}

}  // namespace dualdecoder::examples
