// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>

#include "src/simd/attention_simd.hpp"

namespace dualdecoder::cpu::DUALDECODER_SIMD_NAMESPACE {
namespace {

#include "src/simd/vector.inl"

constexpr int kTogether = 4;  // tokens or chunks whose lanes are summed at once
// Registers decide how many heads share the widened rows: 32 vectors with AVX-512, 16 otherwise.
constexpr int kHeadsTogether = kLanes >= 16 ? 4 : 2;

inline __attribute__((always_inline)) float widened(std::int8_t x) { return static_cast<float>(x); }

/// Products of `Heads` queries with `Rows` <= kTogether rows of `dim` elements, times the rows' scales where there are any:
/// scores[g * stride + r] for r < Rows.
template <int Heads, int Rows, class Element>
inline __attribute__((always_inline)) void dots(const float* queries, const Element* rows, const float* scales, std::size_t dim,
                                                float* scores, std::size_t stride) {
  Vector sums[Heads][kTogether] = {};
  const std::size_t whole = dim / kStep * kStep;
  for (std::size_t d = 0; d < whole; d += kStep) {
    Vector row[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) row[r] = load(rows + static_cast<std::size_t>(r) * dim + d);
#pragma GCC unroll 4
    for (int g = 0; g < Heads; ++g) {
      const Vector q = load(queries + static_cast<std::size_t>(g) * dim + d);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sums[g][r] += q * row[r];
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < Heads; ++g) {
    const float* query = queries + static_cast<std::size_t>(g) * dim;
    Four four = totals(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
    for (std::size_t d = whole; d < dim; ++d) {
      for (int r = 0; r < Rows; ++r) four[r] += query[d] * widened(rows[static_cast<std::size_t>(r) * dim + d]);
    }
    float* to = scores + static_cast<std::size_t>(g) * stride;
    if constexpr (Rows == kTogether) {
      if (scales != nullptr) four *= *reinterpret_cast<const LooseFour*>(scales);
      *reinterpret_cast<LooseFour*>(to) = four;
    } else {
      for (int r = 0; r < Rows; ++r) to[r] = scales != nullptr ? four[r] * scales[r] : four[r];
    }
  }
}

template <int Heads, class Element>
void scores_of_heads(const float* queries, const Element* rows, const float* scales, std::size_t count, std::size_t dim, float* scores,
                     std::size_t stride) {
  std::size_t row = 0;
  for (; row + kTogether <= count; row += kTogether) {
    dots<Heads, kTogether>(queries, rows + row * dim, scales == nullptr ? nullptr : scales + row, dim, scores + row, stride);
  }
  for (; row < count; ++row) {
    dots<Heads, 1>(queries, rows + row * dim, scales == nullptr ? nullptr : scales + row, dim, scores + row, stride);
  }
}

template <class Element>
void scores_of(const float* queries, int group, const Element* rows, const float* scales, std::size_t count, std::size_t dim, float* scores,
               std::size_t stride) {
  for (; group >= kHeadsTogether; group -= kHeadsTogether) {
    scores_of_heads<kHeadsTogether>(queries, rows, scales, count, dim, scores, stride);
    queries += kHeadsTogether * dim;
    scores += kHeadsTogether * stride;
  }
  if constexpr (kHeadsTogether > 2) {
    if (group == 3) scores_of_heads<3>(queries, rows, scales, count, dim, scores, stride);
    if (group == 2) scores_of_heads<2>(queries, rows, scales, count, dim, scores, stride);
  }
  if (group == 1) scores_of_heads<1>(queries, rows, scales, count, dim, scores, stride);
}

/// Asks for memory that is read soon. Segments lie anywhere and are too short for the machine to find their streams by itself.
inline __attribute__((always_inline)) void fetch(const void* memory, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(memory) + at);
}

template <class Element>
void key_scores_of(const float* queries, int group, const Segment* segments, int count, SegmentLayout layout, float* scores,
                   std::size_t stride) {
  constexpr std::size_t kShort = 32;  // tokens of a segment that is asked for ahead
  for (int s = 0; s < count; ++s) {
    const auto tokens = static_cast<std::size_t>(segments[s].tokens);
    const auto* keys = static_cast<const Element*>(segments[s].base);
    if (layout.chunk <= kShort) {
      if (s + 1 < count) fetch(segments[s + 1].base, static_cast<std::size_t>(segments[s + 1].tokens) * layout.dim * sizeof(Element));
      fetch(keys + layout.chunk * layout.dim, tokens * layout.dim * sizeof(Element));  // the values, whose turn comes after the keys
    }
    scores_of(queries, group, keys, nullptr, tokens, layout.dim, scores, stride);
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
  scores_of(queries, group, means, scales, count, dim, scores, stride);
}

/// Whether some head gives chunk `c` more than `negligible`.
inline __attribute__((always_inline)) bool counts(const float* weights, std::size_t stride, int group, float negligible) {
  float largest = weights[0];
  for (int g = 1; g < group; ++g) {
    const float weight = weights[static_cast<std::size_t>(g) * stride];
    largest = weight > largest ? weight : largest;
  }
  return largest > negligible;
}

/// Adds to `Heads` outputs the 2 * `Vectors` vectors at columns `first` and `first + dim / 2`, over the chunks that count.
template <int Heads, int Vectors>
void add_summaries_tile(const float* weights, std::size_t stride, const std::uint8_t* means, const float* scales,
                        const std::uint32_t* chunks, std::size_t count, std::size_t dim, std::size_t first, float* out) {
  const std::size_t half = dim / 2;
  Vector low[Heads][Vectors];
  Vector high[Heads][Vectors];
  for (int g = 0; g < Heads; ++g) {
    for (int v = 0; v < Vectors; ++v) {
      const float* from = out + static_cast<std::size_t>(g) * dim + first + static_cast<std::size_t>(v) * kStep;
      low[g][v] = load(from);
      high[g][v] = load(from + half);
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t c = chunks[i];
    Vector weight[Heads];
#pragma GCC unroll 4
    for (int g = 0; g < Heads; ++g) weight[g] = splat(weights[static_cast<std::size_t>(g) * stride + c] * scales[c]);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      const IntVector both = load_bytes(means + c * half + first + static_cast<std::size_t>(v) * kStep);
      const Vector low_mean = __builtin_convertvector((both & 15) - 8, Vector);
      const Vector high_mean = __builtin_convertvector((both >> 4) - 8, Vector);
#pragma GCC unroll 4
      for (int g = 0; g < Heads; ++g) {
        low[g][v] += weight[g] * low_mean;
        high[g][v] += weight[g] * high_mean;
      }
    }
  }
  for (int g = 0; g < Heads; ++g) {
    for (int v = 0; v < Vectors; ++v) {
      float* to = out + static_cast<std::size_t>(g) * dim + first + static_cast<std::size_t>(v) * kStep;
      store(to, low[g][v]);
      store(to + half, high[g][v]);
    }
  }
}

template <int Heads>
void add_summaries_heads(const float* weights, std::size_t stride, const std::uint8_t* means, const float* scales,
                         const std::uint32_t* chunks, std::size_t count, std::size_t dim, float* out) {
  constexpr int kWide = kLanes >= 16 ? 2 : 1;
  const std::size_t half = dim / 2;
  std::size_t first = 0;
  for (; first + kWide * kStep <= half; first += kWide * kStep) {
    add_summaries_tile<Heads, kWide>(weights, stride, means, scales, chunks, count, dim, first, out);
  }
  for (; first + kStep <= half; first += kStep) {
    add_summaries_tile<Heads, 1>(weights, stride, means, scales, chunks, count, dim, first, out);
  }
  for (; first < half; ++first) {
    for (int g = 0; g < Heads; ++g) {
      float* to = out + static_cast<std::size_t>(g) * dim + first;
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t c = chunks[i];
        const float weight = weights[static_cast<std::size_t>(g) * stride + c] * scales[c];
        const int both = means[c * half + first];
        to[0] += weight * static_cast<float>((both & 15) - 8);
        to[half] += weight * static_cast<float>((both >> 4) - 8);
      }
    }
  }
}

void add_summaries(const float* weights, std::size_t stride, int group, const std::uint8_t* means, const float* scales, std::size_t count,
                   std::size_t dim, float negligible, float* out) {
  constexpr std::size_t kBlock = 512;
  std::uint32_t chunks[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t width = count - begin < kBlock ? count - begin : kBlock;
    std::size_t live = 0;
    for (std::size_t c = 0; c < width; ++c) {
      chunks[live] = static_cast<std::uint32_t>(c);
      live += counts(weights + begin + c, stride, group, negligible) ? 1 : 0;
    }
    const float* block = weights + begin;
    float* to = out;
    int heads = group;
    for (; heads >= kHeadsTogether; heads -= kHeadsTogether) {
      add_summaries_heads<kHeadsTogether>(block, stride, means + begin * (dim / 2), scales + begin, chunks, live, dim, to);
      block += kHeadsTogether * stride;
      to += kHeadsTogether * dim;
    }
    if constexpr (kHeadsTogether > 2) {
      if (heads == 3) add_summaries_heads<3>(block, stride, means + begin * (dim / 2), scales + begin, chunks, live, dim, to);
      if (heads == 2) add_summaries_heads<2>(block, stride, means + begin * (dim / 2), scales + begin, chunks, live, dim, to);
    }
    if (heads == 1) add_summaries_heads<1>(block, stride, means + begin * (dim / 2), scales + begin, chunks, live, dim, to);
  }
}

/// log of the sum of exp over a row.
float log_sum(const float* scores, std::size_t count) {
  const std::size_t whole = count / kStep * kStep;
  Vector highest = splat(scores[0]);
  for (std::size_t c = 0; c < whole; c += kStep) {
    const Vector v = load(scores + c);
    highest = v > highest ? v : highest;
  }
  float largest = highest[0];
  for (int l = 1; l < kLanes; ++l) largest = highest[l] > largest ? highest[l] : largest;
  for (std::size_t c = whole; c < count; ++c) largest = scores[c] > largest ? scores[c] : largest;
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

/// How many of the first `count` keys, a multiple of kStep, are at least `bound`.
inline __attribute__((always_inline)) std::size_t at_least(const std::int32_t* keys, std::size_t count, std::int32_t bound) {
  const IntVector limit = IntVector{} + bound;
  IntVector below{};
  for (std::size_t c = 0; c < count; c += kStep) below += load(keys + c) < limit;  // a true comparison is -1
  int sum = 0;
  for (int l = 0; l < kLanes; ++l) sum += below[l];
  return count - static_cast<std::size_t>(-sum);
}

std::size_t choose(const float* rank, std::size_t count, std::size_t wanted, std::int32_t* keys, std::int32_t* chosen) {
  if (wanted >= count) {
    for (std::size_t c = 0; c < count; ++c) chosen[c] = static_cast<std::int32_t>(c);
    return count;
  }
  if (wanted == 0) return 0;
  constexpr std::int32_t kNone = INT32_MIN;  // the key of no number
  const std::size_t width = (count + kStep - 1) / kStep * kStep;
  std::int32_t low = INT32_MAX;
  std::int32_t high = kNone;
  for (std::size_t c = 0; c < count; ++c) {
    // integers in the order of the numbers
    std::int32_t bits;
    __builtin_memcpy(&bits, rank + c, sizeof(bits));
    std::int32_t key = bits ^ ((bits >> 31) & INT32_MAX);
    key = key == kNone ? kNone + 1 : key;
    keys[c] = key;
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  for (std::size_t c = count; c < width; ++c) keys[c] = kNone;
  // The largest bound that `wanted` keys reach; any bound that exactly as many reach does as well.
  std::size_t reaching = count;
  while (low < high && reaching != wanted) {
    const auto middle = static_cast<std::int32_t>(low + (std::int64_t{high} - low + 1) / 2);
    const std::size_t reach = at_least(keys, width, middle);
    if (reach >= wanted) {
      low = middle;
      reaching = reach;
    } else {
      high = middle - 1;
    }
  }
  std::size_t ties = count;  // how many of the keys at the bound are wanted: the first ones
  if (reaching != wanted) ties = wanted - (low == INT32_MAX ? 0 : at_least(keys, width, low + 1));
  const IntVector limit = IntVector{} + low;
  std::size_t found = 0;
  for (std::size_t c = 0; c < width; c += kStep) {
    for (unsigned bits = bits_of(load(keys + c) >= limit); bits != 0; bits &= bits - 1) {
      const std::size_t index = c + static_cast<std::size_t>(__builtin_ctz(bits));
      if (keys[index] == low) {
        if (ties == 0) continue;
        --ties;
      }
      chosen[found++] = static_cast<std::int32_t>(index);
    }
  }
  return found;
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels{key_scores, add_values, summary_scores, add_summaries, rank, choose};

}  // namespace dualdecoder::cpu::DUALDECODER_SIMD_NAMESPACE
