// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/store_layout.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder::cuda {

// What stores do between passes. Each function enqueues its kernels on `stream` and neither waits nor allocates.

/// A table's entry for one storage slot, passed by value so that no host memory has to outlive the call.
void set_entry(int* table, int slot, int value, cudaStream_t stream);
void set_entry(std::byte** table, int slot, std::byte* value, cudaStream_t stream);

/// Empties every slot and prediction, and begins to count passes.
void clear_store(const StoreLayout& layout, cudaStream_t stream);
/// Forgets a sequence's predictions, and what its slots hold of chunks from `first_chunk` on.
void forget_chunks(const StoreLayout& layout, int slot, int first_chunk, cudaStream_t stream);
/// Brings back from the host tier what the window of `tokens` tokens needs of whole chunks that lay before the window of `before` tokens.
void restore_window(const StoreLayout& layout, int slot, int tokens, int before, cudaStream_t stream);

/// Where `tokens` tokens end within a value group, its mean becomes that of the whole chunks which it is left with, from the host tier.
void restore_value_group(const StoreLayout& layout, int slot, int tokens, cudaStream_t stream);

/// Sets counts to zero in a kernel that overlaps with its neighbours, which a memset in a recorded step does not.
void clear_counts(int* counts, std::size_t size, cudaStream_t stream);

/// lengths[slot] = committed tokens after the pass, for every place whose row 0 is live.
void count_committed(int* lengths, const StepView& view, cudaStream_t stream);

/// Copies `rows` rows of `width` elements into a ring of `ring_rows` rows of f32, from row `at` on.
void keep_rows(RowsIn source, int rows, std::size_t width, float* ring, int ring_rows, int at, cudaStream_t stream);

}  // namespace dualdecoder::cuda
