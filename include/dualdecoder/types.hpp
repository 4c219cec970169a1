// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>

namespace dualdecoder {

using Token = std::int32_t;  ///< index into the vocabulary
using Layer = int;           ///< transformer layer, 0 .. layers-1

/// Names one sequence for its whole life; never reused within a session.
struct SequenceId {
  std::uint64_t value = 0;
  friend auto operator<=>(const SequenceId&, const SequenceId&) = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14 misreads it
  friend bool operator==(const SequenceId&, const SequenceId&) = default;   // spelt out for nvcc
};

/// Element types of tensors in memory (files may hold more, see ModelWeights loaders).
enum class DataType : std::uint8_t { f32, f16, bf16, i8, i32, u8 };

constexpr std::size_t size_of(DataType type) noexcept {
  switch (type) {
    case DataType::f32:
    case DataType::i32: return 4;
    case DataType::f16:
    case DataType::bf16: return 2;
    case DataType::i8:
    case DataType::u8: return 1;
  }
  return 0;
}

constexpr const char* name_of(DataType type) noexcept {
  switch (type) {
    case DataType::f32: return "f32";
    case DataType::f16: return "f16";
    case DataType::bf16: return "bf16";
    case DataType::i8: return "i8";
    case DataType::i32: return "i32";
    case DataType::u8: return "u8";
  }
  return "unknown";
}

/// What the rows of one sequence do in a pass.
enum class RowMode : std::uint8_t {
  idle,    ///< no live row; a padded place in the batch
  single,  ///< row 0 is the true token and is committed; no guess
  dual,    ///< row 0 is the true token and is committed, row 1 is the guess one position later and never committed
  resync,  ///< row 1 is the true token at row 0's position, run without waiting and without commit; row 0 is dead
};

/// What happens to a chunk that row 0 needs and that is in no slot when its layer runs (docs/concepts.md, "Miss policy").
enum class MissPolicy : std::uint8_t {
  wait,      ///< fetched on the urgent lane; row 0 attends to exactly its selected set
  estimate,  ///< estimated from its summary like the rest of the tail; nothing is waited for
};

}  // namespace dualdecoder
