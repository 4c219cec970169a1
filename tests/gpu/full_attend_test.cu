// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// attend_full and append_full against softmax attention in double precision over the same bf16 keys and values. --bench times them.
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
  int split_tokens = 256;
  std::vector<int> lengths;
  std::vector<RowMode> modes;
  float deviation = 1.0F;
  bool bf16 = false;
  std::vector<unsigned> seeds = {};  ///< of the sequences, else 1, 2 ..
  unsigned row1_seed = 50;
};

std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// A store of one more storage slot than sequences and two layers, of which layer 1 is attended to.
class World {
 public:
  explicit World(const Case& c) : c_(c) {
    const int longest = *std::max_element(c.lengths.begin(), c.lengths.end());
    sequences_ = static_cast<int>(c.lengths.size());
    layout_.layers = 2;
    layout_.kv_heads = c.kv_heads;
    layout_.group = c.group;
    layout_.heads = c.kv_heads * c.group;
    layout_.dim = c.dim;
    layout_.max_sequences = sequences_ + 1;
    layout_.rows_per_sequence = c.rows_per_sequence;
    layout_.split_tokens = c.split_tokens;
    layout_.splits = (pages_of(longest) * kPageTokens + c.split_tokens - 1) / c.split_tokens;
    for (int s = 0; s < sequences_; ++s) {
      slot_of_.push_back((s + 1) % layout_.max_sequences);
      std::mt19937 random(seed_of(s));
      std::normal_distribution<float> normal(0.0F, 1.0F);
      tokens_.emplace_back(at(c.lengths[at(s)] * c.kv_heads) * at(c.dim * 2));
      for (std::uint16_t& value : tokens_.back()) value = narrow(normal(random));
    }
    const auto rows_of = [&](int width, float deviation, unsigned kind) {
      return random_rows(sequences_ * c.rows_per_sequence, width, deviation, c.bf16, [&](int row) -> unsigned {
        const int number = row % c.rows_per_sequence;
        if (!row_is_live(c.modes[at(row / c.rows_per_sequence)], number)) return 0;
        return seed_of(row / c.rows_per_sequence) * 1000 + (number == 1 ? c.row1_seed : 0) + kind;
      });
    };
    queries_ = rows_of(layout_.heads * c.dim, c.deviation, 1);
    keys_ = rows_of(c.kv_heads * c.dim, 1.0F, 2);
    values_ = rows_of(c.kv_heads * c.dim, 1.0F, 3);
  }

  std::vector<float> run() {
    std::vector<DeviceArray<std::uint16_t>> contexts;
    std::vector<std::byte*> bases(at(layout_.max_sequences), nullptr);
    std::vector<int> pages(at(layout_.max_sequences), 0);
    for (int s = 0; s < sequences_; ++s) {
      pages[at(slot_of_[at(s)])] = pages_of(c_.lengths[at(s)]);
      const std::size_t elements = at(2 * c_.kv_heads * pages_of(c_.lengths[at(s)])) * at(2 * kPageTokens * c_.dim);
      contexts.emplace_back(std::vector<std::uint16_t>(elements, kNanBits));
      bases[at(slot_of_[at(s)])] = reinterpret_cast<std::byte*>(contexts.back().data());
    }
    const DeviceArray<std::byte*> base(bases);
    const DeviceArray<int> page_counts(pages);
    const DeviceArray<int> slots(slot_of_);
    const DeviceArray<int> positions(c_.lengths);
    const DeviceArray<RowMode> modes(c_.modes);
    const int rows = sequences_ * c_.rows_per_sequence;
    const DeviceArray<float> partials(
        std::vector<float>(at(layout_.max_sequences * c_.rows_per_sequence * c_.kv_heads * layout_.splits * c_.group * (c_.dim + 2)), NAN));
    layout_.base = base.data();
    layout_.pages = page_counts.data();
    layout_.partials = partials.data();
    for (int s = 0; s < sequences_; ++s) append(s);
    const DeviceArray<std::byte> queries(queries_.bytes());
    const DeviceArray<std::byte> keys(keys_.bytes());
    const DeviceArray<std::byte> values(values_.bytes());
    const DeviceArray<std::byte> out(at(rows * layout_.heads * c_.dim) * (c_.bf16 ? 2 : 4));
    const StepView view{sequences_, c_.rows_per_sequence, slots.data(), positions.data(), modes.data(), nullptr};
    const std::vector<std::byte> result = run_and_replay(out, c_.name, [&](cudaStream_t stream) {
      attend_full(layout_, 1, view, {queries.data(), c_.bf16}, {keys.data(), c_.bf16}, {values.data(), c_.bf16}, {out.data(), c_.bf16},
                  stream);
    });
    return as_floats(result, c_.bf16);
  }

