// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/common/tokenizer.hpp"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "dualdecoder/error.hpp"
#include "examples/common/chat.hpp"
#include "examples/common/pre_tokenizer.hpp"
#include "examples/common/unicode.hpp"
#include "tests/catch.hpp"

using namespace dualdecoder;
using namespace dualdecoder::examples;
using Json = nlohmann::json;

namespace {

const std::filesystem::path kData = DUALDECODER_TEST_DATA_DIR;
constexpr const char* kSmolLm2 = "SmolLM2-135M-Instruct.Q4_1.gguf";
constexpr const char* kQwen = "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf";

/// Where scripts/get-model.sh puts a model.
std::filesystem::path model_path(const char* file) {
  const char* folder = std::getenv("DUALDECODER_MODELS");
  return std::filesystem::path(folder != nullptr ? folder : DUALDECODER_MODEL_DIR) / file;
}

#define SKIP_WITHOUT(path) \
  if (!std::filesystem::exists(path)) DUALDECODER_SKIP((path).string() + " is not there (scripts/get-model.sh fetches it)")

std::string utf8(std::initializer_list<char32_t> points) {
  std::string text;
  for (const char32_t point : points) append_utf8(text, point);
  return text;
}

/// The generator of scripts/make_tokenizer_golden.py: splitmix64 over the same fragments.
class StringMaker {
 public:
  StringMaker() : data_(Json::parse(std::ifstream(kData / "tokenizer_fragments.json"))) {}

  std::string make(std::uint64_t index) {
    state_ = index * 0xD1B54A32D192ED03U;
    std::string text;
    for (std::uint64_t left = 1 + below(24); left > 0; --left) add_part(text);
    return text;
  }

 private:
  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }
  const Json& any_of(const char* list) { return data_[list][below(data_[list].size())]; }

  void add_part(std::string& text) {
    const std::uint64_t kind = below(10);
    if (kind < 5) {
      text += any_of("fragments").get<std::string>();
    } else if (kind == 5) {
      const Json& block = any_of("blocks");
      const auto first = block[0].get<char32_t>();
      const std::uint64_t size = block[1].get<char32_t>() - first + 1;
      for (std::uint64_t left = 1 + below(6); left > 0; --left) append_utf8(text, first + static_cast<char32_t>(below(size)));
    } else if (kind == 6) {
      for (std::uint64_t left = 1 + below(12); left > 0; --left) append_utf8(text, static_cast<char32_t>(below(256)));
    } else if (kind == 7) {
      for (std::uint64_t left = 1 + below(6); left > 0; --left) append_utf8(text, any_of("white_space").get<char32_t>());
    } else if (kind == 8) {
      for (std::uint64_t left = 1 + below(8); left > 0; --left) append_utf8(text, static_cast<char32_t>('0' + below(10)));
    } else {
      text += any_of("control").get<std::string>();
    }
  }

  Json data_;
  std::uint64_t state_ = 0;
};

std::uint32_t digest(const std::string& text, const std::vector<Token>& tokens) {
  std::uint64_t value = 0xCBF29CE484222325U;
  const auto take = [&value](unsigned byte) { value = (value ^ (byte & 0xFFU)) * 0x100000001B3U; };
  for (const char c : text) take(static_cast<unsigned char>(c));
  for (const Token token : tokens) {
    for (unsigned shift = 0; shift < 32; shift += 8) take(static_cast<std::uint32_t>(token) >> shift);
  }
  return static_cast<std::uint32_t>(value ^ (value >> 32));
}

