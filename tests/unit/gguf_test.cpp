// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "dualdecoder/gguf.hpp"

#include <sys/stat.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/error.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/model_files.hpp"

namespace dualdecoder::test {
namespace {

GgufHeader parse(const std::string& bytes) { return parse_gguf_header(as_bytes(bytes).data(), bytes.size(), bytes.size()); }

void expect_refused(const std::string& bytes, std::initializer_list<const char*> parts) {
  expect_error<FormatError>([&] { parse(bytes); }, parts);
}

std::string floats(std::size_t count) { return std::string(count * sizeof(float), '\0'); }

constexpr std::uint64_t kHuge = std::uint64_t{1} << 63U;

/// A small file with every kind of entry.
GgufWriter small_file() {
  GgufWriter file;
  file.text("general.architecture", "llama").number("count", 7).real("ratio", 0.5F).flag("yes", true);
  file.texts("words", {"a", "bc", ""}).numbers("signed", {-1, 0, 2});
  file.tensor("one", {3}, 0, floats(3)).tensor("two", {2, 32}, 8, std::string(2 * 34, '\0'));
  return file;
}

}  // namespace

TEST_CASE("a GGUF header holds what was written", "[gguf]") {
  GgufWriter file = small_file();
  file.version = GENERATE(2U, 3U);
  file.raw("u8", 0, "\x05").raw("i8", 1, "\xFF").raw("u16", 2, bytes_of(std::uint16_t{60000})).raw("i16", 3, bytes_of(std::int16_t{-7}));
  file.raw("u64", 10, bytes_of(kHuge)).raw("i64", 11, bytes_of(std::int64_t{-5})).raw("f64", 12, bytes_of(0.1));
  file.raw("bools", 9, bytes_of(std::uint32_t{7}) + bytes_of(std::uint64_t{2}) + std::string("\x01\x00", 2));
  file.raw("empty", 9, bytes_of(std::uint32_t{6}) + bytes_of(std::uint64_t{0}));
  const GgufHeader header = parse(file.bytes());
  CHECK(header.version == file.version);
  CHECK(*header.find<std::string>("general.architecture") == "llama");
  CHECK(*header.find<std::uint64_t>("count") == 7);
  CHECK(*header.find<double>("ratio") == 0.5);
  CHECK(*header.find<bool>("yes"));
  CHECK(*header.find<std::vector<std::string>>("words") == std::vector<std::string>{"a", "bc", ""});
  CHECK(*header.find<std::vector<std::int64_t>>("signed") == std::vector<std::int64_t>{-1, 0, 2});
  CHECK(*header.find<std::uint64_t>("u8") == 5);
  CHECK(*header.find<std::int64_t>("i8") == -1);
  CHECK(*header.find<std::uint64_t>("u16") == 60000);
  CHECK(*header.find<std::int64_t>("i16") == -7);
  CHECK(*header.find<std::uint64_t>("u64") == kHuge);
  CHECK(*header.find<std::int64_t>("i64") == -5);
  CHECK(*header.find<double>("f64") == 0.1);
  CHECK(*header.find<std::vector<bool>>("bools") == std::vector<bool>{true, false});
  CHECK(header.find<std::vector<double>>("empty")->empty());
  CHECK(header.find<std::uint64_t>("ratio") == nullptr);
  CHECK(header.find<std::uint64_t>("absent") == nullptr);
  REQUIRE(header.tensors.size() == 2);
  CHECK(header.tensors[1].name == "two");
  CHECK(header.tensors[1].type == 8);
  CHECK(header.tensors[1].shape == std::vector<std::uint64_t>{2, 32});
  CHECK(header.tensors[1].bytes == 2 * 34);
  CHECK(header.tensors[1].offset == header.tensors[0].offset + 32);
  CHECK(header.tensors[1].offset % 32 == 0);
}

TEST_CASE("a stated alignment moves the data", "[gguf]") {
  GgufWriter file;
  file.alignment = 64;
  file.number("general.alignment", 64).tensor("one", {3}, 0, floats(3)).tensor("two", {3}, 0, floats(3));
  const GgufHeader header = parse(file.bytes());
  CHECK(header.tensors[0].offset % 64 == 0);
  CHECK(header.tensors[1].offset == header.tensors[0].offset + 64);
  for (const std::uint32_t bad : {0U, 3U, 4U, 48U, 1U << 17U, 0xFFFFFFFFU}) {
    expect_refused(GgufWriter().number("general.alignment", bad).bytes(),
                   {"general.alignment", std::to_string(bad).c_str(), "power of two"});
  }
  expect_refused(GgufWriter().text("general.alignment", "32").bytes(), {"general.alignment", "unsigned integer"});
}

TEST_CASE("files that are not GGUF are told apart", "[gguf]") {
  expect_refused("", {"magic", "truncated"});
  expect_refused("PK\x03\x04 something else", {"not a GGUF file"});
  GgufWriter file = small_file();
  file.version = 1;
  expect_refused(file.bytes(), {"version = 1", "2 or 3"});
  file.version = 4;
  expect_refused(file.bytes(), {"version = 4", "2 or 3"});
  file.version = 0x03000000;
  expect_refused(file.bytes(), {"version", "big-endian"});
}

TEST_CASE("every truncation of a GGUF file is refused", "[gguf]") {
  std::string bytes = small_file().bytes();
  bytes.resize(bytes.size() - (32 * 3 - 2 * 34));  // without the padding after the last tensor, which nothing needs
  REQUIRE_NOTHROW(parse(bytes));
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    INFO("length " << length);
    CHECK_THROWS_AS(parse(bytes.substr(0, length)), FormatError);
  }
}

