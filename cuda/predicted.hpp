// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/store_layout.hpp"
#include "dualdecoder/step_view.hpp"

namespace dualdecoder::cuda {

/// What a store that attends to predicted chunks keeps for every list, a KV head of a layer of a storage slot. Passed to kernels by value.
struct PredictedLayout {
  enum Count : int { needed, predictable, predicted_hit, count };

  int layers;
  int kv_heads;
  int group;  ///< query heads of a KV head
  int dim;
  int max_sequences;
  int selected;  ///< chunks of a list at most
  float correct_below;

  int* predicted;           ///< [lists, selected] ascending
  int* predicted_count;     ///< [lists] -1: nothing was predicted yet
  float* queries;           ///< [lists, group, dim] of the last step, where correct_below > 0
  int* seen;                ///< [lists] 1: there are queries of a last step
  int* turned;              ///< [lists] 1: they differ from those of this step
  std::uint64_t* counters;  ///< [count]

  DUALDECODER_HOST_DEVICE std::size_t list(int slot, Layer layer, int kv_head) const {
    return (static_cast<std::size_t>(slot) * static_cast<std::size_t>(layers) + static_cast<std::size_t>(layer)) *
               static_cast<std::size_t>(kv_heads) +
           static_cast<std::size_t>(kv_head);
  }
};

// predicted.cu; each enqueues its kernels on `stream`, neither waits nor allocates, and may be captured. Rows of views are places.

/// Forgets what a storage slot was predicted and asked.
void forget_predicted(const PredictedLayout& layout, int slot, cudaStream_t stream);
/// Compares the queries [rows, heads, dim] with those of the last step, and keeps them.
void compare_queries(const PredictedLayout& layout, Layer layer, const StepView& view, RowsIn queries, cudaStream_t stream);
/// `used` becomes what row 0 attends to: what was predicted, or what it selected. Counts how far the two agree.
void use_predicted(const PredictedLayout& layout, Layer layer, const StepView& view, const Selection& selected, const Selection& used,
                   cudaStream_t stream);
/// Keeps a prediction for a layer.
void keep_predicted(const PredictedLayout& layout, Layer target, const StepView& view, const Selection& predicted, cudaStream_t stream);

}  // namespace dualdecoder::cuda
