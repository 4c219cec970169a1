// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Hundreds of random passes of the resolve kernels beside a model that sorts and searches (slot_model.hpp): after each call every table,
// list and counter is the same. Summaries of committed chunks are compared with the CPU store's. `--bench` prints times of the 8B shape.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "cuda/store_kernels.hpp"
#include "src/summary.hpp"
#include "tests/gpu/check.hpp"
#include "tests/gpu/slot_model.hpp"
#include "tests/gpu/store_arrays.hpp"

namespace dualdecoder {
namespace {

using test::Chosen;
using test::Move;
using test::Places;
using test::SlotModel;
using test::StoreArrays;

struct Soak {
  const char* name;
  test::StoreShape shape;
  std::vector<int> lengths;  // of the sequences in the beginning
  int passes;
  bool some_wait;    // sequences may wait by themselves
  bool layer_ahead;  // some predictions are for the next layer
  bool bounds;       // random bounds on prefetch
  int drift;         // of needed chunks that change in a pass, in percent
};

class Runner {
 public:
  Runner(const Soak& soak, std::uint64_t seed) : soak_(soak), random_(seed), arrays_(placed(soak)), model_(arrays_.layout) {
    const cuda::StoreLayout& layout = arrays_.layout;
    const int rows = layout.rows();
    needed_list_ = test::device_selection(arrays_, rows, layout.selected);
    predicted_list_ = test::device_selection(arrays_, layout.max_sequences, layout.selected);
    const int heads = layout.max_sequences * layout.kv_heads;
    urgent_ = transfers(heads * layout.selected);
    prefetch_ = transfers(2 * heads * layout.selected);
    write_back_ = transfers(heads * layout.layers);
    work_ = arrays_.take<std::byte>(cuda::resolve_work_bytes(layout));
    for (int p = 0; p < layout.max_sequences; ++p) {
      places_.storage.push_back(layout.max_sequences - 1 - p);
      places_.position.push_back(soak.lengths[static_cast<std::size_t>(p)]);
    }
    view_.sequences = layout.max_sequences;
    view_.rows_per_sequence = layout.rows_per_sequence;
    slot_of_ = arrays_.take(places_.storage);
    position_ = arrays_.take<int>(places_.position.size());
    mode_ = arrays_.take<RowMode>(places_.position.size());
    waits_ = arrays_.take<std::uint8_t>(places_.position.size());
    view_.slot_of = slot_of_;
    view_.position = position_;
    view_.mode = mode_;
    view_.waits = soak.some_wait ? waits_ : nullptr;
    fill_windows();
  }

  void run() {
    last_needed_.resize(static_cast<std::size_t>(arrays_.layout.layers));
    for (int pass = 0; pass < soak_.passes && test::failures == 0; ++pass) {
      begin_pass();
      for (Layer layer = 0; layer < arrays_.layout.layers; ++layer) run_layer(layer);
      commit();
    }
  }

 private:
  static StoreArrays placed(const Soak& soak) {
    StoreArrays arrays(soak.shape);
    arrays.take_slots();
    arrays.take_window();
    const auto sequences = static_cast<std::size_t>(soak.shape.max_sequences);
    const int chunks = (soak.shape.max_tokens + soak.shape.chunk - 1) / soak.shape.chunk;
    std::vector<std::byte*> bases;  // never read
    for (std::size_t s = 0; s < sequences; ++s) bases.push_back(reinterpret_cast<std::byte*>((s + 1) << 40));
    arrays.layout.host = arrays.take(bases);
    arrays.layout.host_chunks = arrays.take(std::vector<int>(sequences, chunks));
    return arrays;
  }
  TransferList transfers(int capacity) {
    TransferList list;
    list.items = arrays_.take<TransferItem>(static_cast<std::size_t>(capacity));
    list.count = arrays_.take(std::vector<int>{12345});  // the kernels zero it
    list.capacity = capacity;
    return list;
  }
  int below(int bound) { return static_cast<int>(random_() % static_cast<std::uint64_t>(bound)); }

