// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cuda/store_layout.hpp"
#include "dualdecoder/step_view.hpp"

/// What the resolve kernels are to do, said with sorts and searches on the host: docs/concepts.md#resident-set, and buffers that swap as in
/// arXiv 2607.26475.
namespace dualdecoder::test {

/// A load or copy, by what it moves and where it goes.
struct Move {
  int storage;
  Layer layer;
  int kv_head;
  int chunk;
  std::size_t slot_list;
  int slot;
  float score;
  friend bool operator==(const Move&, const Move&) = default;
};

/// Chunks of one list with their scores.
struct Chosen {
  std::vector<int> chunks;
  std::vector<float> scores;
};

/// The places of a pass.
struct Places {
  std::vector<int> storage;
  std::vector<int> position;
  std::vector<RowMode> mode;
  std::vector<std::uint8_t> waits;
};

class SlotModel {
 public:
  struct Slots {
    std::vector<int> slot_of;
    std::vector<int> chunk_of;
    std::vector<std::uint32_t> used;
  };
  struct Remembered {
    int count = -1;
    int limit = 0;
    std::vector<int> chunks;
    std::vector<float> scores;
  };

  explicit SlotModel(const cuda::StoreLayout& layout) : layout_(layout) {
    slots.resize(static_cast<std::size_t>(layout.max_sequences * layout.slot_layers * layout.kv_heads));
    for (Slots& of : slots) {
      of.slot_of.assign(static_cast<std::size_t>(layout.max_chunks), -1);
      of.chunk_of.assign(static_cast<std::size_t>(layout.slots), -1);
      of.used.assign(static_cast<std::size_t>(layout.slots), 0);
    }
    predictions.resize(layout.list(layout.max_sequences, 0, 0));
  }

  std::size_t slot_list(int storage, Layer ahead, int kv_head) const {
    const std::uint32_t run = pass * static_cast<std::uint32_t>(layout_.layers) + static_cast<std::uint32_t>(ahead);
    const int buffer = layout_.swaps ? static_cast<int>(run % 2) : ahead;
    return static_cast<std::size_t>((storage * layout_.slot_layers + buffer) * layout_.kv_heads + kv_head);
  }

  /// needed: [places, kv_heads] of row 0.
  std::vector<Move> resolve_needed(Layer layer, const Places& places, const std::vector<Chosen>& needed) {
    std::vector<Move> moves;
    const std::uint32_t run = pass * static_cast<std::uint32_t>(layout_.layers) + static_cast<std::uint32_t>(layer);
    const std::uint32_t now = layout_.swaps ? run : 2 * pass + 1;
    for_each_list(
        places,
        [&](int place, int kv_head, const Chosen& list) {
          if (places.mode[at(place)] == RowMode::idle) return;
          const int storage = places.storage[at(place)];
          const std::size_t index = slot_list(storage, layer, kv_head);
          Slots& of = slots[index];
          if (layout_.swaps) {
            for (int s = 0; s < layout_.slots; ++s) {
              if (of.used[at(s)] != run) clear(of, s);
            }
          }
          if (!row_is_live(places.mode[at(place)], 0)) return;  // but a row 1 sees nothing of another layer
          const Remembered& predicted = predictions[layout_.list(storage, layer, kv_head)];
          std::vector<int> missing;
          counted[static_cast<std::size_t>(cuda::Counter::needed)] += list.chunks.size();
          for (const int chunk : list.chunks) {
            if (of.slot_of[at(chunk)] < 0) missing.push_back(chunk);
            if (predicted.count < 0 || chunk >= predicted.limit) continue;
            ++counted[static_cast<std::size_t>(cuda::Counter::predictable)];
            if (std::binary_search(predicted.chunks.begin(), predicted.chunks.end(), chunk)) {
              ++counted[static_cast<std::size_t>(cuda::Counter::predicted_hit)];
            }
          }
          counted[static_cast<std::size_t>(cuda::Counter::resident_hit)] += list.chunks.size() - missing.size();
          if (!waits(places, place)) {
            counted[static_cast<std::size_t>(cuda::Counter::estimated)] += missing.size();
          } else {
            counted[static_cast<std::size_t>(cuda::Counter::urgent_bytes)] += missing.size() * layout_.chunk_bytes;
            std::vector<std::tuple<std::uint32_t, int>> order;
            for (int s = 0; s < layout_.slots; ++s) {
              const int holds = of.chunk_of[at(s)];
              if (holds < 0 || !std::binary_search(list.chunks.begin(), list.chunks.end(), holds)) order.emplace_back(of.used[at(s)], s);
            }
            std::sort(order.begin(), order.end());
            for (std::size_t i = 0; i < missing.size(); ++i) {
              const int slot = std::get<1>(order[i]);
              put(of, slot, missing[i], now);
              moves.push_back({storage, layer, kv_head, missing[i], index, slot, 1.0F});
            }
          }
          for (const int chunk : list.chunks) {
            if (of.slot_of[at(chunk)] >= 0) of.used[at(of.slot_of[at(chunk)])] = now;
          }
        },
        needed);
    return moves;
  }

