// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/store_options.hpp"
#include "dualdecoder/tensor.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "dualdecoder/transfer_scheduler.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder::testing {

/// The vectors of a made-up text: any row can be had again from its seed, layer and position.
class Story {
 public:
  enum class Part : std::uint8_t { query, key, value };

  explicit Story(std::uint64_t seed = 0) : parts_{{0, seed}} {}

  /// The same text up to `position`, and another one from there on.
  Story continued(int position, std::uint64_t seed) const {
    Story story = *this;
    story.parts_.push_back({position, seed});
    return story;
  }

  /// Appends `count` numbers of mean 0 and variance 1.
  void append(std::vector<float>& out, Part part, Layer layer, int position, int count) const {
    std::uint64_t seed = 0;
    for (const auto& [from, of_part] : parts_) seed = position >= from ? of_part : seed;  // a later part replaces an earlier one
    Random mixer(seed * 0x100000001b3U + static_cast<std::uint64_t>(part));
    Random random(mixer.next() ^ (static_cast<std::uint64_t>(layer) << 48) ^ static_cast<std::uint64_t>(position));
    for (int i = 0; i < count; ++i) out.push_back(random.normal());
  }

 private:
  std::vector<std::pair<int, std::uint64_t>> parts_;  // first position and seed
};

/// An array in memory of the backend with a copy on the host.
template <class T>
class Mirror {
 public:
  Mirror(const Workplace& workplace, std::size_t count, T value = T{})
      : host(count, value),
        workplace_(&workplace),
        buffer_(*workplace.device, std::max<std::size_t>(count, 1) * sizeof(T), workplace.stream) {
    upload();
  }
  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }
  void upload() {
    if (!host.empty()) workplace_->copy(data(), host.data(), host.size() * sizeof(T));
  }
  void download() {
    if (!host.empty()) workplace_->copy(host.data(), data(), host.size() * sizeof(T));
  }

  std::vector<T> host;

 private:
  const Workplace* workplace_;
  Buffer buffer_;
};

/// A Selection in memory of the backend with a copy on the host.
struct SelectionMirror {
  SelectionMirror(const Workplace& workplace, int lists, int kv_heads, int capacity)
      : chunks(workplace, static_cast<std::size_t>(lists * kv_heads) * static_cast<std::size_t>(capacity), -1),
        scores(workplace, static_cast<std::size_t>(lists * kv_heads) * static_cast<std::size_t>(capacity)),
        count(workplace, static_cast<std::size_t>(lists * kv_heads)),
        view{chunks.data(), scores.data(), count.data(), capacity, kv_heads} {}

  void download() {
    chunks.download();
    scores.download();
    count.download();
  }
  void upload() {
    chunks.upload();
    scores.upload();
    count.upload();
  }
  void clear() {
    std::fill(count.host.begin(), count.host.end(), 0);
    upload();
  }
  /// The host's copy of a list.
  std::vector<int> list(int row, int kv_head) const {
    const std::size_t l = view.list(row, kv_head);
    const auto first = chunks.host.begin() + static_cast<std::ptrdiff_t>(l * static_cast<std::size_t>(view.capacity));
    return {first, first + std::clamp(count.host[l], 0, view.capacity)};
  }
  void set(int row, int kv_head, const std::vector<int>& list) {
    const std::size_t l = view.list(row, kv_head);
    const auto at = l * static_cast<std::size_t>(view.capacity);
    std::copy(list.begin(), list.end(), chunks.host.begin() + static_cast<std::ptrdiff_t>(at));
    std::fill_n(scores.host.begin() + static_cast<std::ptrdiff_t>(at), list.size(), 1.0F / static_cast<float>(list.size() + 1));
    count.host[l] = static_cast<int>(list.size());
  }

  Mirror<int> chunks;
  Mirror<float> scores;
  Mirror<int> count;
  Selection view;
};

/// What is predicted after each layer of a pass.
enum class Hint : std::uint8_t {
  none,   ///< nothing
  row0,   ///< what row 0 just chose
  row1,   ///< what row 1 just chose
  some,   ///< each of row 0's and row 1's chunks with probability 1/2
  ahead,  ///< for this step, what queries near the next layer's choose there
};

/// Runs a KvStore with a TransferScheduler the way SparseAttention does, on made-up text, and keeps what came out. What it is given must
/// outlive it. Threading: none.
class StoreDriver {
 public:
  struct Place {
    int slot = 0;
    RowMode mode = RowMode::single;
    Story story{};       ///< of row 0, and of a resync row
    int position = 0;    ///< committed tokens
    Story guess{12345};  ///< of row 1 of a dual place
    bool waits = false;
  };
  /// Results of a pass, on the host.
  struct Pass {
    std::vector<std::vector<float>> out;                ///< [layers] of [rows, heads, head_dim]
    std::vector<std::vector<std::vector<int>>> chosen;  ///< [layers][rows * kv_heads] chunks
    int urgent_items = 0;
    int prefetch_items = 0;
    int write_back_items = 0;
    bool lists_fit = true;  ///< every list kept its capacity
  };

