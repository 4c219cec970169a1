// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/chunk_store.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cuda/check.hpp"
#include "cuda/prefetch_bound.hpp"
#include "cuda/readout.hpp"
#include "cuda/store_kernels.hpp"
#include "cuda/store_upkeep.hpp"
#include "dualdecoder/error.hpp"
#include "src/chunk_geometry.hpp"

namespace dualdecoder::cuda {
namespace {

using cpu::ChunkGeometry;
using cpu::index;

/// Shapes and policies; the arrays are still to be placed.
StoreLayout layout_of(const StoreOptions& options) {
  const ChunkGeometry geometry(options);
  const bool swaps = options.kind == StoreKind::ping_pong;
  StoreLayout layout{};
  layout.layers = options.layers;
  layout.heads = options.heads;
  layout.kv_heads = options.kv_heads;
  layout.group = geometry.group;
  layout.dim = geometry.dim;
  layout.max_sequences = options.max_sequences;
  layout.rows_per_sequence = options.rows_per_sequence;
  layout.chunk = geometry.chunk;
  layout.sink_chunks = geometry.sink_chunks;
  layout.window_chunks = geometry.window_chunks;
  layout.local_tokens = options.selection.local_tokens;
  layout.value_group = geometry.value_group;
  layout.max_chunks = (geometry.max_chunks + kTileChunks - 1) / kTileChunks * kTileChunks;
  layout.splits = (layout.max_chunks + kSplitChunks - 1) / kSplitChunks;
  layout.selected = geometry.selected_chunks;
  layout.parts = (geometry.selected_chunks * geometry.chunk + kPartTokens - 1) / kPartTokens;
  layout.slots = swaps ? geometry.selected_chunks : geometry.slots;
  layout.slot_layers = swaps ? 2 : options.layers;
  layout.swaps = swaps;
  layout.chunk_bytes = static_cast<std::uint32_t>(geometry.chunk_bytes);
  layout.one_layer = !options.selects_ahead;
  layout.tail = options.selection.tail_estimate;
  layout.row1_as_row0 = options.row1_set == Row1Set::row0;
  layout.wait_policy = options.miss_policy == MissPolicy::wait;
  layout.bias_scale = options.selection.bias_scale;
  layout.prefetch_chunks_per_layer = prefetch_bound(options, geometry.chunk_bytes);
  return layout;
}

}  // namespace

void ChunkStore::carve(StoreLayout& layout, Extras& extras, Carver& carver) {
  const std::size_t sequences = index(layout.max_sequences);
  const std::size_t lists = layout.list(layout.max_sequences, 0, 0);
  const std::size_t slot_lists = sequences * index(layout.slot_layers) * index(layout.kv_heads);
  const std::size_t chunks = index(layout.max_chunks);
  const std::size_t dim = index(layout.dim);
  const std::size_t slots = index(layout.slots);
  const std::size_t rows = layout.row_lists();
  const std::size_t group = index(layout.group);
  layout.sinks = carver.take<std::byte>(lists * index(layout.sink_chunks) * layout.chunk_bytes);
  layout.window = carver.take<std::byte>(lists * index(layout.window_chunks) * layout.chunk_bytes);
  layout.key_means = carver.take<std::int8_t>(lists * chunks * dim);
  layout.key_scales = carver.take<float>(lists * chunks);
  layout.value_tiles = carver.take<std::uint32_t>(lists * index(layout.value_tile_count()) * 2 * dim);
  layout.value_scales = carver.take<float>(lists * index(layout.value_tile_count()) * kTileChunks);
  layout.bias = carver.take<float>(sequences * index(layout.layers) * index(layout.heads));
  layout.host = carver.take<std::byte*>(sequences);
  layout.host_chunks = carver.take<int>(sequences);
  layout.predicted = carver.take<int>(lists * index(layout.selected));
  layout.predicted_count = carver.take<int>(lists);
  layout.predicted_limit = carver.take<int>(lists);
  layout.slot_of = carver.take<int>(slot_lists * chunks);
  layout.chunk_of = carver.take<int>(slot_lists * slots);
  layout.used = carver.take<std::uint32_t>(slot_lists * slots);
  layout.data = carver.take<std::byte>(slot_lists * slots * layout.chunk_bytes);
  layout.pass = carver.take<std::uint32_t>(1);
  layout.tile_max = carver.take<float>(layout.score_lists() * index(layout.splits * kSplitTiles * layout.columns()));
  layout.score_levels = carver.take<std::uint16_t>(layout.score_lists() * chunks * index(layout.columns()));
  layout.score_max = carver.take<float>(layout.work_lists() * index(layout.score_pieces()) * group);
  layout.score_sum = carver.take<float>(layout.work_lists() * index(layout.score_pieces()) * group);
  layout.partials = carver.take<float>(rows * index(layout.partial_count()) * group * (dim + 2));
  layout.counters = carver.take<std::uint64_t>(kCounters);
  extras.lengths = carver.take<int>(sequences);
  extras.queries = carver.take<float>(index(kCalibrationQueries) * index(layout.heads) * dim);
  extras.resolve_work = carver.take<std::byte>(resolve_work_bytes(layout));
  extras.calibration_work = carver.take<std::byte>(calibration_work_bytes(layout));
}

std::size_t ChunkStore::device_bytes(const StoreOptions& options) {
  StoreLayout layout = layout_of(options);
  Extras extras;
  Carver counting;
  carve(layout, extras, counting);
  return counting.bytes();
}

std::size_t ChunkStore::sequence_bytes(const StoreOptions& options, int tokens) {
  const ChunkGeometry geometry(options);
  const std::size_t chunks = index((tokens + geometry.chunk - 1) / geometry.chunk);
  return index(options.layers) * index(options.kv_heads) * chunks * geometry.chunk_bytes;
}

std::size_t ChunkStore::calibration_bytes(const StoreOptions& options) {
  return index(options.layers) * index(kCalibrationQueries) * index(options.heads) * index(options.head_dim) * sizeof(float);
}

ChunkStore::ChunkStore(const StoreOptions& options, const StoreResources& resources)
    : options_(options), resources_(resources), book_(options), sequences_(index(options.max_sequences)), layout_(layout_of(options)) {
  const DeviceGuard guard(resources_.ordinal);
  const StreamRef stream = resources_.stream;
  device_ = Buffer(*resources_.device, device_bytes(options), stream);
  readout_ = Buffer(*resources_.host, kReadoutBytes, stream);
  Carver placing(device_.data());
  carve(layout_, extras_, placing);
  check(cudaMemsetAsync(device_.data(), 0, device_.bytes(), stream.get()), "cudaMemsetAsync");
  clear_store(layout_, stream.get());
}

KvStore::Capacities ChunkStore::capacities() const noexcept {
  const int heads = layout_.max_sequences * layout_.kv_heads;
  return {.urgent = heads * layout_.selected,
          .prefetch = (layout_.swaps ? 1 : 2) * heads * layout_.selected,
          .write_back = heads * layout_.layers,
          .selection = layout_.selected};
}

void ChunkStore::open(int slot, int capacity_tokens, StreamRef stream) {
  book_.check_open(slot, capacity_tokens);
  const DeviceGuard guard(resources_.ordinal);
  Buffer host(*resources_.host, sequence_bytes(options_, capacity_tokens), stream);
  Buffer calibration(*resources_.device, calibration_bytes(options_), stream);
  set_entry(layout_.host, slot, host.data(), stream.get());
  set_entry(layout_.host_chunks, slot, (capacity_tokens + layout_.chunk - 1) / layout_.chunk, stream.get());
  forget_chunks(layout_, slot, 0, stream.get());
  sequences_[index(slot)] = {std::move(host), std::move(calibration), std::vector<int>(index(layout_.layers))};
  book_.open(slot, capacity_tokens);
}

float* ChunkStore::ring_of(int slot, Layer layer) noexcept {
  return reinterpret_cast<float*>(sequences_[index(slot)].calibration.data()) + index(layer) * index(kCalibrationQueries) * query_row();
}

void ChunkStore::keep_queries(Layer layer, int slot, const ConstTensor& queries, StreamRef stream) {
  const auto given = static_cast<int>(queries.dim(0));
  const int rows = std::min(given, kCalibrationQueries);
  int& kept = sequences_[index(slot)].kept_queries[index(layer)];
  if (rows == kCalibrationQueries) kept = 0;  // they replace all others, so the ring may begin anew
  const std::size_t skipped = index(given - rows) * query_row() * size_of(queries.type);
  keep_rows({static_cast<const std::byte*>(queries.data) + skipped, queries.type == DataType::bf16}, rows, query_row(),
            ring_of(slot, layer), kCalibrationQueries, kept % kCalibrationQueries, stream.get());
  kept += rows;
}

void ChunkStore::append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) {
  const auto tokens = static_cast<int>(block.keys.dim(0));
  const int first = book_.check_append(layer, slot, tokens);
  check_rows(block.keys, "keys");
  check_rows(block.values, "values");
  const DeviceGuard guard(resources_.ordinal);
  append_tokens(layout_, layer, slot, first, tokens, rows_in(block.keys), rows_in(block.values), stream.get());
  if (last_queries) {
    check_rows(last_queries, "last_queries");
    keep_queries(layer, slot, last_queries, stream);
  }
  book_.append(layer, slot, tokens);
}

