// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/bench/prompts.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "dualdecoder/error.hpp"
#include "examples/common/tokenizer.hpp"

namespace dualdecoder::examples {
namespace {

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw IoError(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

std::vector<Text> read_texts(const std::string& model, const std::vector<std::string>& paths) {
  const Tokenizer tokenizer = Tokenizer::load(model);
  std::vector<Text> texts;
  for (const std::string& path : paths) {
    texts.push_back({std::filesystem::path(path).stem().string(), tokenizer.encode(read_text(path), ControlTokens::parse)});
    if (texts.back().tokens.empty()) throw InvalidArgument(path + ": holds no tokens");
  }
  return texts;
}

std::vector<Token> exactly(const std::vector<Token>& text, std::size_t count) {
  const std::size_t tail = std::min<std::size_t>({64, text.size(), count});
  std::vector<Token> out;
  out.reserve(count);
  for (std::size_t i = 0; out.size() + tail < count; ++i) out.push_back(text[i % text.size()]);
  out.insert(out.end(), text.end() - static_cast<std::ptrdiff_t>(tail), text.end());
  return out;
}

std::vector<Token> window(const std::vector<Token>& text, std::size_t count, int index, int windows) {
  const std::size_t room = text.size() > count ? text.size() - count : text.size();
  const std::size_t first = room * static_cast<std::size_t>(index) / static_cast<std::size_t>(std::max(windows, 1));
  std::vector<Token> out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = text[(first + i) % text.size()];
  return out;
}

}  // namespace dualdecoder::examples