  StoreDriver(const Workplace& workplace, KvStore& store, TransferScheduler& scheduler, const StoreOptions& options)
      : workplace_(workplace),
        store_(store),
        scheduler_(scheduler),
        options_(options),
        capacities_(store.capacities()),
        urgent_(workplace_, static_cast<std::size_t>(std::max(capacities_.urgent, 1))),
        prefetch_(workplace_, static_cast<std::size_t>(std::max(capacities_.prefetch, 1))),
        write_back_(workplace_, static_cast<std::size_t>(std::max(capacities_.write_back, 1))),
        count_(workplace_, 1) {}

  /// Appends tokens [from, to) of the story in blocks of at most `block` tokens, every layer.
  void append(int slot, const Story& story, int from, int to, int block) {
    for (int begin = from; begin < to; begin += block) {
      const int end = std::min(begin + block, to);
      for (Layer layer = 0; layer < options_.layers; ++layer) append_block(layer, slot, story, begin, end);
    }
  }
  void append_block(Layer layer, int slot, const Story& story, int begin, int end) {
    const int n = end - begin;
    const int last = std::min(n, KvStore::kCalibrationQueries);
    const Mirror<float> k = tokens(story, Story::Part::key, layer, begin, end, options_.kv_heads);
    const Mirror<float> v = tokens(story, Story::Part::value, layer, begin, end, options_.kv_heads);
    const Mirror<float> q = tokens(story, Story::Part::query, layer, end - last, end, options_.heads);
    store_.append(layer, slot, {tensor(k, n, options_.kv_heads), tensor(v, n, options_.kv_heads)}, tensor(q, last, options_.heads),
                  workplace_.stream);
    workplace_.synchronize();
  }
  void prefill(int slot, const Story& story, int tokens, int block) {
    append(slot, story, 0, tokens, block);
    store_.seal(slot, workplace_.stream);
  }

  /// One pass: every layer, then commit. `seed` decides Hint::some.
  Pass pass(const std::vector<Place>& places, Hint hint, std::uint64_t seed = 1) {
    begin(places, seed);
    Pass result;
    for (Layer layer = 0; layer < options_.layers; ++layer) run_layer(layer, places, hint, result);
    commit(result);
    return result;
  }

  /// Everything under way has arrived; needed before a slot is truncated, closed or opened.
  void settle() {
    scheduler_.drain(workplace_.stream);
    workplace_.synchronize();
  }

 private:
  struct Batch {
    Batch(const Workplace& workplace, const StoreOptions& options, int sequences, int selection)
        : slot_of(workplace, static_cast<std::size_t>(sequences)),
          position(workplace, static_cast<std::size_t>(sequences)),
          mode(workplace, static_cast<std::size_t>(sequences)),
          waits(workplace, static_cast<std::size_t>(sequences)),
          by_row(workplace, sequences * options.rows_per_sequence, options.kv_heads, selection),
          ahead(workplace, sequences * options.rows_per_sequence, options.kv_heads, selection),
          predicted(workplace, sequences, options.kv_heads, selection) {}
    Mirror<int> slot_of;
    Mirror<int> position;
    Mirror<RowMode> mode;
    Mirror<std::uint8_t> waits;
    SelectionMirror by_row;
    SelectionMirror ahead;
    SelectionMirror predicted;
    StepView view;
  };

  ConstTensor tensor(const Mirror<float>& mirror, int rows, int heads) const {
    return {mirror.data(), DataType::f32, {rows, heads, options_.head_dim}};
  }
  Mirror<float> filled(std::vector<float> numbers) const {
    Mirror<float> mirror(workplace_, numbers.size());
    mirror.host = std::move(numbers);
    mirror.upload();
    return mirror;
  }
  Mirror<float> tokens(const Story& story, Story::Part part, Layer layer, int begin, int end, int heads) const {
    std::vector<float> numbers;
    for (int position = begin; position < end; ++position) story.append(numbers, part, layer, position, heads * options_.head_dim);
    return filled(std::move(numbers));
  }
  // Rows of a pass; dead ones hold what must not be looked at.
  Mirror<float> rows(const std::vector<Place>& places, Story::Part part, Layer layer, int heads) const {
    std::vector<float> numbers;
    for (const Place& place : places) {
      for (int row = 0; row < options_.rows_per_sequence; ++row) {
        if (row_is_live(place.mode, row)) {
          const Story& story = place.mode == RowMode::dual && row == 1 ? place.guess : place.story;
          story.append(numbers, part, layer, row_position(place.mode, row, place.position), heads * options_.head_dim);
        } else {
          numbers.insert(numbers.end(), static_cast<std::size_t>(heads * options_.head_dim), std::numeric_limits<float>::quiet_NaN());
        }
      }
    }
    return filled(std::move(numbers));
  }

