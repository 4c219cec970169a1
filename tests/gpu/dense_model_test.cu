// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The dense part on the device against the CPU backend's, which has a double-precision twin of its own; with --bench its speed.
#include "cuda/dense_model.hpp"

#include <cuda_bf16.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/dense_kernels.hpp"
#include "cuda/few_rows.hpp"
#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "examples/bench/shapes.hpp"
#include "src/rope_frequencies.hpp"
#include "tests/gpu/bf16.hpp"
#include "tests/gpu/check.hpp"
#include "tests/gpu/device_weights.hpp"
#include "tests/gpu/replay.hpp"

namespace dualdecoder::test {
namespace {

/// What rounding to bf16 may change, relative to the value: half a last place of its eight binary digits.
constexpr double kUnit = 0x1p-8;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

ModelConfig tiny(const char* architecture, bool tied, int head_dim = 64) {
  ModelConfig config;
  config.architecture = architecture;
  config.layers = 2;
  config.hidden = 328;  // neither this nor the next is a whole number of tiles
  config.intermediate = 520;
  config.heads = 6;
  config.kv_heads = 2;
  config.head_dim = head_dim;
  config.vocabulary = 1003;
  config.context = 1 << 20;
  config.attention_bias = config.architecture == "qwen2";
  config.qk_norm = config.architecture == "qwen3";
  config.tied_embeddings = tied;
  config.rope.theta = 500000.0F;
  return config;
}

std::vector<float> normal(std::size_t count, std::uint64_t seed) {
  testing::Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = random.normal();
  return values;
}

/// Largest difference over the largest magnitude of the expected values.
double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double worst = 0;
  double scale = 1e-30;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    worst = std::isnan(difference) ? 1e30 : std::max(worst, difference);
    scale = std::max(scale, std::abs(static_cast<double>(expected[i])));
  }
  return worst / scale;
}

/// A model on both backends. Everything on the device runs on a stream of its own.
struct Pair {
  Pair(const ModelConfig& shape, int rows, bool gaps = false)
      : host(cpu::make_cpu_backend()),
        weights(make_synthetic_weights(shape, 17, *host)),
        config(weights->config()),
        device_weights(std::make_shared<DeviceWeights>(*weights, gaps)),
        limits{.decode_rows = std::min(rows, 16), .prefill_rows = rows},
        stream(cuda::Stream::create()),
        cpu(host->make_dense(weights, limits)),
        gpu(cuda::make_cuda_dense(device_weights, limits, {memory, stream})) {}

