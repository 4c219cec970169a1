// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>

#include "src/simd/dense_simd.hpp"

namespace dualdecoder::cpu::DUALDECODER_SIMD_NAMESPACE {
namespace {

#include "src/simd/vector.inl"

// Registers decide the tiles: 32 vectors with AVX-512, 16 otherwise.
#if defined(__AVX512F__)
constexpr int kProductRows = 4;
constexpr int kMultiplyRows = 12;
#else
constexpr int kProductRows = 2;
constexpr int kMultiplyRows = 6;
#endif
constexpr int kOutputs = 4;  // outputs of a product tile
constexpr int kPanelVectors = 2;
constexpr int kPanel = kPanelVectors * kLanes;
constexpr std::size_t kPanelStep = static_cast<std::size_t>(kPanel);

/// Outputs 0, apart, 2 * apart, ... of `Rows` rows. Lane l sums the products of k = l, l + kLanes, ...; then the lanes, then the rest of k.
template <int Rows, int Outputs, class Weight>
inline __attribute__((always_inline)) void product_tile(const float* x, std::size_t x_stride, const Weight* w, std::size_t inner,
                                                        std::size_t apart, float* out, std::size_t out_stride, bool add) {
  Vector sums[Rows][kOutputs] = {};
  const std::size_t whole = inner / kStep * kStep;
  for (std::size_t k = 0; k < whole; k += kStep) {
    Vector weights[Outputs];
#pragma GCC unroll 4
    for (int n = 0; n < Outputs; ++n) weights[n] = load(w + static_cast<std::size_t>(n) * apart * inner + k);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Vector values = load(x + static_cast<std::size_t>(r) * x_stride + k);
#pragma GCC unroll 4
      for (int n = 0; n < Outputs; ++n) sums[r][n] += weights[n] * values;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    Four four = totals(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    for (std::size_t k = whole; k < inner; ++k) {
      for (int n = 0; n < Outputs; ++n) {
        four[n] += widened(w[static_cast<std::size_t>(n) * apart * inner + k]) * x[static_cast<std::size_t>(r) * x_stride + k];
      }
    }
    for (int n = 0; n < Outputs; ++n) {
      float& to = out[static_cast<std::size_t>(r) * out_stride + static_cast<std::size_t>(n) * apart];
      to = add ? to + four[n] : four[n];
    }
  }
}

template <int Outputs, class Weight>
void product_rows(const float* x, std::size_t x_stride, int rows, const Weight* w, std::size_t inner, std::size_t apart, float* out,
                  std::size_t out_stride, bool add) {
  while (rows >= kProductRows) {
    product_tile<kProductRows, Outputs>(x, x_stride, w, inner, apart, out, out_stride, add);
    x += kProductRows * x_stride;
    out += kProductRows * out_stride;
    rows -= kProductRows;
  }
#if defined(__AVX512F__)
  if (rows == 3) product_tile<3, Outputs>(x, x_stride, w, inner, apart, out, out_stride, add);
  if (rows == 2) product_tile<2, Outputs>(x, x_stride, w, inner, apart, out, out_stride, add);
#endif
  if (rows == 1) product_tile<1, Outputs>(x, x_stride, w, inner, apart, out, out_stride, add);
}

template <class Weight>
void product_of(const float* x, std::size_t x_stride, int rows, const Weight* w, std::size_t inner, std::size_t begin, std::size_t end,
                float* out, std::size_t out_stride, bool add) {
  // Four streams of weights far apart: prefetchers follow a stream by its page, and lose it where neighbouring rows share pages (measured:
  // half the speed at 4 rows).
  const std::size_t apart = (end - begin) / kOutputs;
  for (std::size_t n = begin; n < begin + apart; ++n) {
    product_rows<kOutputs>(x, x_stride, rows, w + n * inner, inner, apart, out + n, out_stride, add);
  }
  for (std::size_t n = begin + apart * kOutputs; n < end; ++n) {
    product_rows<1>(x, x_stride, rows, w + n * inner, inner, 0, out + n, out_stride, add);
  }
}

void product(const float* x, std::size_t x_stride, int rows, MatrixRows w, std::size_t inner, std::size_t begin, std::size_t end,
             float* out, std::size_t out_stride, bool add) {
  if (w.bf16) {
    product_of(x, x_stride, rows, static_cast<const std::uint16_t*>(w.data), inner, begin, end, out, out_stride, add);
  } else {
    product_of(x, x_stride, rows, static_cast<const float*>(w.data), inner, begin, end, out, out_stride, add);
  }
}

template <class Element>
void pack_transposed_of(const Element* source, std::size_t stride, int columns, std::size_t inner, float* panel_out) {
  // Squares of kLanes x kLanes: contiguous reads into a small block, contiguous writes out of it.
  alignas(64) float block[kLanes][kLanes];
  for (std::size_t k = 0; k < inner; k += kStep) {
    const std::size_t depth = inner - k < kStep ? inner - k : kStep;
    for (int j = 0; j < kPanel; j += kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        const Element* from = source + static_cast<std::size_t>(j + i) * stride + k;
        if (j + i >= columns) {
          store(block[i], Vector{});
        } else if (depth == kStep) {
          store(block[i], load(from));
        } else {
          for (std::size_t d = 0; d < depth; ++d) block[i][d] = widened(from[d]);
        }
      }
      for (std::size_t d = 0; d < depth; ++d) {
        float* to = panel_out + (k + d) * kPanelStep + j;
        for (int i = 0; i < kLanes; ++i) to[i] = block[i][d];
      }
    }
  }
}

void pack_transposed(MatrixRows source, int columns, std::size_t inner, float* panel_out) {
  if (source.bf16) {
    pack_transposed_of(static_cast<const std::uint16_t*>(source.data), source.stride, columns, inner, panel_out);
  } else {
    pack_transposed_of(static_cast<const float*>(source.data), source.stride, columns, inner, panel_out);
  }
}

template <class Element>
void pack_of(const Element* source, std::size_t stride, int columns, std::size_t inner, float* panel_out) {
  for (std::size_t k = 0; k < inner; ++k, source += stride, panel_out += kPanel) {
    if (columns == kPanel) {
      for (int v = 0; v < kPanel; v += kLanes) store(panel_out + v, load(source + v));
    } else {
      for (int j = 0; j < kPanel; ++j) panel_out[j] = j < columns ? widened(source[j]) : 0.0F;
    }
  }
}

void pack(MatrixRows source, int columns, std::size_t inner, float* panel_out) {
  if (source.bf16) {
    pack_of(static_cast<const std::uint16_t*>(source.data), source.stride, columns, inner, panel_out);
  } else {
    pack_of(static_cast<const float*>(source.data), source.stride, columns, inner, panel_out);
  }
}

template <int Rows>
void multiply_tile(const float* x, std::size_t x_stride, const float* panel_in, std::size_t inner, float* out, std::size_t out_stride,
                   int columns, bool add) {
  Vector sums[Rows][kPanelVectors];
  alignas(64) float edge[kPanel];  // a row of a panel that is not full
  const bool full = columns == kPanel;
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    float* from = out + static_cast<std::size_t>(r) * out_stride;
    if (add && !full) {
      for (int j = 0; j < kPanel; ++j) edge[j] = j < columns ? from[j] : 0.0F;
      from = edge;
    }
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = add ? load(from + v * kLanes) : Vector{};
  }
  for (std::size_t k = 0; k < inner; ++k) {
    Vector columns_k[kPanelVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) columns_k[v] = load(panel_in + k * kPanelStep + v * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const Vector value = splat(x[static_cast<std::size_t>(r) * x_stride + k]);
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] += value * columns_k[v];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    float* to = out + static_cast<std::size_t>(r) * out_stride;
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) store((full ? to : edge) + v * kLanes, sums[r][v]);
    if (!full) {
      for (int j = 0; j < columns; ++j) to[j] = edge[j];
    }
  }
}

