// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace dualdecoder::examples {

/// What one decoding step found at the head of some bytes.
struct Utf8Unit {
  char32_t code_point = 0;  ///< U+FFFD when ill-formed
  std::size_t bytes = 0;    ///< consumed; for ill-formed input the maximal subpart (Unicode, section 3.9, U+FFFD substitution)
  bool well_formed = true;
  bool truncated = false;  ///< ill-formed only because the bytes end: more may complete it
};

/// Decodes the first code point of `bytes`, which must not be empty.
Utf8Unit decode_utf8(std::string_view bytes) noexcept;

/// Appends `code_point` as UTF-8; surrogates and values past U+10FFFF become U+FFFD.
void append_utf8(std::string& out, char32_t code_point);

/// `text` with every ill-formed part replaced by U+FFFD, as browsers and Python's errors="replace" do it.
std::string to_well_formed_utf8(std::string_view text);

/// Normalization Form C (Unicode Standard Annex 15) of well-formed UTF-8; plain ASCII is returned as it is.
std::string to_nfc(std::string_view text);

}  // namespace dualdecoder::examples
