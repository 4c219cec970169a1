// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>

#include "src/simd/attention_simd.hpp"

namespace dualdecoder::cpu::DUALDECODER_SIMD_NAMESPACE {
namespace {

#include "src/simd/vector.inl"

typedef std::int8_t ByteVector __attribute__((vector_size(kLanes)));
typedef std::uint8_t UnsignedByteVector __attribute__((vector_size(kLanes)));
typedef std::int8_t LooseByteVector __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef std::uint8_t LooseUnsignedByteVector __attribute__((vector_size(kLanes), aligned(1), may_alias));

constexpr int kTogether = 4;  // tokens or chunks whose lanes are summed at once

inline __attribute__((always_inline)) Vector load(const std::int8_t* p) {
  const ByteVector bytes = *reinterpret_cast<const LooseByteVector*>(p);
  return __builtin_convertvector(bytes, Vector);
}
inline __attribute__((always_inline)) float widened(std::int8_t x) { return static_cast<float>(x); }

/// Products of one query with `Rows` <= kTogether rows of `dim` elements.
template <int Rows, class Element>
inline __attribute__((always_inline)) Four dots(const float* query, const Element* rows, std::size_t dim) {
  Vector sums[kTogether] = {};
  const std::size_t whole = dim / kStep * kStep;
  for (std::size_t d = 0; d < whole; d += kStep) {
    const Vector q = load(query + d);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sums[r] += q * load(rows + static_cast<std::size_t>(r) * dim + d);
  }
  Four four = totals(sums[0], sums[1], sums[2], sums[3]);
  for (std::size_t d = whole; d < dim; ++d) {
    for (int r = 0; r < Rows; ++r) four[r] += query[d] * widened(rows[static_cast<std::size_t>(r) * dim + d]);
  }
  return four;
}

template <class Element>
void scores_of(const float* queries, int group, const Element* rows, std::size_t count, std::size_t dim, float* scores,
               std::size_t stride) {
  std::size_t row = 0;
  for (; row + kTogether <= count; row += kTogether) {
    for (int g = 0; g < group; ++g) {
      const Four four = dots<kTogether>(queries + static_cast<std::size_t>(g) * dim, rows + row * dim, dim);
      *reinterpret_cast<LooseFour*>(scores + static_cast<std::size_t>(g) * stride + row) = four;
    }
  }
  for (; row < count; ++row) {
    for (int g = 0; g < group; ++g) {
      const Four four = dots<1>(queries + static_cast<std::size_t>(g) * dim, rows + row * dim, dim);
      scores[static_cast<std::size_t>(g) * stride + row] = four[0];
    }
  }
}

template <class Element>
void key_scores_of(const float* queries, int group, const Segment* segments, int count, SegmentLayout layout, float* scores,
                   std::size_t stride) {
  for (int s = 0; s < count; ++s) {
    const auto tokens = static_cast<std::size_t>(segments[s].tokens);
    scores_of(queries, group, static_cast<const Element*>(segments[s].base), tokens, layout.dim, scores, stride);
    scores += tokens;
  }
}

void key_scores(const float* queries, int group, const Segment* segments, int count, SegmentLayout layout, float* scores,
                std::size_t stride) {
  if (layout.bf16) {
    key_scores_of<std::uint16_t>(queries, group, segments, count, layout, scores, stride);
  } else {
    key_scores_of<float>(queries, group, segments, count, layout, scores, stride);
  }
}

/// Adds to `Heads` outputs the `Vectors` vectors that begin at column `first`.
template <int Heads, int Vectors, class Element>
void add_values_tile(const float* weights, std::size_t stride, const Segment* segments, int count, SegmentLayout layout, std::size_t first,
                     float* out) {
  Vector sums[Heads][Vectors];
  for (int g = 0; g < Heads; ++g) {
    for (int v = 0; v < Vectors; ++v)
      sums[g][v] = load(out + static_cast<std::size_t>(g) * layout.dim + first + static_cast<std::size_t>(v) * kStep);
  }
  for (int s = 0; s < count; ++s) {
    const auto tokens = static_cast<std::size_t>(segments[s].tokens);
    const Element* values = static_cast<const Element*>(segments[s].base) + layout.chunk * layout.dim + first;
    for (std::size_t t = 0; t < tokens; ++t, values += layout.dim) {
      Vector value[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) value[v] = load(values + static_cast<std::size_t>(v) * kStep);
#pragma GCC unroll 4
      for (int g = 0; g < Heads; ++g) {
        const Vector weight = splat(weights[static_cast<std::size_t>(g) * stride + t]);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sums[g][v] += weight * value[v];
      }
    }
    weights += tokens;
  }
  for (int g = 0; g < Heads; ++g) {
    for (int v = 0; v < Vectors; ++v)
      store(out + static_cast<std::size_t>(g) * layout.dim + first + static_cast<std::size_t>(v) * kStep, sums[g][v]);
  }
}

template <int Heads, class Element>
void add_values_heads(const float* weights, std::size_t stride, const Segment* segments, int count, SegmentLayout layout, float* out) {
  constexpr int kWide = kLanes >= 16 ? 4 : 2;
  std::size_t first = 0;
  for (; first + kWide * kStep <= layout.dim; first += kWide * kStep) {
    add_values_tile<Heads, kWide, Element>(weights, stride, segments, count, layout, first, out);
  }
  for (; first + kStep <= layout.dim; first += kStep) {
    add_values_tile<Heads, 1, Element>(weights, stride, segments, count, layout, first, out);
  }
  for (; first < layout.dim; ++first) {
    for (int g = 0; g < Heads; ++g) {
      float sum = out[static_cast<std::size_t>(g) * layout.dim + first];
      const float* weight = weights + static_cast<std::size_t>(g) * stride;
      for (int s = 0; s < count; ++s) {
        const Element* values = static_cast<const Element*>(segments[s].base) + layout.chunk * layout.dim + first;
        for (int t = 0; t < segments[s].tokens; ++t) sum += *weight++ * widened(values[static_cast<std::size_t>(t) * layout.dim]);
      }
      out[static_cast<std::size_t>(g) * layout.dim + first] = sum;
    }
  }
}

template <class Element>
void add_values_of(const float* weights, std::size_t stride, int group, const Segment* segments, int count, SegmentLayout layout,
                   float* out) {
  for (; group >= 4; group -= 4) {
    add_values_heads<4, Element>(weights, stride, segments, count, layout, out);
    weights += 4 * stride;
    out += 4 * layout.dim;
  }
  if (group == 3) add_values_heads<3, Element>(weights, stride, segments, count, layout, out);
  if (group == 2) add_values_heads<2, Element>(weights, stride, segments, count, layout, out);
  if (group == 1) add_values_heads<1, Element>(weights, stride, segments, count, layout, out);
}

void add_values(const float* weights, std::size_t stride, int group, const Segment* segments, int count, SegmentLayout layout, float* out) {
  if (layout.bf16) {
    add_values_of<std::uint16_t>(weights, stride, group, segments, count, layout, out);
  } else {
    add_values_of<float>(weights, stride, group, segments, count, layout, out);
  }
}

void summary_scores(const float* queries, int group, const std::int8_t* means, const float* scales, std::size_t count, std::size_t dim,
                    float* scores, std::size_t stride) {
  scores_of(queries, group, means, count, dim, scores, stride);
  for (int g = 0; g < group; ++g) {
    float* row = scores + static_cast<std::size_t>(g) * stride;
    for (std::size_t c = 0; c < count; ++c) row[c] *= scales[c];
  }
}

void add_summary(const float* weights, std::size_t stride, int group, const std::uint8_t* mean, float scale, std::size_t dim, float* out) {
  const std::size_t half = dim / 2;
  const std::size_t whole = half / kStep * kStep;
  for (std::size_t d = 0; d < whole; d += kStep) {
    const UnsignedByteVector bytes = *reinterpret_cast<const LooseUnsignedByteVector*>(mean + d);
    const IntVector both = __builtin_convertvector(bytes, IntVector);
    const Vector low = __builtin_convertvector((both & 15) - 8, Vector);
    const Vector high = __builtin_convertvector((both >> 4) - 8, Vector);
    for (int g = 0; g < group; ++g) {
      const Vector weight = splat(weights[static_cast<std::size_t>(g) * stride] * scale);
      float* to = out + static_cast<std::size_t>(g) * dim + d;
      store(to, load(to) + weight * low);
      store(to + half, load(to + half) + weight * high);
    }
  }
  for (std::size_t d = whole; d < half; ++d) {
    for (int g = 0; g < group; ++g) {
      const float weight = weights[static_cast<std::size_t>(g) * stride] * scale;
      float* to = out + static_cast<std::size_t>(g) * dim + d;
      to[0] += weight * static_cast<float>((mean[d] & 15) - 8);
      to[half] += weight * static_cast<float>((mean[d] >> 4) - 8);
    }
  }
}

void add_summaries(const float* weights, std::size_t stride, int group, const std::uint8_t* means, const float* scales, std::size_t count,
                   std::size_t dim, float negligible, float* out) {
  for (std::size_t c = 0; c < count; ++c) {
    float largest = 0.0F;
    for (int g = 0; g < group; ++g) {
      const float weight = weights[static_cast<std::size_t>(g) * stride + c];
      largest = weight > largest ? weight : largest;
    }
    if (largest > negligible) add_summary(weights + c, stride, group, means + c * (dim / 2), scales[c], dim, out);
  }
}

/// log of the sum of exp over a row.
float log_sum(const float* scores, std::size_t count) {
  float largest = scores[0];
  for (std::size_t c = 1; c < count; ++c) largest = scores[c] > largest ? scores[c] : largest;
  const std::size_t whole = count / kStep * kStep;
  Vector sums = {};
  for (std::size_t c = 0; c < whole; c += kStep) sums += exponential(load(scores + c) - largest);
  float sum = total(sums);
  for (std::size_t c = whole; c < count; ++c) sum += exponential(splat(scores[c] - largest))[0];
  return largest + __builtin_logf(sum);
}

void rank(const float* scores, std::size_t stride, int group, std::size_t count, float* rank) {
  if (count == 0) return;
  for (int g = 0; g < group; ++g) {
    const float* row = scores + static_cast<std::size_t>(g) * stride;
    const float shift = log_sum(row, count);
    for (std::size_t c = 0; c < count; ++c) {
      const float share = row[c] - shift;
      rank[c] = g == 0 || share > rank[c] ? share : rank[c];
    }
  }
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels{key_scores, add_values, summary_scores, add_summaries, rank};

}  // namespace dualdecoder::cpu::DUALDECODER_SIMD_NAMESPACE
