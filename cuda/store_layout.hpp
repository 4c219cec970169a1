// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstddef>
#include <cstdint>

#include "dualdecoder/step_view.hpp"
#include "dualdecoder/tensor.hpp"
#include "dualdecoder/types.hpp"

#if defined(__CUDACC__)
#define DUALDECODER_HOST_DEVICE __host__ __device__
#else
#define DUALDECODER_HOST_DEVICE
#endif

namespace dualdecoder::cuda {

inline constexpr int kTileChunks = 16;     ///< chunks that one matrix instruction scores, value groups that one sums up
inline constexpr int kSplitChunks = 1024;  ///< chunks that one block sums up; a multiple of kTileChunks
inline constexpr int kSplitTiles = kSplitChunks / kTileChunks;
inline constexpr int kLeastPieceTiles = 8;  ///< of those that one block scores; see ScoreCut
inline constexpr int kPartTokens = 256;     ///< exact tokens that one block attends to
inline constexpr int kOwnTokens = 512;      ///< of those that the second row may attend to alone, as a few of them are to be expected
inline constexpr int kPartChunks = 128;     ///< chosen chunks that one block attends to at most

/// What a store counted; the order is that of StoreStatistics.
enum class Counter : int {
  needed,
  predicted_hit,
  predictable,
  resident_hit,
  estimated,
  urgent_bytes,
  prefetch_bytes,
  write_back_bytes,
  prefetch_dropped,
  count
};

/// Shapes and device arrays of a store, passed to kernels by value. "list" is a KV head of a layer of a storage slot, "row list" a KV head
/// of a row of a pass. A chunk-head is keys [chunk, dim], then values [chunk, dim], bf16, wherever it lies.
struct StoreLayout {
  int layers;
  int heads;
  int kv_heads;
  int group;  ///< query heads of a KV head
  int dim;    ///< of a head, a multiple of 16
  int max_sequences;
  int rows_per_sequence;
  int chunk;  ///< tokens
  int sink_chunks;
  int window_chunks;  ///< ring: chunk j at j % window_chunks
  int local_tokens;
  int value_group;  ///< chunks whose values have one mean, a value group: 1, 2 or 4
  int max_chunks;   ///< choosable or not, a multiple of kTileChunks
  int splits;       ///< of kSplitChunks that max_chunks takes
  int selected;     ///< chunks of one row list at most
  int parts;        ///< of kPartTokens that the selected chunks take
  int slots;        ///< of one slot list
  int slot_layers;  ///< layers that have slots of their own: all (resident), or 2 buffers that swap (ping-pong)
  bool swaps;       ///< the slots are buffers that swap: nothing survives a pass, and nothing is kept for later ones
  std::uint32_t chunk_bytes;
  std::uint32_t load_offset;  ///< into a chunk-head, of what the host tier holds of it: 0, or its second half where that holds values alone
  bool one_layer;             ///< the work arrays of a pass hold one layer, see StoreOptions::selects_ahead; else two, by parity
  bool tail;                  ///< unselected chunks are estimated
  bool row1_as_row0;          ///< row 1 attends to row 0's chunks
  bool wait_policy;           ///< MissPolicy::wait
  float bias_scale;
  int prefetch_chunks_per_layer;  ///< bound on one layer's loads of a step; 0: none

  // per list
  std::byte* sinks;            ///< [lists, sink_chunks] chunk-heads
  std::byte* window;           ///< [lists, window_chunks] chunk-heads
  std::int8_t* key_means;      ///< [lists, max_chunks, dim]
  float* key_scales;           ///< [lists, max_chunks]
  std::uint32_t* value_tiles;  ///< [lists, value_tile_count(), 2 * dim] see value_place()
  float* value_scales;         ///< [lists, value_tile_count(), 16] see value_k()
  float* bias;                 ///< [max_sequences, layers, heads]
  std::byte** host;      ///< [max_sequences] host tier [layers, kv_heads, host_chunks] chunk-heads or their values, readable by the device
  int* host_chunks;      ///< [max_sequences]
  int* predicted;        ///< [lists, selected] ascending, for the statistics
  int* predicted_count;  ///< [lists] -1: none
  int* predicted_limit;  ///< [lists] end of the choosable chunks when predicted
  // slots; a slot list is a KV head of one of slot_layers of a storage slot
  int* slot_of;         ///< [slot lists, max_chunks] -1: in none
  int* chunk_of;        ///< [slot lists, slots] -1: empty
  std::uint32_t* used;  ///< [slot lists, slots] time of last use: 2 * pass + 1 when needed, 2 * pass + 2 when predicted
  std::byte* data;      ///< [slot lists, slots] chunk-heads
  std::uint32_t* pass;  ///< [1] passes committed so far, from 1

