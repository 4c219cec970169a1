// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "dualdecoder/gguf.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "dualdecoder/error.hpp"
#include "src/dequantize.hpp"
#include "src/in_quotes.hpp"
#include "src/mapped_file.hpp"

namespace dualdecoder {
namespace {

using detail::in_quotes;

// Real files stay far below these; they bound what a hostile header can make us allocate.
constexpr std::uint64_t kMostTensors = 65'536;
constexpr std::uint64_t kMostMetadata = 65'536;
constexpr std::uint64_t kMostArrayElements = std::uint64_t{1} << 24U;  // of all arrays together
constexpr std::uint64_t kLongestKey = 65'535;                          // the specification's
constexpr std::uint64_t kLongestTensorName = 255;
constexpr std::uint32_t kMostDimensions = 4;
constexpr std::uint64_t kLargestAlignment = 65'536;

enum class ValueType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

/// Fewest bytes that a value takes in the file; 0 for numbers that are no type.
std::uint64_t smallest_bytes(ValueType type) {
  switch (type) {
    case ValueType::u8:
    case ValueType::i8:
    case ValueType::boolean: return 1;
    case ValueType::u16:
    case ValueType::i16: return 2;
    case ValueType::u32:
    case ValueType::i32:
    case ValueType::f32: return 4;
    case ValueType::string:
    case ValueType::u64:
    case ValueType::i64:
    case ValueType::f64: return 8;
    case ValueType::array: return 12;
  }
  return 0;
}

[[noreturn]] void fail(const std::string& what, const std::string& value, const std::string& allowed) {
  throw FormatError("GGUF: " + what + " = " + value + ": must be " + allowed);
}

std::string up_to(std::uint64_t most) { return "at most " + std::to_string(most); }

/// Reads forward and never past the end.
class Cursor {
 public:
  Cursor(const std::byte* bytes, std::size_t count) : bytes_(bytes), count_(count) {}

  std::size_t at() const noexcept { return at_; }
  std::uint64_t left() const noexcept { return count_ - at_; }

  template <class T>
  T number(const std::string& what) {
    T value;
    std::memcpy(&value, take(sizeof value, what), sizeof value);
    return value;
  }

  std::string text(const std::string& what, std::uint64_t longest = std::numeric_limits<std::uint64_t>::max()) {
    const auto length = number<std::uint64_t>(what);
    if (length > longest) fail(what + ": length", std::to_string(length), up_to(longest));
    return {reinterpret_cast<const char*>(take(length, what)), static_cast<std::size_t>(length)};
  }

 private:
  const std::byte* take(std::uint64_t bytes, const std::string& what) {
    if (bytes > left()) {
      throw FormatError("GGUF: " + what + ": needs " + std::to_string(bytes) + " bytes at offset " + std::to_string(at_) + ", only " +
                        std::to_string(left()) + " are left (truncated file?)");
    }
    return bytes_ + std::exchange(at_, at_ + static_cast<std::size_t>(bytes));
  }

  const std::byte* bytes_;
  std::size_t count_;
  std::size_t at_ = 0;
};

class Parser {
 public:
  Parser(const std::byte* bytes, std::size_t count, std::uint64_t file_bytes) : in_(bytes, count), file_bytes_(file_bytes) {}

  GgufHeader run() {
    read_magic();
    const auto tensor_count = in_.number<std::uint64_t>("tensor count");
    const auto metadata_count = in_.number<std::uint64_t>("metadata count");
    if (tensor_count > kMostTensors) fail("tensor count", std::to_string(tensor_count), up_to(kMostTensors));
    if (metadata_count > kMostMetadata) fail("metadata count", std::to_string(metadata_count), up_to(kMostMetadata));
    for (std::uint64_t i = 0; i < metadata_count; ++i) read_metadata();
    const std::uint64_t alignment = read_alignment();
    for (std::uint64_t i = 0; i < tensor_count; ++i) read_tensor(alignment);
    place_tensors(alignment);
    return std::move(header_);
  }

 private:
  void read_magic() {
    const auto magic = in_.number<std::uint32_t>("magic");
    if (magic != 0x46554747U) throw FormatError("not a GGUF file: it does not begin with the letters GGUF");
    header_.version = in_.number<std::uint32_t>("version");
    if (header_.version == 2 || header_.version == 3) return;
    const bool swapped = (header_.version & 0xFFFFU) == 0 && header_.version != 0;
    fail("version", std::to_string(header_.version), swapped ? "2 or 3 (this looks like a big-endian file)" : "2 or 3");
  }

