// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "dualdecoder/sampling.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder::cuda {

/// Largest vocabulary that launch_sample takes.
inline constexpr int kMostSampledVocabulary = 1 << 22;

/// Chooses the token after each row of logits [rows of the step, vocabulary] as cpu::sample_row does: same filters, same order, same random
/// number, ties to the lowest token, dead rows get -1. Probabilities are held to a part in 2^62 / vocabulary of the likeliest one's and
/// summed as integers, so a row's token depends on nothing but the row. Overwrites logits. All arrays are device memory.
cudaError_t launch_sample(float* logits, int vocabulary, const SamplingView& sampling, Token* sampled, cudaStream_t stream);

}  // namespace dualdecoder::cuda
