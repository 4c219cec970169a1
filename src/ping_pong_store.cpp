// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/ping_pong_store.hpp"

#include <algorithm>
#include <tuple>

#include "dualdecoder/error.hpp"
#include "src/planned_pieces.hpp"
#include "src/prefetch_bound.hpp"

namespace dualdecoder::cpu {

PingPongStore::PingPongStore(const StoreOptions& options, const StoreResources& resources) : ChunkStore(options, resources) {
  detail::require(options.layers >= 2, "layers", options.layers, "at least 2 for the ping-pong store");
  const std::size_t parts = 2 * index(options.max_sequences) * index(options.kv_heads);
  const std::size_t selected = index(geometry_.selected_chunks);
  const bool placed = allocate([&](Carver& carver, MemoryPlan& plan) {
    carve(carver, plan);
    PlannedPieces pieces(carver, plan);
    slot_of_ = carver.take<int>(parts * index(geometry_.max_chunks));
    chunk_of_ = carver.take<int>(parts * selected);
    pieces.enter("tables of slots");
    data_ = carver.take<std::byte>(parts * selected * geometry_.chunk_bytes);
    pieces.enter("two layers' slots");
    pending_ = carver.take<int>(head_count() * selected);
    pending_score_ = carver.take<float>(head_count() * selected);
    pending_count_ = carver.take<int>(head_count());
    pieces.enter("predictions");
  });
  if (!placed) return;
  std::fill_n(slot_of_, parts * index(geometry_.max_chunks), -1);
  std::fill_n(chunk_of_, parts * selected, -1);
  std::fill_n(pending_count_, head_count(), 0);
  missing_.reserve(selected);
  wishes_.reserve(index(capacities().prefetch));
}

KvStore::Capacities PingPongStore::capacities() const noexcept {
  const int heads = options_.max_sequences * options_.kv_heads;
  return {.urgent = heads * geometry_.selected_chunks,
          .prefetch = heads * geometry_.selected_chunks,
          .write_back = heads * options_.layers,
          .selection = geometry_.selected_chunks};
}

PingPongStore::Part PingPongStore::part_of(int buffer, int slot, int kv_head) const noexcept {
  const std::size_t at = (index(buffer) * index(options_.max_sequences) + index(slot)) * index(options_.kv_heads) + index(kv_head);
  const std::size_t selected = index(geometry_.selected_chunks);
  return {slot_of_ + at * index(geometry_.max_chunks), chunk_of_ + at * selected, data_ + at * selected * geometry_.chunk_bytes};
}

void PingPongStore::clear(const Part& part) const {
  for (int s = 0; s < geometry_.selected_chunks; ++s) {
    if (part.chunk_of[s] >= 0) part.slot_of[part.chunk_of[s]] = -1;
    part.chunk_of[s] = -1;
  }
}

const std::byte* PingPongStore::resident(const Head& head, int chunk) const {
  const std::uint64_t run = run_of(head.layer);
  const int buffer = buffer_of(run);
  if (holds_[buffer] != run) return nullptr;
  const Part part = part_of(buffer, head.slot, head.kv_head);
  const int slot = part.slot_of[chunk];
  return slot < 0 ? nullptr : part.data + index(slot) * geometry_.chunk_bytes;
}

void PingPongStore::resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef) {
  *urgent.count = 0;
  const std::uint64_t run = run_of(layer);
  const int buffer = buffer_of(run);
  if (holds_[buffer] != run) {  // nothing was loaded for this layer, so the buffer holds another one
    for (int part = 0; part < options_.max_sequences * options_.kv_heads; ++part) {
      clear(part_of(buffer, part / options_.kv_heads, part % options_.kv_heads));
    }
    holds_[buffer] = run;
  }
  for (int place = 0; place < view.sequences; ++place) {
    if (!row_is_live(view.mode[place], 0)) continue;
    const int row = place * view.rows_per_sequence;
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      const Head head{view.slot_of[place], layer, kv_head};
      const Part part = part_of(buffer, head.slot, kv_head);
      const std::span<const int> needed(by_row.chunks_of(row, kv_head), index(by_row.count_of(row, kv_head)));
      count_predicted(head, needed);
      missing_.clear();
      for (int chunk : needed) {
        if (part.slot_of[chunk] < 0) missing_.push_back(chunk);
      }
      statistics_.resident_hit += needed.size() - missing_.size();
      if (!waits(view, place)) {
        statistics_.estimated += missing_.size();
        continue;
      }
      int slot = 0;
      for (int chunk : missing_) {
        // a buffer has room for a budget, so a slot is left whose chunk is not needed
        while (part.chunk_of[slot] >= 0 && std::binary_search(needed.begin(), needed.end(), part.chunk_of[slot])) ++slot;
        if (part.chunk_of[slot] >= 0) part.slot_of[part.chunk_of[slot]] = -1;
        part.chunk_of[slot] = chunk;
        part.slot_of[chunk] = slot;
        urgent.items[(*urgent.count)++] = {host_chunk(head, chunk), part.data + index(slot) * geometry_.chunk_bytes,
                                           static_cast<std::uint32_t>(geometry_.chunk_bytes), 1.0F};
        statistics_.urgent_bytes += geometry_.chunk_bytes;
      }
    }
  }
}

