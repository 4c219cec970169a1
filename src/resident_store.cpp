// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/resident_store.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>

#include "src/planned_pieces.hpp"
#include "src/prefetch_bound.hpp"

namespace dualdecoder::cpu {

ResidentStore::ResidentStore(const StoreOptions& options, const StoreResources& resources) : ChunkStore(options, resources) {
  const bool placed = allocate([this](Carver& carver, MemoryPlan& plan) {
    carve(carver, plan);
    PlannedPieces pieces(carver, plan);
    slot_of_ = carver.take<int>(head_count() * index(geometry_.max_chunks));
    chunk_of_ = carver.take<int>(head_count() * index(geometry_.slots));
    used_ = carver.take<std::uint32_t>(head_count() * index(geometry_.slots));
    pieces.enter("tables of slots");
    data_ = carver.take<std::byte>(head_count() * index(geometry_.slots) * geometry_.chunk_bytes);
    pieces.enter("slots");
  });
  if (!placed) return;
  std::fill_n(slot_of_, head_count() * index(geometry_.max_chunks), -1);
  std::fill_n(chunk_of_, head_count() * index(geometry_.slots), -1);
  std::fill_n(used_, head_count() * index(geometry_.slots), 0U);
  missing_.reserve(index(geometry_.selected_chunks));
  victims_.reserve(index(geometry_.slots));
  candidates_.reserve(index(capacities().prefetch));
  missed_.reserve(index(capacities().urgent));
}

KvStore::Capacities ResidentStore::capacities() const noexcept {
  const int heads = options_.max_sequences * options_.kv_heads;
  return {.urgent = heads * geometry_.selected_chunks,
          .prefetch = 2 * heads * geometry_.selected_chunks,
          .write_back = heads * options_.layers,
          .selection = geometry_.selected_chunks};
}

ResidentStore::Slots ResidentStore::slots_of(const Head& head) const noexcept {
  const std::size_t at = head_index(head);
  const std::size_t slots = index(geometry_.slots);
  return {slot_of_ + at * index(geometry_.max_chunks), chunk_of_ + at * slots, used_ + at * slots,
          data_ + at * slots * geometry_.chunk_bytes};
}

const std::byte* ResidentStore::resident(const Head& head, int chunk) const {
  const Slots slots = slots_of(head);
  const int slot = slots.slot_of[chunk];
  return slot < 0 ? nullptr : slots.data + index(slot) * geometry_.chunk_bytes;
}

std::span<const int> ResidentStore::victims(const Slots& slots, std::uint32_t before, int wanted) {
  victims_.clear();
  for (int slot = 0; slot < geometry_.slots; ++slot) {
    if (slots.used[slot] < before) victims_.push_back(slot);
  }
  const int count = std::min(wanted, static_cast<int>(victims_.size()));
  std::partial_sort(victims_.begin(), victims_.begin() + count, victims_.end(),
                    [&](int a, int b) { return std::tie(slots.used[a], a) < std::tie(slots.used[b], b); });
  return {victims_.data(), index(count)};
}

void ResidentStore::place(const Slots& slots, int slot, int chunk, std::uint32_t time) const {
  if (slots.chunk_of[slot] >= 0) slots.slot_of[slots.chunk_of[slot]] = -1;
  slots.chunk_of[slot] = chunk;
  slots.slot_of[chunk] = slot;
  slots.used[slot] = time;
}

void ResidentStore::resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef) {
  constexpr std::uint32_t kPinned = std::numeric_limits<std::uint32_t>::max();
  *urgent.count = 0;
  missed_.clear();
  for (int place_index = 0; place_index < view.sequences; ++place_index) {
    if (!row_is_live(view.mode[place_index], 0)) continue;
    const int row = place_index * view.rows_per_sequence;
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      const Head head{view.slot_of[place_index], layer, kv_head};
      const Slots slots = slots_of(head);
      const std::span<const int> needed(by_row.chunks_of(row, kv_head), index(by_row.count_of(row, kv_head)));
      count_predicted(head, needed);
      missing_.clear();
      for (int chunk : needed) {
        const int slot = slots.slot_of[chunk];
        if (slot < 0) {
          missing_.push_back(chunk);
        } else {
          slots.used[slot] = kPinned;
          ++statistics_.resident_hit;
        }
      }
      if (!waits(view, place_index)) {
        statistics_.estimated += missing_.size();
        const float* scores = by_row.scores_of(row, kv_head);
        for (int chunk : missing_) {
          missed_.push_back(
              {true, scores[std::lower_bound(needed.begin(), needed.end(), chunk) - needed.begin()], head.slot, kv_head, chunk});
        }
      } else if (!missing_.empty()) {
        // a budget never exceeds the slots, so there is a victim for every miss
        const std::span<const int> free = victims(slots, kPinned, static_cast<int>(missing_.size()));
        for (std::size_t i = 0; i < missing_.size(); ++i) {
          place(slots, free[i], missing_[i], kPinned);
          urgent.items[(*urgent.count)++] = {host_chunk(head, missing_[i]), slots.data + index(free[i]) * geometry_.chunk_bytes,
                                             static_cast<std::uint32_t>(geometry_.chunk_bytes), 1.0F};
          statistics_.urgent_bytes += geometry_.chunk_bytes;
        }
      }
      for (int chunk : needed) {
        if (slots.slot_of[chunk] >= 0) slots.used[slots.slot_of[chunk]] = needed_time();
      }
    }
  }
}

