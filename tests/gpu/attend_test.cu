// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// attend_chunks against softmax attention in double precision over sinks, window, chosen and resident chunks, and summaries for the rest.
// Scores and summaries are the test's own, so neither select nor summarise has a part in it. --bench times the kernel.
#include <cstring>
#include <vector>

#include "attend_reference.hpp"
#include "cuda/store_kernels.hpp"

namespace {

using namespace dualdecoder;
using namespace dualdecoder::cuda;
using namespace dualdecoder::test;

struct Case {
  const char* name;
  int dim = 64;
  int kv_heads = 2;
  int group = 4;
  int rows_per_sequence = 2;
  int chunk = 8;
  int sink_chunks = 2;
  int local_tokens = 32;
  int selected = 64;  ///< chunks
  int slots = 96;
  bool ping_pong = false;
  bool tail = true;
  bool row1_as_row0 = false;
  int value_group = 1;
  float bias_scale = 1.0F;
  double resident = 0.8;         ///< of the chosen chunks
  float deviation = 1.0F;        ///< of queries
  float score_deviation = 2.0F;  ///< of summaries
  bool ties = false;             ///< all summaries score the same
  std::vector<int> lengths;
  std::vector<RowMode> modes;
  std::vector<unsigned> seeds = {};  ///< of the sequences, else 1, 2 ..
  unsigned row1_seed = 50;
  bool bf16 = false;
};

std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// A store of one more storage slot than sequences and three layers, of which layer 1 is attended to. What nobody may read is NaN.
class World {
 public:
  explicit World(const Case& c) : c_(c), sequences_(static_cast<int>(c.lengths.size())) {
    const int longest = *std::max_element(c.lengths.begin(), c.lengths.end());
    StoreLayout& l = layout_;
    l.layers = 3;
    l.kv_heads = c.kv_heads;
    l.group = c.group;
    l.heads = c.kv_heads * c.group;
    l.dim = c.dim;
    l.max_sequences = sequences_ + 1;
    l.rows_per_sequence = c.rows_per_sequence;
    l.chunk = c.chunk;
    l.sink_chunks = c.sink_chunks;
    l.local_tokens = c.local_tokens;
    l.window_chunks = (c.local_tokens + c.chunk - 1) / c.chunk + 3;
    l.value_group = c.value_group;
    l.max_chunks = (longest / c.chunk + kTileChunks) / kTileChunks * kTileChunks;
    l.splits = (l.max_chunks + kSplitChunks - 1) / kSplitChunks;
    l.selected = c.selected;
    l.parts = (c.selected * c.chunk + kPartTokens - 1) / kPartTokens;
    l.slots = c.slots;
    l.slot_layers = c.ping_pong ? 2 : l.layers;
    l.swaps = c.ping_pong;
    l.chunk_bytes = static_cast<std::uint32_t>(4 * c.chunk * c.dim);
    l.tail = c.tail;
    l.row1_as_row0 = c.row1_as_row0;
    l.bias_scale = c.bias_scale;
    const std::size_t lists = at(l.max_sequences * l.layers * l.kv_heads);
    slot_lists_ = at(l.max_sequences * l.slot_layers * l.kv_heads);
    sinks_.assign(lists * at(l.sink_chunks) * l.chunk_bytes / 2, kNanBits);
    window_.assign(lists * at(l.window_chunks) * l.chunk_bytes / 2, kNanBits);
    data_.assign(slot_lists_ * at(l.slots) * l.chunk_bytes / 2, kNanBits);
    slot_table_.assign(slot_lists_ * at(l.max_chunks), -1);
    tiles_.assign(lists * at(l.value_tile_count() * 2 * c.dim), 0xFFFFFFFFU);
    value_scales_.assign(lists * at(l.value_tile_count() * kTileChunks), NAN);
    bias_.assign(at(l.max_sequences * l.layers * l.heads), NAN);
    tile_max_.assign(l.score_lists() * at(l.columns() * l.splits * kSplitTiles), NAN);
    score_levels_.assign(l.score_lists() * at(l.columns() * l.max_chunks), 0);
    chosen_.assign(l.row_lists() * at(c.selected), -1);
    chosen_count_.assign(l.row_lists(), 0);
    for (int s = 0; s < sequences_; ++s) {
      slot_of_.push_back((s + 1) % l.max_sequences);
      for (int kv_head = 0; kv_head < l.kv_heads; ++kv_head) fill_list(s, kv_head);
    }
    const auto rows_of = [&](int width, float deviation, unsigned kind) {
      return random_rows(rows(), width, deviation, c.bf16, [&](int row) { return is_live(row) ? row_seed(row) + kind : 0U; });
    };
    queries_ = rows_of(l.heads * c.dim, c.deviation, 1);
    keys_ = rows_of(l.kv_heads * c.dim, 1.0F, 2);
    values_ = rows_of(l.kv_heads * c.dim, 1.0F, 3);
  }

