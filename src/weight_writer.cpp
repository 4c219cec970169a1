// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/weight_writer.hpp"

#include <algorithm>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace dualdecoder::detail {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{8} << 20U;
constexpr std::size_t kBytesPerThread = std::size_t{64} << 10U;  // less is not worth a thread

/// A piece, or the longest row when that is longer.
std::size_t staging_bytes(const ModelConfig& config, DataType matrix_type) {
  std::size_t bytes = 0;
  for (const WeightEntry& entry : weight_entries(config)) {
    const std::size_t row_bytes = static_cast<std::size_t>(entry.columns) * (entry.matrix ? size_of(matrix_type) : sizeof(float));
    bytes = std::max({bytes, row_bytes, std::min(static_cast<std::size_t>(entry.rows) * row_bytes, kPieceBytes)});
  }
  return bytes;
}

std::int64_t thread_count(int asked) { return asked > 0 ? asked : std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

}  // namespace

WeightWriter::WeightWriter(Backend& backend, const ModelConfig& config, DataType matrix_type, int threads)
    : backend_(backend),
      threads_(thread_count(threads)),
      staging_(backend.memory(MemoryKind::pinned), staging_bytes(config, matrix_type), backend.stream()) {}

void WeightWriter::write(const Tensor& target, const Produce& produce, const Done& done) {
  const std::int64_t rows = target.rank == 2 ? target.dim(0) : 1;
  const std::size_t row_bytes = target.bytes() / static_cast<std::size_t>(rows);
  const auto piece_rows = static_cast<std::int64_t>(std::max<std::size_t>(1, kPieceBytes / std::max<std::size_t>(1, row_bytes)));
  for (std::int64_t begin = 0; begin < rows; begin += piece_rows) {
    const std::int64_t end = std::min(rows, begin + piece_rows);
    fill(begin, end, row_bytes, produce);
    backend_.copy(target.as<std::byte>() + static_cast<std::size_t>(begin) * row_bytes, staging_.data(),
                  static_cast<std::size_t>(end - begin) * row_bytes, backend_.stream());
    done(end);
  }
}

void WeightWriter::fill(std::int64_t begin, std::int64_t end, std::size_t row_bytes, const Produce& produce) {
  const std::int64_t rows = end - begin;
  const auto useful = static_cast<std::int64_t>(static_cast<std::size_t>(rows) * row_bytes / kBytesPerThread);
  const std::int64_t parts = std::clamp<std::int64_t>(useful, 1, std::min(threads_, rows));
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(parts));
  const auto part = [&](std::int64_t index) {
    try {
      const std::int64_t first = rows * index / parts;
      produce(begin + first, begin + rows * (index + 1) / parts, staging_.data() + static_cast<std::size_t>(first) * row_bytes);
    } catch (...) {
      errors[static_cast<std::size_t>(index)] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> helpers;
    helpers.reserve(static_cast<std::size_t>(parts));
    std::int64_t index = 1;
    try {
      for (; index < parts; ++index) helpers.emplace_back(part, index);
    } catch (const std::system_error&) {  // no more threads to be had: this one does the rest
      for (; index < parts; ++index) part(index);
    }
    part(0);
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace dualdecoder::detail
