// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/simd/low_bit_simd.hpp"

namespace dualdecoder::cpu {

DUALDECODER_SIMD_CHOICE(LowBitKernels, low_bit_kernels)

}  // namespace dualdecoder::cpu