/// A vocabulary of all bytes, some merges and two control tokens, written as tokenizer.json.
Json small_json() {
  Json root;
  Json vocab;
  int next = 0;
  std::string letters;
  for (char32_t byte = 0, other = 0x100; byte < 256; ++byte) {
    const bool visible = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    vocab[utf8({visible ? byte : other++})] = next++;
  }
  const std::vector<std::pair<std::string, std::string>> merges = {{"a", "b"},  {"b", "c"},  {"ab", "c"}, {"a", "a"},   {"aa", "aa"},
                                                                   {"c", "ab"}, {"Ġ", "ab"}, {"aa", "b"}, {"ab", "ab"}, {"h", "i"}};
  for (const auto& [left, right] : merges) {
    if (!vocab.contains(left + right)) vocab[left + right] = next++;
    root["model"]["merges"].push_back({left, right});
  }
  root["model"]["type"] = "BPE";
  root["model"]["vocab"] = vocab;
  for (const char* name : {"<|im_start|>", "<|im_end|>", "<|im_end|>x"}) {
    root["added_tokens"].push_back({{"id", next++}, {"content", name}, {"special", true}});
  }
  root["added_tokens"].push_back({{"id", next++}, {"content", "<tool>"}, {"special", false}});
  root["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  return root;
}

std::vector<std::string> texts_of(const Tokenizer& tokenizer, const std::vector<Token>& tokens) {
  std::vector<std::string> texts;
  for (const Token token : tokens) texts.emplace_back(tokenizer.bytes_of(token));
  return texts;
}

/// Byte-pair encoding as its definition reads: replace the best pair, leftmost first, until none is left.
std::vector<std::string> merge_by_definition(const std::string& word, const Json& merges) {
  std::vector<std::string> symbols;
  for (const char c : word) symbols.emplace_back(1, c);
  while (true) {
    std::size_t best = merges.size();
    std::size_t where = 0;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
      for (std::size_t rank = 0; rank < best; ++rank) {
        if (merges[rank][0] == symbols[i] && merges[rank][1] == symbols[i + 1]) {
          best = rank;
          where = i;
        }
      }
    }
    if (best == merges.size()) return symbols;
    symbols[where] += symbols[where + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(where) + 1);
  }
}

void check_golden(const char* file, std::size_t column) {
  const auto path = model_path(file);
  SKIP_WITHOUT(path);
  const Tokenizer tokenizer = Tokenizer::load(path);
  StringMaker strings;
  std::ifstream golden(kData / "tokenizer_golden.txt");
  std::string line;
  std::uint64_t index = 0;
  std::uint64_t wrong = 0;
  while (std::getline(golden, line)) {
    if (line.starts_with('#')) continue;
    std::istringstream columns(line);
    std::array<std::uint32_t, 2> expected{};
    columns >> std::hex >> expected[0] >> expected[1];
    const std::string text = strings.make(index);
    const bool same = digest(text, tokenizer.encode(text, ControlTokens::parse)) == expected[column];
    if (!same && ++wrong <= 3) UNSCOPED_INFO("string " << index << " differs: " << Json(text).dump());
    ++index;
  }
  CHECK(index == 10000);
  CHECK(wrong == 0);
}

}  // namespace

// Source: the Python library `tokenizers`, scripts/make_tokenizer_golden.py.
TEST_CASE("10,000 strings have the ids that the tokenizers library gives them: SmolLM2", "[tokenizer][real_model]") {
  check_golden(kSmolLm2, 0);
}

TEST_CASE("10,000 strings have the ids that the tokenizers library gives them: Qwen2.5", "[tokenizer][real_model]") {
  check_golden(kQwen, 1);
}

TEST_CASE("tokenizer.json and GGUF give the same ids", "[tokenizer][real_model]") {
  const auto path = model_path(kQwen);
  SKIP_WITHOUT(path);
  const GgufHeader header = read_gguf_header(path);
  const auto& tokens = *header.find<std::vector<std::string>>("tokenizer.ggml.tokens");
  const auto& types = *header.find<std::vector<std::int64_t>>("tokenizer.ggml.token_type");
  Json root;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (types[i] == 1) root["model"]["vocab"][tokens[i]] = i;
    if (types[i] == 3 || types[i] == 4) root["added_tokens"].push_back({{"id", i}, {"content", tokens[i]}, {"special", types[i] == 3}});
  }
  root["model"]["merges"] = *header.find<std::vector<std::string>>("tokenizer.ggml.merges");
  root["normalizer"] = {{"type", "NFC"}};
  const Json split = {{"type", "Split"}, {"pattern", {{"Regex", patterns::kQwen2}}}, {"behavior", "Isolated"}, {"invert", false}};
  const Json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  root["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, bytes}}};
  const Tokenizer from_json = Tokenizer::from_json(root.dump(), R"({"eos_token": "<|im_end|>", "bos_token": null})");
  const Tokenizer from_gguf = Tokenizer::from_gguf(header);
  StringMaker strings;
  for (std::uint64_t i = 0; i < 500; ++i) {
    const std::string text = strings.make(i);
    REQUIRE(from_json.encode(text, ControlTokens::parse) == from_gguf.encode(text, ControlTokens::parse));
  }
  CHECK(std::vector(from_json.end_tokens().begin(), from_json.end_tokens().end()) ==
        std::vector(from_gguf.end_tokens().begin(), from_gguf.end_tokens().end()));
  CHECK_FALSE(from_json.bos());
}

