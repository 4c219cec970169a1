// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
// Tokenizer definitions from GGUF metadata and from tokenizer.json.
#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "dualdecoder/error.hpp"
#include "examples/common/pre_tokenizer.hpp"
#include "examples/common/tokenizer.hpp"

namespace dualdecoder::examples {
namespace {

using Json = nlohmann::json;

/// Control tokens that end a turn or a text in the supported families; models seldom declare all that they use.
constexpr std::array<std::string_view, 6> kEndNames = {"<|im_end|>",    "<|eot_id|>",      "<|eom_id|>",
                                                       "<|endoftext|>", "<|end_of_text|>", "</s>"};

void add_end_tokens_by_name(TokenizerDefinition& definition) {
  for (const auto& added : definition.added) {
    if (added.control && std::find(kEndNames.begin(), kEndNames.end(), added.text) != kEndNames.end()) {
      definition.end_tokens.push_back(added.token);
    }
  }
  std::sort(definition.end_tokens.begin(), definition.end_tokens.end());
  definition.end_tokens.erase(std::unique(definition.end_tokens.begin(), definition.end_tokens.end()), definition.end_tokens.end());
}

// ---- GGUF

enum class GgufTokenType : std::int64_t { control = 3, user_defined = 4 };

template <class T>
const T& required(const GgufHeader& header, const char* key) {
  const T* value = header.find<T>(key);
  if (value == nullptr) throw FormatError(std::string("GGUF: ") + key + " is missing or of the wrong type");
  return *value;
}

std::optional<Token> token_of(const GgufHeader& header, const char* key) {
  const auto* value = header.find<std::uint64_t>(key);
  if (value == nullptr) return std::nullopt;
  if (*value > 0x7FFFFFFF) throw FormatError(std::string("GGUF: ") + key + " is no token");
  return static_cast<Token>(*value);
}

void choose_pre_tokenizer(const std::string& name, TokenizerDefinition& definition) {
  using namespace patterns;
  if (name == "smollm") {
    definition.patterns = {std::string(kEachDigit), std::string(kGpt2)};
  } else if (name == "qwen2" || name == "deepseek-r1-qwen") {
    definition.patterns = {std::string(kQwen2)};
    definition.nfc = true;
  } else if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") {
    definition.patterns = {std::string(kLlama3)};
    definition.ignore_merges = true;
    definition.add_bos = true;
  } else if (name == "gpt-2" || name == "default") {
    definition.patterns = {std::string(kGpt2)};
  } else {
    throw FormatError("GGUF: tokenizer.ggml.pre = '" + name + "' is not supported: must be smollm, qwen2, llama-bpe or gpt-2");
  }
}

std::pair<std::string, std::string> split_merge(const std::string& merge) {
  const std::size_t space = merge.find(' ', 1);
  if (space == std::string::npos || space + 1 >= merge.size()) throw FormatError("tokenizer: merge '" + merge + "' is no pair");
  return {merge.substr(0, space), merge.substr(space + 1)};
}

// ---- tokenizer.json

std::string string_or_content(const Json& value) {
  if (value.is_object()) return value.at("content").get<std::string>();
  return value.is_string() ? value.get<std::string>() : std::string();
}

/// Calls `use` for a node, or for each part of a "Sequence" node; `list` names the member that holds the parts.
template <class Use>
void for_each_part(const Json& node, const char* list, const Use& use) {
  if (node.is_null()) return;
  if (node.at("type") == "Sequence") {
    for (const Json& part : node.at(list)) use(part);
  } else {
    use(node);
  }
}

void read_normalizer(const Json& node, TokenizerDefinition& definition) {
  for_each_part(node, "normalizers", [&](const Json& part) {
    if (part.at("type") != "NFC")
      throw FormatError("tokenizer.json: normalizer " + part.at("type").dump() + " is not supported: must be NFC");
    definition.nfc = true;
  });
}

void read_pre_tokenizer(const Json& node, TokenizerDefinition& definition) {
  bool byte_level = false;
  for_each_part(node, "pretokenizers", [&](const Json& part) {
    const auto type = part.at("type").get<std::string>();
    if (type == "ByteLevel" && !part.value("add_prefix_space", false)) {
      byte_level = true;
      if (part.value("use_regex", true)) definition.patterns.emplace_back(patterns::kGpt2);
    } else if (type == "Digits" && part.value("individual_digits", false)) {
      definition.patterns.emplace_back(patterns::kEachDigit);
    } else if (type == "Split" && part.at("behavior") == "Isolated" && !part.value("invert", false) &&
               part.at("pattern").contains("Regex")) {
      definition.patterns.push_back(part.at("pattern").at("Regex").get<std::string>());
    } else {
      throw FormatError("tokenizer.json: pre-tokenizer " + part.dump() + " is not supported");
    }
  });
  if (!byte_level) throw FormatError("tokenizer.json: only byte-level BPE is supported");
}

void put_token(TokenizerDefinition& definition, std::size_t most, const std::string& text, const Json& id) {
  const auto token = id.get<std::int64_t>();
  if (token < 0 || static_cast<std::uint64_t>(token) >= most) {
    throw FormatError("tokenizer.json: token '" + text + "' has id " + std::to_string(token) + ": must be in 0 .. " +
                      std::to_string(most - 1));
  }
  const auto at = static_cast<std::size_t>(token);
  if (definition.tokens.size() <= at) definition.tokens.resize(at + 1);
  if (!definition.tokens[at].empty() && definition.tokens[at] != text) {
    throw FormatError("tokenizer.json: id " + std::to_string(token) + " stands for '" + definition.tokens[at] + "' and '" + text + "'");
  }
  definition.tokens[at] = text;
}

void read_model(const Json& model, std::size_t most, TokenizerDefinition& definition) {
  if (model.value("type", "BPE") != "BPE" || model.value("byte_fallback", false) ||
      !string_or_content(model.value("continuing_subword_prefix", Json())).empty() ||
      !string_or_content(model.value("end_of_word_suffix", Json())).empty()) {
    throw FormatError("tokenizer.json: only byte-level BPE without prefixes, suffixes and byte fallback is supported");
  }
  definition.ignore_merges = model.value("ignore_merges", false);
  for (const auto& [text, id] : model.at("vocab").items()) put_token(definition, most, text, id);
  for (const Json& merge : model.at("merges")) {
    definition.merges.push_back(merge.is_array() ? std::pair{merge.at(0).get<std::string>(), merge.at(1).get<std::string>()}
                                                 : split_merge(merge.get<std::string>()));
  }
}

void read_added_tokens(const Json& list, std::size_t most, TokenizerDefinition& definition) {
  for (const Json& entry : list) {
    const auto text = entry.at("content").get<std::string>();
    if (entry.value("lstrip", false) || entry.value("rstrip", false) || entry.value("single_word", false)) {
      throw FormatError("tokenizer.json: added token '" + text + "' wants lstrip, rstrip or single_word, which is not supported");
    }
    put_token(definition, most, text, entry.at("id"));
    definition.added.push_back({text, entry.at("id").get<Token>(), entry.value("special", false)});
  }
}

/// The token that a TemplateProcessing post-processor puts before a single text, or "".
std::string leading_token(const Json& node) {
  std::string token;
  for_each_part(node, "processors", [&](const Json& part) {
    if (part.at("type") != "TemplateProcessing" || part.at("single").empty()) return;
    const Json& first = part.at("single").at(0);
    if (first.contains("SpecialToken")) token = first.at("SpecialToken").at("id").get<std::string>();
  });
  return token;
}

std::optional<Token> added_token(const TokenizerDefinition& definition, const std::string& text) {
  for (const auto& added : definition.added) {
    if (added.text == text) return added.token;
  }
  return std::nullopt;
}

TokenizerDefinition read_json(const Json& root, const Json& config) {
  TokenizerDefinition definition;
  const Json& model = root.at("model");
  const Json added = root.value("added_tokens", Json::array());
  constexpr std::size_t kMostUnusedIds = 65536;
  const std::size_t most = model.at("vocab").size() + added.size() + kMostUnusedIds;
  read_model(model, most, definition);
  read_added_tokens(added, most, definition);
  read_normalizer(root.value("normalizer", Json()), definition);
  read_pre_tokenizer(root.value("pre_tokenizer", Json()), definition);
  std::string bos = leading_token(root.value("post_processor", Json()));
  definition.add_bos = config.value("add_bos_token", !bos.empty());
  if (bos.empty()) bos = string_or_content(config.value("bos_token", Json()));
  definition.bos = added_token(definition, bos);
  definition.add_bos = definition.add_bos && definition.bos.has_value();
  if (const auto end = added_token(definition, string_or_content(config.value("eos_token", Json())))) definition.end_tokens.push_back(*end);
  add_end_tokens_by_name(definition);
  return definition;
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw IoError("cannot open " + path.string());
  std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (in.bad()) throw IoError("cannot read " + path.string());
  return text;
}

}  // namespace