  void fill_windows() {
    const cuda::StoreLayout& layout = arrays_.layout;
    std::normal_distribution<float> normal;
    sinks_.resize(arrays_.lists() * static_cast<std::size_t>(layout.sink_chunks) * layout.chunk_bytes / 2);
    window_.resize(arrays_.lists() * static_cast<std::size_t>(layout.window_chunks) * layout.chunk_bytes / 2);
    for (auto* part : {&sinks_, &window_}) {
      std::size_t i = 0;
      const std::size_t half = layout.chunk_bytes / 4;  // elements of one chunk's keys
      for (auto& element : *part) {
        const std::size_t kind = i++ / half % 11;
        element = __float2bfloat16(kind == 3 ? 0.0F : kind == 5 ? 1.0e-38F : kind == 7 ? 1.0e37F * normal(random_) : normal(random_));
      }
    }
    if (!sinks_.empty()) StoreArrays::put(reinterpret_cast<__nv_bfloat16*>(layout.sinks), sinks_);
    StoreArrays::put(reinterpret_cast<__nv_bfloat16*>(layout.window), window_);
  }

  void begin_pass() {
    using enum RowMode;
    const std::size_t places = places_.position.size();
    places_.mode.clear();
    places_.waits.clear();
    for (std::size_t p = 0; p < places; ++p) {
      const RowMode mode = std::vector{idle, single, dual, dual, dual, resync}[static_cast<std::size_t>(below(6))];
      places_.mode.push_back(places_.position[p] + 1 >= soak_.shape.max_tokens ? idle : mode);
      if (soak_.some_wait) places_.waits.push_back(static_cast<std::uint8_t>(below(3) == 0));
    }
    StoreArrays::put(position_, places_.position);
    StoreArrays::put(mode_, places_.mode);
    if (soak_.some_wait) StoreArrays::put(waits_, places_.waits);
  }

  /// A set like `last` with some of its chunks exchanged, of random size.
  Chosen drifted(const Chosen& last, int position) {
    const cuda::StoreLayout& layout = arrays_.layout;
    const int begin = layout.range_begin();
    const int end = layout.range_end(position);
    const int room = std::min(layout.selected, end - begin);
    const int wanted = room <= 0 ? 0 : below(4) == 0 ? below(room + 1) : room;
    std::vector<char> taken(static_cast<std::size_t>(std::max(end, 0)), 0);
    Chosen next;
    for (const int chunk : last.chunks) {
      if (static_cast<int>(next.chunks.size()) < wanted && chunk < end && below(100) >= soak_.drift) {
        taken[static_cast<std::size_t>(chunk)] = 1;
        next.chunks.push_back(chunk);
      }
    }
    while (static_cast<int>(next.chunks.size()) < wanted) {
      const int chunk = begin + below(end - begin);
      if (taken[static_cast<std::size_t>(chunk)] != 0) continue;
      taken[static_cast<std::size_t>(chunk)] = 1;
      next.chunks.push_back(chunk);
    }
    std::sort(next.chunks.begin(), next.chunks.end());
    for (std::size_t i = 0; i < next.chunks.size(); ++i) next.scores.push_back(static_cast<float>(below(9)) / 8.0F);  // many ties
    return next;
  }

  void upload(const Selection& selection, int rows_apart, const std::vector<Chosen>& lists) {
    const auto heads = static_cast<std::size_t>(selection.kv_heads);
    const auto capacity = static_cast<std::size_t>(selection.capacity);
    const std::size_t rows = lists.size() / heads * static_cast<std::size_t>(rows_apart);
    std::vector<int> chunks(rows * heads * capacity, 1 << 29);  // never to be read
    std::vector<float> scores(rows * heads * capacity, -1.0F);
    std::vector<int> counts(rows * heads, 0);
    for (std::size_t i = 0; i < lists.size(); ++i) {
      const std::size_t list = i / heads * static_cast<std::size_t>(rows_apart) * heads + i % heads;
      std::copy(lists[i].chunks.begin(), lists[i].chunks.end(), chunks.begin() + static_cast<std::ptrdiff_t>(list * capacity));
      std::copy(lists[i].scores.begin(), lists[i].scores.end(), scores.begin() + static_cast<std::ptrdiff_t>(list * capacity));
      counts[list] = static_cast<int>(lists[i].chunks.size());
    }
    StoreArrays::put(selection.chunks, chunks);
    StoreArrays::put(selection.scores, scores);
    StoreArrays::put(selection.count, counts);
  }