  void compare(const std::vector<float>& out) const {
    const double scale = 1.0 / std::sqrt(static_cast<double>(c_.dim));
    const std::size_t dim = at(c_.dim);
    for (int row = 0; row < sequences_ * c_.rows_per_sequence; ++row) {
      const int place = row / c_.rows_per_sequence;
      const RowMode mode = c_.modes[at(place)];
      const int number = row % c_.rows_per_sequence;
      const int length = c_.lengths[at(place)];
      for (int head = 0; head < layout_.heads; ++head) {
        const std::size_t first = at(row * layout_.heads + head) * dim;
        if (!row_is_live(mode, number)) {
          for (std::size_t d = 0; d < dim; ++d) DUALDECODER_EXPECT(out[first + d] == 0.0F, "%s: a dead row is not zero", c_.name);
          continue;
        }
        const int kv_head = head / c_.group;
        const std::vector<float> query(queries_.values.begin() + static_cast<std::ptrdiff_t>(first),
                                       queries_.values.begin() + static_cast<std::ptrdiff_t>(first + dim));
        Attention attention(c_.dim);
        for (int token = 0; token < length; ++token) {
          const std::uint16_t* key = tokens_[at(place)].data() + at(token * c_.kv_heads + kv_head) * dim;
          const std::uint16_t* value = key + tokens_[at(place)].size() / 2;
          attention.add_token(
              query, scale, [&](std::size_t d) { return widen(key[d]); }, [&](std::size_t d) { return widen(value[d]); });
        }
        for (int r = 0; r <= number; ++r) {
          if (!row_is_live(mode, r)) continue;
          const std::size_t source = at((row - number + r) * c_.kv_heads + kv_head) * dim;
          attention.add_token(
              query, scale, [&](std::size_t d) { return widen(narrow(keys_.values[source + d])); },
              [&](std::size_t d) { return widen(narrow(values_.values[source + d])); });
        }
        const Attention::Result expected = attention.result(0.0, c_.bf16);
        for (std::size_t d = 0; d < dim; ++d) {
          const double difference = std::fabs(static_cast<double>(out[first + d]) - expected.value[d]);
          DUALDECODER_EXPECT(difference <= expected.tolerance[d], "%s: row %d head %d dim %zu is %g, expected %g within %g", c_.name, row,
                             head, d, static_cast<double>(out[first + d]), expected.value[d], expected.tolerance[d]);
        }
      }
    }
  }

 private:
  unsigned seed_of(int s) const { return c_.seeds.empty() ? static_cast<unsigned>(s) + 1U : c_.seeds[at(s)]; }
  /// Pages of a sequence that has room for one token more, behind which a guess stands.
  static int pages_of(int tokens) { return (tokens + 2 + kPageTokens - 1) / kPageTokens; }

  /// In two blocks, f32 and bf16 by turns.
  void append(int s) const {
    const std::vector<std::uint16_t>& tokens = tokens_[at(s)];
    const std::size_t width = at(c_.kv_heads * c_.dim);
    const int length = c_.lengths[at(s)];
    const int cut = length / 3;
    for (int block = 0; block < 2; ++block) {
      const int first = block == 0 ? 0 : cut;
      const int count = block == 0 ? cut : length - cut;
      std::vector<std::byte> bytes[2];
      for (int half = 0; half < 2; ++half) {
        Rows rows{std::vector<float>(at(count) * width), block == 0};
        const std::size_t from = at(half) * tokens.size() / 2 + at(first) * width;
        for (std::size_t i = 0; i < rows.values.size(); ++i) rows.values[i] = widen(tokens[from + i]);
        bytes[half] = rows.bytes();
      }
      const DeviceArray<std::byte> keys(bytes[0]);
      const DeviceArray<std::byte> values(bytes[1]);
      append_full(layout_, 1, slot_of_[at(s)], first, count, {keys.data(), block == 0}, {values.data(), block == 0}, nullptr);
      check(cudaDeviceSynchronize(), "append_full");
    }
  }

