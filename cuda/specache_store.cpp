// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/specache_store.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "cuda/check.hpp"
#include "cuda/readout.hpp"
#include "cuda/store_upkeep.hpp"
#include "dualdecoder/error.hpp"
#include "src/chunk_geometry.hpp"
#include "src/prefetch_bound.hpp"

namespace dualdecoder::cuda {
namespace {

using cpu::index;

constexpr std::int64_t kBlocks = 512;  // over all sequences and KV heads, that fill the device

constexpr int rounded_up(int count, int unit) { return (count + unit - 1) / unit * unit; }

/// Tokens of the copy that a block works on: long ones leave little to join, short ones fill the device with a short context.
int split_tokens(const StoreOptions& options, int copied) {
  constexpr int kLeast = 4 * 64;  // a group for each warp
  const std::int64_t all = std::int64_t{copied} * options.max_sequences * options.kv_heads;
  int tokens = kLeast;
  while (tokens < kMostSplitTokens && all / (2 * tokens) >= kBlocks) tokens *= 2;
  return tokens;
}

/// Shapes and policies; the arrays are still to be placed.
SpeCacheLayout layout_of(const StoreOptions& options) {
  const SpeCacheOptions& specache = options.specache;
  SpeCacheLayout layout{};
  layout.layers = options.layers;
  layout.heads = options.heads;
  layout.kv_heads = options.kv_heads;
  layout.group = options.heads / options.kv_heads;
  layout.dim = options.head_dim;
  layout.max_sequences = options.max_sequences;
  layout.rows_per_sequence = options.rows_per_sequence;
  layout.copy = low_bit_group(specache.bits, specache.group, options.head_dim);
  layout.exact = specache.exact_tokens;
  // the exact tokens, an unfinished group, and the rows of a pass
  layout.ring = rounded_up(std::min(specache.exact_tokens + specache.group + 1, options.max_context + 2), specache.group);
  const int copied = layout.copied(options.max_context);
  layout.selected = std::min(specache.fetched_tokens, copied);
  layout.stride = copied;
  layout.split_tokens = split_tokens(options, copied);
  layout.splits = (copied + layout.split_tokens - 1) / layout.split_tokens;
  layout.token_bytes = static_cast<std::uint32_t>(2 * index(options.head_dim) * size_of(options.kv_type));
  layout.one_layer = !options.selects_ahead;
  layout.wait_policy = options.miss_policy == MissPolicy::wait;
  layout.prefetch_tokens_per_layer = -1;
  if (options.prefetch_bytes_per_step > 0) {
    layout.prefetch_tokens_per_layer =
        static_cast<int>(std::min<std::size_t>(cpu::most_prefetches(options, layout.token_bytes), std::numeric_limits<int>::max()));
  }
  return layout;
}

std::size_t lists_of_sequence(const SpeCacheLayout& layout) { return index(layout.layers) * index(layout.kv_heads); }
int host_tokens(const SpeCacheLayout& layout, int capacity) { return rounded_up(capacity, layout.copy.tokens); }
std::size_t host_bytes(const SpeCacheLayout& layout, int capacity) {
  return lists_of_sequence(layout) * index(host_tokens(layout, capacity)) * layout.token_bytes;
}
int copy_groups(const SpeCacheLayout& layout, int capacity) { return layout.copied(capacity) / layout.copy.tokens; }
std::size_t copy_bytes(const SpeCacheLayout& layout, int capacity) {
  return lists_of_sequence(layout) * index(copy_groups(layout, capacity)) * index(layout.copy.bytes);
}

}  // namespace

void SpeCacheStore::carve(SpeCacheLayout& layout, Extras& extras, Carver& carver) {
  const std::size_t sequences = index(layout.max_sequences);
  const std::size_t lists = layout.list(layout.max_sequences, 0, 0);
  const std::size_t selected = index(layout.selected);
  const std::size_t group = index(layout.group);
  const std::size_t parts = index(layout.parts());
  layout.window = carver.take<std::byte>(lists * index(layout.ring) * layout.token_bytes);
  layout.fetched = carver.take<std::byte>(lists * selected * layout.token_bytes);
  layout.fetched_token = carver.take<int>(lists * selected);
  layout.fetched_slot = carver.take<int>(lists * selected);
  layout.fetched_count = carver.take<int>(lists);
  layout.predicted = carver.take<int>(lists * selected);
  layout.predicted_count = carver.take<int>(lists);
  layout.predicted_limit = carver.take<int>(lists);
  layout.host = carver.take<std::byte*>(sequences);
  layout.host_tokens = carver.take<int>(sequences);
  layout.copies = carver.take<std::byte*>(sequences);
  layout.copy_groups = carver.take<int>(sequences);
  layout.scores = carver.take<float>(layout.score_lists() * group * index(layout.stride));
  layout.score_max = carver.take<float>(layout.score_lists() * parts * group);
  layout.score_sum = carver.take<float>(layout.score_lists() * parts * group);
  layout.ranks = carver.take<float>(layout.row_lists() * index(layout.stride));
  layout.histogram = carver.take<int>(layout.row_lists() * index(kHistogram));
  layout.partials = carver.take<float>(layout.row_lists() * parts * group * index(layout.dim + 2));
  layout.counters = carver.take<std::uint64_t>(kCounters);
  extras.lengths = carver.take<int>(sequences);
  extras.fetch_work = carver.take<std::byte>(fetch_work_bytes(layout));
}

void SpeCacheStore::plan(const StoreOptions& options, MemoryPlan& plan) {
  SpeCacheLayout layout = layout_of(options);
  Extras extras;
  Carver counting;
  carve(layout, extras, counting);
  const std::size_t sequences = index(options.max_sequences);
  const std::size_t lists = sequences * lists_of_sequence(layout);
  const std::size_t window = lists * index(layout.ring) * layout.token_bytes;
  const std::size_t fetched = lists * index(layout.selected) * (layout.token_bytes + 3 * sizeof(int));  // with token, slot and prediction
  plan.add("attention work space", MemoryKind::device, counting.bytes() - window - fetched);
  plan.add("low-bit copy", MemoryKind::device, sequences * copy_bytes(layout, options.max_context));
  plan.add("exact last tokens", MemoryKind::device, window);
  plan.add("fetched tokens", MemoryKind::device, fetched);
  plan.add("keys and values", MemoryKind::pinned, sequences * host_bytes(layout, options.max_context));
  plan.add("counts read by the host", MemoryKind::pinned, kReadoutBytes);
}

SpeCacheStore::SpeCacheStore(const StoreOptions& options, const StoreResources& resources)
    : options_(options), resources_(resources), book_(options), sequences_(index(options.max_sequences)), layout_(layout_of(options)) {
  const DeviceGuard guard(resources_.ordinal);
  const StreamRef stream = resources_.stream;
  Carver counting;
  carve(layout_, extras_, counting);
  device_ = Buffer(*resources_.device, counting.bytes(), stream);
  readout_ = Buffer(*resources_.host, kReadoutBytes, stream);
  Carver placing(device_.data());
  carve(layout_, extras_, placing);
  check(cudaMemsetAsync(device_.data(), 0, device_.bytes(), stream.get()), "cudaMemsetAsync");
}

KvStore::Capacities SpeCacheStore::capacities() const noexcept {
  const int heads = layout_.max_sequences * layout_.kv_heads;
  return {.urgent = heads * layout_.selected,
          .prefetch = heads * layout_.selected,
          .write_back = heads * layout_.layers,
          .selection = layout_.selected};
}

void SpeCacheStore::open(int slot, int capacity_tokens, StreamRef stream) {
  book_.check_open(slot, capacity_tokens);
  const DeviceGuard guard(resources_.ordinal);
  Buffer host(*resources_.host, host_bytes(layout_, capacity_tokens), stream);
  Buffer copy(*resources_.device, copy_bytes(layout_, capacity_tokens), stream);
  set_entry(layout_.host, slot, host.data(), stream.get());
  set_entry(layout_.host_tokens, slot, host_tokens(layout_, capacity_tokens), stream.get());
  set_entry(layout_.copies, slot, copy.data(), stream.get());
  set_entry(layout_.copy_groups, slot, copy_groups(layout_, capacity_tokens), stream.get());
  forget_fetched(layout_, slot, stream.get());
  sequences_[index(slot)] = {std::move(host), std::move(copy)};
  book_.open(slot, capacity_tokens);
}

void SpeCacheStore::append(Layer layer, int slot, const KvBlock& block, ConstTensor /*last_queries*/, StreamRef stream) {
  const auto tokens = static_cast<int>(block.keys.dim(0));
  const int first = book_.check_append(layer, slot, tokens);
  check_rows(block.keys, "keys");
  check_rows(block.values, "values");
  const DeviceGuard guard(resources_.ordinal);
  append_to_copy(layout_, layer, slot, first, tokens, rows_in(block.keys), rows_in(block.values), stream.get());
  book_.append(layer, slot, tokens);
}

void SpeCacheStore::seal(int slot, StreamRef stream) {
  const int length = book_.check_seal(slot);
  const DeviceGuard guard(resources_.ordinal);
  set_entry(extras_.lengths, slot, length, stream.get());
  book_.seal(slot);
}

void SpeCacheStore::select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) {
  check_rows(queries, "queries");
  const DeviceGuard guard(resources_.ordinal);
  // when the layer before rehearses this one, what was fetched for it may still be under way
  const bool rehearsed = selecting_ >= 0 && layer == selecting_ + 1;
  if (!rehearsed) selecting_ = layer;
  score_copy(layout_, layer, view, rows_in(queries), !rehearsed, stream.get());
  choose_tokens(layout_, layer, view, by_row, !rehearsed, stream.get());
}

