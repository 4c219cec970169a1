// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/dense_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace dualdecoder::cpu {
namespace {

constexpr int kKeys = 128;          // keys of a block; a multiple of every panel
constexpr int kBlockQueries = 192;  // rows of a block over the whole query group: what repays packing its keys and values

std::size_t at(int index) noexcept { return static_cast<std::size_t>(index); }
int round_up(int a, int b) noexcept { return (a + b - 1) / b * b; }
int rows_per_block(int heads, int kv_heads) noexcept { return std::max(16, kBlockQueries / (heads / kv_heads)); }

MatrixRows from(const MatrixRows& rows, std::size_t elements) noexcept {
  const std::size_t element = rows.bf16 ? sizeof(std::uint16_t) : sizeof(float);
  return {static_cast<const std::byte*>(rows.data) + elements * element, rows.stride, rows.bf16};
}

/// Pieces of one thread's scratch.
struct Scratch {
  Scratch(float* base, int queries, int head_dim, int width) {
    const auto take = [&](std::size_t count) {
      float* piece = base == nullptr ? nullptr : base + used;
      used += (count + 15) / 16 * 16;
      return piece;
    };
    q = take(at(queries) * at(head_dim));
    out = take(at(queries) * at(width));
    scores = take(at(queries) * at(kKeys));
    key_panels = take(at(kKeys) * at(head_dim));
    value_panels = take(at(kKeys) * at(width));
    largest = take(at(queries));
    sum = take(at(queries));
  }

  std::size_t used = 0;  // floats
  float* q;              // [queries, head_dim], scaled
  float* out;            // [queries, width]: head_dim rounded up to whole panels
  float* scores;         // [queries, kKeys]
  float* key_panels;     // [kKeys / panel, head_dim, panel]
  float* value_panels;   // [width / panel, kKeys, panel]
  float* largest;        // [queries]
  float* sum;            // [queries]
};

/// One block of query rows with all heads of a query group, which share keys and values.
class Block {
 public:
  Block(const DenseKernels& kernels, const DenseAttention& attention, int kv_head, int first_row, float* scratch)
      : kernels_(kernels),
        attention_(attention),
        kv_head_(kv_head),
        first_row_(first_row),
        rows_(std::min(rows_per_block(attention.heads, attention.kv_heads), attention.rows - first_row)),
        group_(attention.heads / attention.kv_heads),
        width_(round_up(attention.head_dim, kernels.panel)),
        scratch_(scratch, rows_per_block(attention.heads, attention.kv_heads) * group_, attention.head_dim, width_) {}

  void run() {
    load_queries();
    const int end = attention_.offset + first_row_ + rows_;
    for (int first_key = 0; first_key < end; first_key += kKeys) add_keys(first_key, std::min(kKeys, end - first_key));
    store_out();
  }

 private:
  int queries() const noexcept { return rows_ * group_; }
  /// Elements before the vector of a row and a head of this group, in queries and out.
  std::size_t head_offset(int row, int head) const noexcept {
    return (at(first_row_ + row) * at(attention_.heads) + at(kv_head_ * group_ + head)) * at(attention_.head_dim);
  }

  void load_queries() {
    const float scale = 1.0F / std::sqrt(static_cast<float>(attention_.head_dim));
    for (int query = 0; query < queries(); ++query) {
      const float* source = attention_.queries + head_offset(query % rows_, query / rows_);
      float* target = scratch_.q + at(query) * at(attention_.head_dim);
      for (int d = 0; d < attention_.head_dim; ++d) target[d] = source[d] * scale;
      scratch_.largest[query] = -std::numeric_limits<float>::infinity();
      scratch_.sum[query] = 0.0F;
    }
    std::fill_n(scratch_.out, at(queries()) * at(width_), 0.0F);
  }

  void add_keys(int first_key, int keys) {
    const int panel = kernels_.panel;
    const std::size_t head_dim = at(attention_.head_dim);
    const std::size_t first = at(first_key) * attention_.keys.stride + at(kv_head_) * head_dim;
    const int padded = round_up(keys, panel);
    for (int key = 0; key < keys; key += panel) {
      float* packed = scratch_.key_panels + at(key) * head_dim;
      kernels_.pack_transposed(from(attention_.keys, first + at(key) * attention_.keys.stride), std::min(panel, keys - key), head_dim,
                               packed);
      kernels_.multiply(scratch_.q, head_dim, queries(), packed, head_dim, scratch_.scores + key, kKeys, panel, false);
    }
    for (int query = 0; query < queries(); ++query) {
      const int seen = std::clamp(attention_.offset + first_row_ + query % rows_ + 1 - first_key, 0, keys);
      kernels_.softmax_block(scratch_.scores + at(query) * kKeys, at(seen), at(padded), scratch_.largest + query, scratch_.sum + query,
                             scratch_.out + at(query) * at(width_), at(width_));
    }
    for (int d = 0; d < attention_.head_dim; d += panel) {
      float* packed = scratch_.value_panels + at(d) * kKeys;
      kernels_.pack(from(attention_.values, first + at(d)), std::min(panel, attention_.head_dim - d), at(keys), packed);
      kernels_.multiply(scratch_.scores, kKeys, queries(), packed, at(keys), scratch_.out + d, at(width_), panel, true);
    }
  }

  void store_out() {
    for (int query = 0; query < queries(); ++query) {
      const float scale = 1.0F / scratch_.sum[query];
      const float* source = scratch_.out + at(query) * at(width_);
      float* target = attention_.out + head_offset(query % rows_, query / rows_);
      for (int d = 0; d < attention_.head_dim; ++d) target[d] = source[d] * scale;
    }
  }

  const DenseKernels& kernels_;
  const DenseAttention& attention_;
  int kv_head_;
  int first_row_;
  int rows_;
  int group_;
  int width_;
  Scratch scratch_;
};

}  // namespace

std::size_t attention_scratch(const DenseKernels& kernels, int heads, int kv_heads, int head_dim) noexcept {
  const int queries = rows_per_block(heads, kv_heads) * (heads / kv_heads);
  return Scratch(nullptr, queries, head_dim, round_up(head_dim, kernels.panel)).used;
}

void run_attention(const DenseKernels& kernels, ThreadPool& pool, const DenseAttention& attention, float* scratch) {
  const int block = rows_per_block(attention.heads, attention.kv_heads);
  const int blocks = (attention.rows + block - 1) / block;
  const std::size_t share = attention_scratch(kernels, attention.heads, attention.kv_heads, attention.head_dim);
  pool.parallel_for(blocks * attention.kv_heads, [&](int index, int worker) {
    // The last rows see the most keys, so they come first.
    const int first_row = (blocks - 1 - index / attention.kv_heads) * block;
    Block(kernels, attention, index % attention.kv_heads, first_row, scratch + at(worker) * share).run();
  });
}

}  // namespace dualdecoder::cpu
