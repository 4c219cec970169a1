// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dualdecoder::detail {

/// Word `counter` of the random stream `seed`: SplitMix64 (Steele, Lea and Flood 2014) entered at any place, so that whoever knows seed and
/// counter draws the same number, on any backend and in any order.
constexpr std::uint64_t counter_random(std::uint64_t seed, std::uint64_t counter) noexcept {
  constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15U;
  const auto mix = [](std::uint64_t z) {
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
  };
  return mix(mix(seed + kGolden) + kGolden * (counter + 1));
}

/// The same word as a number in [0, 1).
constexpr double counter_uniform(std::uint64_t seed, std::uint64_t counter) noexcept {
  return static_cast<double>(counter_random(seed, counter) >> 11U) * 0x1p-53;
}

}  // namespace dualdecoder::detail
