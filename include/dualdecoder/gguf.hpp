// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "dualdecoder/export.hpp"

namespace dualdecoder {

/// A metadata value of a GGUF file, widened: unsigned and signed integers to 64 bits, floats to double; arrays are homogeneous.
using GgufValue = std::variant<std::uint64_t, std::int64_t, double, bool, std::string, std::vector<std::uint64_t>,
                               std::vector<std::int64_t>, std::vector<double>, std::vector<bool>, std::vector<std::string>>;

/// One tensor as the file declares it; bounds were checked against the file.
struct GgufTensorInfo {
  std::string name;
  std::uint32_t type = 0;            ///< the file format's ggml_type number
  std::vector<std::uint64_t> shape;  ///< outermost first, so a matrix reads [out, in]
  std::uint64_t offset = 0;          ///< from the start of the file, bytes
  std::uint64_t bytes = 0;
};

/// The header of a GGUF file (version 2 or 3), for tokenizers and tools; weights are loaded by load_weights.
struct GgufHeader {
  std::uint32_t version = 0;
  std::map<std::string, GgufValue, std::less<>> metadata;
  std::vector<GgufTensorInfo> tensors;

  /// The value of `key` as T, or nullptr when the key is absent or holds another type.
  template <class T>
  const T* find(std::string_view key) const {
    const auto at = metadata.find(key);
    return at == metadata.end() ? nullptr : std::get_if<T>(&at->second);
  }
};

/// Parses header and tensor table, bounded by the file's size; reads no weights. Throws IoError, FormatError.
DUALDECODER_EXPORT GgufHeader read_gguf_header(const std::filesystem::path& path);

/// The same from bytes in memory; `file_bytes` is the size of the whole file that the header belongs to. Throws FormatError.
DUALDECODER_EXPORT GgufHeader parse_gguf_header(const std::byte* bytes, std::size_t count, std::uint64_t file_bytes);

}  // namespace dualdecoder