  std::vector<float> run() {
    StoreLayout l = layout_;
    const DeviceArray<std::uint16_t> sinks(sinks_);
    const DeviceArray<std::uint16_t> window(window_);
    const DeviceArray<std::uint16_t> data(data_);
    const DeviceArray<int> slot_table(slot_table_);
    const DeviceArray<std::uint32_t> tiles(tiles_);
    const DeviceArray<float> value_scales(value_scales_);
    const DeviceArray<float> bias(bias_);
    const DeviceArray<float> tile_max(tile_max_);
    const DeviceArray<std::uint16_t> score_levels(score_levels_);
    const DeviceArray<std::uint32_t> pass(std::vector<std::uint32_t>{kPass});
    const DeviceArray<float> partials(std::vector<float>(l.row_lists() * at(l.partial_count() * l.group * (l.dim + 2)), NAN));
    l.sinks = reinterpret_cast<std::byte*>(sinks.data());
    l.window = reinterpret_cast<std::byte*>(window.data());
    l.data = reinterpret_cast<std::byte*>(data.data());
    l.slot_of = slot_table.data();
    l.value_tiles = tiles.data();
    l.value_scales = value_scales.data();
    l.bias = bias.data();
    l.tile_max = tile_max.data();
    l.score_levels = score_levels.data();
    l.pass = pass.data();
    l.partials = partials.data();
    const DeviceArray<int> chosen(chosen_);
    const DeviceArray<int> chosen_count(chosen_count_);
    const DeviceArray<int> slots(slot_of_);
    const DeviceArray<int> positions(c_.lengths);
    const DeviceArray<RowMode> modes(c_.modes);
    const DeviceArray<std::byte> queries(queries_.bytes());
    const DeviceArray<std::byte> keys(keys_.bytes());
    const DeviceArray<std::byte> values(values_.bytes());
    const DeviceArray<std::byte> out(at(rows() * l.heads * l.dim) * (c_.bf16 ? 2 : 4));
    const StepView view{sequences_, c_.rows_per_sequence, slots.data(), positions.data(), modes.data(), nullptr};
    const Selection by_row{chosen.data(), nullptr, chosen_count.data(), c_.selected, l.kv_heads};
    const std::vector<std::byte> result = run_and_replay(out, c_.name, [&](cudaStream_t stream) {
      attend_chunks(l, kLayer, view, {queries.data(), c_.bf16}, {keys.data(), c_.bf16}, {values.data(), c_.bf16}, by_row,
                    {out.data(), c_.bf16}, stream);
    });
    write_rows();
    DUALDECODER_EXPECT(sinks.download() == sinks_ && window.download() == window_, "%s: sinks or window hold something else", c_.name);
    return as_floats(result, c_.bf16);
  }

  /// After run(), since the definition finds the rows' own tokens in the window.
  void compare(const std::vector<float>& out) const {
    for (int row = 0; row < rows(); ++row) {
      for (int head = 0; head < layout_.heads; ++head) compare_head(out, row, head);
    }
  }

 private:
  static constexpr Layer kLayer = 1;
  static constexpr std::uint32_t kPass = 7;

  int rows() const { return sequences_ * c_.rows_per_sequence; }
  unsigned seed_of(int s) const { return c_.seeds.empty() ? static_cast<unsigned>(s) + 1U : c_.seeds[at(s)]; }
  unsigned row_seed(int row) const {
    return seed_of(row / c_.rows_per_sequence) * 1000 + (row % c_.rows_per_sequence == 1 ? c_.row1_seed : 0);
  }
  bool is_live(int row) const { return row_is_live(c_.modes[at(row / c_.rows_per_sequence)], row % c_.rows_per_sequence); }
  int chooser(int row) const {
    const bool guess = row % c_.rows_per_sequence == 1 && c_.modes[at(row / c_.rows_per_sequence)] == RowMode::dual;
    return guess && c_.row1_as_row0 ? row - 1 : row;
  }
  std::size_t slot_list(int slot, int kv_head) const {
    // two buffers that swap from layer to layer and, since the layers are odd, from pass to pass
    const int buffer = c_.ping_pong ? static_cast<int>((kPass * 3 + kLayer) % 2) : kLayer;
    return at((slot * layout_.slot_layers + buffer) * layout_.kv_heads + kv_head);
  }
  int range_end(int length) const { return std::max(c_.sink_chunks, (length - c_.local_tokens) / c_.chunk); }
  std::size_t elements() const { return layout_.chunk_bytes / 2; }
  /// First element of a token's key on the device; its value is half a chunk-head behind.
  std::size_t near_token(std::size_t list, int token) const {
    const int j = token / c_.chunk;
    const std::size_t chunk =
        j < c_.sink_chunks ? list * at(c_.sink_chunks) + at(j) : list * at(layout_.window_chunks) + at(j % layout_.window_chunks);
    return chunk * elements() + at(token % c_.chunk * c_.dim);
  }
  std::vector<std::uint16_t>& near_memory(int token) { return token / c_.chunk < c_.sink_chunks ? sinks_ : window_; }
  const std::vector<std::uint16_t>& near_memory(int token) const { return token / c_.chunk < c_.sink_chunks ? sinks_ : window_; }

