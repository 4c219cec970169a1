// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Groups in few bits against the closed forms of SpeCache (arXiv 2503.16163): 2 bits have levels at the ends and the thirds of a group's
// range, 1 bit at its quarters; keys share a range per channel, values per token and group of channels.
#include "src/low_bit.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/catch.hpp"
#include "tests/unit/kernel_fixture.hpp"

using namespace dualdecoder;
using namespace dualdecoder::cpu;

namespace {

struct Group {
  std::vector<float> keys, values;  // [tokens, dim]
};

Group quantised(const Group& group, const LowBitLayout& layout, Isa isa) {
  std::vector<std::byte> data(layout.bytes, std::byte{0xAA});
  quantise(group.keys.data(), group.values.data(), layout, data.data());
  Group out{std::vector<float>(group.keys.size()), std::vector<float>(group.values.size())};
  low_bit_kernels(isa).keys(data.data(), layout, out.keys.data());
  low_bit_kernels(isa).values(data.data(), layout, out.values.data());
  return out;
}

/// How far `out` is from the nearest level between `least` and `most`, or, where that is more, how much farther from `x` than the level
/// that is nearest to `x`. Relative to the size of what is stored in binary16.
double fault(double out, double x, double least, double most, int bits) {
  const double zero = bits == 1 ? (3 * least + most) / 4 : least;
  const double scale = bits == 1 ? (most - least) / 2 : (most - least) / 3;
  double from_level = HUGE_VAL;
  double nearest = HUGE_VAL;
  for (int code = 0; code < 1 << bits; ++code) {
    from_level = std::min(from_level, std::abs(out - (zero + code * scale)));
    nearest = std::min(nearest, std::abs(x - (zero + code * scale)));
  }
  return std::max(from_level, std::abs(out - x) - nearest) / (std::abs(zero) + most - least);
}

}  // namespace

TEST_CASE("a group holds the levels of its ranges") {
  for (const Isa isa : test::instruction_sets()) {
    for (const int bits : {1, 2}) {
      for (const int tokens : {32, 64}) {
        for (const int dim : {8, 16, 64, 80, 128, 256}) {
          INFO(name_of(isa) << ", " << bits << " bits, groups of " << tokens << ", dim " << dim);
          const LowBitLayout layout = low_bit_layout({.bits = bits, .group = tokens}, dim);
          const auto count = static_cast<std::size_t>(tokens * dim);
          Group group{test::normal(count, 3), test::normal(count, 4)};
          for (std::size_t i = 0; i < count; ++i) group.keys[i] += static_cast<float>(i % static_cast<std::size_t>(dim));  // channels apart
          const Group out = quantised(group, layout, isa);
          double worst = 0.0;
          for (int d = 0; d < dim; ++d) {
            double least = HUGE_VAL;
            double most = -HUGE_VAL;
            for (int t = 0; t < tokens; ++t) {
              least = std::min(least, double(group.keys[static_cast<std::size_t>(t * dim + d)]));
              most = std::max(most, double(group.keys[static_cast<std::size_t>(t * dim + d)]));
            }
            for (int t = 0; t < tokens; ++t) {
              const auto i = static_cast<std::size_t>(t * dim + d);
              worst = std::max(worst, fault(out.keys[i], group.keys[i], least, most, bits));
            }
          }
          for (int t = 0; t < tokens; ++t) {
            for (int first = 0; first < dim; first += tokens) {
              const auto begin = group.values.begin() + t * dim + first;
              const auto [least, most] = std::minmax_element(begin, begin + std::min(tokens, dim - first));
              for (int d = first; d < std::min(dim, first + tokens); ++d) {
                const auto i = static_cast<std::size_t>(t * dim + d);
                worst = std::max(worst, fault(out.values[i], group.values[i], *least, *most, bits));
              }
            }
          }
          CHECK(worst < 1.0 / 1024);  // zero and scale are each off by 2^-11 at most
        }
      }
    }
  }
}

TEST_CASE("ranges that binary16 can hold are kept to the bit") {
  // 0 .. 3 in steps of 1 has the thirds as levels; its quarters are 0.75 and 2.25
  const LowBitLayout two = low_bit_layout({.bits = 2, .group = 32}, 16);
  const LowBitLayout one = low_bit_layout({.bits = 1, .group = 32}, 16);
  Group group{std::vector<float>(512), std::vector<float>(512)};
  for (std::size_t i = 0; i < 512; ++i) {
    group.keys[i] = static_cast<float>((i / 16) % 4);  // by token, so that every channel has all four
    group.values[i] = -static_cast<float>(i % 4);
  }
  for (const Isa isa : test::instruction_sets()) {
    const Group exact = quantised(group, two, isa);
    CHECK(exact.keys == group.keys);
    CHECK(exact.values == group.values);
    const Group quarters = quantised(group, one, isa);
    for (std::size_t i = 0; i < 512; ++i) {
      REQUIRE(quarters.keys[i] == (group.keys[i] < 1.5F ? 0.75F : 2.25F));
      REQUIRE(quarters.values[i] == (group.values[i] < -1.5F ? -2.25F : -0.75F));
    }
  }
}

TEST_CASE("a constant, tiny and huge elements") {
  for (const int bits : {1, 2}) {
    const LowBitLayout layout = low_bit_layout({.bits = bits, .group = 32}, 16);
    for (const float value : {0.0F, -1.5F, 3e-7F, 65504.0F, 1e9F, -1e9F}) {
      INFO(bits << " bits, " << value);
      const Group group{std::vector<float>(512, value), std::vector<float>(512, value)};
      const float held = std::clamp(value, -65504.0F, 65504.0F);
      for (const Isa isa : test::instruction_sets()) {
        const Group out = quantised(group, layout, isa);
        for (std::size_t i = 0; i < 512; ++i) {
          REQUIRE(std::abs(out.keys[i] - held) <= 3e-8F);  // half of binary16's smallest step
          REQUIRE(out.values[i] == out.keys[i]);
        }
      }
    }
  }
}

TEST_CASE("the copy's bytes are those of the publication") {
  // 32 layers of 8 KV heads of 128: 20.5 KB a token at 2 bits in groups of 64, 12.3 KB at 1 bit
  CHECK(low_bit_layout({.bits = 2, .group = 64}, 128).bytes * 32 * 8 / 64 == 20480);
  CHECK(low_bit_layout({.bits = 1, .group = 64}, 128).bytes * 32 * 8 / 64 == 12288);
}