  /// predicted: [places, kv_heads], or empty; missed: row 0's chunks of the same layer, or empty.
  std::vector<Move> resolve_predicted(Layer target, const Places& places, const std::vector<Chosen>& predicted,
                                      const std::vector<Chosen>& missed, int bound) {
    std::vector<Candidate> candidates;
    const std::uint32_t time = 2 * pass + 2;
    if (!missed.empty()) {
      for_each_list(
          places,
          [&](int place, int kv_head, const Chosen& list) {
            if (!row_is_live(places.mode[at(place)], 0) || waits(places, place)) return;
            const int storage = places.storage[at(place)];
            const Slots& of = slots[slot_list(storage, target, kv_head)];
            for (std::size_t i = 0; i < list.chunks.size(); ++i) {
              if (of.slot_of[at(list.chunks[i])] < 0) candidates.push_back({true, list.scores[i], storage, kv_head, list.chunks[i]});
            }
          },
          missed);
    }
    if (!predicted.empty()) {
      for_each_list(
          places,
          [&](int place, int kv_head, const Chosen& list) {
            if (places.mode[at(place)] == RowMode::idle) return;
            const int storage = places.storage[at(place)];
            remember(target, place, kv_head, places, list);
            Slots& of = slots[slot_list(storage, target, kv_head)];
            for (std::size_t i = 0; i < list.chunks.size(); ++i) {
              const int slot = of.slot_of[at(list.chunks[i])];
              if (slot >= 0) {
                of.used[at(slot)] = time;
              } else {
                candidates.push_back({false, list.scores[i], storage, kv_head, list.chunks[i]});
              }
            }
          },
          predicted);
    }
    return load(
        candidates, target, bound,
        [&](Slots& of) {
          int victim = -1;
          for (int s = 0; s < layout_.slots; ++s) {
            if (of.used[at(s)] < time && (victim < 0 || of.used[at(s)] < of.used[at(victim)])) victim = s;
          }
          return victim;
        },
        time);
  }

  std::vector<Move> load_buffer(Layer of_layer, Layer ahead, const Places& places, const std::vector<Chosen>& predicted, int bound) {
    if (!predicted.empty()) {
      for_each_list(
          places,
          [&](int place, int kv_head, const Chosen& list) {
            if (places.mode[at(place)] != RowMode::idle) remember(of_layer, place, kv_head, places, list);
          },
          predicted);
    }
    std::vector<Candidate> candidates;
    for (std::size_t place = 0; place < places.mode.size(); ++place) {
      if (places.mode[place] == RowMode::idle) continue;
      for (int kv_head = 0; kv_head < layout_.kv_heads; ++kv_head) {
        const int storage = places.storage[place];
        Slots& of = slots[slot_list(storage, ahead, kv_head)];
        for (int s = 0; s < layout_.slots; ++s) clear(of, s);
        const Remembered& pending = predictions[layout_.list(storage, ahead % layout_.layers, kv_head)];
        for (int i = 0; i < pending.count; ++i)
          candidates.push_back({false, pending.scores[at(i)], storage, kv_head, pending.chunks[at(i)]});
      }
    }
    const std::uint32_t run = pass * static_cast<std::uint32_t>(layout_.layers) + static_cast<std::uint32_t>(ahead);
    return load(
        candidates, ahead, bound,
        [&](Slots& of) {
          const auto found = std::find(of.chunk_of.begin(), of.chunk_of.end(), -1);
          return found == of.chunk_of.end() ? -1 : static_cast<int>(found - of.chunk_of.begin());
        },
        run);
  }