TEST_CASE("absurd counts and lengths are refused before memory is asked for", "[gguf]") {
  const std::uint64_t count = GENERATE(std::uint64_t{65'537}, kHuge - 1, kHuge, std::numeric_limits<std::uint64_t>::max());
  const std::string text = std::to_string(count);
  GgufWriter file;
  file.extra_tensor_count = count;
  expect_refused(file.bytes(), {"tensor count", text.c_str(), "at most 65536"});
  file = {};
  file.extra_metadata_count = count;
  expect_refused(file.bytes(), {"metadata count", text.c_str(), "at most 65536"});
  for (const std::uint32_t element : {0U, 4U, 8U, 12U}) {
    expect_refused(GgufWriter().raw("list", 9, bytes_of(element) + bytes_of(count)).bytes(),
                   {"'list'", "array length", text.c_str(), "at most"});
  }
  expect_refused(GgufWriter().raw("word", 8, bytes_of(count) + "abc").bytes(), {"'word'", text.c_str(), "are left"});
  const std::string start = "GGUF" + bytes_of(std::uint32_t{3});
  expect_refused(start + bytes_of(std::uint64_t{0}) + bytes_of(std::uint64_t{1}) + bytes_of(count), {"metadata key", text.c_str()});
  expect_refused(start + bytes_of(std::uint64_t{1}) + bytes_of(std::uint64_t{0}) + bytes_of(count), {"tensor name", text.c_str()});
}

TEST_CASE("bad metadata is refused", "[gguf]") {
  expect_refused(GgufWriter().number("a", 1).number("a", 1).bytes(), {"'a'", "twice"});
  expect_refused(GgufWriter().number("", 1).bytes(), {"metadata key"});
  expect_refused(GgufWriter().raw("a", 13, "").bytes(), {"'a'", "type = 13", "0 .. 12"});
  expect_refused(GgufWriter().raw("a", 0xFFFFFFFF, "").bytes(), {"'a'", "type = 4294967295"});
  expect_refused(GgufWriter().raw("a", 7, "\x02").bytes(), {"'a'", "boolean = 2", "0 or 1"});
  const std::string array = bytes_of(std::uint32_t{9});
  const std::string one = bytes_of(std::uint64_t{1});
  expect_refused(GgufWriter().raw("a", 9, array + one + array + one + array + one).bytes(), {"'a'", "nested arrays"});
  expect_refused(GgufWriter().raw("a", 9, bytes_of(std::uint32_t{99}) + one).bytes(), {"'a'", "array element", "99"});
  std::string odd = "bad\n\x1b[31mname";
  expect_refused(GgufWriter().number(odd, 1).number(odd, 1).bytes(), {"'bad??[31mname'"});
}

TEST_CASE("array elements are bounded over the whole file", "[gguf]") {
  const std::uint64_t half = std::uint64_t{1} << 23U;
  const std::string bytes = bytes_of(std::uint32_t{0}) + bytes_of(half + 1) + std::string(static_cast<std::size_t>(half) + 1, '\0');
  expect_refused(GgufWriter().raw("a", 9, bytes).raw("b", 9, bytes).bytes(), {"'b'", "array length = 8388609", "at most 8388607"});
}

TEST_CASE("bad tensor entries are refused", "[gguf]") {
  const std::string data = floats(64);
  expect_refused(GgufWriter().tensor("t", {3}, 0, data).tensor("t", {3}, 0, data).bytes(), {"tensor 't'", "twice"});
  expect_refused(GgufWriter().tensor("t", {}, 0, data).bytes(), {"tensor 't'", "dimensions = 0", "1 .. 4"});
  expect_refused(GgufWriter().tensor("t", {1, 1, 1, 1, 1}, 0, data).bytes(), {"tensor 't'", "dimensions = 5", "1 .. 4"});
  expect_refused(GgufWriter().tensor("t", {2, 0}, 0, data).bytes(), {"tensor 't'", "innermost extent = 0"});
  expect_refused(GgufWriter().tensor("t", {0, 2}, 0, data).bytes(), {"tensor 't'", "extent = 0", "positive"});
  expect_refused(GgufWriter().tensor("t", {2, 33}, 8, data).bytes(), {"tensor 't'", "innermost extent = 33", "Q8_0", "32"});
  expect_refused(GgufWriter().tensor("t", {128}, 12, data).bytes(), {"tensor 't'", "innermost extent = 128", "Q4_K", "256"});
  expect_refused(GgufWriter().tensor("t", {32}, 23, data).bytes(), {"tensor 't'", "23 (IQ4_XS)", "Q4_K", "not supported"});
  expect_refused(GgufWriter().tensor("t", {32}, 4, data).bytes(), {"tensor 't'", "4 (unknown)", "not supported"});
  expect_refused(GgufWriter().tensor(std::string(300, 'n'), {3}, 0, data).bytes(), {"tensor name", "length = 300", "at most 255"});
}

TEST_CASE("tensors outside the file or over each other are refused", "[gguf]") {
  const std::string data = floats(64);  // 256 bytes
  const auto with = [&](const std::vector<std::uint64_t>& shape, std::uint64_t offset) {
    return GgufWriter().tensor("a", {64}, 0, data).table("b", shape, 0, offset).bytes();
  };
  expect_refused(with({8}, 256), {"tensor 'b'", "256", "ends past"});
  expect_refused(with({8}, kHuge), {"tensor 'b'", "9223372036854775808", "ends past"});
  expect_refused(with({8}, std::numeric_limits<std::uint64_t>::max() - 31), {"tensor 'b'", "ends past"});
  expect_refused(with({8}, 33), {"tensor 'b'", "offset = 33", "multiple of the alignment 32"});
  expect_refused(with({8}, 224), {"'a'", "'b'", "overlap"});
  expect_refused(with({8}, 0), {"'a'", "'b'", "overlap"});
  expect_refused(with({kHuge}, 0), {"tensor 'b'", "9223372036854775808", "fits the file"});
  expect_refused(with({kHuge, 2}, 0), {"tensor 'b'", "fits the file"});
  const std::uint64_t root = std::uint64_t{1} << 32U;  // products wrap to 0
  expect_refused(with({root, root}, 0), {"tensor 'b'", "fits the file"});
  expect_refused(with({1U << 16U, 1U << 16U, 1U << 16U, 1U << 16U}, 0), {"tensor 'b'", "fits the file"});
}

TEST_CASE("flipped bits never do worse than an error", "[gguf]") {
  const std::string original = gguf_bytes(make_tiny_model(tiny_config("qwen2")), 8);
  const std::size_t header_bytes = static_cast<std::size_t>(parse(original).tensors.front().offset);
  std::mt19937 random(7);
  int refused = 0;
  for (int round = 0; round < 1'000; ++round) {
    std::string bytes = original;
    const unsigned flips = 1 + random() % 4;
    for (unsigned i = 0; i < flips; ++i) bytes[random() % header_bytes] ^= static_cast<char>(1U << random() % 8);
    try {
      const GgufHeader header = parse(bytes);
      for (const GgufTensorInfo& tensor : header.tensors) REQUIRE(tensor.offset + tensor.bytes <= bytes.size());
    } catch (const FormatError&) {
      ++refused;
    }
  }
  CHECK(refused > 100);
}

TEST_CASE("read_gguf_header names the path of what it cannot read", "[gguf]") {
  const TemporaryFolder folder;
  CHECK(read_gguf_header(folder.write("good.gguf", small_file().bytes())).tensors.size() == 2);
  expect_error<IoError>([&] { read_gguf_header(folder.path() / "missing.gguf"); }, {"missing.gguf", "No such file"});
  expect_error<IoError>([&] { read_gguf_header(folder.path()); }, {folder.path().c_str(), "not a regular file"});
  expect_error<FormatError>([&] { read_gguf_header(folder.write("empty.gguf", "")); }, {"empty.gguf", "truncated"});
  expect_error<FormatError>([&] { read_gguf_header(folder.write("text.gguf", "hello, world")); }, {"text.gguf", "not a GGUF file"});
  REQUIRE(::mkfifo((folder.path() / "pipe").c_str(), 0600) == 0);
  expect_error<IoError>([&] { read_gguf_header(folder.path() / "pipe"); }, {"pipe", "not a regular file"});
}

}  // namespace dualdecoder::test
