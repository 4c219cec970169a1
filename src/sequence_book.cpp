// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/sequence_book.hpp"

#include <algorithm>
#include <string>

#include "dualdecoder/error.hpp"
#include "src/chunk_geometry.hpp"

namespace dualdecoder::cpu {
namespace {

void check_slot(int slot, std::size_t slots) { detail::require(slot >= 0 && index(slot) < slots, "slot", slot, "in 0 .. max_sequences-1"); }

/// Throws "what: slot = 3: must be <state>" unless `ok`.
void require_state(bool ok, const char* what, int slot, const char* state) {
  if (!ok) throw InvalidArgument(std::string(what) + ": slot = " + std::to_string(slot) + ": must be " + state);
}

}  // namespace

SequenceBook::SequenceBook(const StoreOptions& options)
    : layers_(options.layers), max_context_(options.max_context), sequences_(index(options.max_sequences)) {
  for (Sequence& sequence : sequences_) sequence.appended.resize(index(options.layers));
}

const SequenceBook::Sequence& SequenceBook::checked(int slot, const char* what) const {
  check_slot(slot, sequences_.size());
  require_state(sequences_[index(slot)].open, what, slot, "open");
  return sequences_[index(slot)];
}

void SequenceBook::check_open(int slot, int capacity_tokens) const {
  check_slot(slot, sequences_.size());
  detail::require(capacity_tokens >= 1 && capacity_tokens <= max_context_, "capacity_tokens", capacity_tokens, "in 1 .. max_context");
  require_state(!sequences_[index(slot)].open, "open", slot, "closed");
}

void SequenceBook::open(int slot, int capacity_tokens) noexcept {
  Sequence& sequence = sequences_[index(slot)];
  sequence.open = true;
  sequence.sealed = false;
  sequence.capacity = capacity_tokens;
  sequence.length = 0;
  std::fill(sequence.appended.begin(), sequence.appended.end(), 0);
}

int SequenceBook::check_append(Layer layer, int slot, int tokens) const {
  const Sequence& sequence = checked(slot, "append");
  detail::require(layer >= 0 && layer < layers_, "layer", layer, "in 0 .. layers-1");
  require_state(!sequence.sealed, "append", slot, "not sealed yet");
  const int appended = sequence.appended[index(layer)];
  if (tokens > sequence.capacity - appended) {
    throw InvalidArgument("append: " + std::to_string(appended) + " + " + std::to_string(tokens) +
                          " tokens: must be at most the capacity of " + std::to_string(sequence.capacity));
  }
  return appended;
}

void SequenceBook::append(Layer layer, int slot, int tokens) noexcept { sequences_[index(slot)].appended[index(layer)] += tokens; }

int SequenceBook::check_seal(int slot) const {
  const Sequence& sequence = checked(slot, "seal");
  require_state(!sequence.sealed, "seal", slot, "not sealed yet");
  const int length = sequence.appended.front();
  for (Layer layer = 0; layer < layers_; ++layer) {
    if (sequence.appended[index(layer)] != length || length == 0) {
      throw InvalidArgument("seal: layer " + std::to_string(layer) + " holds " + std::to_string(sequence.appended[index(layer)]) +
                            " tokens: must be as many as layer 0, at least 1");
    }
  }
  return length;
}

void SequenceBook::seal(int slot) noexcept {
  Sequence& sequence = sequences_[index(slot)];
  sequence.length = sequence.appended.front();
  sequence.sealed = true;
}

void SequenceBook::check_place(const StepView& view, int place) const {
  const int slot = view.slot_of[place];
  const Sequence& sequence = checked(slot, "step");
  require_state(sequence.sealed, "step", slot, "sealed");
  if (view.position[place] != sequence.length) {
    throw InvalidArgument("position = " + std::to_string(view.position[place]) + " of slot " + std::to_string(slot) +
                          ": must be its committed length " + std::to_string(sequence.length));
  }
}

void SequenceBook::check_commit(const StepView& view) const {
  for (int place = 0; place < view.sequences; ++place) {
    if (!row_is_live(view.mode[place], 0)) continue;
    check_place(view, place);
    const Sequence& sequence = sequences_[index(view.slot_of[place])];
    if (sequence.length >= sequence.capacity) {
      throw InvalidArgument("commit: slot " + std::to_string(view.slot_of[place]) + " is at its capacity of " +
                            std::to_string(sequence.capacity) + " tokens");
    }
  }
}

void SequenceBook::check_truncate(int slot, int tokens) const {
  const Sequence& sequence = checked(slot, "truncate");
  require_state(sequence.sealed, "truncate", slot, "sealed");
  if (tokens < 1 || tokens > sequence.length) {
    throw InvalidArgument("truncate: tokens = " + std::to_string(tokens) + ": must be in 1 .. " + std::to_string(sequence.length));
  }
}

bool SequenceBook::close(int slot) noexcept {
  if (slot < 0 || index(slot) >= sequences_.size()) return false;
  sequences_[index(slot)].open = false;
  sequences_[index(slot)].sealed = false;
  return true;
}

}  // namespace dualdecoder::cpu
