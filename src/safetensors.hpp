// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace dualdecoder::detail {

/// One tensor of a safetensors file; size and place were checked.
struct SafetensorsInfo {
  std::string name;
  std::string type;                  ///< as the file names it: "F32", "BF16", ...
  std::vector<std::uint64_t> shape;  ///< outermost first
  std::uint64_t offset = 0;          ///< from the start of the file, bytes
  std::uint64_t bytes = 0;
};

/// The tensor table of a whole safetensors file. As the format demands, tensors must cover the data without holes or overlaps. Throws
/// FormatError.
std::vector<SafetensorsInfo> parse_safetensors(std::span<const std::byte> file);

/// The weight_map of a model.safetensors.index.json: tensor name -> file name, which names no other folder. Throws FormatError.
std::map<std::string, std::string> parse_safetensors_index(std::span<const std::byte> text);

}  // namespace dualdecoder::detail
