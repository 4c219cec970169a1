// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "dualdecoder/counter_random.hpp"
#include "dualdecoder/retrieval_predictor.hpp"
#include "dualdecoder/types.hpp"

/// The rule by which a place of the batch goes on, once for every backend: StepKernels::advance applies it to each place by itself.
namespace dualdecoder::detail {

constexpr void go_on_with_guess(const StepState& state, int place, Token guess, const AdvanceRule& rule) {
  state.guess[place] = rule.dual ? guess : -1;
  state.mode[place] = rule.dual ? RowMode::dual : RowMode::single;
}

constexpr void go_on_without_guess(const StepState& state, int place, const AdvanceRule& rule) {
  if (rule.dual && rule.random_guess_below > 0) {
    const auto counter = (static_cast<std::uint64_t>(place) << 32U) + static_cast<std::uint32_t>(state.position[place]);
    const auto below = static_cast<std::uint64_t>(rule.random_guess_below);
    go_on_with_guess(state, place, static_cast<Token>(counter_random(rule.seed, counter) % below), rule);
    return;
  }
  state.guess[place] = -1;
  state.mode[place] = rule.dual ? RowMode::resync : RowMode::single;
}

/// `sampled` holds the token after each row of the place.
constexpr void advance_place(const StepState& state, int place, const Token* sampled, const AdvanceRule& rule) {
  const RowMode mode = state.mode[place];
  if (mode == RowMode::idle) return;
  const bool waited = state.waits != nullptr && state.waits[place] != 0;
  if (state.waits != nullptr) state.waits[place] = 0;
  if (mode == RowMode::resync) {
    go_on_with_guess(state, place, sampled[1], rule);
    return;
  }
  const bool right = mode == RowMode::dual && state.guess[place] == sampled[0];
  state.token[place] = sampled[0];
  ++state.position[place];
  if (mode == RowMode::single) {
    go_on_without_guess(state, place, rule);
    return;
  }
  const bool lone = rule.resync == Resync::automatic && rule.lone_sequence && !waited;
  if (right || rule.resync == Resync::never || lone) {
    go_on_with_guess(state, place, sampled[1], rule);
    if (!right && lone && rule.dual && state.waits != nullptr) state.waits[place] = 1;
  } else {
    state.guess[place] = -1;
    state.mode[place] = rule.dual ? RowMode::resync : RowMode::single;
  }
}

}  // namespace dualdecoder::detail