  void fill_list(int s, int kv_head) {
    const int length = c_.lengths[at(s)];
    const std::size_t list = layout_.list(slot_of_[at(s)], kLayer, kv_head);
    std::mt19937 random(seed_of(s) * 100 + static_cast<unsigned>(kv_head));
    std::normal_distribution<float> normal(0.0F, 1.0F);
    const int end = range_end(length);
    for (int token = 0; token < length; ++token) {
      if (token >= c_.sink_chunks * c_.chunk && token < end * c_.chunk) continue;
      const std::size_t key = near_token(list, token);
      for (std::size_t d = 0; d < at(c_.dim); ++d) {
        near_memory(token)[key + d] = narrow(normal(random));
        near_memory(token)[key + elements() / 2 + d] = narrow(normal(random));
      }
    }
    std::uniform_int_distribution<int> level(-7, 7);
    for (int group = c_.sink_chunks / c_.value_group; group * c_.value_group < end; ++group) {
      value_scales_[scale_place(list, group)] = 0.1F * std::exp(normal(random));
      for (int d = 0; d < c_.dim; ++d) set_level(list, group, d, level(random));
    }
    for (int g = 0; g < c_.group; ++g) {
      bias_[at((slot_of_[at(s)] * layout_.layers + kLayer) * layout_.heads + kv_head * c_.group + g)] = normal(random);
    }
    const std::size_t slot_list_index = slot_list(slot_of_[at(s)], kv_head);
    int next_slot = layout_.slots;  // from the last one down, so that slots and chunks are in different order
    for (int number = 0; number < c_.rows_per_sequence; ++number) {
      const int row = s * c_.rows_per_sequence + number;
      if (is_live(row)) choose(row, kv_head, end, slot_list_index, next_slot, random);
    }
  }

  /// Scores of a row's summaries, its chosen chunks, and slots for some of these. Row 0 draws what the sequence shares, so row 1 has a
  /// generator of its own.
  void choose(int row, int kv_head, int end, std::size_t slot_list_index, int& next_slot, std::mt19937& of_sequence) {
    std::mt19937 own(row_seed(row) + static_cast<unsigned>(kv_head));
    std::mt19937& random = row % c_.rows_per_sequence == 0 ? of_sequence : own;
    std::normal_distribution<float> normal(0.0F, c_.score_deviation);
    for (int g = 0; g < c_.group; ++g) {
      std::vector<float> scores(at(layout_.max_chunks), -INFINITY);
      for (int j = c_.sink_chunks; j < end; ++j) scores[at(j)] = c_.ties ? 0.5F : normal(random);
      keep_scores(row, kv_head, g, scores, end);
    }
    std::vector<int> all;
    for (int j = c_.sink_chunks; j < end; ++j) all.push_back(j);
    std::shuffle(all.begin(), all.end(), random);
    all.resize(std::min(all.size(), at(c_.selected)));
    std::sort(all.begin(), all.end());
    const std::size_t list = layout_.row_list(row, kv_head);
    chosen_count_[list] = static_cast<int>(all.size());
    std::copy(all.begin(), all.end(), chosen_.begin() + static_cast<std::ptrdiff_t>(list * at(c_.selected)));
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    std::normal_distribution<float> element(0.0F, 1.0F);
    for (const int j : all) {
      int& slot = slot_table_[slot_list_index * at(layout_.max_chunks) + at(j)];
      // row 1's chunks may be resident only by row 0's doing, so that row 0's result cannot depend on row 1
      if (row % c_.rows_per_sequence == 1 && is_live(row - 1)) continue;
      if (slot >= 0 || next_slot == 0 || uniform(random) >= c_.resident) continue;
      slot = --next_slot;
      std::uint16_t* const to = data_.data() + (slot_list_index * at(layout_.slots) + at(slot)) * elements();
      for (std::size_t i = 0; i < elements(); ++i) to[i] = narrow(element(random));
    }
  }

  /// Index of a query head's maximum of a tile; its levels are the 16 of that index.
  std::size_t score_tile(int row, int kv_head, int g, int tile, int tiles) const {
    const std::size_t list = layout_.score_list(kLayer, row / c_.rows_per_sequence, kv_head);
    const int column = row % c_.rows_per_sequence * c_.group + g;
    return (list * at(tiles) + at(tile)) * at(layout_.columns()) + at(column);
  }
  std::size_t top_place(int row, int kv_head, int g, int j) const {
    return score_tile(row, kv_head, g, j / kTileChunks, layout_.splits * kSplitTiles);
  }
  std::size_t level_place(int row, int kv_head, int g, int j) const {
    return score_tile(row, kv_head, g, j / kTileChunks, layout_.max_chunks / kTileChunks) * at(kTileChunks) +
           at(score_place(j % kTileChunks));
  }
  /// As score_summaries leaves them: the largest of 16 chunks, and how far each lies below it.
  void keep_scores(int row, int kv_head, int g, const std::vector<float>& scores, int end) {
    for (int first = c_.sink_chunks / kTileChunks * kTileChunks; first < end; first += kTileChunks) {
      const float top = *std::max_element(scores.begin() + first, scores.begin() + first + kTileChunks);
      tile_max_[top_place(row, kv_head, g, first)] = top;
      for (int j = first; j < first + kTileChunks; ++j) {
        score_levels_[level_place(row, kv_head, g, j)] =
            static_cast<std::uint16_t>(std::nearbyint(std::min((top - scores[at(j)]) * 4096.0F, 65535.0F)));
      }
    }
  }
  double kept_score(int row, int kv_head, int g, int j) const {
    return static_cast<double>(tile_max_[top_place(row, kv_head, g, j)]) - score_levels_[level_place(row, kv_head, g, j)] / 4096.0;
  }