  void run_layer(Layer layer) {
    cuda::StoreLayout layout = arrays_.layout;
    const auto heads = static_cast<std::size_t>(layout.kv_heads);
    std::vector<Chosen>& needed = last_needed_[static_cast<std::size_t>(layer)];
    needed.resize(places_.mode.size() * heads);
    std::vector<Chosen> live(needed.size());
    for (std::size_t i = 0; i < needed.size(); ++i) {
      if (!row_is_live(places_.mode[i / heads], 0)) continue;
      needed[i] = drifted(needed[i], places_.position[i / heads]);
      live[i] = needed[i];
    }
    upload(needed_list_, layout.rows_per_sequence, live);
    cuda::resolve_needed(layout, layer, view_, needed_list_, urgent_, nullptr);
    compare("urgent", urgent_, model_.resolve_needed(layer, places_, live), false);
    compare_tables("needed");

    if (soak_.bounds) layout.prefetch_chunks_per_layer = std::vector{0, 1, 5, 20, 60}[static_cast<std::size_t>(below(5))];
    const bool ahead = soak_.layer_ahead && layer + 1 < layout.layers && below(2) == 0;
    const Layer target = ahead ? layer + 1 : layer;
    const bool none = below(12) == 0;
    std::vector<Chosen> predicted;
    for (std::size_t i = 0; i < needed.size() && !none; ++i) {
      const bool dead = places_.mode[i / heads] == RowMode::idle;
      predicted.push_back(dead ? Chosen{} : drifted(needed[i], places_.position[i / heads]));
    }
    Selection given = predicted_list_;
    if (none) given = {};
    if (!none) upload(predicted_list_, 1, predicted);
    if (layout.swaps) {
      const Layer loaded = ahead ? target : layer + 2;
      cuda::load_buffer(layout, target, loaded, view_, given, prefetch_, work_, nullptr);
      compare("prefetch", prefetch_, model_.load_buffer(target, loaded, places_, predicted, layout.prefetch_chunks_per_layer), true);
    } else {
      const bool missed = target == layer && !layout.wait_policy;
      cuda::resolve_predicted(layout, target, view_, given, missed ? &needed_list_ : nullptr, prefetch_, work_, nullptr);
      compare("prefetch", prefetch_,
              model_.resolve_predicted(target, places_, predicted, missed ? live : std::vector<Chosen>{}, layout.prefetch_chunks_per_layer),
              true);
    }
    compare_tables("predicted");
  }

  std::byte* target_of(const Move& move) const {
    const cuda::StoreLayout& layout = arrays_.layout;
    return layout.slot_data(move.slot_list, move.slot);
  }
  std::byte* host_of(const Move& move) const {
    const cuda::StoreLayout& layout = arrays_.layout;
    const std::size_t chunks = static_cast<std::size_t>((soak_.shape.max_tokens + layout.chunk - 1) / layout.chunk);
    const auto list = static_cast<std::size_t>(move.layer * layout.kv_heads + move.kv_head);
    return reinterpret_cast<std::byte*>(static_cast<std::size_t>(move.storage + 1) << 40) +
           (list * chunks + static_cast<std::size_t>(move.chunk)) * layout.chunk_bytes;
  }