void ChunkStore::calibrate(Layer layer, int slot, int length, StreamRef stream) {
  const int kept = std::min(sequences_[index(slot)].kept_queries[index(layer)], kCalibrationQueries);
  const int oldest = sequences_[index(slot)].kept_queries[index(layer)] - kept;
  const float* queries = ring_of(slot, layer);
  if (oldest % kCalibrationQueries != 0) {
    // two pieces of the ring, put in order
    const int at = oldest % kCalibrationQueries;
    const std::size_t row_bytes = query_row() * sizeof(float);
    const std::size_t old_bytes = index(kCalibrationQueries - at) * row_bytes;
    auto* const target = reinterpret_cast<std::byte*>(extras_.queries);
    check(cudaMemcpyAsync(target, queries + index(at) * query_row(), old_bytes, cudaMemcpyDeviceToDevice, stream.get()), "cudaMemcpyAsync");
    check(cudaMemcpyAsync(target + old_bytes, queries, index(at) * row_bytes, cudaMemcpyDeviceToDevice, stream.get()), "cudaMemcpyAsync");
    queries = extras_.queries;
  }
  StoreLayout layout = layout_;
  layout.tail = options_.selection.tail_estimate && options_.selection.calibrate_tail;
  calibrate_layer(layout, layer, slot, length, queries, kept, extras_.calibration_work, stream.get());
}

