// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>
#include <utility>

namespace dualdecoder::cuda {

/// f of the head dimension as a constant where prefill attention has kernels for it, else of 0.
template <class F>
auto for_head_dim(int head_dim, F&& f) {
  switch (head_dim) {
    case 64: return std::forward<F>(f)(std::integral_constant<int, 64>());
    case 80: return std::forward<F>(f)(std::integral_constant<int, 80>());
    case 96: return std::forward<F>(f)(std::integral_constant<int, 96>());
    case 128: return std::forward<F>(f)(std::integral_constant<int, 128>());
    case 256: return std::forward<F>(f)(std::integral_constant<int, 256>());
    default: return std::forward<F>(f)(std::integral_constant<int, 0>());
  }
}

}  // namespace dualdecoder::cuda
