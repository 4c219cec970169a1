// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/low_rank_keys.hpp"

#include <algorithm>

#include "dualdecoder/error.hpp"
#include "src/summary.hpp"

namespace dualdecoder::cpu {

LowRankKeys::LowRankKeys(const StoreOptions& options, const ChunkGeometry& geometry, const StoreResources& resources)
    : geometry_(geometry),
      layers_(options.layers),
      kv_heads_(options.kv_heads),
      sequences_(options.max_sequences),
      threads_(resources.thread_count),
      rank_(std::min(options.shadow_kv.rank, options.kv_heads * options.head_dim)),
      bf16_(options.kv_type == DataType::bf16),
      kernels_(attention_kernels(resources.isa)),
      rotations_(options.rope, options.head_dim, geometry.max_chunks * geometry.chunk + geometry.chunk, dense_kernels(resources.isa)) {
  if (!has_lapack()) throw InvalidArgument("store kind = shadow_kv: needs a build with LAPACK (CMake option DUALDECODER_LAPACK)");
}

void LowRankKeys::carve_factors(Carver& carver) {
  const std::size_t lists = index(sequences_) * index(layers_);
  const std::size_t rank = index(rank_);
  directions_ = carver.take<std::byte>(lists * index(kv_heads_) * rank * index(geometry_.dim) * geometry_.element_bytes);
  coefficients_ = carver.take<std::byte>(lists * index(geometry_.max_chunks) * index(geometry_.chunk) * rank * geometry_.element_bytes);
}

void LowRankKeys::carve_work(Carver& carver) {
  rotations_.carve(carver);
  worker_rows_ = carver.take<float>(index(threads_) * worker_floats());
}

LowRankKeys::PrefillWork LowRankKeys::carve_prefill_work(Carver& carver) const {
  const int width = kv_heads_ * geometry_.dim;
  PrefillWork work{.factor = LowRankFactor({.width = width, .block = kBlock}, kernels_)};
  work.factor.carve(carver);
  work.rows = carver.take<float>(index(kBlock) * index(width));
  work.vectors = carver.take<float>(index(rank_) * index(width));
  return work;
}

std::byte* LowRankKeys::directions_of(int slot, Layer layer, int kv_head) const noexcept {
  const std::size_t list = layer_of(slot, layer) * index(kv_heads_) + index(kv_head);
  return directions_ + list * index(rank_) * index(geometry_.dim) * geometry_.element_bytes;
}

std::byte* LowRankKeys::coefficients_of(int slot, Layer layer, int chunk) const noexcept {
  const std::size_t at = layer_of(slot, layer) * index(geometry_.max_chunks) + index(chunk);
  return coefficients_ + at * index(geometry_.chunk) * index(rank_) * geometry_.element_bytes;
}

void LowRankKeys::factor(int slot, Layer layer, const Source& keys, int tokens, PrefillWork& work) {
  const std::size_t dim = index(geometry_.dim);
  const std::size_t width = index(kv_heads_) * dim;
  work.factor.clear();
  for (int first = 0; first < tokens; first += kBlock) {
    const int count = std::min(kBlock, tokens - first);
    for (int t = 0; t < count; ++t) {
      for (int kv_head = 0; kv_head < kv_heads_; ++kv_head) {
        float* row = work.rows + index(t) * width + index(kv_head) * dim;
        widen_elements(keys.base + index(kv_head) * keys.head_bytes, index(first + t) * dim, dim, bf16_, row);
        rotations_.unrotate(row, first + t);
      }
    }
    work.factor.add(work.rows, count);
  }
  work.factor.solve(rank_, work.vectors);
  for (int kv_head = 0; kv_head < kv_heads_; ++kv_head) {
    std::byte* directions = directions_of(slot, layer, kv_head);
    for (std::size_t r = 0; r < index(rank_); ++r) {
      write_elements(work.vectors + r * width + index(kv_head) * dim, dim, directions, r * dim, bf16_);
    }
  }
}

void LowRankKeys::project(int slot, Layer layer, int chunk, const Source& keys, int worker) {
  const std::size_t dim = index(geometry_.dim);
  const std::size_t tokens = index(geometry_.chunk);
  const std::size_t rank = index(rank_);
  float* rows = worker_row(worker);
  float* products = rows + tokens * dim;
  float* sums = products + tokens * rank;
  std::fill_n(sums, tokens * rank, 0.0F);
  for (int kv_head = 0; kv_head < kv_heads_; ++kv_head) {
    widen_elements(keys.base + index(kv_head) * keys.head_bytes, 0, tokens * dim, bf16_, rows);
    for (int t = 0; t < geometry_.chunk; ++t) rotations_.unrotate(rows + index(t) * dim, chunk * geometry_.chunk + t);
    const Segment directions{directions_of(slot, layer, kv_head), rank_};
    kernels_.key_scores(rows, geometry_.chunk, &directions, 1, {.chunk = rank, .dim = dim, .bf16 = bf16_}, products, rank);
    for (std::size_t i = 0; i < tokens * rank; ++i) sums[i] += products[i];
  }
  write_elements(sums, tokens * rank, coefficients_of(slot, layer, chunk), 0, bf16_);
}

void LowRankKeys::rebuild(int slot, Layer layer, int kv_head, int chunk, void* keys, int worker) const {
  const std::size_t dim = index(geometry_.dim);
  const std::size_t tokens = index(geometry_.chunk);
  const std::size_t rank = index(rank_);
  float* rows = worker_row(worker);
  float* coefficients = rows + tokens * dim;
  widen_elements(coefficients_of(slot, layer, chunk), 0, tokens * rank, bf16_, coefficients);
  std::fill_n(rows, tokens * dim, 0.0F);
  // the product of weights and values of attention is the product that is wanted here
  const Segment directions{directions_of(slot, layer, kv_head), rank_};
  kernels_.add_values(coefficients, rank, geometry_.chunk, &directions, 1, {.chunk = 0, .dim = dim, .bf16 = bf16_}, rows);
  for (int t = 0; t < geometry_.chunk; ++t) rotations_.rotate(rows + index(t) * dim, chunk * geometry_.chunk + t);
  write_elements(rows, tokens * dim, keys, 0, bf16_);
}

}  // namespace dualdecoder::cpu
