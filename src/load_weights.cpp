// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "dualdecoder/load_weights.hpp"

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "dualdecoder/error.hpp"
#include "src/dequantize.hpp"
#include "src/in_quotes.hpp"
#include "src/load_options.hpp"
#include "src/load_source_model.hpp"
#include "src/model_config.hpp"
#include "src/model_files.hpp"
#include "src/weight_layout.hpp"
#include "src/weight_writer.hpp"

namespace dualdecoder {
namespace {

using detail::SourceModel;
using detail::SourceTensor;
using detail::WeightEntry;

/// Where row `row` of a projection whose heads have RoPE pairs (i, i + dim/2) lies in a file whose heads have pairs (2i, 2i + 1).
std::int64_t interleaved_row(std::int64_t row, std::int64_t head_dim) {
  const std::int64_t half = head_dim / 2;
  const std::int64_t within = row % head_dim;
  return row - within + 2 * (within % half) + within / half;
}

/// Dequantises one tensor of a file into memory of the target's type.
class TensorReader {
 public:
  TensorReader(const SourceModel& model, const WeightEntry& entry, DataType type)
      : source_(model.tensor(entry)),
        block_(detail::block_format(source_.type)),
        name_(model.name_of(entry.role, entry.layer)),
        columns_(static_cast<std::size_t>(entry.columns)),
        head_dim_(model.rows_interleaved(entry.role) ? model.config().head_dim : 0),
        type_(type) {}

  void rows(std::int64_t begin, std::int64_t end, std::byte* out) const {
    const bool moved = head_dim_ > 0;
    for (std::int64_t row = begin; row < end; ++row, out += columns_ * size_of(type_)) {
      read_row(moved ? interleaved_row(row, head_dim_) : row, out);
    }
  }

  /// A vector, whose elements are what the rows of a matrix are.
  void vector(std::byte* out) const {
    if (head_dim_ == 0) return read_row(0, out);
    std::vector<float> values(columns_);
    read_row(0, reinterpret_cast<std::byte*>(values.data()));
    auto* moved = reinterpret_cast<float*>(out);
    for (std::size_t i = 0; i < columns_; ++i) {
      moved[i] = values[static_cast<std::size_t>(interleaved_row(static_cast<std::int64_t>(i), head_dim_))];
    }
  }

  std::uint64_t bytes() const noexcept { return source_.bytes.size(); }
  /// The part of the file that holds these rows, or as many others when rows move: all of them once every row has been asked for.
  std::span<const std::byte> bytes_of(std::int64_t begin, std::int64_t end) const noexcept {
    const std::size_t row_bytes = columns_ / block_.elements * block_.bytes;
    return source_.bytes.subspan(static_cast<std::size_t>(begin) * row_bytes, static_cast<std::size_t>(end - begin) * row_bytes);
  }

 private:
  static constexpr std::size_t kPiece = 2048;  // values; a multiple of every block, small enough for the first-level cache

  void read_row(std::int64_t row, std::byte* out) const {
    const std::byte* in = source_.bytes.data() + static_cast<std::size_t>(row) * (columns_ / block_.elements * block_.bytes);
    std::array<float, kPiece> piece;
    for (std::size_t at = 0; at < columns_; at += kPiece, in += kPiece / block_.elements * block_.bytes) {
      const std::size_t count = std::min(kPiece, columns_ - at);
      detail::dequantize(source_.type, in, count, piece.data());
      check_finite(piece.data(), count, row, at);
      if (type_ == DataType::bf16) {
        detail::round_to_bf16(piece.data(), count, reinterpret_cast<std::uint16_t*>(out) + at);
      } else {
        std::copy_n(piece.data(), count, reinterpret_cast<float*>(out) + at);
      }
    }
  }

  void check_finite(const float* values, std::size_t count, std::int64_t row, std::size_t column) const {
    const bool bf16 = type_ == DataType::bf16;
    const std::size_t bad = detail::find_at_least(values, count, bf16 ? detail::kBf16Overflow : detail::kInfinity);
    if (bad == count) return;
    throw FormatError("tensor " + detail::in_quotes(name_) + ": row " + std::to_string(row) + ", column " + std::to_string(column + bad) +
                      " = " + std::to_string(values[bad]) + ": must be finite" + (bf16 ? " as bf16" : ""));
  }

  const SourceTensor& source_;
  detail::BlockFormat block_;
  std::string name_;
  std::size_t columns_;
  std::int64_t head_dim_;  // 0: rows stand in order
  DataType type_;
};

/// Every tensor is checked before anything is allocated: memory is then bounded by what the files really hold.
std::uint64_t check_tensors(const SourceModel& model) {
  std::uint64_t bytes = 0;
  for (const WeightEntry& entry : detail::weight_entries(model.config())) bytes += model.tensor(entry).bytes.size();
  model.refuse_unknown_tensors();
  return bytes;
}

}  // namespace

std::shared_ptr<const ModelWeights> detail::load_source_model(const SourceModel& model, Backend& backend, const LoadOptions& options,
                                                              void (*release)(std::span<const std::byte>) noexcept) {
  LoadProgress progress{0, check_tensors(model)};
  const auto report = [&](std::uint64_t done_bytes) {
    progress.done_bytes = done_bytes;
    if (options.on_progress) options.on_progress(progress);
  };
  report(0);
  auto weights =
      std::make_shared<detail::PackedWeights>(detail::stretched(model.config(), options.yarn_factor), options.matrix_type, backend);
  detail::WeightWriter writer(backend, model.config(), options.matrix_type, options.threads);
  std::uint64_t before = 0;  // bytes of the tensors that are done
  for (const WeightEntry& entry : detail::weight_entries(model.config())) {
    const Tensor target = weights->writable(entry);
    const TensorReader reader(model, entry, target.type);
    std::int64_t released = 0;
    writer.write(
        target,
        [&](std::int64_t begin, std::int64_t end, std::byte* out) { entry.matrix ? reader.rows(begin, end, out) : reader.vector(out); },
        [&](std::int64_t rows) {
          const std::int64_t first = std::exchange(released, rows);
          if (release != nullptr) release(reader.bytes_of(first, rows));
          report(before + reader.bytes() / static_cast<std::uint64_t>(entry.rows) * static_cast<std::uint64_t>(rows));
        });
    before += reader.bytes();
  }
  return weights;
}

std::shared_ptr<const ModelWeights> load_weights(const std::filesystem::path& path, Backend& backend, const LoadOptions& options) {
  detail::check_load_options(options);
  const detail::ModelFiles files(path);
  try {
    return detail::load_source_model(files.model, backend, options, detail::release_pages);
  } catch (const FormatError& error) {
    throw FormatError(path.string() + ": " + error.what());
  }
}

ModelConfig read_model_config(const std::filesystem::path& path, float yarn_factor) {
  std::error_code ignored;
  const bool folder = std::filesystem::is_directory(path, ignored);
  const std::filesystem::path file_path = folder ? path / "config.json" : path;
  const detail::MappedFile file(file_path);
  try {
    return detail::stretched(folder ? detail::config_from_json(file.bytes()) : SourceModel::from_gguf(file.bytes()).config(), yarn_factor);
  } catch (const FormatError& error) {
    throw FormatError(file_path.string() + ": " + error.what());
  }
}

}  // namespace dualdecoder
