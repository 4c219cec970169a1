// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
// Input that begins with '{' is read as a tokenizer.json. Of any other, the first byte picks a pre-tokeniser and the rest is text, which
// must come back from its tokens, whole and in streamed parts.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "dualdecoder/error.hpp"
#include "examples/common/pre_tokenizer.hpp"
#include "examples/common/tokenizer.hpp"
#include "examples/common/unicode.hpp"

using namespace dualdecoder::examples;

namespace {

TokenizerDefinition definition(std::vector<std::string> patterns, bool nfc, bool ignore_merges) {
  TokenizerDefinition made{.patterns = std::move(patterns), .nfc = nfc, .ignore_merges = ignore_merges};
  for (char32_t byte = 0, other = 0x100; byte < 256; ++byte) {
    const bool visible = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    append_utf8(made.tokens.emplace_back(), visible ? byte : other++);
  }
  for (const auto& [left, right] : {std::pair{"a", "a"}, {"aa", "aa"}, {"a", "b"}, {"b", "a"}, {"Ġ", "a"}, {"Ġ", "Ġ"}, {"Ã", "©"}}) {
    made.merges.emplace_back(left, right);
    made.tokens.push_back(std::string(left) + right);
  }
  for (const char* name : {"<|a|>", "<|a|>b"}) {
    made.added.push_back({name, static_cast<dualdecoder::Token>(made.tokens.size()), true});
    made.tokens.emplace_back(name);
  }
  return made;
}

void expect(bool holds) {
  if (!holds) std::abort();
}

void check_text(const Tokenizer& tokenizer, std::string_view text, bool nfc) {
  const auto tokens = tokenizer.encode(text);
  const std::string well_formed = to_well_formed_utf8(text);
  expect(tokenizer.decode(tokens) == (nfc ? to_nfc(well_formed) : well_formed));
  TextStream stream(tokenizer);
  std::string streamed;
  for (const auto token : tokens) streamed += stream.push(token);
  streamed += stream.finish();
  expect(streamed == tokenizer.decode(tokens));
  tokenizer.encode(text, ControlTokens::parse);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace patterns;
  static const std::array<Tokenizer, 4> kTokenizers = {
      Tokenizer(definition({std::string(kGpt2)}, false, false)),
      Tokenizer(definition({std::string(kEachDigit), std::string(kGpt2)}, false, false)),
      Tokenizer(definition({std::string(kLlama3)}, false, true)),
      Tokenizer(definition({std::string(kQwen2)}, true, false)),
  };
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (input[0] != '{') {
    const std::size_t which = data[0] % kTokenizers.size();
    check_text(kTokenizers[which], input.substr(1), which == 3);
    return 0;
  }
  try {
    Tokenizer::from_json(input).encode("ab 12\n \u00e9<|a|>", ControlTokens::parse);
  } catch (const dualdecoder::Error&) {  // refused, as most inputs are
  }
  return 0;
}
