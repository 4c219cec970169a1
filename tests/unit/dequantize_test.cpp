// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/dequantize.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "tests/catch.hpp"

namespace dualdecoder::detail {
namespace {

std::string read_golden() {
  std::ifstream file(std::filesystem::path(DUALDECODER_TEST_DATA_DIR) / "dequantize_golden.bin", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::uint32_t word(const std::string& bytes, std::size_t at) {
  std::uint32_t value = 0;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

/// The value of a finite binary16 from the definition in IEEE 754.
float half_by_definition(std::uint32_t half) {
  const int exponent = static_cast<int>(half >> 10U & 31U);
  const int fraction = static_cast<int>(half & 1023U);
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return static_cast<float>((half & 0x8000U) != 0 ? -magnitude : magnitude);
}

}  // namespace

TEST_CASE("every format gives the values of the gguf package bit for bit", "[dequantize]") {
  // Made by scripts/make_dequant_golden.py from the package's own dequantize.
  const std::string golden = read_golden();
  std::set<std::uint32_t> seen;
  std::size_t at = 0;
  while (at < golden.size()) {
    const std::uint32_t type = word(golden, at);
    const std::uint32_t count = word(golden, at + 4);
    const BlockFormat format = block_format(type);
    INFO("type " << file_type_name(type));
    REQUIRE(format.bytes == word(golden, at + 8));
    REQUIRE(format.elements == word(golden, at + 12));
    at += 16;
    const std::string blocks = golden.substr(at, std::size_t{count} * format.bytes);
    at += blocks.size();
    const std::size_t values = std::size_t{count} * format.elements;
    REQUIRE(at + values * sizeof(float) <= golden.size());
    std::vector<float> out(values);
    dequantize(static_cast<FileType>(type), reinterpret_cast<const std::byte*>(blocks.data()), values, out.data());
    for (std::size_t i = 0; i < values; ++i) {
      const std::uint32_t expected = word(golden, at + i * sizeof(float));
      if (std::bit_cast<std::uint32_t>(out[i]) != expected) {
        FAIL("value " << i << " is " << out[i] << ", must be " << std::bit_cast<float>(expected));
      }
    }
    at += values * sizeof(float);
    seen.insert(type);
  }
  CHECK(seen == std::set<std::uint32_t>{0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30});
}

TEST_CASE("f16 widens to the value of its definition", "[dequantize]") {
  for (std::uint32_t half = 0; half < 0x10000U; ++half) {
    if ((half & 0x7C00U) == 0x7C00U) continue;
    float value = 0;
    dequantize(FileType::f16, reinterpret_cast<const std::byte*>(&half), 1, &value);
    if (std::bit_cast<std::uint32_t>(value) != std::bit_cast<std::uint32_t>(half_by_definition(half)))
      FAIL("half " << half << " is " << value);
  }
  for (const std::uint16_t half : {std::uint16_t{0x7C00}, std::uint16_t{0xFC00}, std::uint16_t{0x7E00}, std::uint16_t{0x7C01}}) {
    float value = 0;
    dequantize(FileType::f16, reinterpret_cast<const std::byte*>(&half), 1, &value);
    CHECK(!std::isfinite(value));
    CHECK(std::isnan(value) == ((half & 0x3FF) != 0));
  }
}

TEST_CASE("bf16 is the nearest value, ties to even", "[dequantize]") {
  struct Case {
    std::uint32_t f32;
    std::uint16_t bf16;
  };
  const auto [f32, expected] = GENERATE(Case{0x3F800000, 0x3F80},   // 1 is exact
                                        Case{0x3F808000, 0x3F80},   // half way between even 3F80 and 3F81
                                        Case{0x3F808001, 0x3F81},   // just above half way
                                        Case{0x3F818000, 0x3F82},   // half way between 3F81 and even 3F82
                                        Case{0x3F817FFF, 0x3F81},   // just below half way
                                        Case{0x3FFFFFFF, 0x4000},   // carries into the exponent
                                        Case{0x80000000, 0x8000},   // -0
                                        Case{0x00000001, 0x0000},   // the smallest subnormal
                                        Case{0xBF818000, 0xBF82},   // a negative tie
                                        Case{0x7F7F7FFF, 0x7F7F});  // the largest that does not overflow
  const float value = std::bit_cast<float>(f32);
  std::uint16_t out = 0;
  round_to_bf16(&value, 1, &out);
  CHECK(out == expected);
}

TEST_CASE("values too large or not finite are found", "[dequantize]") {
  std::vector<float> values(100, 1.0F);
  CHECK(find_at_least(values.data(), values.size(), kInfinity) == 100);
  values[70] = std::bit_cast<float>(kBf16Overflow);
  CHECK(find_at_least(values.data(), values.size(), kInfinity) == 100);
  CHECK(find_at_least(values.data(), values.size(), kBf16Overflow) == 70);
  values[70] = -std::numeric_limits<float>::infinity();
  CHECK(find_at_least(values.data(), values.size(), kInfinity) == 70);
  values[33] = std::numeric_limits<float>::quiet_NaN();
  CHECK(find_at_least(values.data(), values.size(), kInfinity) == 33);
  CHECK(find_at_least(values.data(), 0, kInfinity) == 0);
}

TEST_CASE("types that are not read have a name and no format", "[dequantize]") {
  CHECK(block_format(23U).elements == 0);
  CHECK(std::string(file_type_name(23)) == "IQ4_XS");
  CHECK(block_format(4U).elements == 0);
  CHECK(std::string(file_type_name(4)) == "unknown");
  CHECK(std::string(file_type_name(0xFFFFFFFF)) == "unknown");
}

}  // namespace dualdecoder::detail
