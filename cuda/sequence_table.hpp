// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/store_options.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder::cuda {

/// What the host knows of a store's sequences: which slots are open or sealed and how far their layers are filled. Every check throws
/// InvalidArgument. Committed lengths are not among it: passes run on the device, perhaps replayed, and only the device counts them.
class SequenceTable {
 public:
  explicit SequenceTable(const StoreOptions& options) : options_(options), entries_(static_cast<std::size_t>(options.max_sequences)) {}

  void check_slot(int slot) const {
    dualdecoder::detail::require(slot >= 0 && slot < options_.max_sequences, "slot", slot, "in 0 .. max_sequences-1");
  }
  void check_open(int slot, int capacity) const {
    check_slot(slot);
    dualdecoder::detail::require(capacity >= 1 && capacity <= options_.max_context, "capacity_tokens", capacity, "in 1 .. max_context");
    if (entry(slot).open) refuse("open", slot, "must be closed");
  }
  void open(int slot, int capacity) { entry(slot) = {true, false, capacity, std::vector<int>(static_cast<std::size_t>(options_.layers))}; }
  /// Checks that `tokens` more fit into the layer; returns how many it holds.
  int check_append(Layer layer, int slot, int tokens) const {
    const Entry& sequence = open_entry("append", slot);
    dualdecoder::detail::require(layer >= 0 && layer < options_.layers, "layer", layer, "in 0 .. layers-1");
    if (sequence.sealed) refuse("append", slot, "must not be sealed yet");
    const int appended = sequence.appended[static_cast<std::size_t>(layer)];
    if (tokens > sequence.capacity - appended) {
      throw InvalidArgument("append: " + std::to_string(appended) + " + " + std::to_string(tokens) +
                            " tokens: must be at most the capacity of " + std::to_string(sequence.capacity));
    }
    return appended;
  }
  void append(Layer layer, int slot, int tokens) { entry(slot).appended[static_cast<std::size_t>(layer)] += tokens; }
  /// Checks that every layer holds the same tokens; returns how many.
  int check_seal(int slot) const {
    const Entry& sequence = open_entry("seal", slot);
    if (sequence.sealed) refuse("seal", slot, "must not be sealed yet");
    const int length = sequence.appended.front();
    for (Layer layer = 0; layer < options_.layers; ++layer) {
      const int appended = sequence.appended[static_cast<std::size_t>(layer)];
      if (appended != length || length == 0) {
        throw InvalidArgument("seal: layer " + std::to_string(layer) + " holds " + std::to_string(appended) +
                              " tokens: must be as many as layer 0, at least 1");
      }
    }
    return length;
  }
  void seal(int slot) { entry(slot).sealed = true; }
  void check_truncate(int slot) const {
    if (!open_entry("truncate", slot).sealed) refuse("truncate", slot, "must be sealed");
  }
  static void check_kept(int tokens, int length) {
    if (tokens < 1 || tokens > length) {
      throw InvalidArgument("truncate: tokens = " + std::to_string(tokens) + ": must be in 1 .. " + std::to_string(length));
    }
  }
  /// False: there is no such slot.
  bool close(int slot) noexcept {
    if (slot < 0 || slot >= options_.max_sequences) return false;
    entry(slot).open = false;
    entry(slot).sealed = false;
    return true;
  }

 private:
  struct Entry {
    bool open = false;
    bool sealed = false;
    int capacity = 0;           // tokens
    std::vector<int> appended;  // [layers] tokens, while prefilling
  };

  [[noreturn]] static void refuse(const char* call, int slot, const char* allowed) {
    throw InvalidArgument(std::string(call) + ": slot = " + std::to_string(slot) + ": " + allowed);
  }
  Entry& entry(int slot) { return entries_[static_cast<std::size_t>(slot)]; }
  const Entry& entry(int slot) const { return entries_[static_cast<std::size_t>(slot)]; }
  const Entry& open_entry(const char* call, int slot) const {
    check_slot(slot);
    if (!entry(slot).open) refuse(call, slot, "must be open");
    return entry(slot);
  }

  StoreOptions options_;
  std::vector<Entry> entries_;
};

}  // namespace dualdecoder::cuda