  /// The list holds these loads; within one KV head in this order where that is asked for.
  void compare(const char* what, const TransferList& list, std::vector<Move> expected, bool ordered) {
    const int count = StoreArrays::get(list.count, 1)[0];
    DUALDECODER_EXPECT(count == static_cast<int>(expected.size()), "%s, pass %u: %s list of %d, not %zu", soak_.name, model_.pass, what,
                       count, expected.size());
    if (count != static_cast<int>(expected.size())) return;
    std::vector<TransferItem> items = StoreArrays::get(list.items, static_cast<std::size_t>(count));
    const auto by_list = [&](const auto& a, const auto& b) {
      return std::pair(a.slot_list, ordered ? 0 : a.slot) < std::pair(b.slot_list, ordered ? 0 : b.slot);
    };
    std::stable_sort(expected.begin(), expected.end(), by_list);
    const std::size_t list_bytes = static_cast<std::size_t>(arrays_.layout.slots) * arrays_.layout.chunk_bytes;
    const auto list_of = [&](const TransferItem& item) { return static_cast<std::size_t>(item.target - arrays_.layout.data) / list_bytes; };
    std::stable_sort(items.begin(), items.end(), [&](const TransferItem& a, const TransferItem& b) {
      return std::pair(list_of(a), ordered ? nullptr : a.target) < std::pair(list_of(b), ordered ? nullptr : b.target);
    });
    int wrong = 0;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const bool same = items[i].source == host_of(expected[i]) && items[i].target == target_of(expected[i]) &&
                        items[i].bytes == arrays_.layout.chunk_bytes && items[i].score == expected[i].score;
      if (!same) ++wrong;
    }
    DUALDECODER_EXPECT(wrong == 0, "%s, pass %u: %d of %d items of the %s list differ", soak_.name, model_.pass, wrong, count, what);
  }

  void compare_tables(const char* after) {
    const cuda::StoreLayout& layout = arrays_.layout;
    const auto slots = static_cast<std::size_t>(layout.slots);
    const std::vector<int> slot_of = StoreArrays::get(layout.slot_of, arrays_.slot_lists() * arrays_.chunks());
    const std::vector<int> chunk_of = StoreArrays::get(layout.chunk_of, arrays_.slot_lists() * slots);
    const std::vector<std::uint32_t> used = StoreArrays::get(layout.used, arrays_.slot_lists() * slots);
    for (std::size_t list = 0; list < arrays_.slot_lists(); ++list) {
      const SlotModel::Slots& of = model_.slots[list];
      const bool same =
          std::equal(of.slot_of.begin(), of.slot_of.end(), slot_of.begin() + static_cast<std::ptrdiff_t>(list * arrays_.chunks())) &&
          std::equal(of.chunk_of.begin(), of.chunk_of.end(), chunk_of.begin() + static_cast<std::ptrdiff_t>(list * slots)) &&
          std::equal(of.used.begin(), of.used.end(), used.begin() + static_cast<std::ptrdiff_t>(list * slots));
      DUALDECODER_EXPECT(same, "%s, pass %u after %s: the slots of list %zu differ", soak_.name, model_.pass, after, list);
    }
    const std::vector<std::uint64_t> counted = StoreArrays::get(layout.counters, static_cast<std::size_t>(cuda::Counter::count));
    for (std::size_t i = 0; i < counted.size(); ++i) {
      DUALDECODER_EXPECT(counted[i] == model_.counted[i], "%s, pass %u after %s: counter %zu is %llu, not %llu", soak_.name, model_.pass,
                         after, i, static_cast<unsigned long long>(counted[i]), static_cast<unsigned long long>(model_.counted[i]));
    }
  }

  const __nv_bfloat16* near_chunk(std::size_t list, int chunk) const {
    const cuda::StoreLayout& layout = arrays_.layout;
    const std::size_t elements = layout.chunk_bytes / 2;
    return chunk < layout.sink_chunks
               ? sinks_.data() + (list * static_cast<std::size_t>(layout.sink_chunks) + static_cast<std::size_t>(chunk)) * elements
               : window_.data() +
                     (list * static_cast<std::size_t>(layout.window_chunks) + static_cast<std::size_t>(chunk % layout.window_chunks)) *
                         elements;
  }