Tokenizer Tokenizer::from_gguf(const GgufHeader& header) {
  TokenizerDefinition definition;
  if (const auto& model = required<std::string>(header, "tokenizer.ggml.model"); model != "gpt2") {
    throw FormatError("GGUF: tokenizer.ggml.model = '" + model + "' is not supported: must be gpt2 (byte-level BPE)");
  }
  choose_pre_tokenizer(required<std::string>(header, "tokenizer.ggml.pre"), definition);
  definition.tokens = required<std::vector<std::string>>(header, "tokenizer.ggml.tokens");
  const auto& types = required<std::vector<std::int64_t>>(header, "tokenizer.ggml.token_type");
  if (types.size() != definition.tokens.size()) {
    throw FormatError("GGUF: tokenizer.ggml.token_type has " + std::to_string(types.size()) + " entries for " +
                      std::to_string(definition.tokens.size()) + " tokens");
  }
  for (std::size_t i = 0; i < types.size(); ++i) {
    const auto type = static_cast<GgufTokenType>(types[i]);
    if (type != GgufTokenType::control && type != GgufTokenType::user_defined) continue;
    definition.added.push_back({definition.tokens[i], static_cast<Token>(i), type == GgufTokenType::control});
  }
  for (const std::string& merge : required<std::vector<std::string>>(header, "tokenizer.ggml.merges")) {
    definition.merges.push_back(split_merge(merge));
  }
  definition.bos = token_of(header, "tokenizer.ggml.bos_token_id");
  if (const bool* add = header.find<bool>("tokenizer.ggml.add_bos_token")) definition.add_bos = *add;
  definition.add_bos = definition.add_bos && definition.bos.has_value();
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    if (const auto end = token_of(header, key)) definition.end_tokens.push_back(*end);
  }
  add_end_tokens_by_name(definition);
  return Tokenizer(std::move(definition));
}

Tokenizer Tokenizer::from_json(std::string_view tokenizer, std::string_view config) {
  try {
    return Tokenizer(read_json(Json::parse(tokenizer), config.empty() ? Json::object() : Json::parse(config)));
  } catch (const Json::exception& error) {
    throw FormatError(std::string("tokenizer.json: ") + error.what());
  }
}

Tokenizer Tokenizer::load(const std::filesystem::path& model) {
  if (!std::filesystem::is_directory(model)) return from_gguf(read_gguf_header(model));
  const auto config = model / "tokenizer_config.json";
  return from_json(read_file(model / "tokenizer.json"), std::filesystem::exists(config) ? read_file(config) : std::string());
}

}  // namespace dualdecoder::examples