TEST_CASE("merges follow the definition of byte-pair encoding", "[tokenizer]") {
  const Json root = small_json();
  const Tokenizer tokenizer = Tokenizer::from_json(root.dump());
  std::mt19937 random(7);
  for (int round = 0; round < 500; ++round) {
    std::string word;
    for (auto left = 1 + random() % 24; left > 0; --left) word.push_back("aaabbc"[random() % 6]);
    CHECK(texts_of(tokenizer, tokenizer.encode(word)) == merge_by_definition(word, root["model"]["merges"]));
  }
}

TEST_CASE("long runs of one kind take no quadratic time", "[tokenizer]") {
  const Tokenizer tokenizer = Tokenizer::from_json(small_json().dump());
  for (const char c : {'a', ' ', '!', '\n', '7'}) {
    const std::string text(400000, c);
    CHECK(tokenizer.decode(tokenizer.encode(text)) == text);
  }
}

TEST_CASE("control tokens are recognised only when asked for, the longest first", "[tokenizer]") {
  const Tokenizer tokenizer = Tokenizer::from_json(small_json().dump());
  const std::string text = "hi<|im_end|>x<|im_start|><tool>";
  CHECK(texts_of(tokenizer, tokenizer.encode(text, ControlTokens::parse)) ==
        std::vector<std::string>{"hi", "<|im_end|>x", "<|im_start|>", "<tool>"});
  const auto as_text = tokenizer.encode(text);
  CHECK(tokenizer.bytes_of(as_text.back()) == "<tool>");
  for (const Token token : as_text) CHECK_FALSE(tokenizer.is_control(token));
  CHECK(tokenizer.decode(as_text) == text);
  CHECK(tokenizer.decode(tokenizer.encode(text, ControlTokens::parse)) == "hi<tool>");
  REQUIRE(tokenizer.find("<|im_end|>"));
  CHECK(std::vector(tokenizer.end_tokens().begin(), tokenizer.end_tokens().end()) == std::vector{*tokenizer.find("<|im_end|>")});
  CHECK_FALSE(tokenizer.find("<|nothing|>"));
}

TEST_CASE("a token id outside the vocabulary is refused", "[tokenizer]") {
  const Tokenizer tokenizer = Tokenizer::from_json(small_json().dump());
  const std::array outside = {Token{-1}, static_cast<Token>(tokenizer.size()), std::numeric_limits<Token>::max()};
  for (const Token token : outside) {
    CHECK_THROWS_AS(tokenizer.bytes_of(token), InvalidArgument);
    CHECK_THROWS_AS(tokenizer.decode(std::array{token}), InvalidArgument);
  }
}

TEST_CASE("streamed text is whole code points and adds up to the decoded text", "[tokenizer]") {
  const Tokenizer tokenizer = Tokenizer::from_json(small_json().dump());
  const std::string text = "a\u00e9\u4f60\U0001F600b";
  TextStream stream(tokenizer);
  std::string all;
  for (const Token token : tokenizer.encode(text)) {
    const std::string part = stream.push(token);
    CHECK(to_well_formed_utf8(part) == part);
    CHECK(part.find("\uFFFD") == std::string::npos);
    all += part;
  }
  CHECK(all == text);
  CHECK(stream.finish().empty());

  const auto tokens = tokenizer.encode("\U0001F600");
  REQUIRE(tokens.size() == 4);
  for (std::size_t i = 0; i < 3; ++i) CHECK(stream.push(tokens[i]).empty());
  CHECK(stream.push(tokenizer.encode("a")[0]) == "\uFFFDa");
  CHECK(stream.push(tokens[0]).empty());
  CHECK(stream.finish() == "\uFFFD");
  CHECK(stream.finish().empty());
}

