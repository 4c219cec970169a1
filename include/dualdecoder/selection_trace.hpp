// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <istream>
#include <map>
#include <ostream>
#include <span>
#include <tuple>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder {

/// Row 0's chunks of a run, by sequence slot, position, layer and KV head. Saved as 32-bit little-endian words: magic "DDT1", the number
/// of records, then per record slot, position, layer, kv_head, count, chunks. Threading: one thread at a time.
class SelectionTrace {
 public:
  struct Key {
    int slot = 0;
    int position = 0;
    Layer layer = 0;
    int kv_head = 0;
    friend auto operator<=>(const Key&, const Key&) = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14 misreads it
  };

  void record(const Key& key, std::span<const int> chunks) { sets_[key].assign(chunks.begin(), chunks.end()); }
  /// The recorded chunks, ascending; empty when nothing was recorded.
  std::span<const int> find(const Key& key) const {
    const auto at = sets_.find(key);
    return at == sets_.end() ? std::span<const int>{} : std::span<const int>(at->second);
  }
  std::size_t size() const noexcept { return sets_.size(); }

  /// Throws IoError when the stream does not take it.
  void save(std::ostream& out) const {
    put(out, kMagic);
    put(out, static_cast<std::uint32_t>(sets_.size()));
    for (const auto& [key, chunks] : sets_) {
      for (int word : {key.slot, key.position, key.layer, key.kv_head, static_cast<int>(chunks.size())}) {
        put(out, static_cast<std::uint32_t>(word));
      }
      for (int chunk : chunks) put(out, static_cast<std::uint32_t>(chunk));
    }
    if (!out) throw IoError("selection trace: the stream did not take it");
  }
  /// Throws FormatError when the stream holds something else or ends early.
  static SelectionTrace load(std::istream& in) {
    if (get(in) != kMagic) throw FormatError("selection trace: magic is not DDT1");
    SelectionTrace trace;
    const std::uint32_t records = get(in);
    for (std::uint32_t i = 0; i < records; ++i) {
      Key key;
      key.slot = static_cast<int>(get(in));
      key.position = static_cast<int>(get(in));
      key.layer = static_cast<int>(get(in));
      key.kv_head = static_cast<int>(get(in));
      const std::uint32_t count = get(in);
      if (count > kMaxChunks) throw FormatError("selection trace: a record of " + std::to_string(count) + " chunks, at most 16777216");
      std::vector<int> chunks;
      for (std::uint32_t c = 0; c < count; ++c) chunks.push_back(static_cast<int>(get(in)));
      trace.sets_[key] = std::move(chunks);
    }
    return trace;
  }

 private:
  static constexpr std::uint32_t kMagic = 0x31544444;  // "DDT1"
  static constexpr std::uint32_t kMaxChunks = 1U << 24;

  static void put(std::ostream& out, std::uint32_t word) {
    for (int shift = 0; shift < 32; shift += 8) out.put(static_cast<char>((word >> shift) & 0xFFU));
  }
  static std::uint32_t get(std::istream& in) {
    std::uint32_t word = 0;
    for (int shift = 0; shift < 32; shift += 8) {
      const int byte = in.get();
      if (byte == std::istream::traits_type::eof()) throw FormatError("selection trace: ends early");
      word |= static_cast<std::uint32_t>(byte) << shift;
    }
    return word;
  }

  std::map<Key, std::vector<int>> sets_;
};

}  // namespace dualdecoder