  void wait() const { cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize"); }

  std::shared_ptr<Backend> host;
  std::shared_ptr<const ModelWeights> weights;
  const ModelConfig& config;
  std::shared_ptr<const ModelWeights> device_weights;
  DenseLimits limits;
  DeviceMemory memory;
  cuda::Stream stream;
  std::unique_ptr<DenseModel> cpu;
  std::unique_ptr<DenseModel> gpu;
  double slack = 1;  // of bounds that are shares of the largest value
};

template <class Element>
constexpr DataType kTypeOf = sizeof(Element) == 2 ? DataType::bf16 : DataType::f32;

void test_embed(Pair& pair) {
  const int rows = 9;
  std::vector<Token> tokens{0, -1, 5, pair.config.vocabulary - 1, 5, 77, -1, 300, 2};
  std::vector<float> expected(at(rows) * at(pair.config.hidden), 7.0F);
  pair.cpu->embed(tokens.data(), {expected.data(), DataType::f32, {rows, pair.config.hidden}}, pair.host->stream());
  const DeviceArray<Token> device_tokens(tokens);
  const DeviceArray<float> hidden(std::vector<float>(expected.size(), 7.0F));
  pair.gpu->embed(device_tokens.data(), {hidden.data(), DataType::f32, {rows, pair.config.hidden}}, pair.stream);
  DUALDECODER_EXPECT(hidden.download() == expected, "embeddings differ");
}

/// The normed row is rounded to bf16 before the product: an error for each of its terms, evenly spread over at most kUnit of it either way,
/// which mostly cancel. Their sum deviates by less than kUnit / 2 of the outputs' root mean square, and the largest of thousands of outputs
/// is three times that or more: one unit of the largest is more than six deviations. bf16 outputs are rounded by one unit more.
template <class Element>
void test_before_attention(Pair& pair, int rows, bool all) {
  const ModelConfig& c = pair.config;
  const std::vector<float> hidden = normal(at(rows) * at(c.hidden), 3);
  const std::array<int, 6> some{0, 1, 17, 4095, 131071, 1000003};
  std::vector<int> positions(at(rows));
  for (int row = 0; row < rows; ++row) positions[at(row)] = some[at(row) % some.size()] + row / 6;
  std::vector<float> q(at(rows) * at(c.q_width())), k(at(rows) * at(c.kv_width())), v(k.size());
  const auto heads = [&](auto* data, DataType type, int count) { return Tensor(data, type, {rows, count, c.head_dim}); };
  const auto f32 = DataType::f32;
  pair.cpu->before_attention(0, ConstTensor{hidden.data(), f32, {rows, c.hidden}}, positions.data(), heads(q.data(), f32, c.heads),
                             all ? heads(k.data(), f32, c.kv_heads) : Tensor{}, all ? heads(v.data(), f32, c.kv_heads) : Tensor{},
                             pair.host->stream());

  const DeviceArray<float> device_hidden(hidden);
  const DeviceArray<int> device_positions(positions);
  const DeviceArray<Element> device_q(q.size()), device_k(k.size()), device_v(v.size());
  constexpr DataType kType = kTypeOf<Element>;
  pair.gpu->before_attention(0, ConstTensor{device_hidden.data(), f32, {rows, c.hidden}}, device_positions.data(),
                             heads(device_q.data(), kType, c.heads), all ? heads(device_k.data(), kType, c.kv_heads) : Tensor{},
                             all ? heads(device_v.data(), kType, c.kv_heads) : Tensor{}, pair.stream);
  const double bound = (sizeof(Element) == 2 ? 2 : 1) * pair.slack * kUnit;
  const auto compare = [&](const char* name, const DeviceArray<Element>& got, const std::vector<float>& expected) {
    const double error = relative_error(to_floats(got.download()), expected);
    DUALDECODER_EXPECT(error <= bound, "%s %s, head_dim %d, %d rows, %s: error %g of the largest, bound %g", c.architecture.c_str(), name,
                       c.head_dim, rows, name_of(kType), error, bound);
  };
  compare("q", device_q, q);
  if (!all) return;
  compare("k", device_k, k);
  compare("v", device_v, v);
  DUALDECODER_EXPECT(device_hidden.download() == hidden, "hidden was written to");
}

/// Attention, normed rows, gates and ups, and their products are rounded to bf16: four roundings of the same kind as above, whose squares
/// add up, so twice its bound.
template <class Element>
void test_after_attention(Pair& pair, int rows) {
  const ModelConfig& c = pair.config;
  std::vector<float> hidden = normal(at(rows) * at(c.hidden), 4);
  const std::vector<float> attention = normal(at(rows) * at(c.q_width()), 5);
  const DeviceArray<float> device_hidden(hidden);
  const DeviceArray<Element> device_attention(converted<Element>(attention));
  const Layer layer = c.layers - 1;
  pair.cpu->after_attention(layer, ConstTensor{attention.data(), DataType::f32, {rows, c.heads, c.head_dim}},
                            {hidden.data(), DataType::f32, {rows, c.hidden}}, pair.host->stream());
  pair.gpu->after_attention(layer, ConstTensor{device_attention.data(), kTypeOf<Element>, {rows, c.heads, c.head_dim}},
                            {device_hidden.data(), DataType::f32, {rows, c.hidden}}, pair.stream);
  const double error = relative_error(device_hidden.download(), hidden);
  DUALDECODER_EXPECT(error <= 2 * pair.slack * kUnit, "%s, %d rows: hidden after a layer is off by %g of the largest",
                     c.architecture.c_str(), rows, error);
}

void test_head(Pair& pair, int rows) {
  const ModelConfig& c = pair.config;
  const std::vector<float> hidden = normal(at(rows) * at(c.hidden), 6);
  std::vector<float> logits(at(rows) * at(c.vocabulary));
  pair.cpu->head(ConstTensor{hidden.data(), DataType::f32, {rows, c.hidden}}, {logits.data(), DataType::f32, {rows, c.vocabulary}},
                 pair.host->stream());
  const DeviceArray<float> device_hidden(hidden);
  const DeviceArray<float> device_logits(logits.size());
  pair.gpu->head(ConstTensor{device_hidden.data(), DataType::f32, {rows, c.hidden}},
                 {device_logits.data(), DataType::f32, {rows, c.vocabulary}}, pair.stream);
  const double error = relative_error(device_logits.download(), logits);
  DUALDECODER_EXPECT(error <= pair.slack * kUnit, "%s, %d rows: logits are off by %g of the largest", c.architecture.c_str(), rows, error);
}

void test_pass(Pair& pair, int rows) {
  test_before_attention<float>(pair, rows, true);
  test_before_attention<__nv_bfloat16>(pair, rows, true);
  test_before_attention<__nv_bfloat16>(pair, rows, false);
  test_after_attention<float>(pair, rows);
  test_after_attention<__nv_bfloat16>(pair, rows);
  test_head(pair, rows);
}

void test_against_cpu() {
  const std::vector<int> every{1, 2, 3, 7, 8, 14, 16, 17, 32, 33, 200};
  for (const char* architecture : {"llama", "qwen2", "qwen3"}) {
    for (const bool gaps : {false, true}) {
      if (small_run() && gaps != (architecture[0] == 'l')) continue;
      Pair pair(tiny(architecture, architecture[0] == 'q'), 200, gaps);
      test_embed(pair);
      for (const int rows : small_run() ? std::vector<int>{1, 14, 17} : every) test_pass(pair, rows);
    }
  }
  for (const int head_dim : {80, 96, 128, 256}) {
    if (small_run() && head_dim != 256) continue;
    Pair pair(tiny("qwen3", false, head_dim), 16);
    test_before_attention<float>(pair, 12, true);
    test_before_attention<__nv_bfloat16>(pair, 12, true);
    test_after_attention<__nv_bfloat16>(pair, 12);
  }
}

/// Widths around those of tiles and of the pieces that products are summed in, the smallest that are taken among them. The largest of few
/// values is no more than their root mean square, so bounds that rest on three times that are wider.
void test_widths() {
  struct Widths {
    int hidden, intermediate, vocabulary;
  };
  for (const Widths& widths : {Widths{8, 8, 8}, {248, 264, 63}, {256, 512, 64}, {264, 2056, 65}, {4104, 24, 129}, {1016, 8200, 257}}) {
    ModelConfig config = tiny("qwen2", false);
    config.layers = 1;
    config.hidden = widths.hidden;
    config.intermediate = widths.intermediate;
    config.vocabulary = widths.vocabulary;
    if (small_run() && widths.hidden != 264) continue;
    Pair pair(config, 40);
    pair.slack = 4;
    for (const int rows : small_run() ? std::vector<int>{7, 33} : std::vector<int>{1, 8, 9, 14, 32, 33}) test_pass(pair, rows);
  }
}

/// RoPE by its formula (arXiv 2104.09864, section 3.4.2) on the f32 angle, in double precision: positions up to a million within 1e-5.
void test_angles() {
  ModelConfig config = tiny("llama", false, 128);
  const std::vector<int> positions{0, 1, 2, 1000, 65535, 105615, 105616, 131071, 524287, 999999, 1048575};
  const int rows = static_cast<int>(positions.size());
  const int half = config.head_dim / 2;
  for (const RopeScaling scaling : {RopeScaling::none, RopeScaling::yarn}) {
    config.rope.scaling = scaling;
    config.rope.factor = scaling == RopeScaling::none ? 1.0F : 4.0F;
    config.rope.original_context = 32768;
    const detail::RopeFrequencies rope = detail::rope_frequencies(config.rope, config.head_dim);
    const std::vector<float> projected = normal(at(rows) * at(config.q_width()), 8);
    const DeviceArray<float> device_projected(projected);
    const DeviceArray<int> device_positions(positions);
    const DeviceArray<float> inverse(rope.inverse);
    const DeviceArray<float> q(projected.size());
    cuda::check(cuda::launch_finish_heads({.rows = rows,
                                           .heads = config.heads,
                                           .kv_heads = config.kv_heads,
                                           .head_dim = config.head_dim,
                                           .projected = device_projected.data(),
                                           .stride = config.q_width(),
                                           .positions = device_positions.data(),
                                           .inverse = inverse.data(),
                                           .attention_factor = rope.attention_factor,
                                           .q = q.data(),
                                           .type = DataType::f32},
                                          nullptr),
                "launch_finish_heads");
    const std::vector<float> got = q.download();
    double worst = 0;
    for (int row = 0; row < rows; ++row) {
      for (int head = 0; head < config.heads; ++head) {
        const std::size_t begin = (at(row) * at(config.heads) + at(head)) * at(config.head_dim);
        for (int pair = 0; pair < half; ++pair) {
          const double angle = static_cast<double>(static_cast<float>(positions[at(row)]) * rope.inverse[at(pair)]);
          const double x = static_cast<double>(projected[begin + at(pair)]) * static_cast<double>(rope.attention_factor);
          const double y = static_cast<double>(projected[begin + at(pair + half)]) * static_cast<double>(rope.attention_factor);
          worst = std::max(worst, std::abs(static_cast<double>(got[begin + at(pair)]) - (x * std::cos(angle) - y * std::sin(angle))));
          worst =
              std::max(worst, std::abs(static_cast<double>(got[begin + at(pair + half)]) - (y * std::cos(angle) + x * std::sin(angle))));
        }
      }
    }
    DUALDECODER_EXPECT(worst < 1e-5, "rotated heads are off by %g", worst);
  }
}

/// Device memory of one pass over the same rows as a session has it.
struct Pass {
  Pass(const ModelConfig& config, int sequences, int rows_per_sequence)
      : c(config),
        rows(sequences * rows_per_sequence),
        tokens(at(rows)),
        positions(at(rows)),
        hidden(at(rows) * at(c.hidden)),
        q(at(rows) * at(c.q_width())),
        k(at(rows) * at(c.kv_width())),
        v(k.size()),
        attention(q.size()),
        logits(at(rows) * at(c.vocabulary)),
        options(at(sequences)),
        position(at(sequences)),
        mode(at(sequences)),
        sampled(at(rows)) {
    view = {.step = {.sequences = sequences, .rows_per_sequence = rows_per_sequence, .position = position.data(), .mode = mode.data()},
            .options = options.data(),
            .tokens = tokens.data()};
  }

