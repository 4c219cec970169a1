// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/common/chat.hpp"

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "dualdecoder/error.hpp"

namespace dualdecoder::examples {
namespace {

bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

/// A Jinja string literal's text with its escaped line breaks resolved.
std::string unescape(std::string_view literal) {
  std::string out;
  for (std::size_t i = 0; i < literal.size(); ++i) {
    if (literal[i] == '\\' && i + 1 < literal.size()) {
      ++i;
      out.push_back(literal[i] == 'n' ? '\n' : literal[i]);
    } else {
      out.push_back(literal[i]);
    }
  }
  return out;
}

/// What stands between `before` and the next `after`, when no quote lies between.
std::optional<std::string> literal_between(std::string_view text, std::string_view before, std::string_view after) {
  for (std::size_t at = text.find(before); at != std::string_view::npos; at = text.find(before, at + 1)) {
    const std::size_t begin = at + before.size();
    const std::size_t end = text.find(after, begin);
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view found = text.substr(begin, end - begin);
    if (!contains(found, "'") && !contains(found, "\"")) return unescape(found);
  }
  return std::nullopt;
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\v\f\r";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw IoError("cannot open " + path.string());
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// Collects parts, joining text that follows text.
class Writer {
 public:
  Writer& control(std::string_view name) {
    parts_.push_back({true, std::string(name)});
    return *this;
  }
  Writer& text(std::string_view text) {
    if (parts_.empty() || parts_.back().control) parts_.push_back({false, {}});
    parts_.back().text += text;
    return *this;
  }
  std::vector<ChatTemplate::Part> take() { return std::move(parts_); }

 private:
  std::vector<ChatTemplate::Part> parts_;
};

}  // namespace

ChatTemplate ChatTemplate::from_jinja(std::string_view jinja) {
  ChatTemplate made;
  if (contains(jinja, "<|start_header_id|>")) {
    made.format_ = Format::llama3;
    if (contains(jinja, "Cutting Knowledge Date: ")) {
      const std::string known = literal_between(jinja, "Cutting Knowledge Date: ", "\\n").value_or("December 2023");
      const std::string today = literal_between(jinja, "date_string = \"", "\"").value_or("26 Jul 2024");
      made.has_default_system_ = true;
      made.system_head_ = "Cutting Knowledge Date: " + known + "\nToday Date: " + today + "\n\n";
    }
    return made;
  }
  if (contains(jinja, "<|im_start|>")) {
    made.format_ = Format::chatml;
    for (const char* head : {"<|im_start|>system\n", "<|im_start|>system\\n"}) {
      if (const auto text = literal_between(jinja, head, "<|im_end|>")) {
        made.has_default_system_ = true;
        made.default_system_ = *text;
      }
    }
    return made;
  }
  throw FormatError("chat template is of an unknown kind: must be ChatML or Llama 3");
}

ChatTemplate ChatTemplate::from_gguf(const GgufHeader& header) {
  const auto* jinja = header.find<std::string>("tokenizer.chat_template");
  if (jinja == nullptr) throw FormatError("GGUF: tokenizer.chat_template is missing, so this is no chat model");
  return from_jinja(*jinja);
}

ChatTemplate ChatTemplate::load(const std::filesystem::path& model) {
  if (!std::filesystem::is_directory(model)) return from_gguf(read_gguf_header(model));
  if (const auto file = model / "chat_template.jinja"; std::filesystem::exists(file)) return from_jinja(read_file(file));
  const auto file = model / "tokenizer_config.json";
  try {
    return from_jinja(nlohmann::json::parse(read_file(file)).at("chat_template").get<std::string>());
  } catch (const nlohmann::json::exception& error) {
    throw FormatError(file.string() + ": chat_template: " + error.what());
  }
}

std::vector<ChatTemplate::Part> ChatTemplate::render(const std::vector<ChatMessage>& messages) const {
  if (messages.empty()) throw InvalidArgument("messages = none: must be at least one");
  std::vector<ChatMessage> all = messages;
  if (all.front().role != "system" && has_default_system_) all.insert(all.begin(), ChatMessage{"system", default_system_});

  Writer writer;
  const auto header = [&](const std::string& role) {
    if (format_ == Format::chatml) {
      writer.control("<|im_start|>").text(role + "\n");
    } else {
      writer.control("<|start_header_id|>").text(role).control("<|end_header_id|>").text("\n\n");
    }
  };
  if (format_ == Format::llama3) writer.control("<|begin_of_text|>");
  for (const ChatMessage& message : all) {
    const bool known = message.role == "system" || message.role == "user" || message.role == "assistant";
    detail::require(known, "role", message.role, "system, user or assistant");
    header(message.role);
    if (format_ == Format::chatml) {
      writer.text(message.content).control("<|im_end|>").text("\n");
    } else {
      if (&message == &all.front() && message.role == "system") writer.text(system_head_);
      writer.text(trim(message.content)).control("<|eot_id|>");
    }
  }
  header("assistant");
  return writer.take();
}

std::vector<Token> ChatTemplate::encode(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages) const {
  std::vector<Token> out;
  for (const Part& part : render(messages)) {
    if (part.control) {
      const auto token = tokenizer.find(part.text);
      if (!token) throw FormatError("chat template: the vocabulary has no token '" + part.text + "'");
      out.push_back(*token);
    } else {
      const auto text = tokenizer.encode(part.text);
      out.insert(out.end(), text.begin(), text.end());
    }
  }
  return out;
}

}  // namespace dualdecoder::examples