  // of one pass; the first index is the parity of the layer, or there is one_layer
  float* tile_max;              ///< [1 or 2, sequences, kv_heads, splits * kSplitTiles, columns()] largest score of a tile
  std::uint16_t* score_levels;  ///< [1 or 2, sequences, kv_heads, max_chunks / 16, columns(), 16] how far scores lie below it
  float* score_max;             ///< [1 or 2, row lists, score_pieces(), group]
  float* score_sum;             ///< [1 or 2, row lists, score_pieces(), group] of exp(score - score_max)
  float* partials;              ///< [row lists, partial_count(), group, dim + 2] values, then largest score and sum of exp
  std::uint64_t* counters;      ///< [Counter::count]

  DUALDECODER_HOST_DEVICE std::size_t list(int slot, Layer layer, int kv_head) const {
    return (static_cast<std::size_t>(slot) * static_cast<std::size_t>(layers) + static_cast<std::size_t>(layer)) *
               static_cast<std::size_t>(kv_heads) +
           static_cast<std::size_t>(kv_head);
  }
  DUALDECODER_HOST_DEVICE std::size_t row_list(int row, int kv_head) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(kv_head);
  }
  /// Tiles of kTileChunks value groups that the chunks of a list take.
  DUALDECODER_HOST_DEVICE int value_tile_count() const {
    return (max_chunks / kTileChunks + value_group - 1) >> (value_group >> 1);  // kernels that live a few microseconds do not divide
  }
  /// Parts of kPartTokens that sinks and window take.
  DUALDECODER_HOST_DEVICE int near_parts() const { return ((sink_chunks + window_chunks) * chunk + kPartTokens - 1) / kPartTokens; }
  /// Rows of a sequence that one block serves.
  DUALDECODER_HOST_DEVICE int rows_together() const { return rows_per_sequence * group <= 16 ? rows_per_sequence : 1; }
  DUALDECODER_HOST_DEVICE int own_part_tokens() const { return kPartChunks * chunk < kOwnTokens ? kPartChunks * chunk : kOwnTokens; }
  /// Parts of own_part_tokens() that the chunks of a second row take.
  DUALDECODER_HOST_DEVICE int own_parts() const {
    return rows_together() == 2 ? (selected * chunk + own_part_tokens() - 1) / own_part_tokens() : 0;
  }
  /// Parts of what a row list attends to exactly: the chunks of the first row, those that the second row has for itself, sinks and window.
  DUALDECODER_HOST_DEVICE int exact_parts() const { return parts + own_parts() + near_parts(); }
  /// Partial results of a row list: of these parts, then of the tail.
  DUALDECODER_HOST_DEVICE int partial_count() const { return exact_parts() + splits; }
  DUALDECODER_HOST_DEVICE int rows() const { return max_sequences * rows_per_sequence; }
  DUALDECODER_HOST_DEVICE std::size_t row_lists() const { return row_list(rows(), 0); }
  DUALDECODER_HOST_DEVICE std::size_t work_lists() const { return (one_layer ? 1 : 2) * row_lists(); }
  /// Row list of the work arrays that hold a layer or two.
  DUALDECODER_HOST_DEVICE std::size_t work_list(Layer layer, int row, int kv_head) const {
    return (one_layer ? 0 : static_cast<std::size_t>(layer & 1) * row_lists()) + row_list(row, kv_head);
  }
  /// Query heads of a KV head in all rows of a sequence, row by row: they are scored together.
  DUALDECODER_HOST_DEVICE int columns() const { return rows_per_sequence * group; }
  DUALDECODER_HOST_DEVICE int score_pieces() const { return splits * (kSplitTiles / kLeastPieceTiles); }
  DUALDECODER_HOST_DEVICE std::size_t score_lists() const {
    return (one_layer ? 1 : 2) * static_cast<std::size_t>(max_sequences) * static_cast<std::size_t>(kv_heads);
  }
  /// Index of what the rows of the sequence at `place` of the pass have of a KV head in tile_max and score_levels.
  DUALDECODER_HOST_DEVICE std::size_t score_list(Layer layer, int place, int kv_head) const {
    const std::size_t half = one_layer ? 0 : static_cast<std::size_t>(layer & 1) * static_cast<std::size_t>(max_sequences);
    return (half + static_cast<std::size_t>(place)) * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(kv_head);
  }
  DUALDECODER_HOST_DEVICE float* tile_max_of(std::size_t score_list) const {
    return tile_max + score_list * static_cast<std::size_t>(splits * kSplitTiles) * static_cast<std::size_t>(columns());
  }
  DUALDECODER_HOST_DEVICE std::uint16_t* score_levels_of(std::size_t score_list) const {
    return score_levels + score_list * static_cast<std::size_t>(max_chunks) * static_cast<std::size_t>(columns());
  }
  /// Of a chunk-head on the host tier, which is what a load brings.
  DUALDECODER_HOST_DEVICE std::uint32_t loaded_bytes() const { return chunk_bytes - load_offset; }
  /// First chunk that can be chosen, and one behind the last: the window of `length` committed tokens begins there.
  DUALDECODER_HOST_DEVICE int range_begin() const { return sink_chunks; }
  DUALDECODER_HOST_DEVICE int range_end(int length) const {
    const int end = (length - local_tokens) >> chunk_shift();
    return end > sink_chunks ? end : sink_chunks;
  }
  /// Log2 of the chunk's tokens: kernels that live a few microseconds do not divide.
  DUALDECODER_HOST_DEVICE int chunk_shift() const {
#if defined(__CUDA_ARCH__)
    return __ffs(chunk) - 1;
#else
    return std::countr_zero(static_cast<unsigned>(chunk));
#endif
  }
  /// Tokens of sinks and window that precede `end`; the window of `length` committed tokens begins behind the choosable chunks.
  DUALDECODER_HOST_DEVICE int near_tokens(int end, int length) const {
    const int sink_tokens = sink_chunks * chunk < end ? sink_chunks * chunk : end;
    const int window_first = range_end(length) * chunk;
    return sink_tokens + (end > window_first ? end - window_first : 0);
  }
  /// Where a chunk that is a sink or in the window lies on the device.
  DUALDECODER_HOST_DEVICE std::byte* near_chunk(std::size_t list, int j) const {
    return j < sink_chunks
               ? sinks + (list * static_cast<std::size_t>(sink_chunks) + static_cast<std::size_t>(j)) * chunk_bytes
               : window + (list * static_cast<std::size_t>(window_chunks) + static_cast<std::size_t>(j % window_chunks)) * chunk_bytes;
  }
  DUALDECODER_HOST_DEVICE std::byte* slot_data(std::size_t slot_list, int slot) const {
    return data + (slot_list * static_cast<std::size_t>(slots) + static_cast<std::size_t>(slot)) * chunk_bytes;
  }
#if defined(__CUDACC__)
  /// The slot list of a layer in the pass `pass`; buffers that swap go on swapping from pass to pass where the layers are odd.
  __device__ std::size_t slot_list(int slot, Layer layer, int kv_head, std::uint32_t in_pass) const {
    int buffer = layer;
    if (swaps) buffer = static_cast<int>((in_pass * static_cast<std::uint32_t>(layers) + static_cast<std::uint32_t>(layer)) & 1U);
    return (static_cast<std::size_t>(slot) * static_cast<std::size_t>(slot_layers) + static_cast<std::size_t>(buffer)) *
               static_cast<std::size_t>(kv_heads) +
           static_cast<std::size_t>(kv_head);
  }
  /// A chunk on the host tier; only the device reads the table of bases.
  __device__ std::byte* host_chunk(int slot, Layer layer, int kv_head, int j) const {
    const std::size_t at = static_cast<std::size_t>(layer) * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(kv_head);
    return host[slot] + (at * static_cast<std::size_t>(host_chunks[slot]) + static_cast<std::size_t>(j)) * loaded_bytes();
  }
#endif
};

