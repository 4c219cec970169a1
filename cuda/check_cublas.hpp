// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cublas_v2.h>

#include <source_location>

#include "cuda/check.hpp"

namespace dualdecoder::cuda {

/// check() for cuBLAS: CudaError with `what`, the place and the library's own words.
void check(cublasStatus_t status, const char* what, std::source_location place = std::source_location::current());

}  // namespace dualdecoder::cuda