void multiply(const float* x, std::size_t x_stride, int rows, const float* panel_in, std::size_t inner, float* out, std::size_t out_stride,
              int columns, bool add) {
  const auto step = [&](auto tile, int count) {
    tile(x, x_stride, panel_in, inner, out, out_stride, columns, add);
    x += static_cast<std::size_t>(count) * x_stride;
    out += static_cast<std::size_t>(count) * out_stride;
    rows -= count;
  };
  while (rows >= kMultiplyRows) step(multiply_tile<kMultiplyRows>, kMultiplyRows);
#if defined(__AVX512F__)
  if (rows >= 8) step(multiply_tile<8>, 8);
#endif
  if (rows >= 4) step(multiply_tile<4>, 4);
  if (rows >= 2) step(multiply_tile<2>, 2);
  if (rows >= 1) step(multiply_tile<1>, 1);
}

void rms_norm(const float* x, const float* weight, float epsilon, std::size_t count, float* out) {
  const std::size_t whole = count / kStep * kStep;
  Vector squares{};
  for (std::size_t i = 0; i < whole; i += kStep) squares += load(x + i) * load(x + i);
  float sum = total(squares);
  for (std::size_t i = whole; i < count; ++i) sum += x[i] * x[i];
  const float scale = 1.0F / __builtin_sqrtf(sum / static_cast<float>(count) + epsilon);
  for (std::size_t i = 0; i < whole; i += kStep) store(out + i, load(x + i) * scale * load(weight + i));
  for (std::size_t i = whole; i < count; ++i) out[i] = x[i] * scale * weight[i];
}

