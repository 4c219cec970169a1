// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/common/tokenizer.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <queue>
#include <unordered_map>
#include <utility>

#include "dualdecoder/error.hpp"
#include "examples/common/pre_tokenizer.hpp"
#include "examples/common/unicode.hpp"

namespace dualdecoder::examples {
namespace {

constexpr Token kNoToken = -1;

/// GPT-2's printable stand-in for each byte: itself where it is visible Latin-1, else the next free code point from U+0100.
std::array<char32_t, 256> make_byte_alphabet() {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    alphabet[byte] = visible ? byte : next++;
  }
  return alphabet;
}

/// Bytes of a token written in the byte alphabet; nothing when it holds another character.
std::optional<std::string> to_bytes(std::string_view text, const std::array<int, 512>& byte_of) {
  std::string bytes;
  while (!text.empty()) {
    const Utf8Unit unit = decode_utf8(text);
    if (!unit.well_formed || unit.code_point >= byte_of.size() || byte_of[unit.code_point] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(static_cast<unsigned char>(byte_of[unit.code_point])));
    text.remove_prefix(unit.bytes);
  }
  return bytes;
}

std::uint64_t pair_key(Token left, Token right) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32) | static_cast<std::uint32_t>(right);
}

struct PairHash {
  std::size_t operator()(std::uint64_t key) const noexcept {
    key ^= key >> 31;
    key *= 0x9E3779B97F4A7C15U;
    return static_cast<std::size_t>(key ^ (key >> 29));
  }
};

struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
};

struct Merge {
  int rank = 0;
  Token merged = kNoToken;
};

/// One symbol of a piece; symbols form a linked list by index, and one that was merged away has no token.
struct Symbol {
  Token token;
  int previous, next;
};

struct Candidate {
  int rank;
  int left;  ///< index of the left symbol
  Token left_token, right_token, merged;

  friend bool operator>(const Candidate& a, const Candidate& b) { return a.rank != b.rank ? a.rank > b.rank : a.left > b.left; }
};

/// Buffers of one encode call.
struct Workspace {
  std::vector<Symbol> symbols;
  std::vector<Candidate> heap;
};

}  // namespace

struct Tokenizer::State {
  TokenizerDefinition definition;
  PreTokenizer pre_tokenizer;
  std::array<char32_t, 256> byte_alphabet = make_byte_alphabet();
  std::array<Token, 256> token_of_byte{};
  std::vector<std::string> bytes;  // [tokens]
  std::vector<bool> control;       // [tokens]
  std::unordered_map<std::string, Token, TextHash, std::equal_to<>> ids;
  std::unordered_map<std::uint64_t, Merge, PairHash> merges;
  std::array<std::vector<std::size_t>, 256> added_by_first_byte;  // indices into definition.added, longest first

  explicit State(TokenizerDefinition source) : definition(std::move(source)), pre_tokenizer(definition.patterns) {
    add_tokens();
    add_merges();
    add_added_tokens();
    const auto known = [this](Token token) { return token >= 0 && static_cast<std::size_t>(token) < bytes.size(); };
    if (definition.bos && !known(*definition.bos)) throw FormatError("tokenizer: BOS token is outside the vocabulary");
    if (!std::all_of(definition.end_tokens.begin(), definition.end_tokens.end(), known)) {
      throw FormatError("tokenizer: end token is outside the vocabulary");
    }
  }

  void add_tokens() {
    if (definition.tokens.size() > static_cast<std::size_t>(std::numeric_limits<Token>::max())) {
      throw FormatError("tokenizer: vocabulary is too large");
    }
    std::array<int, 512> byte_of;
    byte_of.fill(-1);
    for (std::size_t byte = 0; byte < 256; ++byte) byte_of[byte_alphabet[byte]] = static_cast<int>(byte);
    token_of_byte.fill(kNoToken);
    bytes.reserve(definition.tokens.size());
    ids.reserve(definition.tokens.size());
    for (std::size_t i = 0; i < definition.tokens.size(); ++i) {
      const std::string& text = definition.tokens[i];
      const std::optional<std::string> in_bytes = to_bytes(text, byte_of);
      bytes.push_back(in_bytes.value_or(text));
      if (text.empty()) continue;
      const auto token = static_cast<Token>(i);
      if (!ids.emplace(text, token).second) throw FormatError("tokenizer: token '" + text + "' stands in the vocabulary twice");
      if (in_bytes && in_bytes->size() == 1) token_of_byte[static_cast<unsigned char>(in_bytes->front())] = token;
    }
    control.assign(bytes.size(), false);
  }

