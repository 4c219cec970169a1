// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "src/simd/dense_simd.hpp"
#include "src/thread_pool.hpp"

namespace dualdecoder::cpu {

/// A matrix that rows are multiplied with, and where the results go: out[r, n] = (add ? out[r, n] : 0) + sum_k x[r, k] * weights[n, k].
struct Product {
  MatrixRows weights;
  int outputs = 0;
  float* out = nullptr;
  std::size_t out_stride = 0;
  bool add = false;
};

/// Up to this many rows a product streams the weights once; more rows go through packed panels. The two differ in the last bits.
inline constexpr int kStreamedRows = 16;

/// Floats of scratch that each thread needs for run_products.
std::size_t product_scratch(const DenseKernels& kernels) noexcept;

/// Runs products of the same rows x [rows, inner], at most three, as one parallel loop. Neither the number of threads nor the other rows of
/// the same path change a bit of a row's result. `scratch` is [threads, product_scratch] floats at 64 bytes.
void run_products(const DenseKernels& kernels, ThreadPool& pool, const float* x, int rows, std::size_t inner,
                  std::span<const Product> products, float* scratch);

}  // namespace dualdecoder::cpu