  void read_metadata() {
    const std::string key = in_.text("metadata key", kLongestKey);
    if (key.empty()) fail("metadata key", "''", "at least one character long");
    const std::string what = "metadata " + in_quotes(key);
    const ValueType type = read_type(what);
    GgufValue value = type == ValueType::array ? read_array(what) : read_value(type, what);
    if (!header_.metadata.emplace(key, std::move(value)).second) throw FormatError("GGUF: " + what + ": appears twice");
  }

  ValueType read_type(const std::string& what) {
    const auto number = in_.number<std::uint32_t>(what + ": type");
    const auto type = static_cast<ValueType>(number);
    if (smallest_bytes(type) == 0) fail(what + ": type", std::to_string(number), "0 .. 12");
    return type;
  }

  bool read_boolean(const std::string& what) {
    const auto number = in_.number<std::uint8_t>(what);
    if (number > 1) fail(what + ": boolean", std::to_string(number), "0 or 1");
    return number == 1;
  }

  GgufValue read_value(ValueType type, const std::string& what) {
    switch (type) {
      case ValueType::u8: return std::uint64_t{in_.number<std::uint8_t>(what)};
      case ValueType::u16: return std::uint64_t{in_.number<std::uint16_t>(what)};
      case ValueType::u32: return std::uint64_t{in_.number<std::uint32_t>(what)};
      case ValueType::u64: return in_.number<std::uint64_t>(what);
      case ValueType::i8: return std::int64_t{in_.number<std::int8_t>(what)};
      case ValueType::i16: return std::int64_t{in_.number<std::int16_t>(what)};
      case ValueType::i32: return std::int64_t{in_.number<std::int32_t>(what)};
      case ValueType::i64: return in_.number<std::int64_t>(what);
      case ValueType::f32: return double{in_.number<float>(what)};
      case ValueType::f64: return in_.number<double>(what);
      case ValueType::boolean: return read_boolean(what);
      case ValueType::string: return in_.text(what);
      case ValueType::array: break;
    }
    fail(what + ": array element type", "9", "a scalar or a string: nested arrays are not supported");
  }

  GgufValue read_array(const std::string& what) {
    const ValueType type = read_type(what + ": array element");
    const auto count = in_.number<std::uint64_t>(what + ": array length");
    const std::uint64_t most = std::min(in_.left() / smallest_bytes(type), kMostArrayElements - array_elements_);
    if (count > most) fail(what + ": array length", std::to_string(count), up_to(most) + " (what is left of the file and of the limit)");
    array_elements_ += count;
    switch (type) {
      case ValueType::u8:
      case ValueType::u16:
      case ValueType::u32:
      case ValueType::u64: return read_elements<std::uint64_t>(type, count, what);
      case ValueType::i8:
      case ValueType::i16:
      case ValueType::i32:
      case ValueType::i64: return read_elements<std::int64_t>(type, count, what);
      case ValueType::f32:
      case ValueType::f64: return read_elements<double>(type, count, what);
      case ValueType::boolean: return read_elements<bool>(type, count, what);
      case ValueType::string: return read_elements<std::string>(type, count, what);
      case ValueType::array: break;
    }
    return read_value(type, what);
  }

  template <class T>
  GgufValue read_elements(ValueType type, std::uint64_t count, const std::string& what) {
    std::vector<T> elements;
    elements.reserve(static_cast<std::size_t>(count));
    for (std::uint64_t i = 0; i < count; ++i) elements.push_back(std::get<T>(read_value(type, what)));
    return elements;
  }

  std::uint64_t read_alignment() const {
    if (!header_.metadata.contains("general.alignment")) return 32;
    const auto* alignment = header_.find<std::uint64_t>("general.alignment");
    if (alignment == nullptr) throw FormatError("GGUF: general.alignment: must be an unsigned integer");
    if (!std::has_single_bit(*alignment) || *alignment < 8 || *alignment > kLargestAlignment) {
      fail("general.alignment", std::to_string(*alignment), "a power of two, 8 .. " + std::to_string(kLargestAlignment));
    }
    return *alignment;
  }

