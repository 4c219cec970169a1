// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/simd/dispatch.hpp"

namespace dualdecoder::cpu {

/// Rows of a row-major matrix of f32 or bf16, as the kernels read them.
struct MatrixRows {
  const void* data = nullptr;
  std::size_t stride = 0;  ///< elements from a row to the next
  bool bf16 = false;
};

/// Vector kernels of the dense part of a model. They allocate nothing and keep no state. Every result is a fixed function of its own row:
/// neither the number of rows nor how outputs are split over calls changes a bit.
struct DenseKernels {
  int panel;  ///< columns of a packed panel

  /// Few rows: out[r, n] = (add ? out[r, n] : 0) + sum_k x[r, k] * w[n, k] for n in begin .. end-1; every weight is read once for all
  /// rows. k < inner; w's rows lie one behind the other (stride = inner).
  void (*product)(const float* x, std::size_t x_stride, int rows, MatrixRows w, std::size_t inner, std::size_t begin, std::size_t end,
                  float* out, std::size_t out_stride, bool add);
  /// panel_out[k, j] = source[j, k] for j < columns, 0 for the other columns of the panel; k < inner.
  void (*pack_transposed)(MatrixRows source, int columns, std::size_t inner, float* panel_out);
  /// panel_out[k, j] = source[k, j] for j < columns, 0 for the other columns of the panel; k < inner.
  void (*pack)(MatrixRows source, int columns, std::size_t inner, float* panel_out);
  /// Many rows: out[r, j] = (add ? out[r, j] : 0) + sum_k x[r, k] * panel_in[k, j] for j < columns, summed in the order of k.
  void (*multiply)(const float* x, std::size_t x_stride, int rows, const float* panel_in, std::size_t inner, float* out,
                   std::size_t out_stride, int columns, bool add);

  /// out = x / sqrt(mean(x^2) + epsilon) * weight; out may be x.
  void (*rms_norm)(const float* x, const float* weight, float epsilon, std::size_t count, float* out);
  /// gate = gate / (1 + exp(-gate)) * up.
  void (*gate)(float* gate, const float* up, std::size_t count);
  /// Rotates the pairs (i, i + half) of a head by the angles whose cosines and sines are given.
  void (*rotate)(float* head, const float* cosine, const float* sine, std::size_t half);
  /// x += y.
  void (*add)(float* x, const float* y, std::size_t count);
  /// out = x as f32.
  void (*widen)(const std::uint16_t* x, std::size_t count, float* out);
  /// One row of a streaming softmax over a block of scores: raises `largest` to the largest of the first `count` scores, replaces these by
  /// exp(score - largest) and the rest of `width` by 0, and multiplies `sum` and the row's `accumulated` values [values] by
  /// exp(old largest - largest) before it adds the block's sum. `largest` starts at -inf, `sum` at 0.
  void (*softmax_block)(float* scores, std::size_t count, std::size_t width, float* largest, float* sum, float* accumulated,
                        std::size_t values);
};

/// The kernels for an instruction set that the machine has.
const DenseKernels& dense_kernels(Isa isa) noexcept;

}  // namespace dualdecoder::cpu
