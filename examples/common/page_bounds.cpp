// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/common/page_bounds.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "dualdecoder/cuda/rivals.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::examples {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U); }

/// Nearest bf16 of a finite number, ties to even, as stores round keys.
std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U);
}

float element(const std::byte* data, std::size_t i, DataType type) {
  return type == DataType::bf16 ? bf16_to_float(reinterpret_cast<const std::uint16_t*>(data)[i]) : reinterpret_cast<const float*>(data)[i];
}

/// `count` elements of a tensor from `first` on.
void read(const ConstTensor& tensor, std::size_t first, std::size_t count, float* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = element(static_cast<const std::byte*>(tensor.data), first + i, tensor.type);
}

int chunks_of(const StoreOptions& options, int tokens) {
  return (tokens + options.selection.chunk_tokens - 1) / options.selection.chunk_tokens;
}

}  // namespace

PageBoundsStore::PageBoundsStore(std::unique_ptr<KvStore> inner, const StoreOptions& options, MemoryResource& memory)
    : ForwardingStore(std::move(inner)), options_(options), memory_(memory), sequences_(index(options.max_sequences)) {
  if (options.selection.tail_estimate) throw InvalidArgument("tail_estimate = true: must be false where chunks are ranked by bounds");
  shares_.resize(2 * index(chunks_of(options, options.max_context)));
  order_.reserve(index(chunks_of(options, options.max_context)));
}

std::size_t PageBoundsStore::sequence_bytes(const StoreOptions& options, int tokens) {
  return index(options.layers) * index(options.kv_heads) * index(chunks_of(options, tokens)) * 2 * index(options.head_dim) *
         size_of(options.kv_type);
}

std::byte* PageBoundsStore::bounds_of(int slot, Layer layer, int kv_head, int chunk) const {
  const Sequence& sequence = sequences_[index(slot)];
  const std::size_t list = index(layer) * index(options_.kv_heads) + index(kv_head);
  const std::size_t at = list * index(chunks_of(options_, sequence.capacity)) + index(chunk);
  return sequence.bounds.data() + at * 2 * index(options_.head_dim) * size_of(options_.kv_type);
}

void PageBoundsStore::widen(int slot, Layer layer, int kv_head, int position, const float* key) const {
  std::byte* bounds = bounds_of(slot, layer, kv_head, position / options_.selection.chunk_tokens);
  const bool first = position % options_.selection.chunk_tokens == 0;
  const std::size_t dim = index(options_.head_dim);
  const auto update = [&](auto* data, auto value_of, auto from) {
    for (std::size_t d = 0; d < dim; ++d) {
      const auto stored = from(key[d]);
      if (first || value_of(stored) < value_of(data[d])) data[d] = stored;
      if (first || value_of(stored) > value_of(data[dim + d])) data[dim + d] = stored;
    }
  };
  if (options_.kv_type == DataType::bf16) {
    update(reinterpret_cast<std::uint16_t*>(bounds), bf16_to_float, to_bf16);
  } else {
    const auto same = [](float x) { return x; };
    update(reinterpret_cast<float*>(bounds), same, same);
  }
}

double PageBoundsStore::bound(const float* query, const std::byte* bounds) const {
  const std::size_t dim = index(options_.head_dim);
  double sum = 0;
  for (std::size_t d = 0; d < dim; ++d) {
    const float least = query[d] * element(bounds, d, options_.kv_type);
    const float largest = query[d] * element(bounds, dim + d, options_.kv_type);
    sum += static_cast<double>(std::max(least, largest));
  }
  return sum;
}

void PageBoundsStore::open(int slot, int capacity_tokens, StreamRef stream) {
  ForwardingStore::open(slot, capacity_tokens, stream);
  Sequence& sequence = sequences_[index(slot)];
  try {
    sequence.bounds = Buffer(memory_, sequence_bytes(options_, capacity_tokens), stream);
  } catch (...) {
    ForwardingStore::close(slot, stream);
    throw;
  }
  sequence.capacity = capacity_tokens;
  sequence.appended.assign(index(options_.layers), 0);
  sequence.row0.resize(index(options_.layers) * index(options_.kv_heads) * index(options_.head_dim));
}

void PageBoundsStore::close(int slot, StreamRef stream) noexcept {
  ForwardingStore::close(slot, stream);
  if (slot >= 0 && slot < options_.max_sequences) sequences_[index(slot)].bounds = Buffer();
}

void PageBoundsStore::append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) {
  ForwardingStore::append(layer, slot, block, last_queries, stream);
  const std::size_t dim = index(options_.head_dim);
  std::vector<float> key(dim);
  int& appended = sequences_[index(slot)].appended[index(layer)];
  for (std::int64_t t = 0; t < block.keys.dim(0); ++t, ++appended) {
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      read(block.keys, (static_cast<std::size_t>(t) * index(options_.kv_heads) + index(kv_head)) * dim, dim, key.data());
      widen(slot, layer, kv_head, appended, key.data());
    }
  }
}

