// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "dualdecoder/step_view.hpp"
#include "dualdecoder/store_options.hpp"

namespace dualdecoder::cpu {

/// What a store knows of its sequences' lengths, and the checks that KvStore asks of every call. The check of a call throws InvalidArgument
/// and changes nothing; what follows a check cannot fail. Threading: one thread at a time.
class SequenceBook {
 public:
  explicit SequenceBook(const StoreOptions& options);

  void check_open(int slot, int capacity_tokens) const;
  void open(int slot, int capacity_tokens) noexcept;
  /// Of append; returns the position of the block's first token.
  int check_append(Layer layer, int slot, int tokens) const;
  void append(Layer layer, int slot, int tokens) noexcept;
  /// Of seal; returns the length.
  int check_seal(int slot) const;
  void seal(int slot) noexcept;
  /// That the sequence of a place is sealed and as long as the view says.
  void check_place(const StepView& view, int place) const;
  /// That every row 0 that a commit would keep has room.
  void check_commit(const StepView& view) const;
  /// The committed token; returns the new length.
  int commit(int slot) noexcept { return ++sequences_[static_cast<std::size_t>(slot)].length; }
  void check_truncate(int slot, int tokens) const;
  void truncate(int slot, int tokens) noexcept { sequences_[static_cast<std::size_t>(slot)].length = tokens; }
  /// False for a slot that there is not; anything else may be closed.
  bool close(int slot) noexcept;

  /// Committed tokens of a sealed sequence.
  int length(int slot) const noexcept { return sequences_[static_cast<std::size_t>(slot)].length; }
  int capacity(int slot) const noexcept { return sequences_[static_cast<std::size_t>(slot)].capacity; }

 private:
  struct Sequence {
    bool open = false;
    bool sealed = false;
    int capacity = 0;           // tokens
    int length = 0;             // committed tokens, once sealed
    std::vector<int> appended;  // [layers] tokens, while prefilling
  };

  const Sequence& checked(int slot, const char* what) const;

  int layers_;
  int max_context_;
  std::vector<Sequence> sequences_;
};

}  // namespace dualdecoder::cpu
