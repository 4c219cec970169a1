// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "dualdecoder/types.hpp"

namespace dualdecoder::examples {

/// A text as tokens, under the stem of its file's name.
struct Text {
  std::string name;
  std::vector<Token> tokens;
};

/// Reads files with the model's tokenizer, which is gone when this returns, so that it takes no part in what is measured. Throws IoError,
/// FormatError, InvalidArgument for a text without tokens.
std::vector<Text> read_texts(const std::string& model, const std::vector<std::string>& paths);

/// Exactly `count` tokens: the text from its beginning, again from there where it is short, and its last 64 tokens at the end.
std::vector<Token> exactly(const std::vector<Token>& text, std::size_t count);

/// Exactly `count` tokens of the `index`-th of `windows` windows, which begin at even distances; a text that is shorter goes on from its
/// beginning.
std::vector<Token> window(const std::vector<Token>& text, std::size_t count, int index, int windows);

}  // namespace dualdecoder::examples