  Case c_;
  FullLayout layout_{};
  int sequences_ = 0;
  std::vector<int> slot_of_;
  std::vector<std::vector<std::uint16_t>> tokens_;  // [sequences] keys [tokens, kv_heads, dim], then values
  Rows queries_;
  Rows keys_;
  Rows values_;
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
void test_bits() {
  const auto row0 = [](const Case& c, int place) {
    World world(c);
    const std::vector<float> out = world.run();
    const std::ptrdiff_t width = c.kv_heads * c.group * c.dim;
    const std::ptrdiff_t first = place * c.rows_per_sequence * width;
    return std::vector<float>(out.begin() + first, out.begin() + first + width);
  };
  Case c{.name = "same bits", .dim = 128, .lengths = {700}, .modes = {kDual}, .seeds = {5}};
  const std::vector<float> expected = row0(c, 0);
  c.row1_seed = 60;
  DUALDECODER_EXPECT(row0(c, 0) == expected, "row 0 depends on row 1");
  c.modes = {kSingle};
  DUALDECODER_EXPECT(row0(c, 0) == expected, "row 0 depends on whether there is a row 1");
  c.lengths = {1000, 700, 3};
  c.modes = {kDual, kDual, kResync};
  c.seeds = {6, 5, 7};
  DUALDECODER_EXPECT(row0(c, 1) == expected, "row 0 depends on its place or its batch mates");
}

void bench(int batch, int length, int split_tokens, int rows_per_sequence) {
  constexpr int kDim = 128;
  constexpr int kHeads = 8;
  constexpr int kGroup = 4;
  constexpr int kLayers = 2;
  FullLayout layout{};
  layout.layers = kLayers;
  layout.kv_heads = kHeads;
  layout.group = kGroup;
  layout.heads = kHeads * kGroup;
  layout.dim = kDim;
  layout.max_sequences = batch;
  layout.rows_per_sequence = rows_per_sequence;
  const int pages = (length + 2 + kPageTokens - 1) / kPageTokens;
  layout.split_tokens = split_tokens;
  layout.splits = (pages * kPageTokens + split_tokens - 1) / split_tokens;
  const std::size_t sequence_bytes = at(kLayers * kHeads) * at(pages) * at(4 * kPageTokens * kDim);
  const DeviceArray<std::byte> context(sequence_bytes * at(batch));
  check(cudaMemset(context.data(), 0x3C, context.size()), "cudaMemset");  // bf16 0.0115 everywhere
  std::vector<std::byte*> bases;
  for (int s = 0; s < batch; ++s) bases.push_back(context.data() + at(s) * sequence_bytes);
  const DeviceArray<std::byte*> base(bases);
  const DeviceArray<int> page_counts(std::vector<int>(at(batch), pages));
  std::vector<int> numbers(at(batch));
  for (int s = 0; s < batch; ++s) numbers[at(s)] = s;
  const DeviceArray<int> slots(numbers);
  const DeviceArray<int> positions(std::vector<int>(at(batch), length));
  const DeviceArray<RowMode> modes(std::vector<RowMode>(at(batch), rows_per_sequence == 2 ? kDual : kSingle));
  const int rows = batch * rows_per_sequence;
  const DeviceArray<float> partials(at(rows * kHeads * layout.splits * kGroup * (kDim + 2)));
  const DeviceArray<std::byte> queries(at(rows * kHeads * kGroup * kDim * 2));
  const DeviceArray<std::byte> keys(at(rows * kHeads * kDim * 2));
  const DeviceArray<std::byte> out(queries.size());
  for (const DeviceArray<std::byte>* rows_of : {&queries, &keys}) check(cudaMemset(rows_of->data(), 0x3C, rows_of->size()), "cudaMemset");
  layout.base = base.data();
  layout.pages = page_counts.data();
  layout.partials = partials.data();
  const StepView view{batch, rows_per_sequence, slots.data(), positions.data(), modes.data(), nullptr};
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  int layer = 0;
  const double time = milliseconds(stream, 20, [&] {
    attend_full(layout, layer++ % kLayers, view, {queries.data(), true}, {keys.data(), true}, {keys.data(), true}, {out.data(), true},
                stream);
  });
  const double bytes = static_cast<double>(batch) * kHeads * length * kDim * 4.0;
  std::printf("attend_full batch %d x %d tokens, %d row(s), splits of %d: %.1f us, %.0f GB/s of keys and values\n", batch, length,
              rows_per_sequence, split_tokens, time * 1e3, bytes / time * 1e-6);
  cudaStreamDestroy(stream);
}

}  // namespace

int main(int argc, char** argv) {
  return run_on_device([&] {
    if (argc > 1 && std::strcmp(argv[1], "--bench") == 0) {
      for (const int split : {256, 512, 1024, 2048, 4096}) bench(7, 131072, split, 1);
      bench(7, 131072, 1024, 2);
      for (const int split : {256, 512, 1024, 2048, 4096}) bench(1, 131072, split, 1);
      for (const int split : {64, 128, 256}) bench(1, 4096, split, 1);
      return;
    }
    run_case(
        {.name = "ragged", .lengths = {1, 63, 64, 255, 256, 257, 700}, .modes = {kDual, kSingle, kDual, kDual, kDual, kResync, kIdle}});
    run_case({.name = "one row", .rows_per_sequence = 1, .lengths = {1, 100, 513}, .modes = {kSingle, kSingle, kIdle}});
    run_case({.name = "bf16", .dim = 128, .kv_heads = 1, .lengths = {300}, .modes = {kDual}, .bf16 = true});
    run_case({.name = "dim 80", .dim = 80, .group = 3, .lengths = {130, 70}, .modes = {kDual, kResync}});
    run_case({.name = "dim 96", .dim = 96, .group = 1, .lengths = {130, 70}, .modes = {kDual, kResync}});
    run_case({.name = "dim 256", .dim = 256, .kv_heads = 1, .group = 8, .lengths = {130, 70}, .modes = {kDual, kSingle}});
    run_case({.name = "group 16", .dim = 128, .kv_heads = 1, .group = 16, .lengths = {130, 255}, .modes = {kDual, kDual}});
    run_case({.name = "group 7, dim 64", .group = 7, .lengths = {333}, .modes = {kDual}});
    run_case({.name = "huge scores", .dim = 128, .lengths = {333}, .modes = {kDual}, .deviation = 40.0F});
    run_case({.name = "full pages", .lengths = {62, 126}, .modes = {kDual, kDual}});
    test_bits();
    if (!small_run()) {
      run_case({.name = "long", .dim = 128, .kv_heads = 2, .lengths = {131072, 40000}, .modes = {kDual, kSingle}});
    }
  });
}