void ChunkStore::seal(int slot, StreamRef stream) {
  const int length = book_.check_seal(slot);
  const DeviceGuard guard(resources_.ordinal);
  set_entry(extras_.lengths, slot, length, stream.get());
  for (Layer layer = 0; layer < layout_.layers; ++layer) calibrate(layer, slot, length, stream);
  sequences_[index(slot)].calibration = Buffer();
  book_.seal(slot);
}

void ChunkStore::select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) {
  check_rows(queries, "queries");
  const DeviceGuard guard(resources_.ordinal);
  score_summaries(layout_, layer, view, rows_in(queries), stream.get());
  choose_chunks(layout_, layer, view, by_row, stream.get());
}

void ChunkStore::resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  needed_ = by_row;
  needed_layer_ = layer;
  urgent_ = urgent;
  // where nothing is loaded for it, attention does not rest on what this does to the tables: it can run beside the dense products
  deferred_ = !layout_.swaps && !waits_for_loads(view);
  if (!deferred_) cuda::resolve_needed(layout_, layer, view, by_row, urgent, stream.get());
}

void ChunkStore::attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) {
  check_rows(rows.queries, "queries");
  check_rows(rows.keys, "keys");
  check_rows(rows.values, "values");
  check_rows(out, "out");
  const DeviceGuard guard(resources_.ordinal);
  attend_chunks(layout_, layer, view, rows_in(rows.queries), rows_in(rows.keys), rows_in(rows.values), by_row, rows_out(out), stream.get());
}

Layer ChunkStore::resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                                    StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  if (layout_.swaps) {
    const Layer ahead = prediction.this_step ? prediction.layer : layer + 2;
    load_buffer(layout_, prediction.layer, ahead, view, prediction.chunks, prefetch, extras_.resolve_work, stream.get());
    return ahead % layout_.layers;
  }
  if (std::exchange(deferred_, false)) cuda::resolve_needed(layout_, needed_layer_, view, needed_, urgent_, stream.get());
  // what row 0 had to estimate is likely to be needed again; under `wait` it had to estimate nothing
  const bool missed = !layout_.wait_policy && prediction.layer == layer && needed_layer_ == layer;
  cuda::resolve_predicted(layout_, prediction.layer, view, prediction.chunks, missed ? &needed_ : nullptr, prefetch, extras_.resolve_work,
                          stream.get());
  return prediction.layer;
}

void ChunkStore::commit(const StepView& view, const TransferList& write_back, StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  commit_rows(layout_, view, write_back, stream.get());
  count_committed(extras_.lengths, view, stream.get());
}

void ChunkStore::truncate(int slot, int tokens, StreamRef stream) {
  book_.check_sealed(slot, "truncate");
  const DeviceGuard guard(resources_.ordinal);
  const int length = read_length(extras_.lengths, slot, readout_.data(), stream);
  dualdecoder::detail::SequenceBook::check_kept(tokens, length);
  restore_window(layout_, slot, tokens, length, stream.get());
  restore_value_group(layout_, slot, tokens, stream.get());
  forget_chunks(layout_, slot, layout_.swaps ? 0 : layout_.range_end(tokens), stream.get());
  set_entry(extras_.lengths, slot, tokens, stream.get());
}

void ChunkStore::close(int slot, StreamRef /*stream*/) noexcept {
  if (!book_.close(slot)) return;
  sequences_[index(slot)] = Sequence();
}

StoreStatistics ChunkStore::statistics() const {
  const DeviceGuard guard(resources_.ordinal);
  return read_statistics(layout_.counters, readout_.data(), resources_.stream);
}

}  // namespace dualdecoder::cuda
