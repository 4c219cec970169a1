// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "dualdecoder/testing/workplace.hpp"
#include "src/simd/dispatch.hpp"

namespace dualdecoder::test {

/// What kernels are compiled for and this machine has.
inline std::vector<cpu::Isa> instruction_sets() {
  std::vector<cpu::Isa> sets{cpu::Isa::baseline};
  if (cpu::detected_isa() >= cpu::Isa::avx2) sets.push_back(cpu::Isa::avx2);
  if (cpu::detected_isa() >= cpu::Isa::avx512) sets.push_back(cpu::Isa::avx512);
  return sets;
}

/// Seeded numbers of a normal distribution.
inline std::vector<float> normal(std::size_t count, std::uint64_t seed) {
  testing::Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = random.normal();
  return values;
}

/// Values rounded to bf16 by cutting, as bits and as the floats that the bits mean.
struct Bf16 {
  explicit Bf16(std::vector<float> source) : values(std::move(source)), bits(values.size()) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint32_t word = 0;
      std::memcpy(&word, &values[i], sizeof word);
      bits[i] = static_cast<std::uint16_t>(word >> 16U);
      word &= 0xFFFF0000U;
      std::memcpy(&values[i], &word, sizeof word);
    }
  }
  std::vector<float> values;
  std::vector<std::uint16_t> bits;
};

}  // namespace dualdecoder::test
