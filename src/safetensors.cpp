// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/safetensors.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "dualdecoder/error.hpp"
#include "src/bounded_json.hpp"
#include "src/in_quotes.hpp"

namespace dualdecoder::detail {
namespace {

using nlohmann::json;

constexpr std::size_t kMostTensors = 65'536;
constexpr std::size_t kMostDimensions = 8;

struct ElementType {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr std::array kElementTypes = {
    ElementType{"F64", 8}, ElementType{"F32", 4}, ElementType{"F16", 2}, ElementType{"BF16", 2}, ElementType{"F8_E4M3", 1},
    ElementType{"I64", 8}, ElementType{"I32", 4}, ElementType{"I16", 2}, ElementType{"I8", 1},   ElementType{"F8_E5M2", 1},
    ElementType{"U64", 8}, ElementType{"U32", 4}, ElementType{"U16", 2}, ElementType{"U8", 1},   ElementType{"BOOL", 1},
};

const json& member(const json& object, const char* key, const std::string& what) {
  const auto at = object.find(key);
  if (at == object.end()) throw FormatError(what + ": " + key + " is missing");
  return *at;
}

std::vector<std::uint64_t> whole_numbers(const json& value, const std::string& what, std::size_t most) {
  if (!value.is_array() || value.size() > most)
    throw FormatError(what + ": must be a list of at most " + std::to_string(most) + " numbers");
  std::vector<std::uint64_t> numbers;
  for (const json& number : value) {
    if (!number.is_number_unsigned()) throw FormatError(what + ": entries must be whole numbers, 0 .. 2^64 - 1");
    numbers.push_back(number.get<std::uint64_t>());
  }
  return numbers;
}

std::uint64_t element_bytes(const std::string& type, const std::string& what) {
  for (const ElementType& known : kElementTypes) {
    if (known.name == type) return known.bytes;
  }
  throw FormatError(what + ": dtype = " + in_quotes(type) + ": must be a type of the format (weights: F32, F16 or BF16)");
}

SafetensorsInfo parse_tensor(const std::string& name, const json& entry, std::uint64_t data_begin, std::uint64_t data_bytes) {
  const std::string what = "safetensors: tensor " + in_quotes(name);
  if (!entry.is_object()) throw FormatError(what + ": must be a JSON object");
  SafetensorsInfo tensor;
  tensor.name = name;
  const json& type = member(entry, "dtype", what);
  if (!type.is_string()) throw FormatError(what + ": dtype must be a string");
  tensor.type = type.get<std::string>();
  tensor.shape = whole_numbers(member(entry, "shape", what), what + ": shape", kMostDimensions);

  const auto offsets = whole_numbers(member(entry, "data_offsets", what), what + ": data_offsets", 2);
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes) {
    throw FormatError(what + ": data_offsets = " + entry["data_offsets"].dump() +
                      ": must be [begin, end] with begin <= end <= " + std::to_string(data_bytes) + ", the bytes of data in the file");
  }
  tensor.offset = data_begin + offsets[0];
  tensor.bytes = offsets[1] - offsets[0];

  std::uint64_t bytes = element_bytes(tensor.type, what);
  const bool empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0U) != tensor.shape.end();
  if (empty) bytes = 0;
  for (const std::uint64_t extent : tensor.shape) {
    if (bytes != 0 && extent > data_bytes / bytes)
      bytes = data_bytes + 1;  // more than any tensor here can have
    else
      bytes *= extent;
    if (bytes > data_bytes) break;
  }
  if (bytes != tensor.bytes) {
    throw FormatError(what + ": " + std::to_string(tensor.bytes) + " bytes of data do not fit dtype " + tensor.type + " and shape " +
                      entry["shape"].dump());
  }
  return tensor;
}

/// Names of at most 255 characters that stay in the model's folder.
bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == name.npos;
}

}  // namespace

std::vector<SafetensorsInfo> parse_safetensors(std::span<const std::byte> file) {
  std::uint64_t header_bytes = 0;
  if (file.size() < sizeof header_bytes) {
    throw FormatError("safetensors: file of " + std::to_string(file.size()) + " bytes: must be at least 8 (truncated file?)");
  }
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
  const std::uint64_t most = std::min<std::uint64_t>(kLongestJson, file.size() - sizeof header_bytes);
  if (header_bytes > most) {
    throw FormatError("safetensors: header length = " + std::to_string(header_bytes) + ": must be at most " + std::to_string(most) +
                      " (truncated file?)");
  }
  const std::uint64_t data_begin = sizeof header_bytes + header_bytes;
  const json header =
      parse_bounded_json(file.subspan(sizeof header_bytes, static_cast<std::size_t>(header_bytes)), "safetensors header", 3);
  if (header.size() > kMostTensors) {
    throw FormatError("safetensors: tensor count = " + std::to_string(header.size()) + ": must be at most " + std::to_string(kMostTensors));
  }

  std::vector<SafetensorsInfo> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") tensors.push_back(parse_tensor(name, entry, data_begin, file.size() - data_begin));
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes); });
  std::uint64_t end = data_begin;
  for (const SafetensorsInfo& tensor : tensors) {
    if (tensor.offset != end) {
      throw FormatError("safetensors: tensor " + in_quotes(tensor.name) + " begins at offset " + std::to_string(tensor.offset) +
                        (tensor.offset < end ? ", inside the tensor that ends at " : ", after a hole from ") + std::to_string(end));
    }
    end += tensor.bytes;
  }
  if (end != file.size()) {
    throw FormatError("safetensors: tensors end at offset " + std::to_string(end) + ", the file at " + std::to_string(file.size()) +
                      ": must be equal");
  }
  return tensors;
}

std::map<std::string, std::string> parse_safetensors_index(std::span<const std::byte> text) {
  const std::string what = "model.safetensors.index.json";
  const json index = parse_bounded_json(text, what, 4);
  const json& weight_map = member(index, "weight_map", what);
  if (!weight_map.is_object() || weight_map.empty() || weight_map.size() > kMostTensors) {
    throw FormatError(what + ": weight_map must be an object with 1 .. " + std::to_string(kMostTensors) + " tensors");
  }
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : weight_map.items()) {
    if (!file.is_string() || !is_plain_file_name(file.get<std::string>())) {
      throw FormatError(what + ": file of tensor " + in_quotes(name) + " must be a file name without a folder");
    }
    files.emplace(name, file.get<std::string>());
  }
  return files;
}

}  // namespace dualdecoder::detail
