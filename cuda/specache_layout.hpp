// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/low_bit.hpp"
#include "cuda/store_layout.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder::cuda {

inline constexpr int kHistogram = 2048;        ///< counts that a row list keeps
inline constexpr int kMostSplitTokens = 1024;  ///< tokens of the copy that a block works on at most

/// Shapes and device arrays of a SpeCacheStore, passed to kernels by value. "list" is a KV head of a layer of a storage slot, "row list" a
/// KV head of a row of a pass. A token is its key [dim], then its value [dim], bf16, wherever it lies in full. What a pass attends to is
/// cut into parts: splits of the copy, then of kPartTokens tokens each the fetched ones and the window.
struct SpeCacheLayout {
  int layers;
  int heads;
  int kv_heads;
  int group;  ///< query heads of a KV head
  int dim;
  int max_sequences;
  int rows_per_sequence;
  LowBitGroup copy;
  int exact;         ///< last tokens that stay out of the copy
  int ring;          ///< tokens of a list's window, whole groups: position p at p % ring
  int selected;      ///< tokens that a list fetches at most
  int stride;        ///< scores of a query head: tokens of the copy of the longest sequence
  int split_tokens;  ///< whole groups, at most kMostSplitTokens
  int splits;
  std::uint32_t token_bytes;
  bool one_layer;                 ///< the scores are those of one layer, see StoreOptions::selects_ahead; else of two, by parity
  bool wait_policy;               ///< MissPolicy::wait
  int prefetch_tokens_per_layer;  ///< bound on one layer's loads of a step; -1: none

  // of sequences
  std::byte** host;      ///< [max_sequences] host tier [layers, kv_heads, host_tokens] tokens, readable by the device
  int* host_tokens;      ///< [max_sequences] whole groups
  std::byte** copies;    ///< [max_sequences] [layers, kv_heads, copy_groups] groups
  int* copy_groups;      ///< [max_sequences]
  std::byte* window;     ///< [lists, ring] tokens
  std::byte* fetched;    ///< [lists, selected] tokens
  int* fetched_token;    ///< [lists, selected] the first fetched_count ascending
  int* fetched_slot;     ///< [lists, selected] where in `fetched` the token lies
  int* fetched_count;    ///< [lists]
  int* predicted;        ///< [lists, selected] ascending, for the statistics
  int* predicted_count;  ///< [lists] -1: none
  int* predicted_limit;  ///< [lists] end of the copy when predicted

  // of one pass
  float* scores;            ///< [1 or 2, row lists, group, stride] in units of log 2
  float* score_max;         ///< [1 or 2, row lists, parts(), group]
  float* score_sum;         ///< [1 or 2, row lists, parts(), group] of 2^(score - score_max)
  float* ranks;             ///< [row lists, stride] mean over the group of shares
  int* histogram;           ///< [row lists, kHistogram] of ranks; zeros between passes
  float* partials;          ///< [row lists, parts(), group, dim + 2] values, then largest score and sum
  std::uint64_t* counters;  ///< [Counter::count]

  /// Tokens of the copy when a sequence has `length`.
  DUALDECODER_HOST_DEVICE int copied(int length) const { return length < exact ? 0 : (length - exact) / copy.tokens * copy.tokens; }
  DUALDECODER_HOST_DEVICE int fetched_parts() const { return (selected + kPartTokens - 1) / kPartTokens; }
  DUALDECODER_HOST_DEVICE int window_parts() const { return (ring + kPartTokens - 1) / kPartTokens; }
  DUALDECODER_HOST_DEVICE int parts() const { return splits + fetched_parts() + window_parts(); }
  DUALDECODER_HOST_DEVICE std::size_t list(int slot, Layer layer, int kv_head) const {
    return (static_cast<std::size_t>(slot) * static_cast<std::size_t>(layers) + static_cast<std::size_t>(layer)) *
               static_cast<std::size_t>(kv_heads) +
           static_cast<std::size_t>(kv_head);
  }
  DUALDECODER_HOST_DEVICE std::size_t row_list(int row, int kv_head) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(kv_head);
  }
  DUALDECODER_HOST_DEVICE std::size_t row_lists() const { return row_list(max_sequences * rows_per_sequence, 0); }
  DUALDECODER_HOST_DEVICE std::size_t score_lists() const { return (one_layer ? 1 : 2) * row_lists(); }
  DUALDECODER_HOST_DEVICE std::size_t score_list(Layer layer, int row, int kv_head) const {
    return (one_layer ? 0 : static_cast<std::size_t>(layer & 1) * row_lists()) + row_list(row, kv_head);
  }
  DUALDECODER_HOST_DEVICE float* scores_of(std::size_t score_list, int head) const {
    return scores + (score_list * static_cast<std::size_t>(group) + static_cast<std::size_t>(head)) * static_cast<std::size_t>(stride);
  }
  /// Index of a part's largest score and sum for query head 0.
  DUALDECODER_HOST_DEVICE std::size_t part_sums(std::size_t score_list, int part) const {
    return (score_list * static_cast<std::size_t>(parts()) + static_cast<std::size_t>(part)) * static_cast<std::size_t>(group);
  }
  DUALDECODER_HOST_DEVICE std::byte* window_token(std::size_t list, int position) const {
    return window + (list * static_cast<std::size_t>(ring) + static_cast<std::size_t>(position % ring)) * token_bytes;
  }
  DUALDECODER_HOST_DEVICE std::byte* fetched_data(std::size_t list, int number) const {
    return fetched + (list * static_cast<std::size_t>(selected) + static_cast<std::size_t>(number)) * token_bytes;
  }