void PageBoundsStore::select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef) {
  const SelectionOptions& selection = options_.selection;
  const std::size_t dim = index(options_.head_dim);
  const int group = options_.heads / options_.kv_heads;
  const int first = (selection.sink_tokens + selection.chunk_tokens - 1) / selection.chunk_tokens;
  std::vector<float> query(dim);
  for (int row = 0; row < view.rows(); ++row) {
    const int place = row / view.rows_per_sequence;
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      by_row.count_of(row, kv_head) = 0;
      if (!row_is_live(view.mode[place], row % view.rows_per_sequence)) continue;
      const int count = (view.position[place] - selection.local_tokens) / selection.chunk_tokens - first;
      if (count <= 0) continue;
      double* shares = shares_.data();
      double* rank = shares + index(count);
      std::fill_n(rank, count, 0.0);
      for (int g = 0; g < group; ++g) {
        read(queries, (index(row) * index(options_.heads) + index(kv_head * group + g)) * dim, dim, query.data());
        double largest = -std::numeric_limits<double>::infinity();
        for (int c = 0; c < count; ++c) {
          shares[c] = bound(query.data(), bounds_of(view.slot_of[place], layer, kv_head, first + c)) / std::sqrt(static_cast<double>(dim));
          largest = std::max(largest, shares[c]);
        }
        double sum = 0;
        for (int c = 0; c < count; ++c) sum += shares[c] = std::exp(shares[c] - largest);
        for (int c = 0; c < count; ++c) rank[c] = std::max(rank[c], shares[c] / sum);
      }
      const int chosen = std::min({count, by_row.capacity, selection.budget_tokens / selection.chunk_tokens});
      order_.resize(index(count));
      std::iota(order_.begin(), order_.end(), 0);
      std::partial_sort(order_.begin(), order_.begin() + chosen, order_.end(),
                        [&](int a, int b) { return std::pair(-rank[a], a) < std::pair(-rank[b], b); });
      std::sort(order_.begin(), order_.begin() + chosen);
      for (int i = 0; i < chosen; ++i) {
        by_row.chunks_of(row, kv_head)[i] = first + order_[index(i)];
        by_row.scores_of(row, kv_head)[i] = static_cast<float>(rank[order_[index(i)]]);
      }
      by_row.count_of(row, kv_head) = chosen;
    }
  }
}

void PageBoundsStore::attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out,
                             StreamRef stream) {
  ForwardingStore::attend(layer, view, rows, by_row, out, stream);
  const std::size_t width = index(options_.kv_heads) * index(options_.head_dim);
  for (int place = 0; place < view.sequences; ++place) {
    if (!row_is_live(view.mode[place], 0)) continue;
    float* keys = sequences_[index(view.slot_of[place])].row0.data() + index(layer) * width;
    read(rows.keys, index(place * view.rows_per_sequence) * width, width, keys);
  }
}

void PageBoundsStore::commit(const StepView& view, const TransferList& write_back, StreamRef stream) {
  ForwardingStore::commit(view, write_back, stream);
  for (int place = 0; place < view.sequences; ++place) {
    if (!row_is_live(view.mode[place], 0)) continue;
    const float* keys = sequences_[index(view.slot_of[place])].row0.data();
    for (int list = 0; list < options_.layers * options_.kv_heads; ++list) {
      widen(view.slot_of[place], list / options_.kv_heads, list % options_.kv_heads, view.position[place],
            keys + index(list) * index(options_.head_dim));
    }
  }
}

PageBoundsBackend::PageBoundsBackend(std::shared_ptr<Backend> inner)
    : ForwardingBackend(std::move(inner)), on_cuda_(std::string_view(name()) == "cuda") {
  if (!on_cuda_ && std::string_view(name()) != "cpu") {
    throw InvalidArgument("backend = " + std::string(name()) + ": must be cpu or cuda where chunks are ranked by bounds");
  }
}

std::unique_ptr<KvStore> PageBoundsBackend::make_store(const StoreOptions& options) {
  std::unique_ptr<KvStore> inner = ForwardingBackend::make_store(options);
  MemoryResource& device = memory(MemoryKind::device);
  if (on_cuda_) return cuda::rank_by_bounds(std::move(inner), options, device, stream());
  return std::make_unique<PageBoundsStore>(std::move(inner), options, device);
}

MemoryPlan PageBoundsBackend::store_plan(const StoreOptions& options) const {
  MemoryPlan plan = ForwardingBackend::store_plan(options);
  if (on_cuda_) {
    cuda::plan_bounds(options, plan);
    return plan;
  }
  plan.add("bounds of chunks", MemoryKind::device,
           index(options.max_sequences) * PageBoundsStore::sequence_bytes(options, options.max_context));
  return plan;
}

}  // namespace dualdecoder::examples