  void begin(const std::vector<Place>& places, std::uint64_t seed) {
    const int sequences = static_cast<int>(places.size());
    random_ = Random(seed);
    Batch& batch = batch_.emplace(workplace_, options_, sequences, capacities_.selection);
    for (std::size_t p = 0; p < places.size(); ++p) {
      batch.slot_of.host[p] = places[p].slot;
      batch.position.host[p] = places[p].position;
      batch.mode.host[p] = places[p].mode;
      batch.waits.host[p] = places[p].waits ? 1 : 0;
    }
    batch.slot_of.upload();
    batch.position.upload();
    batch.mode.upload();
    batch.waits.upload();
    batch.view = {sequences,         options_.rows_per_sequence, batch.slot_of.data(), batch.position.data(),
                  batch.mode.data(), batch.waits.data()};
  }

  void run_layer(Layer layer, const std::vector<Place>& places, Hint hint, Pass& result) {
    Batch& batch = *batch_;
    const int row_count = batch.view.rows();
    const StreamRef stream = workplace_.stream;
    const Mirror<float> q = rows(places, Story::Part::query, layer, options_.heads);
    const Mirror<float> k = rows(places, Story::Part::key, layer, options_.kv_heads);
    const Mirror<float> v = rows(places, Story::Part::value, layer, options_.kv_heads);
    Mirror<float> out(workplace_, q.host.size(), std::numeric_limits<float>::quiet_NaN());

    scheduler_.wait(Lane::prefetch, layer, stream);
    store_.select(layer, batch.view, tensor(q, row_count, options_.heads), batch.by_row.view, stream);
    workplace_.synchronize();
    batch.by_row.download();
    Prediction prediction{layer, false, batch.predicted.view};
    predict(layer, places, hint, prediction);
    store_.resolve_needed(layer, batch.view, batch.by_row.view, list(urgent_), stream);
    result.urgent_items += submit(Lane::urgent, layer, urgent_, result);
    scheduler_.wait(Lane::urgent, layer, stream);
    store_.attend(layer, batch.view,
                  {tensor(q, row_count, options_.heads), tensor(k, row_count, options_.kv_heads), tensor(v, row_count, options_.kv_heads)},
                  batch.by_row.view, {out.data(), DataType::f32, {row_count, options_.heads, options_.head_dim}}, stream);
    workplace_.synchronize();
    const Layer target = store_.resolve_predicted(layer, batch.view, prediction, list(prefetch_), stream);
    result.prefetch_items += submit(Lane::prefetch, target, prefetch_, result);

    out.download();
    result.out.push_back(out.host);
    auto& chosen = result.chosen.emplace_back();
    for (int row = 0; row < row_count; ++row) {
      for (int head = 0; head < options_.kv_heads; ++head) {
        const int n = batch.by_row.count.host[batch.by_row.view.list(row, head)];
        if (n < 0 || n > capacities_.selection) result.lists_fit = false;
        chosen.push_back(batch.by_row.list(row, head));
      }
    }
  }

  void predict(Layer layer, const std::vector<Place>& places, Hint hint, Prediction& prediction) {
    Batch& batch = *batch_;
    const int per = options_.rows_per_sequence;
    if (hint == Hint::ahead && layer + 1 < options_.layers) {
      const Mirror<float> q = rows(places, Story::Part::query, layer + 1, options_.heads);
      store_.select(layer + 1, batch.view, tensor(q, batch.view.rows(), options_.heads), batch.ahead.view, workplace_.stream);
      workplace_.synchronize();
      batch.ahead.download();
      prediction.layer = layer + 1;
      prediction.this_step = true;
    }
    for (int place = 0; place < batch.view.sequences; ++place) {
      for (int head = 0; head < options_.kv_heads; ++head) {
        std::vector<int> chunks;
        const bool live = row_is_live(places[static_cast<std::size_t>(place)].mode, 0);
        const bool guess = per == 2 && row_is_live(places[static_cast<std::size_t>(place)].mode, 1);
        if (hint == Hint::ahead && prediction.this_step && live) chunks = batch.ahead.list(place * per, head);
        if (hint == Hint::row0 && live) chunks = batch.by_row.list(place * per, head);
        if (hint == Hint::row1 && guess) chunks = batch.by_row.list(place * per + 1, head);
        if (hint == Hint::some) chunks = some_of(place, head, live, guess);
        batch.predicted.set(place, head, chunks);
      }
    }
    batch.predicted.upload();
  }

