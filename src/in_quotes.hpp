// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace dualdecoder::detail {

/// `text` from an untrusted file, fit for a message: in quotes, control characters and non-ASCII bytes as ?, at most 96 characters.
inline std::string in_quotes(std::string_view text) {
  constexpr std::size_t kLongest = 96;
  std::string out = "'";
  for (char c : text.substr(0, kLongest)) out += (c >= ' ' && c <= '~') ? c : '?';
  return out + (text.size() > kLongest ? "...'" : "'");
}

}  // namespace dualdecoder::detail
