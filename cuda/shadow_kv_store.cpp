// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/shadow_kv_store.hpp"

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
#include "src/planned_pieces.hpp"
#include "src/rope_frequencies.hpp"

namespace dualdecoder::cuda {
namespace {

using cpu::ChunkGeometry;
using cpu::index;
using dualdecoder::detail::rope_frequencies;
using dualdecoder::detail::RopeFrequencies;

constexpr int kFactoredTokens = 4096;  // that are turned back and multiplied at a time

/// Beside the whole chunks of the local window: the unfinished one, the guess's, and one whose values may still be on their way to the
/// host.
constexpr int kWindowSpare = 3;

/// Shapes and policies; the arrays are still to be placed.
ShadowLayout layout_of(const StoreOptions& options) {
  const ChunkGeometry geometry(options);
  const ShadowKvOptions& shadow = options.shadow_kv;
  ShadowLayout layout{};
  StoreLayout& store = layout.store;
  store.layers = options.layers;
  store.heads = options.heads;
  store.kv_heads = options.kv_heads;
  store.group = geometry.group;
  store.dim = geometry.dim;
  store.max_sequences = options.max_sequences;
  store.rows_per_sequence = options.rows_per_sequence;
  store.chunk = geometry.chunk;
  store.window_chunks = shadow.local_chunks + kWindowSpare;
  store.local_tokens = shadow.local_chunks * geometry.chunk;
  store.max_chunks = (geometry.max_chunks + kTileChunks - 1) / kTileChunks * kTileChunks;
  store.selected = geometry.selected_chunks;
  store.slots = geometry.selected_chunks;
  store.slot_layers = options.layers;
  store.chunk_bytes = static_cast<std::uint32_t>(geometry.chunk_bytes);
  store.load_offset = store.chunk_bytes / 2;
  store.row1_as_row0 = options.row1_set == Row1Set::row0;
  store.wait_policy = true;
  store.prefetch_chunks_per_layer = prefetch_bound(options, store.loaded_bytes());
  layout.rank = std::min(shadow.rank, layout.width());
  layout.outlier_slots = std::min(shadow.outlier_chunks, geometry.max_chunks);
  const int attended = layout.outlier_slots + store.selected + store.window_chunks;
  layout.parts = (attended * store.chunk + kPartTokens - 1) / kPartTokens;
  layout.rotation_scale = rope_frequencies(options.rope, options.head_dim).attention_factor;
  return layout;
}

KeyFactors::Shape factor_shape(const StoreOptions& options, const ShadowLayout& layout) {
  return {
      .width = layout.width(), .rank = layout.rank, .block = std::min(kFactoredTokens, options.max_context), .matrices = options.layers};
}

std::size_t host_bytes(const StoreOptions& options, int tokens) {
  const ChunkGeometry geometry(options);
  const std::size_t chunks = index((tokens + geometry.chunk - 1) / geometry.chunk);
  return index(options.layers) * index(options.kv_heads) * chunks * geometry.chunk_bytes / 2;
}

std::size_t prompt_bytes(const StoreOptions& options, int tokens) {
  return index(options.layers) * index(tokens) * index(options.kv_heads) * index(options.head_dim) * sizeof(__nv_bfloat16);
}

std::size_t prefill_bytes(const StoreOptions& options, const ShadowLayout& layout) {
  Carver counting;
  KeyFactors::carve(factor_shape(options, layout), counting);
  return counting.bytes();
}

void require_cusolver() {
  if (!has_cusolver()) {
    throw InvalidArgument("store kind = shadow_kv: needs a build with cuSOLVER on the CUDA backend (CMake option DUALDECODER_CUSOLVER)");
  }
}

}  // namespace

void ShadowKvStore::carve(ShadowLayout& layout, Extras& extras, Carver& carver, MemoryPlan& plan) {
  StoreLayout& store = layout.store;
  const std::size_t sequences = index(store.max_sequences);
  const std::size_t lists = store.list(store.max_sequences, 0, 0);
  const std::size_t chunks = index(store.max_chunks);
  const std::size_t slots = index(store.slots);
  const std::size_t dim = index(store.dim);
  const std::size_t group = index(store.group);
  const std::size_t rows = store.row_lists();
  const std::size_t rank = index(layout.rank);
  const std::size_t outliers = index(layout.outlier_slots);
  cpu::PlannedPieces pieces(carver, plan);
  layout.directions = carver.take<__nv_bfloat16>(lists * rank * dim);
  layout.coefficients = carver.take<__nv_bfloat16>(sequences * index(store.layers) * chunks * index(store.chunk) * rank);
  pieces.enter("low-rank keys");
  layout.landmarks = carver.take<__nv_bfloat16>(lists * chunks * dim);
  pieces.enter("landmarks");
  layout.outliers = carver.take<std::byte>(lists * outliers * store.chunk_bytes);
  layout.outlier_chunks = carver.take<int>(lists * outliers);
  layout.outlier_count = carver.take<int>(lists);
  layout.outlier_bits = carver.take<std::uint32_t>(lists * index(layout.bit_words()));
  pieces.enter("outlier chunks");
  store.window = carver.take<std::byte>(lists * index(store.window_chunks) * store.chunk_bytes);
  pieces.enter("local window");
  store.data = carver.take<std::byte>(lists * slots * store.chunk_bytes);
  pieces.enter("buffers of chosen chunks");
  store.slot_of = carver.take<int>(lists * chunks);
  store.chunk_of = carver.take<int>(lists * slots);
  store.used = carver.take<std::uint32_t>(lists * slots);
  layout.keys_of = carver.take<int>(lists * slots);
  store.predicted = carver.take<int>(lists * index(store.selected));
  store.predicted_count = carver.take<int>(lists);
  store.predicted_limit = carver.take<int>(lists);
  store.host = carver.take<std::byte*>(sequences);
  store.host_chunks = carver.take<int>(sequences);
  extras.lengths = carver.take<int>(sequences);
  store.pass = carver.take<std::uint32_t>(1);
  store.counters = carver.take<std::uint64_t>(kCounters);
  pieces.enter("tables of chunks");
  layout.inverse = carver.take<float>(dim / 2);
  layout.scores = carver.take<float>(rows * group * chunks);
  layout.score_max = carver.take<float>(rows * index(layout.score_splits()) * group);
  layout.score_sum = carver.take<float>(rows * index(layout.score_splits()) * group);
  layout.ranks = carver.take<float>(rows * chunks);
  layout.partials = carver.take<float>(rows * index(layout.parts) * group * (dim + 2));
  extras.resolve_work = carver.take<std::byte>(resolve_work_bytes(store));
  pieces.enter("rotations and work space");
}

MemoryPlan ShadowKvStore::plan(const StoreOptions& options) {
  require_cusolver();
  ShadowLayout layout = layout_of(options);
  Extras extras;
  Carver counting;
  MemoryPlan plan;
  carve(layout, extras, counting, plan);
  plan.add("factorisation of one prompt", MemoryKind::device, prefill_bytes(options, layout));
  plan.add("keys of one prompt", MemoryKind::pinned, prompt_bytes(options, options.max_context));
  plan.add("values", MemoryKind::pinned, index(options.max_sequences) * host_bytes(options, options.max_context));
  plan.add("counts read by the host", MemoryKind::pinned, kReadoutBytes);
  return plan;
}

ShadowKvStore::ShadowKvStore(const StoreOptions& options, const StoreResources& resources)
    : options_(options), resources_(resources), book_(options), sequences_(index(options.max_sequences)), layout_(layout_of(options)) {
  require_cusolver();
  const DeviceGuard guard(resources_.ordinal);
  const StreamRef stream = resources_.stream;
  Carver counting;
  MemoryPlan counted;
  ShadowLayout shape = layout_;
  carve(shape, extras_, counting, counted);
  device_ = Buffer(*resources_.device, counting.bytes(), stream);
  readout_ = Buffer(*resources_.host, kReadoutBytes, stream);
  Carver placing(device_.data());
  MemoryPlan placed;
  carve(layout_, extras_, placing, placed);
  check(cudaMemsetAsync(device_.data(), 0, device_.bytes(), stream.get()), "cudaMemsetAsync");
  clear_store(layout_.store, stream.get());
  const std::size_t slots = layout_.store.list(layout_.store.max_sequences, 0, 0) * index(layout_.store.slots);
  check(cudaMemsetAsync(layout_.keys_of, 0xFF, slots * sizeof(int), stream.get()), "cudaMemsetAsync");
  const RopeFrequencies rope = rope_frequencies(options.rope, options.head_dim);
  check(cudaMemcpyAsync(layout_.inverse, rope.inverse.data(), rope.inverse.size() * sizeof(float), cudaMemcpyHostToDevice, stream.get()),
        "cudaMemcpyAsync");
  factors_.emplace(factor_shape(options_, layout_));
}

KvStore::Capacities ShadowKvStore::capacities() const noexcept {
  const StoreLayout& store = layout_.store;
  const int heads = store.max_sequences * store.kv_heads;
  return {.urgent = heads * store.selected,
          .prefetch = heads * store.selected,
          .write_back = heads * store.layers,
          .selection = store.selected};
}

PromptKeys ShadowKvStore::prompt_of(int slot) const noexcept {
  return {reinterpret_cast<__nv_bfloat16*>(sequences_[index(slot)].prompt_keys.data()), book_.capacity(slot)};
}

void ShadowKvStore::open(int slot, int capacity_tokens, StreamRef stream) {
  book_.check_open(slot, capacity_tokens);
  const DeviceGuard guard(resources_.ordinal);
  Sequence sequence{.values = Buffer(*resources_.host, host_bytes(options_, capacity_tokens), stream),
                    .prompt_keys = Buffer(*resources_.host, prompt_bytes(options_, capacity_tokens), stream),
                    .prefill_work = Buffer(*resources_.device, prefill_bytes(options_, layout_), stream)};
  const StoreLayout& store = layout_.store;
  set_entry(store.host, slot, sequence.values.data(), stream.get());
  set_entry(store.host_chunks, slot, (capacity_tokens + store.chunk - 1) / store.chunk, stream.get());
  forget_chunks(store, slot, 0, stream.get());
  forget_shadow(layout_, slot, 0, stream.get());
  sequences_[index(slot)] = std::move(sequence);
  book_.open(slot, capacity_tokens);
}

void ShadowKvStore::append(Layer layer, int slot, const KvBlock& block, ConstTensor /*last_queries*/, StreamRef stream) {
  const auto tokens = static_cast<int>(block.keys.dim(0));
  const int first = book_.check_append(layer, slot, tokens);
  check_rows(block.keys, "keys");
  check_rows(block.values, "values");
  const DeviceGuard guard(resources_.ordinal);
  append_shadow(layout_, prompt_of(slot), layer, slot, first, tokens, rows_in(block.keys), rows_in(block.values), stream.get());
  book_.append(layer, slot, tokens);
}

void ShadowKvStore::factor(Layer layer, int slot, int length, const KeyFactors::Work& work, StreamRef stream) {
  const int block = factor_shape(options_, layout_).block;
  const PromptKeys prompt = prompt_of(slot);
  factors_->clear(work, stream.get());
  for (int first = 0; first < length; first += block) {
    const int count = std::min(block, length - first);
    unrotate_rows(layout_, prompt, layer, first, count, work.rows, stream.get());
    factors_->add(work, count, stream.get());
  }
  factors_->solve(work, layer, *resources_.device, stream.get());
  keep_directions(layout_, layer, slot, work.gram, work.vectors, stream.get());
  const int whole = length / layout_.store.chunk * layout_.store.chunk;
  for (int first = 0; first < whole; first += block) {
    const int count = std::min(block, whole - first);
    if (length > block) unrotate_rows(layout_, prompt, layer, first, count, work.rows, stream.get());  // else they are still there
    factors_->project(work, count, stream.get());
    keep_coefficients(layout_, layer, slot, first, count, work.products, stream.get());
  }
}

void ShadowKvStore::seal(int slot, StreamRef stream) {
  const int length = book_.check_seal(slot);
  const DeviceGuard guard(resources_.ordinal);
  Sequence& sequence = sequences_[index(slot)];
  Carver carver(sequence.prefill_work.data());
  const KeyFactors::Work work = KeyFactors::carve(factor_shape(options_, layout_), carver);
  for (Layer layer = 0; layer < layout_.store.layers; ++layer) factor(layer, slot, length, work, stream);
  finish_prompt(layout_, prompt_of(slot), slot, length, stream.get());
  set_entry(extras_.lengths, slot, length, stream.get());
  KeyFactors::require_converged(work, layout_.store.layers, stream.get());
  sequence.prompt_keys = Buffer();
  sequence.prefill_work = Buffer();
  book_.seal(slot);
}

void ShadowKvStore::select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) {
  check_rows(queries, "queries");
  const DeviceGuard guard(resources_.ordinal);
  select_landmarks(layout_, layer, view, rows_in(queries), by_row, stream.get());
}

