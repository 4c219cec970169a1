// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dualdecoder/error.hpp"
#include "dualdecoder/load_weights.hpp"

namespace dualdecoder::detail {

inline constexpr int kMostThreads = 1'024;

/// Throws InvalidArgument.
inline void check_load_options(const LoadOptions& options) {
  require(options.matrix_type == DataType::f32 || options.matrix_type == DataType::bf16, "LoadOptions.matrix_type",
          name_of(options.matrix_type), "f32 or bf16");
  require(options.threads >= 0 && options.threads <= kMostThreads, "LoadOptions.threads", options.threads, "0 .. 1024");
}

}  // namespace dualdecoder::detail
