// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "cuda/store_layout.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder::cuda {

// One function per step of a store; each enqueues its kernels on `stream`, neither waits nor allocates, and may be captured. The CPU twin
// of each is named. Grids follow from the view's row counts and the layout's capacities alone, since lengths live in device memory.

// select.cu: ChunkStore::select
/// Scores of every choosable chunk for every live row, queries [rows, heads, dim], scaled by 1 / sqrt(dim); with split maxima and sums.
void score_summaries(const StoreLayout& layout, Layer layer, const StepView& view, RowsIn queries, cudaStream_t stream);
// choose.cu: ChunkStore::select
/// Chooses the `by_row.capacity` chunks with the largest share of the softmax over chunks, the largest over the group, ties to the lower
/// chunk; ascending, with shares. Dead rows get none.
void choose_chunks(const StoreLayout& layout, Layer layer, const StepView& view, const Selection& by_row, cudaStream_t stream);

// resolve.cu: ResidentStore::resolve_needed, resolve_predicted; ChunkStore::commit
/// Marks row 0's chunks as used and, where its sequence waits, gives every missing one a slot and an urgent load.
void resolve_needed(const StoreLayout& layout, Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent,
                    cudaStream_t stream);
/// Marks predicted chunks and gives missing ones slots and loads, best scores first within the bound, then what row 0 of the same layer had
/// to estimate where `missed` is given. `work` is scratch of resolve_work_bytes().
void resolve_predicted(const StoreLayout& layout, Layer target, const StepView& view, const Selection& predicted, const Selection* missed,
                       const TransferList& prefetch, void* work, cudaStream_t stream);
std::size_t resolve_work_bytes(const StoreLayout& layout);
// load_buffer.cu: PingPongStore::resolve_predicted
/// Remembers the prediction for layer `of` (it may be empty), and loads what was predicted for layer `ahead` into the buffer that it will
/// use, which is emptied first. `ahead` counts on into the next pass: layer + 2, or the prediction's own layer where that is of this step.
/// `work` keeps the predictions from pass to pass.
void load_buffer(const StoreLayout& layout, Layer of, Layer ahead, const StepView& view, const Selection& predicted,
                 const TransferList& prefetch, void* work, cudaStream_t stream);
/// Row 0 of single and dual places becomes part of the context: summarises chunks that are complete, lists them for the host, moves chunks
/// that leave the window into slots (resident store), counts the pass.
void commit_rows(const StoreLayout& layout, const StepView& view, const TransferList& write_back, cudaStream_t stream);

// attend.cu: ChunkStore::attend, AttentionRunner
/// Writes the rows' keys and values into the window, then attends: exact tokens of sinks, chosen and resident chunks and window, and the
/// tail.
void attend_chunks(const StoreLayout& layout, Layer layer, const StepView& view, RowsIn queries, RowsIn keys, RowsIn values,
                   const Selection& by_row, RowsOut out, cudaStream_t stream);

// prefill.cu: ChunkStore::append
/// Adds tokens first .. first+count-1 to a list group: host tier, sinks, window, and summaries of the chunks that become whole.
/// keys, values: [count, kv_heads, dim].
void append_tokens(const StoreLayout& layout, Layer layer, int slot, int first, int count, RowsIn keys, RowsIn values, cudaStream_t stream);
// calibrate.cu: ChunkStore::seal
/// Calibrates one layer of a sequence of `length` tokens and warms its slots; queries: [kept, heads, dim] f32, oldest first, the newest at
/// position length - 1. Without `layout.tail` it only warms. Uses the scores of a pass; `work` is scratch of calibration_work_bytes().
void calibrate_layer(const StoreLayout& layout, Layer layer, int slot, int length, const float* queries, int kept, void* work,
                     cudaStream_t stream);
std::size_t calibration_work_bytes(const StoreLayout& layout);

/// What a store that keeps everything on the device attends with; pages of kPageTokens tokens: keys [64, dim], then values [64, dim].
inline constexpr int kPageTokens = 64;
struct FullLayout {
  int layers;
  int heads;
  int kv_heads;
  int group;
  int dim;
  int max_sequences;
  int rows_per_sequence;
  int splits;        ///< parts of a sequence that blocks work on
  int split_tokens;  ///< a multiple of kPageTokens
  std::byte** base;  ///< [max_sequences] [layers, kv_heads, pages]
  int* pages;        ///< [max_sequences] of one list
  float* partials;   ///< [row lists, splits, group, dim + 2]
};

// full_attend.cu: FullStore
void append_full(const FullLayout& layout, Layer layer, int slot, int first, int count, RowsIn keys, RowsIn values, cudaStream_t stream);
/// Writes the rows' keys and values behind the context and attends to everything before and including each row.
void attend_full(const FullLayout& layout, Layer layer, const StepView& view, RowsIn queries, RowsIn keys, RowsIn values, RowsOut out,
                 cudaStream_t stream);

}  // namespace dualdecoder::cuda