  /// Returns the chunks that are copied from the window into slots; positions are not advanced.
  std::vector<Move> commit(const Places& places) {
    std::vector<Move> moves;
    const std::uint32_t time = 2 * pass + 2;
    for (std::size_t place = 0; place < places.mode.size(); ++place) {
      if (!row_is_live(places.mode[place], 0)) continue;
      const int length = places.position[place] + 1;
      for (Layer layer = 0; layer < layout_.layers; ++layer) {
        for (int kv_head = 0; kv_head < layout_.kv_heads; ++kv_head) {
          if (length % layout_.chunk == 0) counted[static_cast<std::size_t>(cuda::Counter::write_back_bytes)] += layout_.chunk_bytes;
          if (layout_.swaps) continue;
          const std::size_t index = slot_list(places.storage[place], layer, kv_head);
          Slots& of = slots[index];
          for (int chunk = layout_.range_end(length - 1); chunk < layout_.range_end(length); ++chunk) {
            if (of.slot_of[at(chunk)] >= 0) continue;
            const auto oldest = std::min_element(of.used.begin(), of.used.end());
            if (*oldest >= time) continue;
            const int slot = static_cast<int>(oldest - of.used.begin());
            put(of, slot, chunk, time);
            moves.push_back({places.storage[place], layer, kv_head, chunk, index, slot, 0.0F});
          }
        }
      }
    }
    ++pass;
    return moves;
  }

  std::vector<Slots> slots;
  std::vector<Remembered> predictions;
  std::array<std::uint64_t, static_cast<std::size_t>(cuda::Counter::count)> counted{};
  std::uint32_t pass = 1;

 private:
  struct Candidate {
    bool missed;
    float score;
    int storage;
    int kv_head;
    int chunk;
  };

  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  bool waits(const Places& places, int place) const {
    return layout_.wait_policy || (!places.waits.empty() && places.waits[at(place)] != 0);
  }
  template <class F>
  void for_each_list(const Places& places, F f, const std::vector<Chosen>& lists) {
    for (std::size_t place = 0; place < places.mode.size(); ++place) {
      for (int kv_head = 0; kv_head < layout_.kv_heads; ++kv_head) {
        f(static_cast<int>(place), kv_head, lists[place * at(layout_.kv_heads) + at(kv_head)]);
      }
    }
  }
  void remember(Layer layer, int place, int kv_head, const Places& places, const Chosen& list) {
    predictions[layout_.list(places.storage[at(place)], layer, kv_head)] = {
        static_cast<int>(list.chunks.size()), layout_.range_end(places.position[at(place)]), list.chunks, list.scores};
  }
  static void clear(Slots& of, int slot) {
    if (of.chunk_of[at(slot)] >= 0) of.slot_of[at(of.chunk_of[at(slot)])] = -1;
    of.chunk_of[at(slot)] = -1;
  }
  static void put(Slots& of, int slot, int chunk, std::uint32_t time) {
    clear(of, slot);
    of.chunk_of[at(slot)] = chunk;
    of.slot_of[at(chunk)] = slot;
    of.used[at(slot)] = time;
  }
  template <class Find>
  std::vector<Move> load(std::vector<Candidate>& candidates, Layer ahead, int bound, Find find, std::uint32_t time) {
    std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
      return std::tuple(a.missed, -a.score, a.storage, a.kv_head, a.chunk) < std::tuple(b.missed, -b.score, b.storage, b.kv_head, b.chunk);
    });
    std::vector<Move> moves;
    for (const Candidate& candidate : candidates) {
      const std::size_t index = slot_list(candidate.storage, ahead, candidate.kv_head);
      Slots& of = slots[index];
      if (of.slot_of[at(candidate.chunk)] >= 0) continue;  // missed and predicted at once
      const bool full = bound > 0 && static_cast<int>(moves.size()) >= bound;
      const int slot = full ? -1 : find(of);
      if (slot < 0) {
        ++counted[static_cast<std::size_t>(cuda::Counter::prefetch_dropped)];
        continue;
      }
      put(of, slot, candidate.chunk, time);
      counted[static_cast<std::size_t>(cuda::Counter::prefetch_bytes)] += layout_.chunk_bytes;
      moves.push_back({candidate.storage, ahead % layout_.layers, candidate.kv_head, candidate.chunk, index, slot, candidate.score});
    }
    return moves;
  }

  cuda::StoreLayout layout_;
};

}  // namespace dualdecoder::test