  void set_level(std::size_t list, int group, int d, int level) {
    const ValuePlace place = place_of(group, d);
    std::uint32_t& word = tiles_[value_tile(list, group) * at(2 * c_.dim) + at(place.word)];
    word = (word & ~(0xFU << place.shift)) | static_cast<std::uint32_t>(level + 8) << place.shift;
  }
  /// Of a chunk, which is that of its group.
  float value_scale(std::size_t list, int j) const { return value_scales_[scale_place(list, j / c_.value_group)]; }
  float value_mean(std::size_t list, int j, int d) const {
    const int group = j / c_.value_group;
    const ValuePlace place = place_of(group, d);
    const std::uint32_t word = tiles_[value_tile(list, group) * at(2 * c_.dim) + at(place.word)];
    return static_cast<float>(static_cast<int>(word >> place.shift & 0xFU) - 8) * value_scale(list, j);
  }
  std::size_t value_tile(std::size_t list, int group) const { return list * at(layout_.value_tile_count()) + at(group / kTileChunks); }
  std::size_t scale_place(std::size_t list, int group) const {
    return value_tile(list, group) * at(kTileChunks) + at(value_k(c_.value_group, group % kTileChunks));
  }
  ValuePlace place_of(int group, int d) const { return value_place(c_.dim, value_k(c_.value_group, group % kTileChunks), d); }

  void write_rows() {
    for (int row = 0; row < rows(); ++row) {
      if (!is_live(row)) continue;
      const int place = row / c_.rows_per_sequence;
      const int position = row_position(c_.modes[at(place)], row % c_.rows_per_sequence, c_.lengths[at(place)]);
      for (int kv_head = 0; kv_head < layout_.kv_heads; ++kv_head) {
        const std::size_t key = near_token(layout_.list(slot_of_[at(place)], kLayer, kv_head), position);
        const std::size_t source = layout_.row_list(row, kv_head) * at(c_.dim);
        for (std::size_t d = 0; d < at(c_.dim); ++d) {
          near_memory(position)[key + d] = narrow(keys_.values[source + d]);
          near_memory(position)[key + elements() / 2 + d] = narrow(values_.values[source + d]);
        }
      }
    }
  }

  void compare_head(const std::vector<float>& out, int row, int head) const {
    const std::size_t dim = at(c_.dim);
    const std::size_t first = at(row * layout_.heads + head) * dim;
    if (!is_live(row)) {
      for (std::size_t d = 0; d < dim; ++d) DUALDECODER_EXPECT(out[first + d] == 0.0F, "%s: a dead row is not zero", c_.name);
      return;
    }
    const int place = row / c_.rows_per_sequence;
    const int slot = slot_of_[at(place)];
    const int length = c_.lengths[at(place)];
    const int position = row_position(c_.modes[at(place)], row % c_.rows_per_sequence, length);
    const int kv_head = head / c_.group;
    const int end = range_end(length);
    const std::size_t list = layout_.list(slot, kLayer, kv_head);
    const std::vector<float> query(queries_.values.begin() + static_cast<std::ptrdiff_t>(first),
                                   queries_.values.begin() + static_cast<std::ptrdiff_t>(first + dim));
    Attention attention(c_.dim);
    const auto add_token = [&](const std::uint16_t* key) {
      attention.add_token(
          query, 1.0 / std::sqrt(static_cast<double>(c_.dim)), [=](std::size_t d) { return widen(key[d]); },
          [=, this](std::size_t d) { return widen(key[elements() / 2 + d]); });
    };
    for (int token = 0; token <= position; ++token) {
      if (token >= c_.sink_chunks * c_.chunk && token < end * c_.chunk) continue;
      add_token(near_memory(token).data() + near_token(list, token));
    }
    const std::size_t choice = layout_.row_list(chooser(row), kv_head);
    const int* const chosen = chosen_.data() + choice * at(c_.selected);
    const double shift =
        std::log(static_cast<double>(c_.chunk)) +
        static_cast<double>(c_.bias_scale) * static_cast<double>(bias_[at((slot * layout_.layers + kLayer) * layout_.heads + head)]);
    double largest_value = 0.0;
    for (int j = c_.sink_chunks; j < end; ++j) {
      const int in_slot = slot_table_[slot_list(slot, kv_head) * at(layout_.max_chunks) + at(j)];
      if (in_slot >= 0 && std::binary_search(chosen, chosen + chosen_count_[choice], j)) {
        const std::uint16_t* const chunk = data_.data() + (slot_list(slot, kv_head) * at(layout_.slots) + at(in_slot)) * elements();
        for (int t = 0; t < c_.chunk; ++t) add_token(chunk + t * c_.dim);
      } else if (c_.tail) {
        largest_value = std::max(largest_value, 7.0 * static_cast<double>(value_scale(list, j)));
        attention.add_summary(kept_score(row, kv_head, head % c_.group, j) + shift,
                              [&](std::size_t d) { return value_mean(list, j, static_cast<int>(d)); });
      }
    }
    const Attention::Result expected = attention.result(largest_value, c_.bf16);
    for (std::size_t d = 0; d < dim; ++d) {
      const double difference = std::fabs(static_cast<double>(out[first + d]) - expected.value[d]);
      DUALDECODER_EXPECT(difference <= expected.tolerance[d], "%s: row %d head %d dim %zu is %g, expected %g within %g", c_.name, row, head,
                         d, static_cast<double>(out[first + d]), expected.value[d], expected.tolerance[d]);
    }
  }