  void add_merges() {
    merges.reserve(definition.merges.size());
    std::string merged;
    for (std::size_t rank = 0; rank < definition.merges.size(); ++rank) {
      const auto& [left, right] = definition.merges[rank];
      merged = left;
      merged += right;
      const auto l = ids.find(left);
      const auto r = ids.find(right);
      const auto m = ids.find(merged);
      if (l == ids.end() || r == ids.end() || m == ids.end()) {
        throw FormatError("tokenizer: merge " + std::to_string(rank) + " ('" + left + "' '" + right +
                          "') names a token outside the vocabulary");
      }
      merges.try_emplace(pair_key(l->second, r->second), Merge{static_cast<int>(rank), m->second});
    }
    definition.merges = {};
    definition.tokens = {};
  }

  void add_added_tokens() {
    for (std::size_t i = 0; i < definition.added.size(); ++i) {
      const auto& added = definition.added[i];
      if (added.text.empty()) throw FormatError("tokenizer: an added token has no text");
      if (added.token < 0 || static_cast<std::size_t>(added.token) >= bytes.size()) {
        throw FormatError("tokenizer: added token '" + added.text + "' has an id outside the vocabulary");
      }
      bytes[static_cast<std::size_t>(added.token)] = added.text;
      control[static_cast<std::size_t>(added.token)] = added.control;
      added_by_first_byte[static_cast<unsigned char>(added.text[0])].push_back(i);
    }
    for (auto& bucket : added_by_first_byte) {
      std::stable_sort(bucket.begin(), bucket.end(),
                       [this](std::size_t a, std::size_t b) { return definition.added[a].text.size() > definition.added[b].text.size(); });
    }
  }

  /// The longest added token at the head of `text`, or null.
  const TokenizerDefinition::AddedToken* added_at(std::string_view text, ControlTokens parse) const {
    for (const std::size_t i : added_by_first_byte[static_cast<unsigned char>(text[0])]) {
      const auto& added = definition.added[i];
      if ((parse == ControlTokens::parse || !added.control) && text.starts_with(added.text)) return &added;
    }
    return nullptr;
  }

  /// Text between added tokens.
  void encode_plain(std::string_view text, std::vector<Token>& out, Workspace& work) const {
    if (text.empty()) return;
    const std::string normalised = definition.nfc ? to_nfc(text) : std::string();
    if (definition.nfc) text = normalised;
    for (const std::string_view piece : pre_tokenizer.split(text)) encode_piece(piece, out, work);
  }

  void encode_piece(std::string_view piece, std::vector<Token>& out, Workspace& work) const {
    if (definition.ignore_merges) {
      std::string text;
      for (const char c : piece) append_utf8(text, byte_alphabet[static_cast<unsigned char>(c)]);
      if (const auto found = ids.find(text); found != ids.end()) {
        out.push_back(found->second);
        return;
      }
    }
    auto& symbols = work.symbols;
    symbols.clear();
    for (const char c : piece) {
      const Token token = token_of_byte[static_cast<unsigned char>(c)];
      if (token == kNoToken) continue;
      const int index = static_cast<int>(symbols.size());
      symbols.push_back({token, index - 1, index + 1});
    }
    if (symbols.empty()) return;
    symbols.back().next = -1;
    merge(work);
    for (int i = 0; i != -1; i = symbols[static_cast<std::size_t>(i)].next) out.push_back(symbols[static_cast<std::size_t>(i)].token);
  }