void SpeCacheStore::resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent,
                                   StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  needed_ = by_row;
  needed_layer_ = layer;
  urgent_ = urgent;
  deferred_ = !waits_for_loads(view);  // it then only counts, which can run beside the dense products
  if (!deferred_) fetch_needed(layout_, layer, view, by_row, urgent, stream.get());
}

void SpeCacheStore::attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& /*by_row*/, Tensor out,
                           StreamRef stream) {
  check_rows(rows.queries, "queries");
  check_rows(rows.keys, "keys");
  check_rows(rows.values, "values");
  check_rows(out, "out");
  const DeviceGuard guard(resources_.ordinal);
  selecting_ = -1;
  attend_copy(layout_, layer, view, rows_in(rows.queries), rows_in(rows.keys), rows_in(rows.values), rows_out(out), stream.get());
}

Layer SpeCacheStore::resolve_predicted(Layer /*layer*/, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                                       StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  if (std::exchange(deferred_, false)) fetch_needed(layout_, needed_layer_, view, needed_, urgent_, stream.get());
  fetch_predicted(layout_, prediction.layer, view, prediction.chunks, prefetch, extras_.fetch_work, stream.get());
  return prediction.layer;
}

void SpeCacheStore::commit(const StepView& view, const TransferList& write_back, StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  commit_to_copy(layout_, view, write_back, stream.get());
  count_committed(extras_.lengths, view, stream.get());
}

void SpeCacheStore::truncate(int slot, int tokens, StreamRef stream) {
  book_.check_sealed(slot, "truncate");
  const DeviceGuard guard(resources_.ordinal);
  const int length = read_length(extras_.lengths, slot, readout_.data(), stream);
  dualdecoder::detail::SequenceBook::check_kept(tokens, length);
  cut_copy(layout_, slot, tokens, length, stream.get());
  set_entry(extras_.lengths, slot, tokens, stream.get());
}

void SpeCacheStore::close(int slot, StreamRef /*stream*/) noexcept {
  if (book_.close(slot)) sequences_[index(slot)] = Sequence();
}

StoreStatistics SpeCacheStore::statistics() const {
  const DeviceGuard guard(resources_.ordinal);
  return read_statistics(layout_.counters, readout_.data(), resources_.stream);
}

}  // namespace dualdecoder::cuda
