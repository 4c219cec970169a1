// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dualdecoder/detail/advance_place.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/retrieval_predictor.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder {

/// StepKernels for memory that the host reads and writes: the CPU backend's, and for programs that bring their own parts and use core
/// alone. Every call returns with its work done. Threading: stateless, so any thread.
class HostStepKernels final : public StepKernels {
 public:
  /// Throws InvalidArgument where `to` has other KV heads than `from` or less capacity.
  void copy_row(const StepView& view, const Selection& from, int row, const Selection& to, StreamRef) override {
    detail::require(to.kv_heads == from.kv_heads, "to.kv_heads", to.kv_heads, "the same as from.kv_heads");
    detail::require(to.capacity >= from.capacity, "to.capacity", to.capacity, "at least from.capacity");
    for (int place = 0; place < view.sequences; ++place) {
      const bool live = row < view.rows_per_sequence && row_is_live(view.mode[place], row);
      const int from_row = place * view.rows_per_sequence + row;
      for (int head = 0; head < to.kv_heads; ++head) {
        int& count = to.count_of(place, head);
        count = live ? from.count_of(from_row, head) : 0;
        std::copy_n(from.chunks_of(from_row, head), count, to.chunks_of(place, head));
        if (from.scores != nullptr && to.scores != nullptr) {
          std::copy_n(from.scores_of(from_row, head), count, to.scores_of(place, head));
        }
      }
    }
  }

  /// Throws InvalidArgument for a dual rule where a pass has one row per sequence.
  void advance(const StepState& state, const Outcome& outcome, const AdvanceRule& rule, StreamRef) override {
    detail::require(!rule.dual || state.rows_per_sequence == 2, "rows_per_sequence", state.rows_per_sequence, "2 for a dual rule");
    for (int place = 0; place < state.sequences; ++place) {
      detail::advance_place(state, place, outcome.sampled + static_cast<std::ptrdiff_t>(place) * state.rows_per_sequence, rule);
    }
  }

  void lay_out(const StepState& state, Token* tokens, int* positions, StreamRef) override {
    for (int place = 0; place < state.sequences; ++place) {
      const RowMode mode = state.mode[place];
      for (int row = 0; row < state.rows_per_sequence; ++row) {
        const int at = place * state.rows_per_sequence + row;
        const bool live = row_is_live(mode, row);
        const bool guess = mode == RowMode::dual && row == 1;
        tokens[at] = live ? (guess ? state.guess : state.token)[place] : -1;
        positions[at] = live ? row_position(mode, row, state.position[place]) : 0;
      }
    }
  }

  void force(const StepState& state, const Token* forced, Token* sampled, StreamRef) override {
    for (int place = 0; place < state.sequences; ++place) {
      if (row_is_live(state.mode[place], 0) && forced[place] >= 0) sampled[place * state.rows_per_sequence] = forced[place];
    }
  }
  void mark_seen(const StepState& state, std::uint64_t* const* seen, StreamRef) override {
    for (int place = 0; place < state.sequences; ++place) {
      if (!row_is_live(state.mode[place], 0) || seen[place] == nullptr) continue;
      const auto token = static_cast<std::uint32_t>(state.token[place]);
      seen[place][token / 64] |= std::uint64_t{1} << (token % 64);
    }
  }

  void upload(void* target, const void* source, std::size_t bytes, StreamRef) override { move(target, source, bytes); }
  void copy(void* target, const void* source, std::size_t bytes, StreamRef) override { move(target, source, bytes); }
  void download(void* target, const void* source, std::size_t bytes, StreamRef) override { move(target, source, bytes); }

 private:
  static void move(void* target, const void* source, std::size_t bytes) {
    if (bytes > 0) std::memcpy(target, source, bytes);
  }
};

}  // namespace dualdecoder