  void commit() {
    const cuda::StoreLayout& layout = arrays_.layout;
    cuda::commit_rows(layout, view_, write_back_, nullptr);
    const std::vector<Move> kept = model_.commit(places_);
    compare_tables("commit");
    DUALDECODER_EXPECT(StoreArrays::get(layout.pass, 1)[0] == model_.pass, "%s: pass is not %u", soak_.name, model_.pass);
    for (const Move& move : kept) {
      const std::vector<std::byte> bytes = StoreArrays::get(target_of(move), layout.chunk_bytes);
      const bool same =
          std::memcmp(bytes.data(), near_chunk(layout.list(move.storage, move.layer, move.kv_head), move.chunk), bytes.size()) == 0;
      DUALDECODER_EXPECT(same, "%s, pass %u: chunk %d is not the window's", soak_.name, model_.pass, move.chunk);
    }
    std::vector<TransferItem> expected;
    for (std::size_t p = 0; p < places_.mode.size(); ++p) {
      if (!row_is_live(places_.mode[p], 0)) continue;
      const int length = ++places_.position[p];
      if (length % layout.chunk != 0) continue;
      for (Layer layer = 0; layer < layout.layers; ++layer) {
        for (int kv_head = 0; kv_head < layout.kv_heads; ++kv_head) {
          const int chunk = length / layout.chunk - 1;
          const std::size_t list = layout.list(places_.storage[p], layer, kv_head);
          expected.push_back(
              {layout.near_chunk(list, chunk), host_of({places_.storage[p], layer, kv_head, chunk, 0, 0, 0.0F}), layout.chunk_bytes, 0.0F});
          check_summary(list, chunk);
        }
      }
    }
    const int count = StoreArrays::get(write_back_.count, 1)[0];
    std::vector<TransferItem> items = StoreArrays::get(write_back_.items, static_cast<std::size_t>(std::max(count, 0)));
    const auto by_target = [](const TransferItem& a, const TransferItem& b) { return a.target < b.target; };
    std::sort(items.begin(), items.end(), by_target);
    std::sort(expected.begin(), expected.end(), by_target);
    const auto same = [](const TransferItem& a, const TransferItem& b) {
      return a.source == b.source && a.target == b.target && a.bytes == b.bytes;
    };
    DUALDECODER_EXPECT(std::equal(items.begin(), items.end(), expected.begin(), expected.end(), same),
                       "%s, pass %u: %d chunks are written back, not %zu, or others", soak_.name, model_.pass, count, expected.size());
  }

  /// Bit for bit what the CPU store makes of the chunk and of its value group.
  void check_summary(std::size_t list, int chunk) const {
    const cuda::StoreLayout& layout = arrays_.layout;
    const auto dim = static_cast<std::size_t>(layout.dim);
    const cpu::SegmentLayout segments{static_cast<std::size_t>(layout.chunk), dim, true};
    std::vector<float> mean(dim);
    std::vector<std::int8_t> keys(dim);
    float key_scale = 0.0F;
    cpu::summarise_keys(near_chunk(list, chunk), segments, mean.data(), {keys.data(), &key_scale});
    const std::size_t at = list * arrays_.chunks() + static_cast<std::size_t>(chunk);
    DUALDECODER_EXPECT(StoreArrays::get(layout.key_scales + at, 1)[0] == key_scale, "%s, pass %u: the key scale of chunk %d differs",
                       soak_.name, model_.pass, chunk);
    DUALDECODER_EXPECT(StoreArrays::get(layout.key_means + at * dim, dim) == keys, "%s, pass %u: key mean of chunk %d differs", soak_.name,
                       model_.pass, chunk);

    const int group = chunk / layout.value_group;
    std::vector<const void*> chunks;
    for (int j = group * layout.value_group; j <= chunk; ++j) chunks.push_back(near_chunk(list, j));
    std::vector<std::uint8_t> values(dim / 2);
    float value_scale = 0.0F;
    cpu::summarise_values(chunks, segments, mean.data(), {values.data(), &value_scale});
    const int k = cuda::value_k(layout.value_group, group % cuda::kTileChunks);
    const std::size_t tile =
        list * static_cast<std::size_t>(layout.value_tile_count()) + static_cast<std::size_t>(group / cuda::kTileChunks);
    const float scale = StoreArrays::get(layout.value_scales + tile * cuda::kTileChunks + static_cast<std::size_t>(k), 1)[0];
    DUALDECODER_EXPECT(scale == value_scale, "%s, pass %u: the value scale of chunk %d's group differs", soak_.name, model_.pass, chunk);
    const std::vector<std::uint32_t> levels = StoreArrays::get(layout.value_tiles + tile * 2 * dim, 2 * dim);
    int wrong = 0;
    for (int d = 0; d < layout.dim; ++d) {
      const cuda::ValuePlace place = cuda::value_place(layout.dim, k, d);
      const auto half = static_cast<int>(dim / 2);
      const unsigned expected = d < half ? values[static_cast<std::size_t>(d)] & 15U : values[static_cast<std::size_t>(d - half)] >> 4U;
      if (((levels[static_cast<std::size_t>(place.word)] >> place.shift) & 15U) != expected) ++wrong;
    }
    DUALDECODER_EXPECT(wrong == 0, "%s, pass %u: %d value levels of chunk %d's group differ", soak_.name, model_.pass, wrong, chunk);
  }