void ResidentStore::add_candidates(const Head& head, std::span<const int> predicted, const float* scores) {
  const Slots slots = slots_of(head);
  for (std::size_t i = 0; i < predicted.size(); ++i) {
    const int slot = slots.slot_of[predicted[i]];
    if (slot >= 0) {
      slots.used[slot] = predicted_time();
    } else {
      candidates_.push_back({false, scores[i], head.slot, head.kv_head, predicted[i]});
    }
  }
}

Layer ResidentStore::resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                                       StreamRef) {
  *prefetch.count = 0;
  candidates_.clear();
  const Layer target = prediction.layer;
  const Selection& predicted = prediction.chunks;
  for (int place_index = 0; place_index < view.sequences; ++place_index) {
    if (view.mode[place_index] == RowMode::idle) continue;
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      const Head head{view.slot_of[place_index], target, kv_head};
      if (predicted.chunks == nullptr) continue;
      const std::span<const int> chunks(predicted.chunks_of(place_index, kv_head), index(predicted.count_of(place_index, kv_head)));
      remember_prediction(head, chunks);
      add_candidates(head, chunks, predicted.scores_of(place_index, kv_head));
    }
  }
  // what row 0 had to estimate is likely to be needed again
  if (target == layer) candidates_.insert(candidates_.end(), missed_.begin(), missed_.end());
  std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    return std::tuple(a.missed, -a.score, a.slot, a.kv_head, a.chunk) < std::tuple(b.missed, -b.score, b.slot, b.kv_head, b.chunk);
  });
  const std::size_t allowed = std::min(candidates_.size(), most_prefetches(options_, geometry_.chunk_bytes));
  for (const Candidate& candidate : candidates_) {
    const Head head{candidate.slot, target, candidate.kv_head};
    const Slots slots = slots_of(head);
    if (slots.slot_of[candidate.chunk] >= 0) continue;  // missed and predicted at once
    if (index(*prefetch.count) >= allowed) {
      ++statistics_.prefetch_dropped;
      continue;
    }
    const std::span<const int> free = victims(slots, predicted_time(), 1);
    if (free.empty()) {
      ++statistics_.prefetch_dropped;
      continue;
    }
    place(slots, free[0], candidate.chunk, predicted_time());
    prefetch.items[(*prefetch.count)++] = {host_chunk(head, candidate.chunk), slots.data + index(free[0]) * geometry_.chunk_bytes,
                                           static_cast<std::uint32_t>(geometry_.chunk_bytes), candidate.score};
    statistics_.prefetch_bytes += geometry_.chunk_bytes;
  }
  return target;
}

void ResidentStore::warm(const Head& head, std::span<const int> chunks) {
  const Slots slots = slots_of(head);
  int slot = 0;
  for (int chunk : chunks) {
    place(slots, slot, chunk, needed_time());
    std::memcpy(slots.data + index(slot) * geometry_.chunk_bytes, host_chunk(head, chunk), geometry_.chunk_bytes);
    ++slot;
  }
}

void ResidentStore::leave_window(const Head& head, int chunk, const std::byte* data) {
  const Slots slots = slots_of(head);
  if (slots.slot_of[chunk] >= 0) return;
  const std::span<const int> free = victims(slots, predicted_time(), 1);
  if (free.empty()) return;  // every slot holds what the next step is expected to need
  place(slots, free[0], chunk, predicted_time());
  std::memcpy(slots.data + index(free[0]) * geometry_.chunk_bytes, data, geometry_.chunk_bytes);
}

void ResidentStore::forget(int slot, int first_chunk) {
  for (int list = 0; list < options_.layers * options_.kv_heads; ++list) {
    const Slots slots = slots_of({slot, list / options_.kv_heads, list % options_.kv_heads});
    for (int s = 0; s < geometry_.slots; ++s) {
      if (slots.chunk_of[s] < first_chunk) continue;
      slots.slot_of[slots.chunk_of[s]] = -1;
      slots.chunk_of[s] = -1;
      slots.used[s] = 0;
    }
  }
}

}  // namespace dualdecoder::cpu
