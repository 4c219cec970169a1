// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/safetensors.hpp"

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "dualdecoder/error.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/model_files.hpp"

namespace dualdecoder::test {
namespace {

using detail::parse_safetensors;
using detail::parse_safetensors_index;
using detail::SafetensorsInfo;

std::vector<SafetensorsInfo> parse(const std::string& bytes) { return parse_safetensors(as_bytes(bytes)); }

void expect_refused(const std::string& bytes, std::initializer_list<const char*> parts) {
  expect_error<FormatError>([&] { parse(bytes); }, parts);
}

/// A file whose header is `json`, with `data` bytes after it.
std::string file(const std::string& json, std::size_t data = 0) {
  return bytes_of(static_cast<std::uint64_t>(json.size())) + json + std::string(data, '\0');
}

/// A file with one tensor entry as it stands and 16 bytes of data.
std::string entry(const std::string& json) { return file("{\"t\":" + json + "}", 16); }

}  // namespace

TEST_CASE("a safetensors header holds what was written", "[safetensors]") {
  SafetensorsWriter writer;
  writer.raw("\"__metadata__\":{\"format\":\"pt\"}");
  writer.tensor("b", {2, 2}, "BF16", std::string(8, 'x')).tensor("a", {3}, "F32", std::string(12, 'y')).tensor("none", {0, 5}, "F16", "");
  const std::string bytes = writer.bytes();
  const auto tensors = parse(bytes);
  REQUIRE(tensors.size() == 3);
  CHECK(tensors[0].name == "b");
  CHECK(tensors[0].type == "BF16");
  CHECK(tensors[0].shape == std::vector<std::uint64_t>{2, 2});
  CHECK(tensors[0].bytes == 8);
  CHECK(bytes.substr(static_cast<std::size_t>(tensors[0].offset), 8) == std::string(8, 'x'));
  CHECK(bytes.substr(static_cast<std::size_t>(tensors[1].offset), 12) == std::string(12, 'y'));
  CHECK(parse(file("{}")).empty());
}

TEST_CASE("every truncation of a safetensors file is refused", "[safetensors]") {
  const std::string bytes = SafetensorsWriter().tensor("a", {3}, "F32", std::string(12, 'y')).tensor("b", {1}, "F16", "xx").bytes();
  REQUIRE_NOTHROW(parse(bytes));
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    INFO("length " << length);
    CHECK_THROWS_AS(parse(bytes.substr(0, length)), FormatError);
  }
  expect_refused(bytes + "z", {"tensors end at offset", "must be equal"});
}

TEST_CASE("safetensors header lengths beyond the file are refused", "[safetensors]") {
  const std::uint64_t length =
      GENERATE(std::uint64_t{3}, (std::uint64_t{1} << 63U) - 1, std::uint64_t{1} << 63U, std::numeric_limits<std::uint64_t>::max());
  expect_refused(bytes_of(length) + "{}", {"header length", std::to_string(length).c_str(), "at most 2"});
}

