// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/prefill_attention.hpp"

namespace dualdecoder::cuda {

/// Whether the current device is a Hopper and this build has its kernel (architecture 90a) for head_dim: 64, 80, 96, 128 and 256.
bool has_warpgroup_attention(int head_dim) noexcept;

/// Lets the kernel of the current device use its shared memory; once, outside of a recording.
cudaError_t prepare_warpgroup_attention(int head_dim);

/// What launch_prefill_attention computes, for queries, keys and values of bf16, on Hopper's warpgroup products. The same promises; bits
/// differ between the two.
cudaError_t launch_warpgroup_attention(const PrefillAttention& job, cudaStream_t stream);

}  // namespace dualdecoder::cuda
