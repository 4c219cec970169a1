// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "dualdecoder/memory.hpp"

namespace dualdecoder::cpu {

/// Which tokens lie in the slots of the lists (KV heads of layers) of one sequence. Threading: one thread at a time.
class FetchedTokens {
 public:
  FetchedTokens() = default;
  FetchedTokens(std::size_t lists, std::size_t slots) : lists_(lists), slots_(slots) {}

  /// Takes the memory from `carver`; called once with a counting carver for the size and once with memory, then clear().
  void carve(Carver& carver);
  void clear() noexcept;

  /// Ascending.
  std::span<const int> tokens(std::size_t list) const noexcept { return {tokens_ + list * slots_, static_cast<std::size_t>(count_[list])}; }
  /// Slot of the i-th of tokens().
  int slot(std::size_t list, std::size_t i) const noexcept { return slot_of_[list * slots_ + i]; }
  bool holds(std::size_t list, int token) const noexcept;
  /// Empties the slots of all tokens that are not among `wanted`, which is ascending.
  void keep(std::size_t list, std::span<const int> wanted) noexcept;
  /// Empties the slots of the tokens from `first` on.
  void forget_from(std::size_t list, int first) noexcept;
  /// Gives a token that lies in no slot the first free one, which there must be, and returns it.
  int add(std::size_t list, int token) noexcept;

 private:
  std::size_t lists_ = 0;
  std::size_t slots_ = 0;
  int* tokens_ = nullptr;          // [lists, slots] the first count_ ascending
  int* slot_of_ = nullptr;         // [lists, slots] of the tokens
  int* count_ = nullptr;           // [lists]
  unsigned char* used_ = nullptr;  // [lists, slots]
};

}  // namespace dualdecoder::cpu