  std::vector<int> some_of(int place, int head, bool live, bool guess) {
    const SelectionMirror& by_row = batch_->by_row;
    const int first = place * options_.rows_per_sequence;
    std::vector<int> all = live ? by_row.list(first, head) : std::vector<int>();
    if (guess) {
      const std::vector<int> more = by_row.list(first + 1, head);
      all.insert(all.end(), more.begin(), more.end());
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    std::erase_if(all, [&](int) { return random_.chance(0.5); });
    if (static_cast<int>(all.size()) > capacities_.selection) all.resize(static_cast<std::size_t>(capacities_.selection));
    return all;
  }

  TransferList list(const Mirror<TransferItem>& items) {
    count_.host[0] = 0;
    count_.upload();
    return {items.data(), count_.data(), static_cast<int>(items.host.size())};
  }
  // Enqueues what the store wrote into `items`; returns how many.
  int submit(Lane lane, Layer layer, const Mirror<TransferItem>& items, Pass& result) {
    workplace_.synchronize();
    count_.download();
    const int count = count_.host[0];
    if (count < 0 || count > static_cast<int>(items.host.size())) {
      result.lists_fit = false;
      return 0;
    }
    scheduler_.submit(lane, layer, {items.data(), count_.data(), static_cast<int>(items.host.size())}, workplace_.stream);
    return count;
  }
  void commit(Pass& result) {
    scheduler_.wait(Lane::write_back, 0, workplace_.stream);
    store_.commit(batch_->view, list(write_back_), workplace_.stream);
    result.write_back_items += submit(Lane::write_back, 0, write_back_, result);
  }

  Workplace workplace_;
  KvStore& store_;
  TransferScheduler& scheduler_;
  StoreOptions options_;
  KvStore::Capacities capacities_;
  Mirror<TransferItem> urgent_;
  Mirror<TransferItem> prefetch_;
  Mirror<TransferItem> write_back_;
  Mirror<int> count_;
  std::optional<Batch> batch_;  // of the pass that runs
  Random random_{1};
};

/// Dense attention of one row in double precision, straight from its definition. `context` tokens of `story`, then the rows that the row
/// sees in its pass, itself included. Returns [heads, head_dim].
inline std::vector<double> dense_attention(const StoreOptions& options, const Story& story, Layer layer, int context,
                                           const std::vector<std::pair<Story, int>>& now, const std::pair<Story, int>& query_row) {
  const auto d = static_cast<std::size_t>(options.head_dim);
  const int kv_width = options.kv_heads * options.head_dim;
  std::vector<float> keys;
  std::vector<float> values;
  for (int position = 0; position < context; ++position) {
    story.append(keys, Story::Part::key, layer, position, kv_width);
    story.append(values, Story::Part::value, layer, position, kv_width);
  }
  for (const auto& [row, position] : now) {
    row.append(keys, Story::Part::key, layer, position, kv_width);
    row.append(values, Story::Part::value, layer, position, kv_width);
  }
  std::vector<float> queries;
  query_row.first.append(queries, Story::Part::query, layer, query_row.second, options.heads * options.head_dim);
  const std::size_t tokens = keys.size() / static_cast<std::size_t>(kv_width);
  std::vector<double> out(queries.size());
  for (int head = 0; head < options.heads; ++head) {
    const auto kv = static_cast<std::size_t>(head / (options.heads / options.kv_heads)) * d;
    const float* query = queries.data() + static_cast<std::size_t>(head) * d;
    std::vector<double> weight(tokens);
    double largest = -std::numeric_limits<double>::infinity();
    for (std::size_t t = 0; t < tokens; ++t) {
      const float* key = keys.data() + t * static_cast<std::size_t>(kv_width) + kv;
      for (std::size_t i = 0; i < d; ++i) weight[t] += static_cast<double>(query[i]) * static_cast<double>(key[i]);
      weight[t] /= std::sqrt(static_cast<double>(d));
      largest = std::max(largest, weight[t]);
    }
    double sum = 0;
    for (double& w : weight) sum += w = std::exp(w - largest);
    for (std::size_t t = 0; t < tokens; ++t) {
      const float* value = values.data() + t * static_cast<std::size_t>(kv_width) + kv;
      for (std::size_t i = 0; i < d; ++i) out[static_cast<std::size_t>(head) * d + i] += weight[t] / sum * static_cast<double>(value[i]);
    }
  }
  return out;
}

}  // namespace dualdecoder::testing