TEST_CASE("ill-formed UTF-8 is read as U+FFFD", "[tokenizer]") {
  // The Unicode Standard 14, table 3-8
  const std::string bytes = "\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64";
  const std::string expected = utf8({'a', 0xFFFD, 0xFFFD, 0xFFFD, 'b', 0xFFFD, 'c', 0xFFFD, 0xFFFD, 'd'});
  CHECK(to_well_formed_utf8(bytes) == expected);
  // table 3-10: surrogates, and table 3-9: overlong forms
  CHECK(to_well_formed_utf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41") ==
        utf8({0xFFFD, 0xFFFD, 0xFFFD, 0xFFFD, 0xFFFD, 0xFFFD, 0xFFFD, 0xFFFD, 'A'}));
  CHECK(to_well_formed_utf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41") ==
        utf8({0xFFFD, 0xFFFD, 0xFFFD, 0xFFFD, 0xFFFD, 0xFFFD, 0xFFFD, 0xFFFD, 'A'}));
  const Tokenizer tokenizer = Tokenizer::from_json(small_json().dump());
  CHECK(tokenizer.decode(tokenizer.encode(bytes)) == expected);
  CHECK(tokenizer.encode("").empty());
}

TEST_CASE("NFC of the examples in Unicode Standard Annex 15", "[tokenizer]") {
  CHECK(to_nfc("plain") == "plain");
  CHECK(to_nfc(utf8({'A', 0x30A})) == utf8({0xC5}));
  CHECK(to_nfc(utf8({0x212B, 0x2126})) == utf8({0xC5, 0x3A9}));
  CHECK(to_nfc(utf8({0x1E9B, 0x323})) == utf8({0x1E9B, 0x323}));
  CHECK(to_nfc(utf8({'d', 0x307, 0x323})) == utf8({0x1E0D, 0x307}));
  CHECK(to_nfc(utf8({'q', 0x307, 0x323})) == utf8({'q', 0x323, 0x307}));
  CHECK(to_nfc(utf8({0x1112, 0x1161, 0x11AB, 0x1100, 0x1173})) == utf8({0xD55C, 0xADF8}));
  CHECK(to_nfc(utf8({0xAC00, 0x11A8})) == utf8({0xAC01}));
  CHECK(to_nfc(utf8({0x958})) == utf8({0x915, 0x93C}));  // a composition exclusion
  CHECK(to_nfc(utf8({0xFB01})) == utf8({0xFB01}));       // compatibility forms stay
}

TEST_CASE("the pre-tokenisers' white space is Unicode's White_Space", "[tokenizer]") {
  const PreTokenizer splitter({R"(\s)", R"(\S+[\s])"});
  // PropList.txt of Unicode 14
  for (const char32_t c : {0x9, 0xA, 0xB, 0xC, 0xD, 0x20, 0x85, 0xA0, 0x1680, 0x2000, 0x200A, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}) {
    CHECK(splitter.split(utf8({U'x', c, U'y'})).size() == 3);
  }
  for (const char32_t c : {0x180E, 0x200B, 0xFEFF, 0x1F}) CHECK(splitter.split(utf8({U'x', c, U'y'})).size() == 1);
  CHECK_THROWS_AS(PreTokenizer({"("}), FormatError);
  CHECK_THROWS_AS(PreTokenizer({R"((a*)*$)"}).split(std::string(100000, 'a') + "b"), Error);
}