  /// Applies merges, best rank first and leftmost among equals, in O(n log n).
  void merge(Workspace& work) const {
    auto& heap = work.heap;
    const auto at = [&work](int i) -> Symbol& { return work.symbols[static_cast<std::size_t>(i)]; };
    const auto offer = [&](int left) {
      if (left == -1 || at(left).next == -1) return;
      const Token l = at(left).token;
      const Token r = at(at(left).next).token;
      const auto found = merges.find(pair_key(l, r));
      if (found == merges.end()) return;
      heap.push_back({found->second.rank, left, l, r, found->second.merged});
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    };
    heap.clear();
    for (int i = 0; i != -1; i = at(i).next) offer(i);
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end(), std::greater<>());
      const Candidate best = heap.back();
      heap.pop_back();
      Symbol& left = at(best.left);
      if (left.token != best.left_token || left.next == -1 || at(left.next).token != best.right_token) continue;
      Symbol& right = at(left.next);
      left.token = best.merged;
      left.next = right.next;
      right.token = kNoToken;
      if (left.next != -1) at(left.next).previous = best.left;
      offer(left.previous);
      offer(best.left);
    }
  }
};

Tokenizer::Tokenizer(TokenizerDefinition definition) : state_(std::make_unique<const State>(std::move(definition))) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

std::vector<Token> Tokenizer::encode(std::string_view text, ControlTokens control) const {
  const std::string well_formed = to_well_formed_utf8(text);
  const std::string_view all = well_formed;
  std::vector<Token> out;
  out.reserve(all.size() / 3);
  Workspace work;
  std::size_t plain = 0;
  for (std::size_t i = 0; i < all.size();) {
    const auto* added = state_->added_at(all.substr(i), control);
    if (added == nullptr) {
      ++i;
      continue;
    }
    state_->encode_plain(all.substr(plain, i - plain), out, work);
    out.push_back(added->token);
    i += added->text.size();
    plain = i;
  }
  state_->encode_plain(all.substr(plain), out, work);
  return out;
}

std::string_view Tokenizer::bytes_of(Token token) const {
  const bool known = token >= 0 && static_cast<std::size_t>(token) < state_->bytes.size();
  detail::require(known, "token", token, ("in 0 .. " + std::to_string(state_->bytes.size() - 1)).c_str());
  return state_->bytes[static_cast<std::size_t>(token)];
}

bool Tokenizer::is_control(Token token) const {
  bytes_of(token);
  return state_->control[static_cast<std::size_t>(token)];
}

std::string Tokenizer::decode(std::span<const Token> tokens) const {
  std::string bytes;
  for (const Token token : tokens) {
    if (!is_control(token)) bytes += bytes_of(token);
  }
  return to_well_formed_utf8(bytes);
}

std::optional<Token> Tokenizer::find(std::string_view token) const {
  for (const auto& added : state_->definition.added) {
    if (added.text == token) return added.token;
  }
  const auto found = state_->ids.find(token);
  return found == state_->ids.end() ? std::nullopt : std::optional(found->second);
}

std::optional<Token> Tokenizer::bos() const { return state_->definition.add_bos ? state_->definition.bos : std::nullopt; }

std::span<const Token> Tokenizer::end_tokens() const { return state_->definition.end_tokens; }

std::size_t Tokenizer::size() const { return state_->bytes.size(); }

std::string TextStream::push(Token token) {
  if (!tokenizer_->is_control(token)) pending_ += tokenizer_->bytes_of(token);
  std::size_t complete = 0;
  while (complete < pending_.size()) {
    const Utf8Unit unit = decode_utf8(std::string_view(pending_).substr(complete));
    if (unit.truncated) break;
    complete += unit.bytes;
  }
  std::string text = to_well_formed_utf8(std::string_view(pending_).substr(0, complete));
  pending_.erase(0, complete);
  return text;
}

std::string TextStream::finish() { return to_well_formed_utf8(std::exchange(pending_, {})); }

}  // namespace dualdecoder::examples
