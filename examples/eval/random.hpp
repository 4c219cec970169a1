// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dualdecoder/counter_random.hpp"

namespace dualdecoder::examples {

/// Seeded numbers that are the same on every machine and with every standard library.
class Random {
 public:
  /// `stream` keeps users of one seed apart; its text counts.
  Random(std::uint64_t seed, std::string_view stream) : seed_(seed) {
    for (const char c : stream) seed_ = dualdecoder::detail::counter_random(seed_, static_cast<unsigned char>(c));
  }

  /// In 0 .. count-1; count >= 1.
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(dualdecoder::detail::counter_random(seed_, counter_++) % count); }
  /// In first .. last.
  int between(int first, int last) { return first + static_cast<int>(below(static_cast<std::size_t>(last - first + 1))); }

  template <class Values>
  const auto& pick(const Values& values) {
    return values[below(std::size(values))];
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }

  /// `count` letters or digits out of `alphabet`.
  std::string letters(std::string_view alphabet, std::size_t count) {
    std::string out;
    while (out.size() < count) out += alphabet[below(alphabet.size())];
    return out;
  }

 private:
  std::uint64_t seed_;
  std::uint64_t counter_ = 0;
};

}  // namespace dualdecoder::examples