  /// All that a pass enqueues; attention is that of a prompt, among the rows of the pass.
  void enqueue(DenseModel& model, StreamRef stream) {
    const auto bf16 = DataType::bf16;
    const Tensor rows_hidden(hidden.data(), DataType::f32, {rows, c.hidden});
    const Tensor rows_q(q.data(), bf16, {rows, c.heads, c.head_dim});
    const Tensor rows_k(k.data(), bf16, {rows, c.kv_heads, c.head_dim});
    const Tensor rows_v(v.data(), bf16, {rows, c.kv_heads, c.head_dim});
    const Tensor rows_attention(attention.data(), bf16, {rows, c.heads, c.head_dim});
    const Tensor rows_logits(logits.data(), DataType::f32, {rows, c.vocabulary});
    model.embed(tokens.data(), rows_hidden, stream);
    for (Layer layer = 0; layer < c.layers; ++layer) {
      model.before_attention(layer, rows_hidden, positions.data(), rows_q, rows_k, rows_v, stream);
      model.prefill_attention(rows_q, rows_k, rows_v, 0, rows_attention, stream);
      model.after_attention(layer, rows_attention, rows_hidden, stream);
    }
    model.head(rows_hidden, rows_logits, stream);
    cuda::check(cudaMemcpyAsync(q.data(), logits.data(), std::min(q.size() * 2, logits.size() * 4), cudaMemcpyDeviceToDevice, stream.get()),
                "cudaMemcpyAsync");  // logits outlive sampling here
    model.sample(rows_logits, view, sampled.data(), stream);
  }