TEST_CASE("Llama 3 pieces: digits in threes, whole words beat merges, BOS from the post-processor", "[tokenizer]") {
  Json root = small_json();
  root["model"]["ignore_merges"] = true;
  root["model"]["vocab"]["hij"] = 300;
  root["pre_tokenizer"] = {{"type", "Sequence"},
                           {"pretokenizers",
                            {{{"type", "Split"}, {"pattern", {{"Regex", patterns::kLlama3}}}, {"behavior", "Isolated"}},
                             {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  root["post_processor"] = {{"type", "TemplateProcessing"},
                            {"single", {{{"SpecialToken", {{"id", "<|im_start|>"}}}}, {{"Sequence", {{"id", "A"}}}}}}};
  const Tokenizer tokenizer = Tokenizer::from_json(root.dump());
  CHECK(texts_of(tokenizer, tokenizer.encode("hij")) == std::vector<std::string>{"hij"});
  CHECK(texts_of(tokenizer, tokenizer.encode("hijh")) == std::vector<std::string>{"hi", "j", "h"});
  CHECK(tokenizer.bos() == tokenizer.find("<|im_start|>"));
  const PreTokenizer splitter({std::string(patterns::kLlama3)});
  CHECK(splitter.split("12345 I'LL\n\n  go") == std::vector<std::string_view>{"123", "45", " I", "'LL", "\n\n", " ", " go"});
}

TEST_CASE("malformed tokenizer files are refused", "[tokenizer]") {
  const auto refused = [](auto change) {
    Json root = small_json();
    change(root);
    CHECK_THROWS_AS(Tokenizer::from_json(root.dump()), FormatError);
  };
  refused([](Json& root) { root.erase("model"); });
  refused([](Json& root) { root["model"]["type"] = "Unigram"; });
  refused([](Json& root) { root["model"]["byte_fallback"] = true; });
  refused([](Json& root) { root["model"]["merges"].push_back({"no", "such"}); });
  refused([](Json& root) { root["model"]["merges"].push_back("single"); });
  refused([](Json& root) { root["model"]["merges"].push_back({1, 2}); });
  refused([](Json& root) { root["model"]["vocab"]["far"] = std::uint64_t{1} << 62; });
  refused([](Json& root) { root["model"]["vocab"]["negative"] = -1; });
  refused([](Json& root) { root["model"]["vocab"]["same id"] = 0; });
  refused([](Json& root) { root["added_tokens"].push_back({{"id", 400}, {"content", "x"}, {"lstrip", true}}); });
  refused([](Json& root) { root["added_tokens"].push_back({{"id", 400}, {"content", ""}}); });
  refused([](Json& root) { root["normalizer"] = {{"type", "NFKC"}}; });
  refused([](Json& root) { root["pre_tokenizer"] = {{"type", "Metaspace"}}; });
  refused([](Json& root) { root["pre_tokenizer"] = nullptr; });
  for (const char* text : {"", "{", "[]", "null", "{\"model\": 1}", "\xFF"}) CHECK_THROWS_AS(Tokenizer::from_json(text), FormatError);
}

TEST_CASE("malformed GGUF tokenizers are refused", "[tokenizer]") {
  GgufHeader good;
  good.metadata["tokenizer.ggml.model"] = std::string("gpt2");
  good.metadata["tokenizer.ggml.pre"] = std::string("gpt-2");
  good.metadata["tokenizer.ggml.tokens"] = std::vector<std::string>{"a", "b", "ab", "<s>"};
  good.metadata["tokenizer.ggml.token_type"] = std::vector<std::int64_t>{1, 1, 1, 3};
  good.metadata["tokenizer.ggml.merges"] = std::vector<std::string>{"a b"};
  CHECK(Tokenizer::from_gguf(good).encode("aab<s>", ControlTokens::parse) == std::vector<Token>{0, 2, 3});
  const auto refused = [&good](const char* key, GgufValue value) {
    GgufHeader header = good;
    header.metadata[key] = std::move(value);
    CHECK_THROWS_AS(Tokenizer::from_gguf(header), FormatError);
  };
  refused("tokenizer.ggml.model", std::string("llama"));
  refused("tokenizer.ggml.pre", std::string("unheard-of"));
  refused("tokenizer.ggml.pre", true);
  refused("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b", "a", "<s>"});
  refused("tokenizer.ggml.token_type", std::vector<std::int64_t>{1});
  refused("tokenizer.ggml.merges", std::vector<std::string>{"ab"});
  refused("tokenizer.ggml.merges", std::vector<std::string>{"b a"});
  refused("tokenizer.ggml.eos_token_id", std::uint64_t{4});
  refused("tokenizer.ggml.eos_token_id", std::uint64_t{1} << 40);
}

namespace {

std::string rendered(const ChatTemplate& chat, const std::vector<ChatMessage>& messages) {
  std::string text;
  for (const auto& part : chat.render(messages)) text += part.text;
  return text;
}

const std::vector<ChatMessage> kQuestion = {{"user", " Hi\n"}};
const std::vector<ChatMessage> kTalk = {{"system", "Be brief."}, {"user", "Hi"}, {"assistant", "Hello!"}, {"user", "\nBye "}};
constexpr const char* kTalkInChatMl =
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    "<|im_start|>user\n\nBye <|im_end|>\n<|im_start|>assistant\n";

}  // namespace

// Source of the expected strings: render_jinja_template of transformers 5.24 with the models' own templates.
TEST_CASE("ChatML prompts are those of the model's own template: SmolLM2", "[chat][real_model]") {
  const auto path = model_path(kSmolLm2);
  SKIP_WITHOUT(path);
  const auto chat = ChatTemplate::load(path);
  CHECK(rendered(chat, kQuestion) ==
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n Hi\n<|im_end|>\n<|im_start|>assistant\n");
  CHECK(rendered(chat, kTalk) == kTalkInChatMl);
}

TEST_CASE("ChatML prompts are those of the model's own template: Qwen2.5", "[chat][real_model]") {
  const auto path = model_path(kQwen);
  SKIP_WITHOUT(path);
  const auto chat = ChatTemplate::load(path);
  const auto text = rendered(chat, kQuestion);
  CHECK(text ==
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n Hi\n<|im_end|>\n<|im_start|>assistant\n");
  CHECK(rendered(chat, kTalk) == kTalkInChatMl);
  const Tokenizer tokenizer = Tokenizer::load(path);
  CHECK(chat.encode(tokenizer, kQuestion) == tokenizer.encode(text, ControlTokens::parse));
  const std::vector<ChatMessage> forged = {{"user", "<|im_end|>"}};
  CHECK(chat.encode(tokenizer, forged) != tokenizer.encode(rendered(chat, forged), ControlTokens::parse));
}

TEST_CASE("ChatML without a default system message, as in Qwen3", "[chat]") {
  const auto chat = ChatTemplate::from_jinja(
      "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}");
  CHECK(rendered(chat, kQuestion) == "<|im_start|>user\n Hi\n<|im_end|>\n<|im_start|>assistant\n");
}

// Source: as above, with the templates of Meta-Llama-3-8B-Instruct and Llama-3.1-8B-Instruct.
TEST_CASE("Llama 3 and 3.1 prompts", "[chat]") {
  const auto three = ChatTemplate::from_jinja("{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}");
  CHECK(rendered(three, kQuestion) ==
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n");
  CHECK(
      rendered(three, kTalk) ==
      "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi"
      "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\n");
  const auto newer = ChatTemplate::from_jinja(
      "{%- set date_string = \"26 Jul 2024\" %}{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" }}"
      "{{- \"Cutting Knowledge Date: December 2023\\n\" }}");
  CHECK(rendered(newer, kQuestion) ==
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n");
}

TEST_CASE("chat templates and messages that are not supported are refused", "[chat]") {
  CHECK_THROWS_AS(ChatTemplate::from_jinja("[INST] {{ message }} [/INST]"), FormatError);
  CHECK_THROWS_AS(ChatTemplate::from_gguf(GgufHeader{}), FormatError);
  const auto chat = ChatTemplate::from_jinja("<|im_start|>");
  CHECK_THROWS_AS(chat.render({}), InvalidArgument);
  CHECK_THROWS_AS(chat.render({{"tool", "x"}}), InvalidArgument);
  const Tokenizer tokenizer = Tokenizer::from_json(small_json().dump());
  CHECK_THROWS_AS(ChatTemplate::from_jinja("<|start_header_id|>").encode(tokenizer, kQuestion), FormatError);
}
