// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/simd/dense_simd.hpp"

namespace dualdecoder::cpu {

DUALDECODER_SIMD_CHOICE(DenseKernels, dense_kernels)

}  // namespace dualdecoder::cpu
