// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/store_options.hpp"

namespace dualdecoder::detail {

/// What the host knows of a store's sequences, and the checks that KvStore asks of every call. The check of a call throws InvalidArgument
/// and changes nothing; what follows a check cannot fail. Where passes run on a device, perhaps replayed, only the device counts committed
/// tokens: such a store uses check_sealed and check_kept instead of what takes a length from here. Threading: one thread at a time.
class SequenceBook {
 public:
  explicit SequenceBook(const StoreOptions& options)
      : layers_(options.layers), max_context_(options.max_context), sequences_(static_cast<std::size_t>(options.max_sequences)) {
    for (Sequence& sequence : sequences_) sequence.appended.resize(static_cast<std::size_t>(options.layers));
  }

  void check_open(int slot, int capacity_tokens) const {
    check_slot(slot);
    require(capacity_tokens >= 1 && capacity_tokens <= max_context_, "capacity_tokens", capacity_tokens, "in 1 .. max_context");
    require_state(!of(slot).open, "open", slot, "closed");
  }
  void open(int slot, int capacity_tokens) noexcept {
    Sequence& sequence = of(slot);
    sequence.open = true;
    sequence.sealed = false;
    sequence.capacity = capacity_tokens;
    sequence.length = 0;
    std::fill(sequence.appended.begin(), sequence.appended.end(), 0);
  }
  /// Of append; returns the position of the block's first token.
  int check_append(Layer layer, int slot, int tokens) const {
    const Sequence& sequence = checked(slot, "append");
    require(layer >= 0 && layer < layers_, "layer", layer, "in 0 .. layers-1");
    require_state(!sequence.sealed, "append", slot, "not sealed yet");
    const int appended = sequence.appended[static_cast<std::size_t>(layer)];
    if (tokens > sequence.capacity - appended) {
      throw InvalidArgument("append: " + std::to_string(appended) + " + " + std::to_string(tokens) +
                            " tokens: must be at most the capacity of " + std::to_string(sequence.capacity));
    }
    return appended;
  }
  void append(Layer layer, int slot, int tokens) noexcept { of(slot).appended[static_cast<std::size_t>(layer)] += tokens; }
  /// Of seal; returns the length.
  int check_seal(int slot) const {
    const Sequence& sequence = checked(slot, "seal");
    require_state(!sequence.sealed, "seal", slot, "not sealed yet");
    const int length = sequence.appended.front();
    for (Layer layer = 0; layer < layers_; ++layer) {
      const int appended = sequence.appended[static_cast<std::size_t>(layer)];
      if (appended != length || length == 0) {
        throw InvalidArgument("seal: layer " + std::to_string(layer) + " holds " + std::to_string(appended) +
                              " tokens: must be as many as layer 0, at least 1");
      }
    }
    return length;
  }
  void seal(int slot) noexcept {
    of(slot).length = of(slot).appended.front();
    of(slot).sealed = true;
  }
  void check_sealed(int slot, const char* call) const { require_state(checked(slot, call).sealed, call, slot, "sealed"); }
  /// That the sequence of a place is sealed and as long as the view says.
  void check_place(const StepView& view, int place) const {
    const int slot = view.slot_of[place];
    check_sealed(slot, "step");
    if (view.position[place] != of(slot).length) {
      throw InvalidArgument("position = " + std::to_string(view.position[place]) + " of slot " + std::to_string(slot) +
                            ": must be its committed length " + std::to_string(of(slot).length));
    }
  }
  /// That every row 0 that a commit would keep has room.
  void check_commit(const StepView& view) const {
    for (int place = 0; place < view.sequences; ++place) {
      if (!row_is_live(view.mode[place], 0)) continue;
      check_place(view, place);
      const Sequence& sequence = of(view.slot_of[place]);
      if (sequence.length >= sequence.capacity) {
        throw InvalidArgument("commit: slot " + std::to_string(view.slot_of[place]) + " is at its capacity of " +
                              std::to_string(sequence.capacity) + " tokens");
      }
    }
  }
  /// The committed token; returns the new length.
  int commit(int slot) noexcept { return ++of(slot).length; }
  void check_truncate(int slot, int tokens) const {
    check_sealed(slot, "truncate");
    check_kept(tokens, of(slot).length);
  }
  /// That a sequence of `length` tokens can be cut to `tokens`.
  static void check_kept(int tokens, int length) {
    if (tokens < 1 || tokens > length) {
      throw InvalidArgument("truncate: tokens = " + std::to_string(tokens) + ": must be in 1 .. " + std::to_string(length));
    }
  }
  void truncate(int slot, int tokens) noexcept { of(slot).length = tokens; }
  /// False for a slot that there is not; anything else may be closed.
  bool close(int slot) noexcept {
    if (slot < 0 || static_cast<std::size_t>(slot) >= sequences_.size()) return false;
    of(slot).open = false;
    of(slot).sealed = false;
    return true;
  }

  /// Committed tokens of a sealed sequence.
  int length(int slot) const noexcept { return of(slot).length; }
  int capacity(int slot) const noexcept { return of(slot).capacity; }

 private:
  struct Sequence {
    bool open = false;
    bool sealed = false;
    int capacity = 0;           // tokens
    int length = 0;             // committed tokens, once sealed
    std::vector<int> appended;  // [layers] tokens, while prefilling
  };

  Sequence& of(int slot) noexcept { return sequences_[static_cast<std::size_t>(slot)]; }
  const Sequence& of(int slot) const noexcept { return sequences_[static_cast<std::size_t>(slot)]; }
  void check_slot(int slot) const {
    require(slot >= 0 && static_cast<std::size_t>(slot) < sequences_.size(), "slot", slot, "in 0 .. max_sequences-1");
  }
  const Sequence& checked(int slot, const char* call) const {
    check_slot(slot);
    require_state(of(slot).open, call, slot, "open");
    return of(slot);
  }
  /// Throws "call: slot = 3: must be <state>" unless `ok`.
  static void require_state(bool ok, const char* call, int slot, const char* state) {
    if (!ok) throw InvalidArgument(std::string(call) + ": slot = " + std::to_string(slot) + ": must be " + state);
  }

  int layers_;
  int max_context_;
  std::vector<Sequence> sequences_;
};

}  // namespace dualdecoder::detail