  /// New contents for the same memory.
  void fill(std::uint64_t seed) {
    testing::Random random(seed);
    std::vector<Token> new_tokens(at(rows));
    std::vector<int> new_positions(at(rows));
    for (int row = 0; row < rows; ++row) {
      new_tokens[at(row)] = random.chance(0.2) ? -1 : random.below(c.vocabulary);
      new_positions[at(row)] = random.below(100000);
    }
    std::vector<SamplingOptions> new_options(options.size());
    std::vector<RowMode> new_mode(mode.size());
    std::vector<int> new_position(position.size());
    for (std::size_t i = 0; i < mode.size(); ++i) {
      new_options[i] = {.temperature = i % 2 == 0 ? 0.0F : 1.0F, .top_k = 50, .top_p = 0.9F, .seed = random.next()};
      new_mode[i] = static_cast<RowMode>(random.below(4));
      new_position[i] = random.below(100000);
    }
    tokens.upload(new_tokens);
    positions.upload(new_positions);
    options.upload(new_options);
    mode.upload(new_mode);
    position.upload(new_position);
  }

  const ModelConfig& c;
  int rows;
  DeviceArray<Token> tokens;
  DeviceArray<int> positions;
  DeviceArray<float> hidden;
  DeviceArray<__nv_bfloat16> q, k, v, attention;
  DeviceArray<float> logits;
  DeviceArray<SamplingOptions> options;
  DeviceArray<int> position;
  DeviceArray<RowMode> mode;
  DeviceArray<Token> sampled;
  SamplingView view;
};

std::vector<std::uint16_t> bits_of(const std::vector<__nv_bfloat16>& values) {
  std::vector<std::uint16_t> bits;
  for (const __nv_bfloat16 value : values) bits.push_back(__bfloat16_as_ushort(value));
  return bits;
}

/// A recorded pass, replayed over new contents of the same memory, gives the bits of a pass that was enqueued directly, and neither
/// allocates from the memory that the model was given.
void test_recorded_pass() {
  Pair pair(tiny("qwen3", true), 16);
  Pass pass(pair.config, 8, 2);
  const int allocations = pair.memory.allocations;
  pass.fill(1);
  pass.enqueue(*pair.gpu, pair.stream);  // cuBLAS loads its kernels
  pair.wait();
  const Replay recorded(pair.stream.get(), [&] { pass.enqueue(*pair.gpu, pair.stream); });
  for (std::uint64_t seed = 2; seed < 6; ++seed) {
    pass.fill(seed);
    pass.enqueue(*pair.gpu, pair.stream);
    pair.wait();
    const std::vector<float> hidden = pass.hidden.download();
    const std::vector<std::uint16_t> logits = bits_of(pass.q.download());
    const std::vector<Token> sampled = pass.sampled.download();
    pass.hidden.upload(std::vector<float>(hidden.size(), 1.0F));
    recorded.launch(pair.stream.get());
    pair.wait();
    DUALDECODER_EXPECT(pass.hidden.download() == hidden, "the recorded pass gives other hidden rows");
    DUALDECODER_EXPECT(bits_of(pass.q.download()) == logits, "the recorded pass gives other logits");
    DUALDECODER_EXPECT(pass.sampled.download() == sampled, "the recorded pass samples other tokens");
  }
  DUALDECODER_EXPECT(pair.memory.allocations == allocations, "a pass allocated");
}

/// The same row gives the same bits in every place of passes of the same number of rows, and ahead of the head in passes of all numbers of
/// rows that our own products multiply.
void test_places() {
  Pair pair(tiny("llama", false), 33);
  const ModelConfig& c = pair.config;
  std::vector<float> few;  // what the first number of rows leaves of a hidden row
  for (const int rows : small_run() ? std::vector<int>{5, 9} : std::vector<int>{2, 5, 14, 16, 17, 32, 33}) {
    std::vector<float> bits;
    std::vector<float> last;  // hidden row of the last place
    for (int place = 0; place < rows; ++place) {
      std::vector<float> hidden = normal(at(rows) * at(c.hidden), static_cast<std::uint64_t>(100 + place));
      const std::vector<float> own = normal(at(c.hidden), 7);
      std::copy(own.begin(), own.end(), hidden.begin() + static_cast<std::ptrdiff_t>(at(place) * at(c.hidden)));
      const DeviceArray<float> device_hidden(hidden);
      const DeviceArray<int> positions(std::vector<int>(at(rows), 12345));
      const DeviceArray<float> q(at(rows) * at(c.q_width())), k(at(rows) * at(c.kv_width())), v(at(rows) * at(c.kv_width()));
      const DeviceArray<float> logits(at(rows) * at(c.vocabulary));
      const Tensor rows_hidden(device_hidden.data(), DataType::f32, {rows, c.hidden});
      const Tensor rows_q(q.data(), DataType::f32, {rows, c.heads, c.head_dim});
      pair.gpu->before_attention(1, rows_hidden, positions.data(), rows_q, {k.data(), DataType::f32, {rows, c.kv_heads, c.head_dim}},
                                 {v.data(), DataType::f32, {rows, c.kv_heads, c.head_dim}}, pair.stream);
      pair.gpu->after_attention(1, rows_q, rows_hidden, pair.stream);
      pair.gpu->head(rows_hidden, {logits.data(), DataType::f32, {rows, c.vocabulary}}, pair.stream);
      const std::vector<float> all = logits.download();
      const std::vector<float> row(all.begin() + static_cast<std::ptrdiff_t>(at(place) * at(c.vocabulary)),
                                   all.begin() + static_cast<std::ptrdiff_t>(at(place + 1) * at(c.vocabulary)));
      if (place == 0) bits = row;
      const std::vector<float> all_hidden = device_hidden.download();
      last.assign(all_hidden.begin() + static_cast<std::ptrdiff_t>(at(place) * at(c.hidden)),
                  all_hidden.begin() + static_cast<std::ptrdiff_t>(at(place + 1) * at(c.hidden)));
      DUALDECODER_EXPECT(row == bits, "of %d rows, place %d gives other bits than place 0", rows, place);
    }
    if (!cuda::has_few_rows() || rows > cuda::kMostFewRows) continue;
    if (few.empty()) few = last;
    DUALDECODER_EXPECT(last == few, "of %d rows a row has other bits than of fewer", rows);
  }
}

void expect_refused(const char* what, const std::function<void()>& action) {
  try {
    action();
  } catch (const InvalidArgument&) {
    return;
  }
  DUALDECODER_EXPECT(false, "%s was accepted", what);
}

void test_refusals() {
  const auto host = cpu::make_cpu_backend();
  const cuda::Stream stream = cuda::Stream::create();
  DeviceMemory memory;
  const DenseLimits limits{.decode_rows = 2, .prefill_rows = 16};
  const auto make = [&](const ModelConfig& config, DataType type) {
    const auto weights = make_synthetic_weights(config, 1, *host, {.matrix_type = type});
    return cuda::make_cuda_dense(std::make_shared<DeviceWeights>(*weights, false), limits, {memory, stream});
  };
  expect_refused("f32 matrices", [&] { make(tiny("llama", false), DataType::f32); });
  expect_refused("head_dim 72", [&] { make(tiny("llama", false, 72), DataType::bf16); });
  ModelConfig narrow = tiny("llama", false);
  narrow.hidden = 100;
  expect_refused("hidden 100", [&] { make(narrow, DataType::bf16); });
  expect_refused("no weights", [&] { cuda::make_cuda_dense(nullptr, limits, {memory, stream}); });
  DUALDECODER_EXPECT(memory.live_bytes == 0, "%zu bytes stay after refusals", memory.live_bytes);

  const ModelConfig good = tiny("llama", false);
  const auto model = make(good, DataType::bf16);
  const std::size_t planned = cuda::cuda_dense_plan(good, limits).device_bytes();
  DUALDECODER_EXPECT(memory.live_bytes == planned, "%zu bytes taken, %zu planned", memory.live_bytes, planned);
  const DeviceArray<float> hidden(at(17) * at(good.hidden));
  const DeviceArray<Token> tokens(std::vector<Token>(17, 0));
  expect_refused("17 rows of 16", [&] { model->embed(tokens.data(), {hidden.data(), DataType::f32, {17, good.hidden}}, stream); });
  expect_refused("hidden in bf16", [&] { model->embed(tokens.data(), {hidden.data(), DataType::bf16, {2, good.hidden}}, stream); });
}

/// The dense part of a layer: its weights over the time of everything that before_ and after_attention enqueue; what its
/// products take by themselves few_rows_test prints.
void print_speed_of(const char* name, int layer_count) {
  ModelConfig config = examples::shape_named(name);
  config.layers = layer_count;  // enough that no weights are in L2
  config.vocabulary = 4096;
  const auto host = cpu::make_cpu_backend();
  const auto weights = make_synthetic_weights(config, 1, *host);
  const auto device_weights = std::make_shared<DeviceWeights>(*weights, false);
  const cuda::Stream stream = cuda::Stream::create();
  DeviceMemory memory;
  constexpr int kMostRows = 2048;
  const auto model = cuda::make_cuda_dense(device_weights, {.decode_rows = 16, .prefill_rows = kMostRows}, {memory, stream});
  const double parameters =
      static_cast<double>(config.hidden) * (2.0 * config.q_width() + 2.0 * config.kv_width() + 3.0 * config.intermediate);
  Pass pass(config, kMostRows, 1);
  pass.hidden.upload(normal(pass.hidden.size(), 1));
  pass.attention.upload(converted<__nv_bfloat16>(normal(pass.attention.size(), 2)));
  pass.positions.upload(std::vector<int>(at(kMostRows), 1000));
  for (const int rows : {1, 2, 4, 8, 14, 16, 28, 32, 33, 512, 2048}) {
    const Tensor hidden(pass.hidden.data(), DataType::f32, {rows, config.hidden});
    const auto layers = [&] {
      for (Layer layer = 0; layer < config.layers; ++layer) {
        model->before_attention(layer, hidden, pass.positions.data(),
                                {pass.q.data(), DataType::bf16, {rows, config.heads, config.head_dim}},
                                {pass.k.data(), DataType::bf16, {rows, config.kv_heads, config.head_dim}},
                                {pass.v.data(), DataType::bf16, {rows, config.kv_heads, config.head_dim}}, stream);
        model->after_attention(layer, ConstTensor{pass.attention.data(), DataType::bf16, {rows, config.heads, config.head_dim}}, hidden,
                               stream);
      }
    };
    layers();
    const Replay replay(stream.get(), layers);
    const double us = 1e3 * milliseconds(stream.get(), 20, [&] { replay.launch(stream.get()); }) / config.layers;
    std::printf("%s layer, %4d rows: %.1f us, %.2f TB/s of weights, %.0f TFLOP/s\n", name, rows, us, 2e-6 * parameters / us,
                2e-6 * parameters * rows / us);
  }
}

void print_speed() {
  print_speed_of("8b", 4);
  print_speed_of("1.5b", 28);
}

}  // namespace
}  // namespace dualdecoder::test

int main(int argc, char**) {
  return dualdecoder::test::run_on_device([&] {
    if (argc > 1) return dualdecoder::test::print_speed();
    dualdecoder::test::test_against_cpu();
    dualdecoder::test::test_widths();
    dualdecoder::test::test_angles();
    dualdecoder::test::test_recorded_pass();
    dualdecoder::test::test_places();
    dualdecoder::test::test_refusals();
  });
}