/// The score of a chunk, as the choice compares it and the tail weighs it, is the largest of its tile minus score_levels / kScoreLevels:
/// steps of 1 / 4,096 nat, which change a weight by 1.3e-4 of itself at most. What lies 16 nats and more below its neighbour, a ten
/// millionth of its weight, counts as 16 nats below it.
inline constexpr float kScoreLevels = 4096.0F;
inline constexpr float kLowestLevel = 65535.0F;
/// Place of a chunk's level among the 16 of its tile: the four chunks 2t, 2t + 1, 2t + 8 and 2t + 9, which one lane scores and weighs, lie
/// together.
DUALDECODER_HOST_DEVICE inline int score_place(int chunk_in_tile) {
  return chunk_in_tile % 8 / 2 * 4 + chunk_in_tile / 8 * 2 + chunk_in_tile % 2;
}

/// Place of a value group among the 16 of its tile, the k of mma.m16n8k16. A lane t weighs the chunks 2t, 2t + 1, 2t + 8 and 2t + 9 of a
/// tile of scores, and its part of the instruction are the same k: so these k are of groups whose chunks it weighs itself, in one tile of
/// scores, or in two; or, of four chunks in four tiles, together with the lane t ^ 1, even lanes those that begin in the first half of a
/// tile, odd lanes the others.
DUALDECODER_HOST_DEVICE inline int value_k(int value_group, int group_in_tile) {
  if (value_group == 1) return group_in_tile;
  const bool two = value_group == 2;
  const int t = two ? group_in_tile % 4 : group_in_tile % 2 * 2 + group_in_tile / 2 % 2;
  const int i = group_in_tile / 4;  // of the lane's four
  return 2 * t + i % 2 + i / 2 * 8;
}
/// The group that has place k: the inverse of value_k().
DUALDECODER_HOST_DEVICE inline int value_group_at(int value_group, int k) {
  if (value_group == 1) return k;
  const int t = k % 8 / 2;
  const int i = k % 2 + k / 8 * 2;
  return value_group == 2 ? 4 * i + t : 4 * i + t % 2 * 2 + t / 2;
}