  void read_tensor(std::uint64_t alignment) {
    GgufTensorInfo tensor;
    tensor.name = in_.text("tensor name", kLongestTensorName);
    const std::string what = "tensor " + in_quotes(tensor.name);
    if (!names_.insert(tensor.name).second) throw FormatError("GGUF: " + what + ": appears twice");
    const auto dimensions = in_.number<std::uint32_t>(what + ": dimensions");
    if (dimensions == 0 || dimensions > kMostDimensions) fail(what + ": dimensions", std::to_string(dimensions), "1 .. 4");
    for (std::uint32_t i = 0; i < dimensions; ++i) tensor.shape.push_back(in_.number<std::uint64_t>(what + ": shape"));
    tensor.type = in_.number<std::uint32_t>(what + ": type");
    tensor.bytes = tensor_bytes(tensor, what);
    std::reverse(tensor.shape.begin(), tensor.shape.end());
    tensor.offset = in_.number<std::uint64_t>(what + ": offset");
    if (tensor.offset % alignment != 0) {
      fail(what + ": offset", std::to_string(tensor.offset), "a multiple of the alignment " + std::to_string(alignment));
    }
    header_.tensors.push_back(std::move(tensor));
  }

  /// Of a tensor with its shape still innermost first, as the file has it.
  std::uint64_t tensor_bytes(const GgufTensorInfo& tensor, const std::string& what) const {
    const detail::BlockFormat block = detail::block_format(tensor.type);
    if (block.elements == 0) {
      fail(what + ": type", std::to_string(tensor.type) + " (" + detail::file_type_name(tensor.type) + ")",
           std::string(detail::kSupportedFileTypes) + "; other quantisations are not supported");
    }
    const std::uint64_t row = tensor.shape.front();
    if (row == 0 || row % block.elements != 0) {
      fail(what + ": innermost extent", std::to_string(row),
           std::string("a positive multiple of the ") + detail::file_type_name(tensor.type) + " block, " + std::to_string(block.elements));
    }
    std::uint64_t bytes = block.bytes;
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      const std::uint64_t blocks = i == 0 ? row / block.elements : tensor.shape[i];
      if (blocks == 0) fail(what + ": extent", "0", "positive");
      if (blocks > file_bytes_ / bytes) {
        fail(what + ": extent", std::to_string(tensor.shape[i]),
             "such that the tensor fits the file of " + std::to_string(file_bytes_) + " bytes");
      }
      bytes *= blocks;
    }
    return bytes;
  }

  /// Makes offsets absolute and checks that tensors lie inside the file and apart from each other.
  void place_tensors(std::uint64_t alignment) {
    const std::uint64_t begin = (in_.at() + alignment - 1) / alignment * alignment;
    const std::uint64_t room = file_bytes_ > begin ? file_bytes_ - begin : 0;
    std::vector<const GgufTensorInfo*> order;
    for (GgufTensorInfo& tensor : header_.tensors) {
      if (tensor.bytes > room || tensor.offset > room - tensor.bytes) {
        throw FormatError("GGUF: tensor " + in_quotes(tensor.name) + ": offset " + std::to_string(tensor.offset) + " + " +
                          std::to_string(tensor.bytes) + " bytes ends past the " + std::to_string(room) +
                          " bytes of the file's data section (truncated file?)");
      }
      tensor.offset += begin;
      order.push_back(&tensor);
    }
    std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->offset < b->offset; });
    for (std::size_t i = 1; i < order.size(); ++i) {
      if (order[i - 1]->offset + order[i - 1]->bytes > order[i]->offset) {
        throw FormatError("GGUF: tensors " + in_quotes(order[i - 1]->name) + " and " + in_quotes(order[i]->name) + " overlap at offset " +
                          std::to_string(order[i]->offset));
      }
    }
  }

  Cursor in_;
  std::uint64_t file_bytes_;
  std::uint64_t array_elements_ = 0;
  std::set<std::string> names_;
  GgufHeader header_;
};

}  // namespace

GgufHeader parse_gguf_header(const std::byte* bytes, std::size_t count, std::uint64_t file_bytes) {
  return Parser(bytes, count, file_bytes).run();
}

GgufHeader read_gguf_header(const std::filesystem::path& path) {
  const detail::MappedFile file(path);
  try {
    return parse_gguf_header(file.bytes().data(), file.bytes().size(), file.bytes().size());
  } catch (const FormatError& error) {
    throw FormatError(path.string() + ": " + error.what());
  }
}

}  // namespace dualdecoder
