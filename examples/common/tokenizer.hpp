// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dualdecoder/gguf.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder::examples {

/// Whether names of control tokens that stand in a text ("<|im_end|>") become those tokens or stay ordinary text.
enum class ControlTokens { as_text, parse };

/// What a tokenizer is made of, whichever file it came from. Strings are in the byte-level alphabet of GPT-2.
struct TokenizerDefinition {
  struct AddedToken {
    std::string text;  ///< as it stands in a text
    Token token = 0;
    bool control = false;  ///< matched only under ControlTokens::parse, and not shown
  };
  std::vector<std::string> tokens;                          ///< by id; empty where an id is unused
  std::vector<std::pair<std::string, std::string>> merges;  ///< best first
  std::vector<AddedToken> added;
  std::vector<std::string> patterns;  ///< PCRE2 syntax; each splits the pieces that the one before left
  bool nfc = false;                   ///< normalise to NFC first
  bool ignore_merges = false;         ///< a piece that is a token is taken whole
  bool add_bos = false;
  std::optional<Token> bos;
  std::vector<Token> end_tokens;  ///< generation stops at any of them
};

/// Byte-level BPE of the families Llama 3, Qwen2/2.5/3, SmolLM2 and GPT-2; ids equal those of the Hugging Face tokenizers.
/// Immutable after construction, so one object serves any number of threads.
class Tokenizer {
 public:
  /// From a .gguf file or from a folder with tokenizer.json. Throws IoError, FormatError (malformed or of another kind).
  static Tokenizer load(const std::filesystem::path& model);
  static Tokenizer from_gguf(const GgufHeader& header);
  /// From the text of a tokenizer.json; `config` is that of tokenizer_config.json (BOS and end tokens) or empty.
  static Tokenizer from_json(std::string_view tokenizer, std::string_view config = {});
  explicit Tokenizer(TokenizerDefinition definition);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Ids of `text`, without BOS. Ill-formed UTF-8 counts as U+FFFD; bytes for which the vocabulary has no token are left out.
  /// Throws Error when a pattern of tokenizer.json exceeds the matcher's limits.
  std::vector<Token> encode(std::string_view text, ControlTokens control = ControlTokens::as_text) const;

  /// The bytes that `token` stands for; a control token's name. Throws InvalidArgument for an id outside the vocabulary.
  std::string_view bytes_of(Token token) const;
  bool is_control(Token token) const;

  /// Well-formed UTF-8 of the tokens' bytes, control tokens left out.
  std::string decode(std::span<const Token> tokens) const;

  std::optional<Token> find(std::string_view token) const;  ///< by its text, control tokens included
  std::optional<Token> bos() const;                         ///< set when the model wants it before a text
  std::span<const Token> end_tokens() const;
  std::size_t size() const;  ///< ids are 0 .. size()-1

 private:
  struct State;
  std::unique_ptr<const State> state_;
};

/// Turns tokens into text as they come; never returns part of a code point.
class TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}

  std::string push(Token token);  ///< the text that is complete with this token; control tokens add nothing
  std::string finish();           ///< what is left, as U+FFFD; the stream is empty afterwards

 private:
  const Tokenizer* tokenizer_;
  std::string pending_;
};

}  // namespace dualdecoder::examples