  Case c_;
  int sequences_;
  StoreLayout layout_{};
  std::size_t slot_lists_ = 0;
  std::vector<std::uint16_t> sinks_, window_, data_;
  std::vector<int> slot_table_, chosen_, chosen_count_, slot_of_;
  std::vector<std::uint32_t> tiles_;
  std::vector<float> value_scales_, bias_, tile_max_;
  std::vector<std::uint16_t> score_levels_;
  Rows queries_, keys_, values_;
};

void run_case(const Case& c) {
  World world(c);
  world.compare(world.run());
}

constexpr RowMode kSingle = RowMode::single;
constexpr RowMode kDual = RowMode::dual;
constexpr RowMode kResync = RowMode::resync;
constexpr RowMode kIdle = RowMode::idle;

/// Row 0 has the same bits whatever row 1 holds and whoever shares the batch, at whatever place.
void test_bits(int value_group) {
  const auto row0 = [](const Case& c, int place) {
    World world(c);
    const std::vector<float> out = world.run();
    const std::ptrdiff_t width = c.kv_heads * c.group * c.dim;
    const std::ptrdiff_t first = place * c.rows_per_sequence * width;
    return std::vector<float>(out.begin() + first, out.begin() + first + width);
  };
  Case c{.name = "same bits",
         .dim = 128,
         .value_group = value_group,
         .score_deviation = 8.0F,
         .lengths = {12000},
         .modes = {kDual},
         .seeds = {5}};
  const std::vector<float> expected = row0(c, 0);
  c.row1_seed = 60;
  DUALDECODER_EXPECT(row0(c, 0) == expected, "row 0 depends on row 1");
  c.modes = {kSingle};
  DUALDECODER_EXPECT(row0(c, 0) == expected, "row 0 depends on whether there is a row 1");
  c.lengths = {14000, 12000, 3};
  c.modes = {kDual, kDual, kResync};
  c.seeds = {6, 5, 7};
  DUALDECODER_EXPECT(row0(c, 1) == expected, "row 0 depends on its place or its batch mates");
}

/// A pattern is repeated, so the time is right and the result is not looked at.
template <class T>
DeviceArray<T> filled(std::size_t count, const std::vector<T>& pattern) {
  DeviceArray<T> out(count);
  std::size_t done = std::min(pattern.size(), count);
  check(cudaMemcpy(out.data(), pattern.data(), done * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  while (done < count) {
    const std::size_t some = std::min(done, count - done);
    check(cudaMemcpy(out.data() + done, out.data(), some * sizeof(T), cudaMemcpyDeviceToDevice), "cudaMemcpy");
    done += some;
  }
  return out;
}

/// What --bench times: rows of 128 dims.
struct Shape {
  const char* name;
  int batch;
  int length;
  int kv_heads = 8;
  int group = 4;
  int chunk = 8;
  int budget = 1024;
  int rows_per_sequence = 2;
  int value_group = 1;
};

/// Rows that stand side by side share 11 of 20 chosen chunks, and of the others of the second row two thirds are resident: as the trace
/// of a real text has it where slots are four times the budget.
constexpr int kOf = 20;
bool is_own(int i) { return i % kOf % 2 == 1 && i % kOf != 19; }
bool is_resident(int i, bool own) { return !own || i % 3 != 0; }

void bench(const Shape& shape) {
  StoreLayout l{};
  l.layers = 4;
  l.kv_heads = shape.kv_heads;
  l.group = shape.group;
  l.heads = l.kv_heads * l.group;
  l.dim = 128;
  l.max_sequences = shape.batch;
  l.rows_per_sequence = shape.rows_per_sequence;
  l.chunk = shape.chunk;
  l.sink_chunks = std::max(16 / l.chunk, 1);
  l.local_tokens = 128;
  l.window_chunks = 128 / l.chunk + 3;
  l.value_group = shape.value_group;
  l.max_chunks = (shape.length / l.chunk + kTileChunks) / kTileChunks * kTileChunks;
  l.splits = (l.max_chunks + kSplitChunks - 1) / kSplitChunks;
  l.selected = shape.budget / l.chunk;
  l.parts = (shape.budget + kPartTokens - 1) / kPartTokens;
  l.slots = 2 * l.selected;
  l.slot_layers = l.layers;
  l.chunk_bytes = static_cast<std::uint32_t>(4 * l.chunk * l.dim);
  l.bias_scale = 1.0F;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  std::vector<std::uint16_t> halves(1 << 20);
  std::vector<std::uint32_t> words(1 << 20);
  std::vector<float> scores(1 << 20);
  std::vector<std::uint16_t> levels(1 << 20);
  for (std::uint16_t& half : halves) half = narrow(normal(random));
  for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random());
  for (float& score : scores) score = normal(random);
  for (std::uint16_t& level : levels) level = static_cast<std::uint16_t>(random() % 20000);
  const std::size_t lists = at(shape.batch * l.layers * l.kv_heads);
  const DeviceArray<std::uint16_t> sinks = filled(lists * at(l.sink_chunks) * l.chunk_bytes / 2, halves);
  const DeviceArray<std::uint16_t> window = filled(lists * at(l.window_chunks) * l.chunk_bytes / 2, halves);
  const DeviceArray<std::uint16_t> data = filled(lists * at(l.slots) * l.chunk_bytes / 2, halves);
  const DeviceArray<std::uint32_t> tiles = filled(lists * at(l.value_tile_count()) * 256, words);
  const DeviceArray<float> value_scales =
      filled(lists * at(l.value_tile_count() * kTileChunks), std::vector<float>{0.5F, 0.25F, 0.75F, 1.0F});
  const DeviceArray<float> bias = filled(at(shape.batch * l.layers * l.heads), std::vector<float>{0.0F});
  const DeviceArray<float> tile_max = filled(l.score_lists() * at(l.columns() * l.splits * kSplitTiles), scores);
  const DeviceArray<std::uint16_t> score_levels = filled(l.score_lists() * at(l.columns() * l.max_chunks), levels);
  const DeviceArray<float> partials(l.row_lists() * at(l.partial_count() * l.group * (l.dim + 2)));
  const DeviceArray<std::uint32_t> pass(std::vector<std::uint32_t>{1});
  const int spacing = (l.max_chunks - l.sink_chunks - l.window_chunks - 16) / l.selected;
  std::vector<int> slot_table(lists * at(l.max_chunks), -1);
  std::vector<int> chosen(l.row_lists() * at(l.selected));
  for (std::size_t list = 0; list < l.row_lists(); ++list) {
    const bool second = l.rows_per_sequence == 2 && list / at(l.kv_heads) % 2 == 1;
    for (int i = 0; i < l.selected; ++i) {
      chosen[list * at(l.selected) + at(i)] = l.sink_chunks + i * spacing + (second && is_own(i) ? 1 : 0);
    }
  }
  double tokens = 0.0;  // of a KV head of a sequence, both rows' together
  for (int i = 0; i < l.selected; ++i) {
    for (const bool own : {false, true}) {
      if (own && (l.rows_per_sequence == 1 || !is_own(i))) continue;
      if (!is_resident(i, own)) continue;
      tokens += l.chunk;
      for (std::size_t list = 0; list < lists; ++list) {
        slot_table[list * at(l.max_chunks) + at(l.sink_chunks + i * spacing + (own ? 1 : 0))] = (i * 37 + (own ? l.selected : 0)) % l.slots;
      }
    }
  }
  const DeviceArray<int> slots_of_chunks(slot_table);
  const DeviceArray<int> all_chosen(chosen);
  const DeviceArray<int> counts(std::vector<int>(l.row_lists(), l.selected));
  std::vector<int> numbers(at(shape.batch));
  for (int s = 0; s < shape.batch; ++s) numbers[at(s)] = s;
  const DeviceArray<int> slots(numbers);
  const DeviceArray<int> positions(std::vector<int>(at(shape.batch), shape.length));
  const DeviceArray<RowMode> modes(std::vector<RowMode>(at(shape.batch), l.rows_per_sequence == 2 ? kDual : kSingle));
  const int rows = shape.batch * l.rows_per_sequence;
  const DeviceArray<std::uint16_t> queries = filled(at(rows * l.heads * l.dim), halves);
  const DeviceArray<std::uint16_t> keys = filled(at(rows * l.kv_heads * l.dim), halves);
  const DeviceArray<std::uint16_t> out(queries.size());
  l.sinks = reinterpret_cast<std::byte*>(sinks.data());
  l.window = reinterpret_cast<std::byte*>(window.data());
  l.data = reinterpret_cast<std::byte*>(data.data());
  l.slot_of = slots_of_chunks.data();
  l.value_tiles = tiles.data();
  l.value_scales = value_scales.data();
  l.bias = bias.data();
  l.tile_max = tile_max.data();
  l.score_levels = score_levels.data();
  l.pass = pass.data();
  l.partials = partials.data();
  const StepView view{shape.batch, l.rows_per_sequence, slots.data(), positions.data(), modes.data(), nullptr};
  const Selection by_row{all_chosen.data(), nullptr, counts.data(), l.selected, l.kv_heads};
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  for (const bool tail : {true, false}) {
    l.tail = tail;
    constexpr int kLayers = 16;  // of a graph, so that the host does not hold it up
    const Replay step(stream, [&] {
      for (int layer = 0; layer < kLayers; ++layer) {
        attend_chunks(l, layer % l.layers, view, {queries.data(), true}, {keys.data(), true}, {keys.data(), true}, by_row,
                      {out.data(), true}, stream);
      }
    });
    const double time = milliseconds(stream, 20, [&] { step.launch(stream); }) / kLayers;
    const double per_sequence = static_cast<double>(shape.batch) * l.kv_heads;
    const double exact = per_sequence * (tokens + 16.0 + 128.0) * l.dim * 4.0;
    const double levels = tail ? per_sequence * (shape.length / l.chunk / l.value_group) * (l.dim / 2.0 + 4.0) : 0.0;
    const double score_bytes = tail ? per_sequence * l.columns() * (shape.length / l.chunk) * 2.25 : 0.0;
    std::printf(
        "attend_chunks %s, batch %d x %d tokens, %d row(s), chunk %d (values of %d), budget %d, tail %d: %.1f us, %.0f GB/s (tokens %.1f "
        "MB, summaries "
        "%.1f MB, scores %.1f MB)\n",
        shape.name, shape.batch, shape.length, l.rows_per_sequence, l.chunk, l.value_group, shape.budget, static_cast<int>(tail),
        time * 1e3, (exact + levels + score_bytes) / time * 1e-6, exact * 1e-6, levels * 1e-6, score_bytes * 1e-6);
  }
  cudaStreamDestroy(stream);
}

}  // namespace

int main(int argc, char** argv) {
  return run_on_device([&] {
    if (argc > 1 && std::strcmp(argv[1], "--bench") == 0) {
      bench({.name = "8B", .batch = 7, .length = 131072});
      bench({.name = "8B", .batch = 7, .length = 131072, .budget = 2048});
      bench({.name = "8B", .batch = 7, .length = 131072, .chunk = 2, .budget = 512, .value_group = 2});
      bench({.name = "8B", .batch = 7, .length = 131072, .chunk = 4, .budget = 512});
      bench({.name = "8B", .batch = 7, .length = 131072, .rows_per_sequence = 1});
      bench({.name = "8B", .batch = 7, .length = 131072, .value_group = 2});
      bench({.name = "8B", .batch = 7, .length = 131072, .value_group = 4});
      bench({.name = "8B", .batch = 7, .length = 131072, .chunk = 4, .budget = 512, .value_group = 2});
      bench({.name = "8B", .batch = 7, .length = 131072, .chunk = 4, .budget = 512, .value_group = 4});
      bench({.name = "8B", .batch = 1, .length = 131072, .value_group = 2});
      bench({.name = "8B", .batch = 1, .length = 131072});
      bench({.name = "8B", .batch = 1, .length = 4096});
      bench({.name = "1.5B", .batch = 16, .length = 122880, .kv_heads = 2, .group = 6});
      bench({.name = "1.5B", .batch = 28, .length = 122880, .kv_heads = 2, .group = 6});
      bench({.name = "1.5B", .batch = 16, .length = 122880, .kv_heads = 2, .group = 6, .value_group = 2});
      bench({.name = "1.5B", .batch = 28, .length = 122880, .kv_heads = 2, .group = 6, .value_group = 2});
      bench({.name = "1.5B", .batch = 16, .length = 122880, .kv_heads = 2, .group = 6, .value_group = 4});
      bench({.name = "1.5B", .batch = 28, .length = 122880, .kv_heads = 2, .group = 6, .value_group = 4});
      return;
    }
    const std::vector<RowMode> modes = {kDual, kSingle, kResync, kDual, kIdle, kDual, kDual, kDual};
    const std::vector<int> ragged = {1, 15, 16, 47, 48, 600, 1999, 9000};
    run_case({.name = "ragged", .lengths = ragged, .modes = modes});
    run_case({.name = "row 1 as row 0", .row1_as_row0 = true, .lengths = ragged, .modes = modes});
    run_case({.name = "no tail", .tail = false, .lengths = ragged, .modes = modes});
    run_case({.name = "ping-pong", .ping_pong = true, .lengths = ragged, .modes = modes});
    run_case({.name = "one row", .rows_per_sequence = 1, .lengths = {1, 700, 3000}, .modes = {kSingle, kSingle, kIdle}});
    run_case({.name = "all resident", .resident = 1.0, .lengths = {600, 3000}, .modes = {kDual, kResync}});
    run_case({.name = "none resident", .resident = 0.0, .lengths = {600, 3000}, .modes = {kDual, kResync}});
    run_case({.name = "no tail, none resident", .tail = false, .resident = 0.0, .lengths = {600}, .modes = {kDual}});
    run_case({.name = "budget of the whole context", .resident = 1.0, .lengths = {540, 560}, .modes = {kDual, kSingle}});
    run_case({.name = "one chunk", .selected = 1, .slots = 1, .resident = 1.0, .lengths = {64, 2000}, .modes = {kDual, kDual}});
    run_case({.name = "ties", .ties = true, .lengths = {5000}, .modes = {kDual}});
    run_case({.name = "huge scores", .deviation = 30.0F, .score_deviation = 40.0F, .lengths = {5000}, .modes = {kDual}});
    run_case({.name = "flat tail", .bias_scale = 0.0F, .score_deviation = 0.1F, .lengths = {9000}, .modes = {kDual}});
    run_case({.name = "no sinks", .sink_chunks = 0, .lengths = {1, 31, 40, 3000}, .modes = {kDual, kDual, kDual, kDual}});
    run_case({.name = "wide window", .sink_chunks = 8, .local_tokens = 300, .lengths = {100, 365, 3000}, .modes = {kDual, kDual, kDual}});
    for (const int dim : {64, 80, 128}) {  // row 1's own chunks take several parts
      run_case({.name = "chunk 2", .dim = dim, .chunk = 2, .selected = 300, .slots = 400, .lengths = {5000, 30}, .modes = {kDual, kDual}});
    }
    run_case({.name = "chunk 4", .chunk = 4, .selected = 100, .lengths = {5000, 30}, .modes = {kDual, kDual}});
    run_case({.name = "chunk 16", .chunk = 16, .lengths = {5000, 70}, .modes = {kDual, kDual}});
    run_case({.name = "chunk 32", .chunk = 32, .lengths = {5000, 100}, .modes = {kDual, kDual}});
    run_case({.name = "long lists", .chunk = 4, .selected = 1500, .slots = 1500, .lengths = {20000}, .modes = {kDual}});
    run_case({.name = "dim 128", .dim = 128, .lengths = {5000, 40}, .modes = {kDual, kResync}});
    run_case({.name = "bf16", .dim = 128, .lengths = {5000, 40}, .modes = {kDual, kSingle}, .bf16 = true});
    run_case({.name = "dim 80", .dim = 80, .group = 3, .lengths = {5000}, .modes = {kDual}});
    run_case({.name = "dim 96", .dim = 96, .group = 7, .lengths = {5000}, .modes = {kDual}});
    run_case({.name = "dim 256", .dim = 256, .kv_heads = 1, .group = 2, .lengths = {5000}, .modes = {kDual}});
    run_case({.name = "dim 256, group 8", .dim = 256, .kv_heads = 1, .group = 8, .lengths = {3000}, .modes = {kDual}});
    for (const int together : {2, 4}) {  // with sinks and windows that cut groups
      run_case({.name = "values together", .value_group = together, .lengths = ragged, .modes = modes});
      run_case({.name = "values together, one sink", .sink_chunks = 1, .value_group = together, .lengths = ragged, .modes = modes});
      run_case({.name = "values together, chunk 4",
                .dim = 128,
                .chunk = 4,
                .sink_chunks = 3,
                .value_group = together,
                .lengths = {5005, 50},
                .modes = {kDual, kDual}});
      run_case({.name = "values together, huge scores",
                .value_group = together,
                .deviation = 30.0F,
                .score_deviation = 40.0F,
                .lengths = {5000},
                .modes = {kDual}});
      run_case({.name = "values together, flat",
                .value_group = together,
                .bias_scale = 0.0F,
                .score_deviation = 0.1F,
                .lengths = {9000},
                .modes = {kDual}});
      run_case({.name = "values together, ties", .dim = 128, .value_group = together, .ties = true, .lengths = {5000}, .modes = {kDual}});
      run_case({.name = "values together, dim 80", .dim = 80, .group = 6, .value_group = together, .lengths = {5000}, .modes = {kDual}});
      run_case({.name = "values together, dim 96", .dim = 96, .group = 3, .value_group = together, .lengths = {5000}, .modes = {kDual}});
      run_case({.name = "values together, dim 256",
                .dim = 256,
                .kv_heads = 1,
                .group = 2,
                .value_group = together,
                .lengths = {5000},
                .modes = {kDual}});
      run_case({.name = "values together, dim 256, group 8",
                .dim = 256,
                .kv_heads = 1,
                .group = 8,
                .value_group = together,
                .lengths = {3000},
                .modes = {kDual}});
      run_case({.name = "values together, group 6",
                .dim = 128,
                .group = 6,
                .value_group = together,
                .lengths = {5000, 1300},
                .modes = {kDual, kResync}});
      run_case({.name = "values together, bf16",
                .dim = 128,
                .value_group = together,
                .lengths = {5000, 40},
                .modes = {kDual, kSingle},
                .bf16 = true});
    }
    run_case({.name = "group 1", .group = 1, .lengths = {5000}, .modes = {kDual}});
    run_case({.name = "group 8", .dim = 128, .group = 8, .lengths = {5000}, .modes = {kDual}});
    run_case({.name = "group 12", .kv_heads = 1, .group = 12, .lengths = {5000}, .modes = {kDual}});
    run_case({.name = "group 16", .dim = 128, .kv_heads = 1, .group = 16, .lengths = {3000, 3000}, .modes = {kDual, kResync}});
    for (const int together : {1, 2, 4}) test_bits(together);
    if (small_run()) return;
    run_case({.name = "long", .dim = 128, .kv_heads = 1, .selected = 128, .slots = 256, .lengths = {131072}, .modes = {kDual}});
  });
}