void PingPongStore::load(std::uint64_t run, const StepView& view, Layer target, const TransferList& prefetch) {
  const int buffer = buffer_of(run);
  for (int part = 0; part < options_.max_sequences * options_.kv_heads; ++part) {
    clear(part_of(buffer, part / options_.kv_heads, part % options_.kv_heads));
  }
  holds_[buffer] = run;
  const std::size_t allowed = std::min(index(prefetch.capacity), most_prefetches(options_, geometry_.chunk_bytes));
  wishes_.clear();
  for (int place = 0; place < view.sequences; ++place) {
    if (view.mode[place] == RowMode::idle) continue;
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      const Head head{view.slot_of[place], target, kv_head};
      for (int i = 0; i < pending_count_[head_index(head)]; ++i) {
        wishes_.push_back({pending_score_[list_of(head) + index(i)], head.slot, kv_head, pending_[list_of(head) + index(i)]});
      }
      pending_count_[head_index(head)] = 0;
    }
  }
  // the best of all heads first, so that a bound cuts the least important
  std::sort(wishes_.begin(), wishes_.end(), [](const Wish& a, const Wish& b) {
    return std::tuple(-a.score, a.slot, a.kv_head, a.chunk) < std::tuple(-b.score, b.slot, b.kv_head, b.chunk);
  });
  for (const Wish& wish : wishes_) {
    if (index(*prefetch.count) >= allowed) {
      ++statistics_.prefetch_dropped;
      continue;
    }
    const Part part = part_of(buffer, wish.slot, wish.kv_head);
    const int slot = static_cast<int>(std::find(part.chunk_of, part.chunk_of + geometry_.selected_chunks, -1) - part.chunk_of);
    part.chunk_of[slot] = wish.chunk;
    part.slot_of[wish.chunk] = slot;
    prefetch.items[(*prefetch.count)++] = {host_chunk({wish.slot, target, wish.kv_head}, wish.chunk),
                                           part.data + index(slot) * geometry_.chunk_bytes,
                                           static_cast<std::uint32_t>(geometry_.chunk_bytes), wish.score};
    statistics_.prefetch_bytes += geometry_.chunk_bytes;
  }
}

Layer PingPongStore::resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                                       StreamRef) {
  *prefetch.count = 0;
  const Selection& predicted = prediction.chunks;
  for (int place = 0; predicted.chunks != nullptr && place < view.sequences; ++place) {
    if (view.mode[place] == RowMode::idle) continue;
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      const Head head{view.slot_of[place], prediction.layer, kv_head};
      const int count = std::min(predicted.count_of(place, kv_head), geometry_.selected_chunks);
      std::copy_n(predicted.chunks_of(place, kv_head), count, pending_ + list_of(head));
      std::copy_n(predicted.scores_of(place, kv_head), count, pending_score_ + list_of(head));
      pending_count_[head_index(head)] = count;
      remember_prediction(head, {predicted.chunks_of(place, kv_head), index(count)});
    }
  }
  if (prediction.this_step) {
    load(run_of(prediction.layer), view, prediction.layer, prefetch);
    return prediction.layer;
  }
  const Layer target = (layer + 2) % options_.layers;
  load(run_of(layer) + 2, view, target, prefetch);
  return target;
}

void PingPongStore::forget(int slot, int first_chunk) {
  for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
    for (int buffer = 0; buffer < 2; ++buffer) clear(part_of(buffer, slot, kv_head));
    for (Layer layer = 0; layer < options_.layers; ++layer) {
      const Head head{slot, layer, kv_head};
      int& count = pending_count_[head_index(head)];
      if (first_chunk == 0) count = 0;
      while (count > 0 && pending_[list_of(head) + index(count - 1)] >= first_chunk) --count;
    }
  }
}

}  // namespace dualdecoder::cpu