TEST_CASE("safetensors headers that are not what the format says are refused", "[safetensors]") {
  expect_refused(file(""), {"not valid JSON"});
  expect_refused(file("{"), {"not valid JSON"});
  expect_refused(file("[]"), {"must be a JSON object"});
  expect_refused(file("{\"a\":\"\xFF\"}"), {"not valid JSON"});
  expect_refused(file("{\"t\":1e999}"), {"not valid JSON"});
  expect_refused(file("{} trailing"), {"not valid JSON"});
  expect_refused(file("{\"a\":" + std::string(100'000, '[')), {"nested deeper than 3"});
  expect_refused(file("{\"a\":{},\"a\":{}}"), {"'a'", "twice"});
  expect_refused(entry("{\"dtype\":\"F32\",\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[0,16]}"), {"'dtype'", "twice"});
  expect_refused(entry("3"), {"'t'", "JSON object"});
  expect_refused(entry("{\"shape\":[4],\"data_offsets\":[0,16]}"), {"'t'", "dtype is missing"});
  expect_refused(entry("{\"dtype\":\"F32\",\"data_offsets\":[0,16]}"), {"'t'", "shape is missing"});
  expect_refused(entry("{\"dtype\":\"F32\",\"shape\":[4]}"), {"'t'", "data_offsets is missing"});
  expect_refused(entry("{\"dtype\":7,\"shape\":[4],\"data_offsets\":[0,16]}"), {"'t'", "dtype must be a string"});
  expect_refused(entry("{\"dtype\":\"Q4\",\"shape\":[4],\"data_offsets\":[0,16]}"), {"'t'", "'Q4'", "F32, F16 or BF16"});
  expect_refused(entry("{\"dtype\":\"F32\",\"shape\":4,\"data_offsets\":[0,16]}"), {"'t'", "shape", "list"});
  expect_refused(entry("{\"dtype\":\"F32\",\"shape\":[-4],\"data_offsets\":[0,16]}"), {"'t'", "shape", "whole numbers"});
  expect_refused(entry("{\"dtype\":\"F32\",\"shape\":[4.0],\"data_offsets\":[0,16]}"), {"'t'", "shape", "whole numbers"});
  expect_refused(entry("{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,4],\"data_offsets\":[0,16]}"), {"'t'", "shape", "at most 8"});
}

TEST_CASE("safetensors offsets, shapes and types must agree", "[safetensors]") {
  const auto with = [](const std::string& shape, const std::string& offsets) {
    return entry("{\"dtype\":\"F32\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}");
  };
  REQUIRE_NOTHROW(parse(with("[4]", "[0,16]")));
  expect_refused(with("[4]", "[0,20]"), {"'t'", "[0,20]", "<= 16"});
  expect_refused(with("[4]", "[16,0]"), {"'t'", "[16,0]", "begin <= end"});
  expect_refused(with("[4]", "[0]"), {"'t'", "data_offsets"});
  expect_refused(with("[4]", "[0,9223372036854775808]"), {"'t'", "9223372036854775808"});
  expect_refused(with("[4]", "[0,18446744073709551616]"), {"'t'", "whole numbers"});
  expect_refused(with("[5]", "[0,16]"), {"'t'", "16 bytes of data do not fit dtype F32 and shape [5]"});
  expect_refused(with("[3]", "[0,16]"), {"'t'", "do not fit"});
  expect_refused(with("[4611686018427387904]", "[0,0]"), {"'t'", "do not fit"});     // 2^62 x 4 bytes wraps to 0
  expect_refused(with("[4294967296,4294967296]", "[0,0]"), {"'t'", "do not fit"});   // 2^64 wraps to 0
  expect_refused(with("[9223372036854775809,4]", "[0,16]"), {"'t'", "do not fit"});  // wraps to 16
  REQUIRE_NOTHROW(parse(file("{\"t\":{\"dtype\":\"F32\",\"shape\":[9223372036854775809,0],\"data_offsets\":[0,0]}}")));
}

TEST_CASE("safetensors data without holes or overlaps", "[safetensors]") {
  const auto two = [](const std::string& first, const std::string& second) {
    const std::string f16 = "{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":";
    return file("{\"a\":" + f16 + first + "},\"b\":" + f16 + second + "}}", 8);
  };
  REQUIRE_NOTHROW(parse(two("[4,8]", "[0,4]")));
  expect_refused(two("[0,4]", "[0,4]"), {"begins at offset", "inside the tensor"});
  expect_refused(two("[0,4]", "[2,6]"), {"'b'", "inside the tensor"});
  expect_refused(file("{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[4,8]}}", 8), {"'a'", "after a hole"});
}

TEST_CASE("flipped bits in safetensors never do worse than an error", "[safetensors]") {
  const std::string original = safetensors_bytes(make_tiny_model(tiny_config("qwen3")), "BF16");
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, original.data(), sizeof header_bytes);
  std::mt19937 random(11);
  int refused = 0;
  for (int round = 0; round < 1'000; ++round) {
    std::string bytes = original;
    bytes[random() % (8 + static_cast<std::size_t>(header_bytes))] ^= static_cast<char>(1U << random() % 8);
    try {
      for (const SafetensorsInfo& tensor : parse(bytes)) REQUIRE(tensor.offset + tensor.bytes <= bytes.size());
    } catch (const FormatError&) {
      ++refused;
    }
  }
  CHECK(refused > 100);
}

TEST_CASE("the index of a sharded model", "[safetensors]") {
  const auto index = [](const std::string& json) { return parse_safetensors_index(as_bytes(json)); };
  const auto map = index("{\"metadata\":{\"total_size\":8},\"weight_map\":{\"a\":\"x-1.safetensors\",\"b\":\"x-2.safetensors\"}}");
  CHECK(map == std::map<std::string, std::string>{{"a", "x-1.safetensors"}, {"b", "x-2.safetensors"}});
  expect_error<FormatError>([&] { index("{}"); }, {"index.json", "weight_map is missing"});
  expect_error<FormatError>([&] { index("{\"weight_map\":{}}"); }, {"weight_map must be an object"});
  expect_error<FormatError>([&] { index("{\"weight_map\":{\"a\":1}}"); }, {"'a'", "file name"});
  for (const char* name : {"../x.safetensors", "/etc/passwd", "", ".", "..", "a\\\\b", "a\\u0000b"}) {
    INFO(name);
    expect_error<FormatError>([&] { index("{\"weight_map\":{\"a\":\"" + std::string(name) + "\"}}"); }, {"'a'", "without a folder"});
  }
  expect_error<FormatError>([&] { index("{\"weight_map\":{\"a\":\"x\",\"a\":\"y\"}}"); }, {"'a'", "twice"});
}

}  // namespace dualdecoder::test
