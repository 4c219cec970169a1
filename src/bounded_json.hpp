// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

namespace dualdecoder::detail {

/// Longest text that is parsed, bytes: 65,536 tensors at 256 bytes each, tenfold what large models need.
inline constexpr std::size_t kLongestJson = std::size_t{16} << 20U;

/// Parses untrusted text whose root is an object. Throws FormatError, which begins with `what`: syntax and UTF-8 errors, keys that appear
/// twice in one object, texts longer than kLongestJson, objects and arrays nested more than `deepest` levels.
nlohmann::json parse_bounded_json(std::span<const std::byte> text, const std::string& what, int deepest);

}  // namespace dualdecoder::detail
