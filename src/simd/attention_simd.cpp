// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/simd/attention_simd.hpp"

namespace dualdecoder::cpu {

DUALDECODER_SIMD_CHOICE(AttentionKernels, attention_kernels)

}  // namespace dualdecoder::cpu