#if defined(__CUDACC__)
  // only the device reads the tables
  __device__ std::size_t list_in_sequence(Layer layer, int kv_head) const {
    return static_cast<std::size_t>(layer) * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(kv_head);
  }
  __device__ std::byte* host_token(int slot, Layer layer, int kv_head, int position) const {
    const std::size_t tokens = static_cast<std::size_t>(host_tokens[slot]);
    return host[slot] + (list_in_sequence(layer, kv_head) * tokens + static_cast<std::size_t>(position)) * token_bytes;
  }
  __device__ std::byte* copied_group(int slot, Layer layer, int kv_head, int position) const {
    const std::size_t groups = static_cast<std::size_t>(copy_groups[slot]);
    return copies[slot] + (list_in_sequence(layer, kv_head) * groups + static_cast<std::size_t>(position / copy.tokens)) *
                              static_cast<std::size_t>(copy.bytes);
  }
#endif
};

// One function per step of a SpeCacheStore; each enqueues its kernels on `stream`, neither waits nor allocates, and may be captured. The
// twins are those of the CPU backend's store of the same name.

// specache_upkeep.cu
/// Adds tokens first .. first+count-1: host tier, copy of the groups that have left the window, window. keys, values: [count, kv_heads,
/// dim].
void append_to_copy(const SpeCacheLayout& layout, Layer layer, int slot, int first, int count, RowsIn keys, RowsIn values,
                    cudaStream_t stream);
/// Row 0 of single and dual places becomes part of the context: quantises the group that leaves the window, lists groups that are complete
/// for the host.
void commit_to_copy(const SpeCacheLayout& layout, const StepView& view, const TransferList& write_back, cudaStream_t stream);
/// Cuts a sequence of `before` tokens to `tokens`: brings back what the window had lost of them, forgets fetched tokens that are no longer
/// in the copy, and every prediction.
void cut_copy(const SpeCacheLayout& layout, int slot, int tokens, int before, cudaStream_t stream);
/// Forgets fetched tokens and predictions of a storage slot.
void forget_fetched(const SpeCacheLayout& layout, int slot, cudaStream_t stream);

// specache_scores.cu
/// Scores every token of the context for every live row. `laid`: fetched tokens by their full precision, but for places that wait.
void score_copy(const SpeCacheLayout& layout, Layer layer, const StepView& view, RowsIn queries, bool laid, cudaStream_t stream);
// specache_choose.cu
/// The `by_row.capacity` tokens of the copy with the largest mean share over the query group, ties to the lower token; ascending, with
/// shares. Dead rows get none.
void choose_tokens(const SpeCacheLayout& layout, Layer layer, const StepView& view, const Selection& by_row, bool laid,
                   cudaStream_t stream);
// specache_resolve.cu
/// Counts what row 0 needs and, where its sequence waits, makes it the fetched set, with an urgent load for what is not there.
void fetch_needed(const SpeCacheLayout& layout, Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent,
                  cudaStream_t stream);
/// Makes the predicted tokens the fetched set, as far as the bound on loads lets the best in. `work` is scratch of fetch_work_bytes().
void fetch_predicted(const SpeCacheLayout& layout, Layer target, const StepView& view, const Selection& predicted,
                     const TransferList& prefetch, void* work, cudaStream_t stream);
std::size_t fetch_work_bytes(const SpeCacheLayout& layout);
// specache_attend.cu
/// Writes the rows' keys and values into the window, then attends: the copy by the scores of select, fetched tokens in its place, window.
void attend_copy(const SpeCacheLayout& layout, Layer layer, const StepView& view, RowsIn queries, RowsIn keys, RowsIn values, RowsOut out,
                 cudaStream_t stream);

}  // namespace dualdecoder::cuda