/// Applies f to whole vectors, and to the rest in a padded one. f(vector of a, vector of b) -> new a.
template <class F>
inline __attribute__((always_inline)) void map(float* a, const float* b, std::size_t count, F f) {
  std::size_t i = 0;
  for (; i + kStep <= count; i += kStep) store(a + i, f(load(a + i), load(b + i)));
  if (i == count) return;
  float rest_a[kLanes] = {};
  float rest_b[kLanes] = {};
  for (std::size_t j = i; j < count; ++j) {
    rest_a[j - i] = a[j];
    rest_b[j - i] = b[j];
  }
  store(rest_a, f(load(rest_a), load(rest_b)));
  for (std::size_t j = i; j < count; ++j) a[j] = rest_a[j - i];
}

void gate(float* gate, const float* up, std::size_t count) {
  map(gate, up, count, [](Vector g, Vector u) {
    const Vector limit = splat(88.0F);
    return g / (exponential(-g < limit ? -g : limit) + 1.0F) * u;
  });
}

void add(float* x, const float* y, std::size_t count) {
  map(x, y, count, [](Vector a, Vector b) { return a + b; });
}

void rotate(float* head, const float* cosine, const float* sine, std::size_t half) {
  float* low = head;
  float* high = head + half;
  std::size_t i = 0;
  for (; i + kStep <= half; i += kStep) {
    const Vector a = load(low + i);
    const Vector b = load(high + i);
    store(low + i, a * load(cosine + i) - b * load(sine + i));
    store(high + i, b * load(cosine + i) + a * load(sine + i));
  }
  for (; i < half; ++i) {
    const float a = low[i];
    const float b = high[i];
    low[i] = a * cosine[i] - b * sine[i];
    high[i] = b * cosine[i] + a * sine[i];
  }
}

void widen(const std::uint16_t* x, std::size_t count, float* out) {
  std::size_t i = 0;
  for (; i + kStep <= count; i += kStep) store(out + i, load(x + i));
  for (; i < count; ++i) out[i] = widened(x[i]);
}

void softmax_block(float* scores, std::size_t count, std::size_t width, float* largest, float* sum, float* accumulated,
                   std::size_t values) {
  const std::size_t whole = count / kStep * kStep;
  Vector highest = splat(*largest);
  for (std::size_t i = 0; i < whole; i += kStep) {
    const Vector v = load(scores + i);
    highest = v > highest ? v : highest;
  }
  float top = *largest;
  for (int l = 0; l < kLanes; ++l) top = highest[l] > top ? highest[l] : top;
  for (std::size_t i = whole; i < count; ++i) top = scores[i] > top ? scores[i] : top;

  if (top > *largest) {
    float factor[kLanes];
    store(factor, exponential(splat(*largest - top)));
    *sum *= factor[0];
    for (std::size_t i = 0; i < values; ++i) accumulated[i] *= factor[0];
    *largest = top;
  }
  for (std::size_t i = count; i < width; ++i) scores[i] = -__builtin_inff();
  Vector sums{};
  for (std::size_t i = 0; i < width / kStep * kStep; i += kStep) {
    const Vector p = exponential(load(scores + i) - top);
    store(scores + i, p);
    sums += p;
  }
  *sum += total(sums);
}

}  // namespace

extern const DenseKernels dense_kernels;
const DenseKernels dense_kernels{kPanel, product, pack_transposed, pack, multiply, rms_norm, gate, rotate, add, widen, softmax_block};

}  // namespace dualdecoder::cpu::DUALDECODER_SIMD_NAMESPACE
