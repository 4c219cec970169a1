// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/dense_product.hpp"

#include <algorithm>
#include <cstdint>

namespace dualdecoder::cpu {
namespace {

constexpr int kDepth = 512;          // inner elements of a panel: one panel of 32 columns then fills 64 KiB of the second-level cache
constexpr int kTasksPerThread = 16;  // enough for threads that are slowed down to be overtaken
constexpr int kSmallestSlice = 32;   // outputs of a streamed task
constexpr int kSmallestRows = 96;    // rows that repay packing a panel

int divide_up(int a, int b) noexcept { return (a + b - 1) / b; }

/// The product that piece `index` belongs to, where a product of n outputs has ceil(n / size) pieces; `index` becomes the piece's number in
/// it.
const Product& product_of(std::span<const Product> products, int size, int& index) noexcept {
  std::size_t p = 0;
  for (; p + 1 < products.size(); ++p) {
    const int pieces = divide_up(products[p].outputs, size);
    if (index < pieces) break;
    index -= pieces;
  }
  return products[p];
}

int pieces_of(std::span<const Product> products, int size) noexcept {
  int pieces = 0;
  for (const Product& product : products) pieces += divide_up(product.outputs, size);
  return pieces;
}

void run_streamed(const DenseKernels& kernels, ThreadPool& pool, const float* x, int rows, std::size_t inner,
                  std::span<const Product> products) {
  int outputs = 0;
  for (const Product& product : products) outputs += product.outputs;
  const int slice = std::max(kSmallestSlice, divide_up(outputs, pool.size() * kTasksPerThread * 4) * 4);
  pool.parallel_for(pieces_of(products, slice), [&](int index) {
    const Product& product = product_of(products, slice, index);
    const int begin = index * slice;
    const int end = std::min(begin + slice, product.outputs);
    kernels.product(x, inner, rows, product.weights, inner, static_cast<std::size_t>(begin), static_cast<std::size_t>(end), product.out,
                    product.out_stride, product.add);
  });
}

void run_packed(const DenseKernels& kernels, ThreadPool& pool, const float* x, int rows, std::size_t inner,
                std::span<const Product> products, float* scratch) {
  const int panels = pieces_of(products, kernels.panel);
  int row_blocks = 1;
  while (panels * row_blocks < 4 * pool.size() && rows / (row_blocks * 2) >= kSmallestRows) row_blocks *= 2;
  const int rows_per_block = divide_up(rows, row_blocks);
  pool.parallel_for(panels * row_blocks, [&](int index, int worker) {
    const int first_row = index / panels * rows_per_block;
    const int block_rows = std::min(rows_per_block, rows - first_row);
    int piece = index % panels;
    const Product& product = product_of(products, kernels.panel, piece);
    const int begin = piece * kernels.panel;
    const int columns = std::min(kernels.panel, product.outputs - begin);
    const std::size_t element = product.weights.bf16 ? sizeof(std::uint16_t) : sizeof(float);
    float* panel = scratch + static_cast<std::size_t>(worker) * product_scratch(kernels);
    float* out = product.out + static_cast<std::size_t>(first_row) * product.out_stride + begin;
    const float* rows_in = x + static_cast<std::size_t>(first_row) * inner;
    for (std::size_t k = 0; k < inner; k += kDepth) {
      const std::size_t depth = std::min<std::size_t>(kDepth, inner - k);
      const auto* data = static_cast<const std::byte*>(product.weights.data);
      const std::size_t offset = static_cast<std::size_t>(begin) * product.weights.stride + k;
      kernels.pack_transposed({data + offset * element, product.weights.stride, product.weights.bf16}, columns, depth, panel);
      kernels.multiply(rows_in + k, inner, block_rows, panel, depth, out, product.out_stride, columns, product.add || k > 0);
    }
  });
}

}  // namespace

std::size_t product_scratch(const DenseKernels& kernels) noexcept { return static_cast<std::size_t>(kernels.panel) * kDepth; }

void run_products(const DenseKernels& kernels, ThreadPool& pool, const float* x, int rows, std::size_t inner,
                  std::span<const Product> products, float* scratch) {
  if (rows <= kStreamedRows) {
    run_streamed(kernels, pool, x, rows, inner, products);
  } else {
    run_packed(kernels, pool, x, rows, inner, products, scratch);
  }
}

}  // namespace dualdecoder::cpu
