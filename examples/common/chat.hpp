// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "dualdecoder/gguf.hpp"
#include "dualdecoder/types.hpp"
#include "examples/common/tokenizer.hpp"

namespace dualdecoder::examples {

struct ChatMessage {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
};

/// How a model wants a conversation written down. The Jinja template that comes with a model is recognised, not executed.
class ChatTemplate {
 public:
  /// Part of a prompt: the name of a control token, or text in which no control token is looked for.
  struct Part {
    bool control = false;
    std::string text;
  };

  /// From a .gguf file or from a folder with tokenizer_config.json or chat_template.jinja. Throws IoError, FormatError.
  static ChatTemplate load(const std::filesystem::path& model);
  static ChatTemplate from_gguf(const GgufHeader& header);
  /// From the text of a Jinja template: ChatML (SmolLM2, Qwen2, Qwen2.5, Qwen3) or Llama 3, 3.1, 3.2. Throws FormatError for any other.
  static ChatTemplate from_jinja(std::string_view jinja);

  /// The conversation, and the head of the answer that is to be generated. Neighbouring text parts are joined. Where no system
  /// message comes first, the model's own default stands in. Throws InvalidArgument for another role or for no message.
  std::vector<Part> render(const std::vector<ChatMessage>& messages) const;

  /// Ids of render(): a message that spells a control token's name stays text.
  std::vector<Token> encode(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages) const;

 private:
  enum class Format { chatml, llama3 };

  Format format_ = Format::chatml;
  bool has_default_system_ = false;
  std::string default_system_;  // ChatML: said when no system message is there
  std::string system_head_;     // Llama 3.1 and later: stands before the first system message
};

}  // namespace dualdecoder::examples
