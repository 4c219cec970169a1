// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/full_store.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cuda/check.hpp"
#include "cuda/readout.hpp"
#include "cuda/store_upkeep.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

// Tokens of a block, by measurement on an H200: long blocks leave little to join, but the fewer there are the longer the device waits for
// the last ones, so a lone short sequence is cut finely, and long ones in many blocks again.
constexpr int kBlocks = 256;  // over all sequences and KV heads, that fill the device
constexpr int kLeastTokens = 128;
constexpr int kMostTokens = 1024;
constexpr std::int64_t kManyBlocks = 4096;  // with more than these of kMostTokens, half of them is better

constexpr std::size_t index(int i) noexcept { return static_cast<std::size_t>(i); }

int pages_of(int tokens) { return (tokens + 1 + kPageTokens - 1) / kPageTokens; }  // a guess stands behind the last token

FullLayout layout_of(const StoreOptions& options) {
  const int tokens = pages_of(options.max_context) * kPageTokens;
  const std::int64_t all_tokens = std::int64_t{tokens} * options.max_sequences * options.kv_heads;
  const std::int64_t most = all_tokens / kMostTokens > kManyBlocks ? kMostTokens / 2 : kMostTokens;
  const int of_block = static_cast<int>(std::clamp<std::int64_t>(all_tokens / kBlocks, kLeastTokens, most));
  FullLayout layout{};
  layout.layers = options.layers;
  layout.heads = options.heads;
  layout.kv_heads = options.kv_heads;
  layout.group = options.heads / options.kv_heads;
  layout.dim = options.head_dim;
  layout.max_sequences = options.max_sequences;
  layout.rows_per_sequence = options.rows_per_sequence;
  layout.split_tokens = of_block / kPageTokens * kPageTokens;
  layout.splits = (tokens + layout.split_tokens - 1) / layout.split_tokens;
  return layout;
}

}  // namespace

void FullStore::carve(FullLayout& layout, int*& lengths, Carver& carver) {
  const std::size_t row_lists = index(layout.max_sequences) * index(layout.rows_per_sequence) * index(layout.kv_heads);
  layout.base = carver.take<std::byte*>(index(layout.max_sequences));
  layout.pages = carver.take<int>(index(layout.max_sequences));
  layout.partials = carver.take<float>(row_lists * index(layout.splits) * index(layout.group) * index(layout.dim + 2));
  lengths = carver.take<int>(index(layout.max_sequences));
}

std::size_t FullStore::device_bytes(const StoreOptions& options) {
  FullLayout layout = layout_of(options);
  int* lengths = nullptr;
  Carver counting;
  carve(layout, lengths, counting);
  return counting.bytes();
}

std::size_t FullStore::sequence_bytes(const StoreOptions& options, int tokens) {
  const std::size_t page = 2 * index(kPageTokens) * index(options.head_dim) * size_of(options.kv_type);
  return index(options.layers) * index(options.kv_heads) * index(pages_of(tokens)) * page;
}

FullStore::FullStore(const StoreOptions& options, const StoreResources& resources)
    : options_(options), resources_(resources), book_(options), pages_(index(options.max_sequences)), layout_(layout_of(options)) {
  const DeviceGuard guard(resources_.ordinal);
  device_ = Buffer(*resources_.device, device_bytes(options), resources_.stream);
  readout_ = Buffer(*resources_.host, readout_bytes(), resources_.stream);
  Carver placing(device_.data());
  carve(layout_, lengths_, placing);
  check(cudaMemsetAsync(device_.data(), 0, device_.bytes(), resources_.stream.get()), "cudaMemsetAsync");
}

void FullStore::open(int slot, int capacity_tokens, StreamRef stream) {
  book_.check_open(slot, capacity_tokens);
  const DeviceGuard guard(resources_.ordinal);
  Buffer pages(*resources_.device, sequence_bytes(options_, capacity_tokens), stream);
  set_entry(layout_.base, slot, pages.data(), stream.get());
  set_entry(layout_.pages, slot, pages_of(capacity_tokens), stream.get());
  pages_[index(slot)] = std::move(pages);
  book_.open(slot, capacity_tokens);
}

void FullStore::append(Layer layer, int slot, const KvBlock& block, ConstTensor /*last_queries*/, StreamRef stream) {
  const auto tokens = static_cast<int>(block.keys.dim(0));
  const int first = book_.check_append(layer, slot, tokens);
  check_rows(block.keys, "keys");
  check_rows(block.values, "values");
  const DeviceGuard guard(resources_.ordinal);
  append_full(layout_, layer, slot, first, tokens, rows_in(block.keys), rows_in(block.values), stream.get());
  book_.append(layer, slot, tokens);
}

void FullStore::seal(int slot, StreamRef stream) {
  const int length = book_.check_seal(slot);
  const DeviceGuard guard(resources_.ordinal);
  set_entry(lengths_, slot, length, stream.get());
  book_.seal(slot);
}

void FullStore::select(Layer, const StepView& view, ConstTensor, const Selection& by_row, StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  clear_counts(by_row.count, by_row.list(view.rows(), 0), stream.get());
}

void FullStore::resolve_needed(Layer, const StepView&, const Selection&, const TransferList& urgent, StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  clear_counts(urgent.count, 1, stream.get());
}

Layer FullStore::resolve_predicted(Layer layer, const StepView&, const Prediction&, const TransferList& prefetch, StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  clear_counts(prefetch.count, 1, stream.get());
  return layer;
}

void FullStore::attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection&, Tensor out, StreamRef stream) {
  check_rows(rows.queries, "queries");
  check_rows(rows.keys, "keys");
  check_rows(rows.values, "values");
  check_rows(out, "out");
  const DeviceGuard guard(resources_.ordinal);
  attend_full(layout_, layer, view, rows_in(rows.queries), rows_in(rows.keys), rows_in(rows.values), rows_out(out), stream.get());
}

void FullStore::commit(const StepView& view, const TransferList& write_back, StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  clear_counts(write_back.count, 1, stream.get());
  count_committed(lengths_, view, stream.get());
}

void FullStore::truncate(int slot, int tokens, StreamRef stream) {
  book_.check_sealed(slot, "truncate");
  const DeviceGuard guard(resources_.ordinal);
  dualdecoder::detail::SequenceBook::check_kept(tokens, read_length(lengths_, slot, readout_.data(), stream));
  set_entry(lengths_, slot, tokens, stream.get());
}

void FullStore::close(int slot, StreamRef /*stream*/) noexcept {
  if (book_.close(slot)) pages_[index(slot)] = Buffer();
}

}  // namespace dualdecoder::cuda
