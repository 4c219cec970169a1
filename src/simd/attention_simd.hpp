// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/simd/dispatch.hpp"

namespace dualdecoder::cpu {

/// Tokens of one chunk-head in memory: keys [chunk, dim], then values [chunk, dim], of which the first `tokens` count.
struct Segment {
  const void* base = nullptr;
  int tokens = 0;
};

/// How the elements of segments are laid out.
struct SegmentLayout {
  std::size_t chunk = 0;  ///< tokens that a chunk-head has room for
  std::size_t dim = 0;    ///< head_dim, a multiple of 8
  bool bf16 = false;
};

/// Vector kernels of selection and attention. `queries` are [group, dim] f32, scaled by 1/sqrt(dim). They keep no state, and what they
/// compute for a token or chunk does not depend on its neighbours.
struct AttentionKernels {
  /// scores[g * stride + t] = queries[g] . key t, t counting over all segments.
  void (*key_scores)(const float* queries, int group, const Segment* segments, int count, SegmentLayout layout, float* scores,
                     std::size_t stride);
  /// out[g * dim + d] += sum_t weights[g * stride + t] * value t [d].
  void (*add_values)(const float* weights, std::size_t stride, int group, const Segment* segments, int count, SegmentLayout layout,
                     float* out);
  /// scores[g * stride + c] = scales[c] * (queries[g] . means[c]), means: [count, dim] int8.
  void (*summary_scores)(const float* queries, int group, const std::int8_t* means, const float* scales, std::size_t count, std::size_t dim,
                         float* scores, std::size_t stride);
  /// out[g * dim + d] += sum_c weights[g * stride + c] * scales[c] * (means[c][d] - 8) over the chunks where some weight exceeds
  /// `negligible`; means: [count, dim / 2] with d in the low nibble of byte d, d + dim / 2 in its high nibble.
  void (*add_summaries)(const float* weights, std::size_t stride, int group, const std::uint8_t* means, const float* scales,
                        std::size_t count, std::size_t dim, float negligible, float* out);
  /// rank[c] = max over g of log softmax(scores[g])[c], the order in which chunks are chosen.
  void (*rank)(const float* scores, std::size_t stride, int group, std::size_t count, float* rank);
  /// Writes the indices of the `wanted` largest ranks, ascending, of equal ones the first, and returns how many there are: `wanted`, or
  /// `count` where that is less. keys: work space for `count` rounded up to whole vectors of 16.
  std::size_t (*choose)(const float* rank, std::size_t count, std::size_t wanted, std::int32_t* keys, std::int32_t* chosen);
};

/// The kernels for an instruction set that the machine has.
const AttentionKernels& attention_kernels(Isa isa) noexcept;

}  // namespace dualdecoder::cpu