  Soak soak_;
  std::mt19937_64 random_;
  StoreArrays arrays_;
  SlotModel model_;
  Places places_;
  StepView view_;
  Selection needed_list_, predicted_list_;
  TransferList urgent_, prefetch_, write_back_;
  std::byte* work_ = nullptr;
  int* slot_of_ = nullptr;
  int* position_ = nullptr;
  RowMode* mode_ = nullptr;
  std::uint8_t* waits_ = nullptr;
  std::vector<__nv_bfloat16> sinks_, window_;
  std::vector<std::vector<Chosen>> last_needed_;  // [layers] [places, kv_heads]
};

std::vector<Soak> soaks() {
  test::StoreShape small{.layers = 2,
                         .kv_heads = 2,
                         .dim = 64,
                         .max_sequences = 3,
                         .rows_per_sequence = 2,
                         .chunk = 4,
                         .sink_chunks = 1,
                         .local_tokens = 8,
                         .max_tokens = 1500,
                         .selected = 16,
                         .slots = 40};
  test::StoreShape waiting = small;
  waiting.wait_policy = true;
  waiting.value_group = 4;
  test::StoreShape tight = small;
  tight.slots = 16;  // no more than a budget
  tight.sink_chunks = 0;
  tight.dim = 80;
  tight.chunk = 8;
  tight.value_group = 2;
  test::StoreShape swapping = small;
  swapping.swaps = true;
  swapping.slots = swapping.selected;
  swapping.layers = 5;
  test::StoreShape large{.layers = 1,
                         .kv_heads = 1,
                         .dim = 128,
                         .max_sequences = 2,
                         .rows_per_sequence = 1,
                         .chunk = 4,
                         .sink_chunks = 2,
                         .local_tokens = 16,
                         .max_tokens = 40000,
                         .selected = 2500,
                         .slots = 6000,
                         .wait_policy = true};
  test::StoreShape large_estimate = large;
  large_estimate.wait_policy = false;
  large_estimate.dim = 256;
  const std::vector<int> lengths = {5, 130, 900};
  return {
      {"estimate", small, lengths, 300, false, false, false, 25},
      {"estimate, some wait, bounded", small, lengths, 300, true, true, true, 25},
      {"wait", waiting, lengths, 300, false, true, true, 10},
      {"few slots", tight, lengths, 300, true, true, true, 40},
      {"swapping", swapping, lengths, 100, true, true, true, 30},
      {"large, wait", large, {39000, 3000}, 6, false, false, false, 50},
      {"large, estimate", large_estimate, {39000, 12000}, 6, false, false, true, 60},
  };
}

/// Times of one layer of the 8B shape: 7 sequences of 128K, budget 1024 in chunks of 8, four budgets of slots.
void bench() {
  test::StoreShape shape{.layers = 4,
                         .kv_heads = 8,
                         .group = 4,
                         .dim = 128,
                         .max_sequences = 7,
                         .rows_per_sequence = 2,
                         .chunk = 8,
                         .sink_chunks = 2,
                         .local_tokens = 128,
                         .max_tokens = 131072,
                         .selected = 128,
                         .slots = 512};
  StoreArrays arrays(shape);
  arrays.take_slots();
  arrays.take_window();
  const int lists = 7 * 8;
  std::vector<std::byte*> bases(7, reinterpret_cast<std::byte*>(std::size_t{1} << 40));
  arrays.layout.host = arrays.take(bases);
  arrays.layout.host_chunks = arrays.take(std::vector<int>(7, 16384));
  StepView view;
  view.sequences = 7;
  view.rows_per_sequence = 2;
  view.slot_of = arrays.take(std::vector<int>{0, 1, 2, 3, 4, 5, 6});
  view.position = arrays.take(std::vector<int>(7, 131063));
  view.mode = arrays.take(std::vector<RowMode>(7, RowMode::dual));
  // two sets in turn, which differ in a tenth of their chunks
  std::mt19937 random(3);
  Selection sets[2];
  Selection predicted[2];
  for (int s = 0; s < 2; ++s) {
    sets[s] = test::device_selection(arrays, 14, 128);
    predicted[s] = test::device_selection(arrays, 7, 128);
    for (Selection* of : {&sets[s], &predicted[s]}) {
      std::vector<int> chunks;
      std::vector<float> scores;
      const int rows = of == &sets[s] ? 14 : 7;
      for (int list = 0; list < rows * 8; ++list) {
        for (int i = 0; i < 128; ++i) {
          chunks.push_back(2 + i * 120 + (i % 10 == 0 ? static_cast<int>(random() % 100) : 0));
          scores.push_back(static_cast<float>(random() % 1000) * 1e-4F);
        }
      }
      StoreArrays::put(of->chunks, chunks);
      StoreArrays::put(of->scores, scores);
      StoreArrays::put(of->count, std::vector<int>(static_cast<std::size_t>(rows) * 8, 128));
    }
  }
  const auto list = [&](int capacity) {
    return TransferList{arrays.take<TransferItem>(static_cast<std::size_t>(capacity)), arrays.take<int>(1), capacity};
  };
  const TransferList urgent = list(lists * 128);
  const TransferList prefetch = list(2 * lists * 128);
  const TransferList write_back = list(lists * 4);
  void* const work = arrays.take<std::byte>(cuda::resolve_work_bytes(arrays.layout));
  cudaStream_t stream = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  constexpr int kRounds = 100;
  for (const bool waits : {false, true}) {
    cuda::StoreLayout layout = arrays.layout;
    layout.wait_policy = waits;
    int round = 0;
    const double needed =
        1e3 * test::milliseconds(stream, kRounds, [&] { cuda::resolve_needed(layout, 0, view, sets[round++ & 1], urgent, stream); });
    for (const int bound : {0, 100}) {
      layout.prefetch_chunks_per_layer = bound;
      const double loads =
          1e3 * test::milliseconds(stream, kRounds, [&] {
            cuda::resolve_predicted(layout, 0, view, predicted[round & 1], waits ? nullptr : &sets[round & 1], prefetch, work, stream);
            ++round;
          });
      std::printf("resolve, 7 x 128K, %s: needed %.1f us; predicted, at most %d loads: %.1f us\n", waits ? "wait" : "estimate", needed,
                  bound, loads);
    }
  }
  const double commit = 1e3 * test::milliseconds(stream, kRounds, [&] { cuda::commit_rows(arrays.layout, view, write_back, stream); });
  std::printf("commit, 7 x 128K, 4 layers, every chunk complete: %.1f us\n", commit);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace dualdecoder

int main(int argc, char** argv) {
  return dualdecoder::test::run_on_device([&] {
    if (argc > 1 && std::string_view(argv[1]) == "--bench") return dualdecoder::bench();
    std::uint64_t seed = 20261130;
    for (auto soak : dualdecoder::soaks()) {
      if (dualdecoder::test::small_run()) soak.passes = std::min(soak.passes, 20);
      dualdecoder::Runner(soak, ++seed).run();
    }
  });
}
