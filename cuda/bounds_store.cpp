// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/bounds.hpp"
#include "cuda/check.hpp"
#include "cuda/device_of.hpp"
#include "cuda/store.hpp"
#include "cuda/store_upkeep.hpp"
#include "dualdecoder/cuda/rivals.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/testing/forwarding.hpp"
#include "src/chunk_geometry.hpp"

namespace dualdecoder::cuda {
namespace {

using cpu::index;

int chunks_of(const StoreOptions& options, int tokens) {
  return (tokens + options.selection.chunk_tokens - 1) / options.selection.chunk_tokens;
}

std::size_t sequence_bytes(const StoreOptions& options, int tokens) {
  return index(options.layers) * index(options.kv_heads) * index(chunks_of(options, tokens)) * 2 * index(options.head_dim) *
         size_of(DataType::bf16);
}

BoundsLayout layout_of(const StoreOptions& options) {
  using dualdecoder::detail::require;
  validate(options);
  const SelectionOptions& selection = options.selection;
  if (selection.tail_estimate) throw InvalidArgument("tail_estimate = true: must be false where chunks are ranked by bounds");
  require(options.kv_type == DataType::bf16, "kv_type", name_of(options.kv_type), "bf16 on the CUDA backend");
  require(options.heads / options.kv_heads <= 16, "heads / kv_heads", options.heads / options.kv_heads, "in 1 .. 16 on the CUDA backend");
  BoundsLayout layout{};
  layout.layers = options.layers;
  layout.kv_heads = options.kv_heads;
  layout.group = options.heads / options.kv_heads;
  layout.dim = options.head_dim;
  layout.max_sequences = options.max_sequences;
  layout.rows_per_sequence = options.rows_per_sequence;
  layout.chunk = selection.chunk_tokens;
  layout.first_chunk = chunks_of(options, selection.sink_tokens);
  layout.local_tokens = selection.local_tokens;
  layout.selected = selection.budget_tokens / selection.chunk_tokens;
  layout.stride = (chunks_of(options, options.max_context) + 3) / 4 * 4;
  return layout;
}

void carve(BoundsLayout& layout, Carver& carver) {
  const std::size_t sequences = index(layout.max_sequences);
  const std::size_t row_lists = layout.row_list(layout.max_sequences * layout.rows_per_sequence, 0);
  layout.bounds = carver.take<std::byte*>(sequences);
  layout.chunks = carver.take<int>(sequences);
  layout.row0 = carver.take<std::uint16_t>(sequences * index(layout.layers) * index(layout.kv_heads) * index(layout.dim));
  layout.scores = carver.take<float>(row_lists * index(layout.group) * index(layout.stride));
  layout.ranks = carver.take<float>(row_lists * index(layout.stride));
}

class BoundsStore final : public testing::ForwardingStore {
 public:
  BoundsStore(std::unique_ptr<KvStore> inner, const StoreOptions& options, MemoryResource& memory, StreamRef stream)
      : ForwardingStore(std::move(inner)), options_(options), memory_(memory), layout_(layout_of(options)) {
    sequences_.resize(index(options.max_sequences));
    Carver counting;
    carve(layout_, counting);
    device_ = Buffer(memory, counting.bytes(), stream);
    ordinal_ = device_of(device_.data());
    Carver placing(device_.data());
    carve(layout_, placing);
    const DeviceGuard guard(ordinal_);
    check(cudaMemsetAsync(device_.data(), 0, device_.bytes(), stream.get()), "cudaMemsetAsync");
  }

  void open(int slot, int capacity_tokens, StreamRef stream) override {
    ForwardingStore::open(slot, capacity_tokens, stream);
    Sequence& sequence = sequences_[index(slot)];
    const DeviceGuard guard(ordinal_);
    try {
      sequence.bounds = Buffer(memory_, sequence_bytes(options_, capacity_tokens), stream);
      set_entry(layout_.bounds, slot, sequence.bounds.data(), stream.get());
      set_entry(layout_.chunks, slot, chunks_of(options_, capacity_tokens), stream.get());
    } catch (...) {
      ForwardingStore::close(slot, stream);
      throw;
    }
    sequence.appended.assign(index(options_.layers), 0);
  }
  void close(int slot, StreamRef stream) noexcept override {
    ForwardingStore::close(slot, stream);
    if (slot >= 0 && slot < options_.max_sequences) sequences_[index(slot)].bounds = Buffer();
  }
  void append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) override {
    ForwardingStore::append(layer, slot, block, last_queries, stream);
    const DeviceGuard guard(ordinal_);
    const auto tokens = static_cast<int>(block.keys.dim(0));
    int& appended = sequences_[index(slot)].appended[index(layer)];
    widen_by_block(layout_, layer, slot, appended, tokens, rows_in(block.keys), stream.get());
    appended += tokens;
  }
  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override {
    check_rows(queries, "queries");
    const DeviceGuard guard(ordinal_);
    choose_by_bounds(layout_, layer, view, rows_in(queries), by_row, stream.get());
  }
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) override {
    ForwardingStore::attend(layer, view, rows, by_row, out, stream);
    const DeviceGuard guard(ordinal_);
    keep_row0(layout_, layer, view, rows_in(rows.keys), stream.get());
  }
  void commit(const StepView& view, const TransferList& write_back, StreamRef stream) override {
    ForwardingStore::commit(view, write_back, stream);
    const DeviceGuard guard(ordinal_);
    widen_by_row0(layout_, view, stream.get());
  }

 private:
  struct Sequence {
    Buffer bounds;              // [layers, kv_heads, chunks] bounds
    std::vector<int> appended;  // [layers]
  };

  StoreOptions options_;
  MemoryResource& memory_;
  int ordinal_ = 0;
  std::vector<Sequence> sequences_;
  Buffer device_;
  BoundsLayout layout_;
};

}  // namespace

std::unique_ptr<KvStore> rank_by_bounds(std::unique_ptr<KvStore> inner, const StoreOptions& options, MemoryResource& memory,
                                        StreamRef stream) {
  return std::make_unique<BoundsStore>(std::move(inner), options, memory, stream);
}

void plan_bounds(const StoreOptions& options, MemoryPlan& plan) {
  BoundsLayout layout = layout_of(options);
  Carver counting;
  carve(layout, counting);
  plan.add("bounds of chunks", MemoryKind::device, index(options.max_sequences) * sequence_bytes(options, options.max_context));
  plan.add("ranking by bounds", MemoryKind::device, counting.bytes());
}

}  // namespace dualdecoder::cuda
