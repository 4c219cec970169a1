// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "dualdecoder/types.hpp"

namespace dualdecoder {

/// A view of dense row-major memory of the backend. Owns nothing; the last index is contiguous.
template <class Pointer>
struct BasicTensor {
  Pointer data = nullptr;
  DataType type = DataType::f32;
  int rank = 0;
  std::array<std::int64_t, 4> shape{};  // unused trailing extents are 0

  BasicTensor() = default;
  BasicTensor(Pointer memory, DataType element, std::initializer_list<std::int64_t> extents) : data(memory), type(element) {
    for (std::int64_t extent : extents) {
      if (rank < 4) shape[static_cast<std::size_t>(rank++)] = extent;
    }
  }
  /// A mutable view converts to a read-only one.
  template <class Other>
  requires(!std::is_same_v<Other, Pointer> && std::is_convertible_v<Other, Pointer>) BasicTensor(const BasicTensor<Other>& other)
      : data(other.data), type(other.type), rank(other.rank), shape(other.shape) {}

  std::int64_t dim(int axis) const noexcept { return axis < rank ? shape[static_cast<std::size_t>(axis)] : 1; }
  std::int64_t count() const noexcept {
    if (rank == 0) return 0;
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[static_cast<std::size_t>(i)];
    return n;
  }
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count()) * size_of(type); }
  explicit operator bool() const noexcept { return data != nullptr; }

  /// The memory as `T*`; the caller vouches that `T` matches `type`.
  template <class T>
  auto as() const noexcept {
    if constexpr (std::is_const_v<std::remove_pointer_t<Pointer>>) {
      return static_cast<const T*>(data);
    } else {
      return static_cast<T*>(data);
    }
  }
};

using Tensor = BasicTensor<void*>;
using ConstTensor = BasicTensor<const void*>;

}  // namespace dualdecoder