/// Where the element of the value group at place k lies in its tile: in the order in which mma.m16n8k16 takes it. Each of 32 lanes has
/// dim / 16 words; where these are whole vectors of four, the first vectors of all lanes lie together, then the second ones. A word holds,
/// for an even and an odd group j of 8 dims, the places 2t, 2t + 1, 2t + 8 and 2t + 9 of lane t: pair p = (j % 2) * 2 + h at bits 4 p
/// (place 2t + 8h) and 16 + 4 p (place 2t + 8h + 1). Nibbles are the level plus 8, -7 .. 7.
struct ValuePlace {
  int word;  ///< in the tile
  int shift;
};
DUALDECODER_HOST_DEVICE inline ValuePlace value_place(int dim, int k, int d) {
  const int j = d / 8;
  const int lane = (d % 8) * 4 + (k % 8) / 2;
  const int pair = (j % 2) * 2 + k / 8;
  const int own = j / 2;
  const int word = dim % 64 == 0 ? own / 4 * 128 + lane * 4 + own % 4 : lane * (dim / 16) + own;
  return {word, (k % 2) * 16 + pair * 4};
}

/// Rows that kernels read or write: f32 or bf16, told apart at run time, since they are few next to what a kernel reads.
struct RowsIn {
  const void* data;
  bool bf16;
};
struct RowsOut {
  void* data;
  bool bf16;
};
inline RowsIn rows_in(const ConstTensor& tensor) { return {tensor.data, tensor.type == DataType::bf16}; }
inline RowsOut rows_out(const Tensor& tensor) { return {tensor.data, tensor.type == DataType::bf16}; }

}  // namespace dualdecoder::cuda