void ShadowKvStore::resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent,
                                   StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  cuda::resolve_needed(layout_.store, layer, view, by_row, urgent, stream.get());
}

void ShadowKvStore::attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) {
  check_rows(rows.queries, "queries");
  check_rows(rows.keys, "keys");
  check_rows(rows.values, "values");
  check_rows(out, "out");
  const DeviceGuard guard(resources_.ordinal);
  rebuild_chosen(layout_, layer, view, by_row, stream.get());
  attend_shadow(layout_, layer, view, rows_in(rows.queries), rows_in(rows.keys), rows_in(rows.values), by_row, rows_out(out), stream.get());
}

Layer ShadowKvStore::resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                                       StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  if (!options_.shadow_kv.reuse) empty_slots(layout_, layer, view, stream.get());
  cuda::resolve_predicted(layout_.store, prediction.layer, view, prediction.chunks, nullptr, prefetch, extras_.resolve_work, stream.get());
  return prediction.layer;
}

void ShadowKvStore::commit(const StepView& view, const TransferList& write_back, StreamRef stream) {
  const DeviceGuard guard(resources_.ordinal);
  commit_shadow(layout_, view, write_back, stream.get());
  count_committed(extras_.lengths, view, stream.get());
}

void ShadowKvStore::truncate(int slot, int tokens, StreamRef stream) {
  book_.check_sealed(slot, "truncate");
  const DeviceGuard guard(resources_.ordinal);
  const int length = read_length(extras_.lengths, slot, readout_.data(), stream);
  dualdecoder::detail::SequenceBook::check_kept(tokens, length);
  restore_shadow_window(layout_, slot, tokens, length, stream.get());
  forget_chunks(layout_.store, slot, layout_.store.range_end(tokens), stream.get());
  forget_shadow(layout_, slot, layout_.store.range_end(tokens), stream.get());
  set_entry(extras_.lengths, slot, tokens, stream.get());
}

void ShadowKvStore::close(int slot, StreamRef /*stream*/) noexcept {
  if (book_.close(slot)) sequences_[index(slot)] = Sequence();
}

StoreStatistics ShadowKvStore::statistics() const {
  const DeviceGuard guard(resources_.ordinal);
  return read_statistics(layout_.store.counters, readout_.data(), resources_.stream);
}

}  // namespace dualdecoder::cuda
