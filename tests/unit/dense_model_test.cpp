// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/dense_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "src/dense_attention.hpp"
#include "src/dense_product.hpp"
#include "src/rope.hpp"
#include "src/simd/dense_simd.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/kernel_fixture.hpp"
#include "tests/unit/test_backend.hpp"

namespace dualdecoder::cpu {
namespace {

using test::Bf16;
using test::instruction_sets;
using test::normal;

const StreamRef kStream = static_cast<CUstream_st*>(nullptr);

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

/// Memory at 64 bytes, as the kernels' scratch needs.
struct Scratch {
  explicit Scratch(std::size_t floats) : buffer(memory, floats * sizeof(float), kStream) {}
  float* data() const { return reinterpret_cast<float*>(buffer.data()); }
  testing::HeapMemory memory;
  Buffer buffer;
};

ModelConfig tiny(bool bias, bool qk_norm, bool tied) {
  ModelConfig config;
  config.architecture = qk_norm ? "qwen3" : bias ? "qwen2" : "llama";
  config.layers = 2;
  config.hidden = 72;  // neither this nor the next is a whole number of vectors or panels
  config.intermediate = 100;
  config.heads = 6;
  config.kv_heads = 2;
  config.head_dim = 24;
  config.vocabulary = 203;
  config.context = 512;
  config.attention_bias = bias;
  config.qk_norm = qk_norm;
  config.tied_embeddings = tied;
  return config;
}

using Rows = std::vector<std::vector<double>>;

/// The model written down from its formulas (Llama 2, arXiv 2307.09288, section 2.2; RoFormer, arXiv 2104.09864; GQA, arXiv 2305.13245) in
/// double precision, one row at a time, without a thought for speed: the brute-force twin.
class Twin {
 public:
  explicit Twin(const ModelWeights& weights) : weights_(weights), config_(weights.config()) {}

  double weight(TensorRole role, Layer layer, std::int64_t index) const {
    const ConstTensor tensor = weights_.tensor(role, layer);
    if (tensor.type == DataType::f32) return static_cast<double>(tensor.as<float>()[index]);
    const std::uint32_t word = std::uint32_t{tensor.as<std::uint16_t>()[index]} << 16U;
    float value = 0;
    std::memcpy(&value, &word, sizeof value);
    return static_cast<double>(value);
  }
  std::vector<double> product(TensorRole role, Layer layer, const std::vector<double>& x) const {
    const std::int64_t inner = static_cast<std::int64_t>(x.size());
    std::vector<double> out(at(weights_.tensor(role, layer).count() / inner), 0.0);
    for (std::size_t n = 0; n < out.size(); ++n) {
      for (std::size_t k = 0; k < x.size(); ++k)
        out[n] += weight(role, layer, static_cast<std::int64_t>(n) * inner + static_cast<std::int64_t>(k)) * x[k];
    }
    return out;
  }
  std::vector<double> norm(TensorRole role, Layer layer, std::vector<double> x) const {
    double squares = 0;
    for (const double value : x) squares += value * value;
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + static_cast<double>(config_.rms_epsilon));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] *= scale * weight(role, layer, static_cast<std::int64_t>(i));
    return x;
  }
  std::vector<double> embedding(Token token) const {
    std::vector<double> row(at(config_.hidden));
    for (int i = 0; i < config_.hidden; ++i) row[at(i)] = weight(TensorRole::embedding, 0, std::int64_t{token} * config_.hidden + i);
    return row;
  }
  /// q, k or v of one row.
  std::vector<double> projection(TensorRole role, TensorRole bias, TensorRole norm_role, Layer layer, const std::vector<double>& hidden,
                                 int position, bool rotated) const {
    std::vector<double> out = product(role, layer, norm(TensorRole::attention_norm, layer, hidden));
    if (config_.attention_bias) {
      for (std::size_t i = 0; i < out.size(); ++i) out[i] += weight(bias, layer, static_cast<std::int64_t>(i));
    }
    if (!rotated) return out;
    const std::size_t width = at(config_.head_dim);
    const std::size_t half = width / 2;
    for (std::size_t head = 0; head < out.size(); head += width) {
      std::vector<double> values(out.begin() + static_cast<std::ptrdiff_t>(head), out.begin() + static_cast<std::ptrdiff_t>(head + width));
      if (config_.qk_norm) values = norm(norm_role, layer, values);
      for (std::size_t i = 0; i < half; ++i) {
        const double angle =
            position * std::pow(static_cast<double>(config_.rope.theta), -2.0 * static_cast<double>(i) / static_cast<double>(width));
        out[head + i] = values[i] * std::cos(angle) - values[i + half] * std::sin(angle);
        out[head + i + half] = values[i + half] * std::cos(angle) + values[i] * std::sin(angle);
      }
    }
    return out;
  }
  std::vector<double> query(Layer layer, const std::vector<double>& hidden, int position) const {
    return projection(TensorRole::query, TensorRole::query_bias, TensorRole::query_norm, layer, hidden, position, true);
  }
  std::vector<double> key(Layer layer, const std::vector<double>& hidden, int position) const {
    return projection(TensorRole::key, TensorRole::key_bias, TensorRole::key_norm, layer, hidden, position, true);
  }
  std::vector<double> value(Layer layer, const std::vector<double>& hidden) const {
    return projection(TensorRole::value, TensorRole::value_bias, TensorRole::value, layer, hidden, 0, false);
  }
  /// hidden after the layer, given the row's attention.
  std::vector<double> after(Layer layer, const std::vector<double>& attention, std::vector<double> hidden) const {
    const std::vector<double> out = product(TensorRole::attention_out, layer, attention);
    for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] += out[i];
    const std::vector<double> normed = norm(TensorRole::mlp_norm, layer, hidden);
    std::vector<double> gate = product(TensorRole::gate, layer, normed);
    const std::vector<double> up = product(TensorRole::up, layer, normed);
    for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1.0 + std::exp(-gate[i])) * up[i];
    const std::vector<double> down = product(TensorRole::down, layer, gate);
    for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] += down[i];
    return hidden;
  }
  std::vector<double> logits(const std::vector<double>& hidden) const {
    return product(TensorRole::head, 0, norm(TensorRole::output_norm, 0, hidden));
  }
  /// Attention of one query row over `tokens` keys, heads side by side.
  static std::vector<double> attention(const ModelConfig& config, const std::vector<double>& q, const Rows& keys, const Rows& values,
                                       std::size_t tokens) {
    const std::size_t width = at(config.head_dim);
    std::vector<double> out(q.size(), 0.0);
    for (int head = 0; head < config.heads; ++head) {
      const std::size_t begin = at(head) * width;
      const std::size_t kv = at(head / config.query_group()) * width;
      std::vector<double> scores(tokens, 0.0);
      for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t d = 0; d < width; ++d) scores[t] += q[begin + d] * keys[t][kv + d];
        scores[t] /= std::sqrt(static_cast<double>(width));
      }
      const double top = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double& score : scores) sum += score = std::exp(score - top);
      for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t d = 0; d < width; ++d) out[begin + d] += scores[t] / sum * values[t][kv + d];
      }
    }
    return out;
  }

 private:
  const ModelWeights& weights_;
  const ModelConfig& config_;
};

/// Largest difference between a row of floats and the twin's, over the twin's largest magnitude.
double relative_error(const float* row, const std::vector<double>& expected) {
  double worst = 0;
  double scale = 1e-30;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(row[i]) - expected[i]));
    scale = std::max(scale, std::abs(expected[i]));
  }
  return worst / scale;
}

/// A dense part and the activations of a prompt that goes through it as prefill does.
struct Prompt {
  Prompt(std::shared_ptr<const ModelWeights> model, int tokens, int threads, Isa isa)
      : weights(std::move(model)),
        config(weights->config()),
        pool(threads),
        dense(make_cpu_dense(weights, {.decode_rows = 2, .prefill_rows = std::max(tokens, 2)}, {memory, kStream, pool, isa})),
        token(at(tokens)),
        hidden(at(tokens) * at(config.hidden)),
        q(at(tokens) * at(config.q_width())),
        out(q.size()),
        k(at(tokens) * at(config.kv_width())),
        v(k.size()),
        logits(at(tokens) * at(config.vocabulary)) {
    for (int i = 0; i < tokens; ++i) token[at(i)] = i * 17 % config.vocabulary;
  }

  Tensor heads(std::vector<float>& values, int first, int rows, int count) {
    return {values.data() + at(first) * at(count) * at(config.head_dim), DataType::f32, {rows, count, config.head_dim}};
  }
  Tensor wide(std::vector<float>& values, int first, int rows, int width) {
    return {values.data() + at(first) * at(width), DataType::f32, {rows, width}};
  }
  /// All layers, in blocks of `block` rows.
  void run(int block) {
    const int tokens = static_cast<int>(token.size());
    for (int first = 0; first < tokens; first += block) {
      const int rows = std::min(block, tokens - first);
      dense->embed(token.data() + first, wide(hidden, first, rows, config.hidden), kStream);
    }
    for (Layer layer = 0; layer < config.layers; ++layer) {
      for (int first = 0; first < tokens; first += block) {
        const int rows = std::min(block, tokens - first);
        std::vector<int> positions(at(rows));
        for (int i = 0; i < rows; ++i) positions[at(i)] = first + i;
        const Tensor h = wide(hidden, first, rows, config.hidden);
        dense->before_attention(layer, h, positions.data(), heads(q, first, rows, config.heads), heads(k, first, rows, config.kv_heads),
                                heads(v, first, rows, config.kv_heads), kStream);
        dense->prefill_attention(heads(q, first, rows, config.heads), heads(k, 0, first + rows, config.kv_heads),
                                 heads(v, 0, first + rows, config.kv_heads), first, heads(out, first, rows, config.heads), kStream);
        dense->after_attention(layer, heads(out, first, rows, config.heads), h, kStream);
      }
    }
    for (int first = 0; first < tokens; first += block) {
      const int rows = std::min(block, tokens - first);
      dense->head(wide(hidden, first, rows, config.hidden), wide(logits, first, rows, config.vocabulary), kStream);
    }
  }
  /// The same by the twin: logits of every token.
  Rows expected() const {
    const Twin twin(*weights);
    Rows rows;
    for (const Token one : token) rows.push_back(twin.embedding(one));
    for (Layer layer = 0; layer < config.layers; ++layer) {
      Rows keys;
      Rows values;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        keys.push_back(twin.key(layer, rows[i], static_cast<int>(i)));
        values.push_back(twin.value(layer, rows[i]));
        const std::vector<double> query = twin.query(layer, rows[i], static_cast<int>(i));
        rows[i] = twin.after(layer, Twin::attention(config, query, keys, values, i + 1), rows[i]);
      }
    }
    for (std::vector<double>& row : rows) row = twin.logits(row);
    return rows;
  }

  std::shared_ptr<const ModelWeights> weights;
  const ModelConfig& config;
  testing::HeapMemory memory;
  ThreadPool pool;
  std::unique_ptr<DenseModel> dense;
  std::vector<Token> token;
  std::vector<float> hidden, q, out, k, v, logits;
};

std::shared_ptr<const ModelWeights> weights_for(const ModelConfig& config, DataType type, test::MemoryBackend& backend) {
  LoadOptions options;
  options.matrix_type = type;
  options.threads = 1;
  return make_synthetic_weights(config, 5, backend, options);
}

}  // namespace

TEST_CASE("products equal sums in double precision, for any rows, shapes and instruction set", "[dense]") {
  ThreadPool pool(3);
  for (const Isa isa : instruction_sets()) {
    const DenseKernels& kernels = dense_kernels(isa);
    const Scratch scratch(3 * product_scratch(kernels));
    for (const int inner : {1, 7, 64, 72, 600}) {
      for (const int outputs : {1, 5, 33, 130}) {
        const Bf16 w(normal(at(inner) * at(outputs), 1));
        for (const int rows : {1, 2, 3, 7, 16, 17, 45}) {
          const std::vector<float> x = normal(at(rows) * at(inner), 2);
          for (const bool bf16 : {false, true}) {
            INFO(name_of(isa) << ", inner " << inner << ", outputs " << outputs << ", rows " << rows << ", bf16 " << bf16);
            std::vector<float> out(at(rows) * at(outputs), 1.0F);
            const MatrixRows matrix{bf16 ? static_cast<const void*>(w.bits.data()) : w.values.data(), at(inner), bf16};
            const Product product{matrix, outputs, out.data(), at(outputs), true};
            run_products(kernels, pool, x.data(), rows, at(inner), {&product, 1}, scratch.data());
            double worst = 0;
            for (int r = 0; r < rows; ++r) {
              for (int n = 0; n < outputs; ++n) {
                double sum = 1.0;
                for (int k = 0; k < inner; ++k) {
                  sum += static_cast<double>(x[at(r) * at(inner) + at(k)]) * static_cast<double>(w.values[at(n) * at(inner) + at(k)]);
                }
                worst = std::max(worst, std::abs(sum - static_cast<double>(out[at(r) * at(outputs) + at(n)])));
              }
            }
            CHECK(worst <= 1e-6 * (1 + inner));
          }
        }
      }
    }
  }
}

TEST_CASE("a row's product does not depend on the rows beside it, nor on threads", "[dense]") {
  constexpr int kInner = 200;
  constexpr int kOutputs = 150;
  const std::vector<float> w = normal(kInner * kOutputs, 1);
  const std::vector<float> x = normal(64 * kInner, 2);
  for (const Isa isa : instruction_sets()) {
    INFO(name_of(isa));
    const DenseKernels& kernels = dense_kernels(isa);
    const auto run = [&](int first, int rows, int threads) {
      ThreadPool pool(threads);
      const Scratch scratch(at(threads) * product_scratch(kernels));
      std::vector<float> out(at(rows) * kOutputs);
      const Product product{{w.data(), kInner, false}, kOutputs, out.data(), kOutputs, false};
      run_products(kernels, pool, x.data() + at(first) * kInner, rows, kInner, {&product, 1}, scratch.data());
      return out;
    };
    const std::vector<float> streamed = run(0, 16, 1);
    const std::vector<float> packed = run(0, 64, 1);
    for (const int threads : {1, 2, 5}) {
      for (int first = 0; first < 16; ++first) {
        for (const int rows : {1, 2, 3, 5}) {
          if (first + rows > 16) continue;
          const std::vector<float> some = run(first, rows, threads);
          CHECK(std::equal(some.begin(), some.end(), streamed.begin() + first * kOutputs));
        }
      }
      for (const int rows : {17, 30, 41}) {
        const std::vector<float> some = run(20, rows, threads);
        CHECK(std::equal(some.begin(), some.end(), packed.begin() + 20 * kOutputs));
      }
    }
  }
}

TEST_CASE("prefill attention equals softmax in double precision, at any offset", "[dense]") {
  struct Shape {
    int heads, kv_heads, head_dim;
  };
  for (const Isa isa : instruction_sets()) {
    const DenseKernels& kernels = dense_kernels(isa);
    for (const Shape& shape : {Shape{6, 2, 24}, Shape{4, 4, 64}, Shape{9, 3, 80}, Shape{14, 2, 8}}) {
      ModelConfig config;
      config.heads = shape.heads;
      config.kv_heads = shape.kv_heads;
      config.head_dim = shape.head_dim;
      for (const auto& block : std::vector<std::pair<int, int>>{{1, 0}, {5, 0}, {1, 130}, {100, 31}, {130, 200}}) {
        const int rows = block.first;  // clang 14 captures no structured binding
        const int offset = block.second;
        INFO(name_of(isa) << ", heads " << shape.heads << "/" << shape.kv_heads << ", head_dim " << shape.head_dim << ", rows " << rows
                          << ", offset " << offset);
        const std::size_t kv_width = at(config.kv_width());
        const std::size_t q_width = at(config.q_width());
        std::vector<float> q = normal(at(rows) * q_width, 1);
        for (float& value : q) value *= 3.0F;  // scores that a softmax without its maximum would not survive everywhere
        const Bf16 k(normal(at(offset + rows) * kv_width, 2));
        const Bf16 v(normal(at(offset + rows) * kv_width, 3));
        const auto run = [&](bool bf16, int threads) {
          ThreadPool pool(threads);
          const Scratch scratch(at(threads) * attention_scratch(kernels, shape.heads, shape.kv_heads, shape.head_dim));
          std::vector<float> out(q.size());
          const auto matrix = [&](const Bf16& m) {
            return MatrixRows{bf16 ? static_cast<const void*>(m.bits.data()) : m.values.data(), kv_width, bf16};
          };
          run_attention(kernels, pool,
                        {.heads = shape.heads,
                         .kv_heads = shape.kv_heads,
                         .head_dim = shape.head_dim,
                         .rows = rows,
                         .offset = offset,
                         .queries = q.data(),
                         .keys = matrix(k),
                         .values = matrix(v),
                         .out = out.data()},
                        scratch.data());
          return out;
        };
        const std::vector<float> out = run(false, 1);
        CHECK(out == run(true, 2));
        Rows keys;
        Rows values;
        for (int t = 0; t < offset + rows; ++t) {
          const auto row = [&](const Bf16& m) {
            const auto begin = m.values.begin() + static_cast<std::ptrdiff_t>(at(t) * kv_width);
            return std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(kv_width));
          };
          keys.push_back(row(k));
          values.push_back(row(v));
        }
        double worst = 0;
        for (int r = 0; r < rows; ++r) {
          const auto begin = q.begin() + static_cast<std::ptrdiff_t>(at(r) * q_width);
          const std::vector<double> query(begin, begin + static_cast<std::ptrdiff_t>(q_width));
          worst = std::max(worst,
                           relative_error(out.data() + at(r) * q_width, Twin::attention(config, query, keys, values, at(offset + r + 1))));
        }
        CHECK(worst <= 3e-6);
      }
    }
  }
}

TEST_CASE("the exponential of the softmax and the gate are exact to a few steps of float32", "[dense]") {
  for (const Isa isa : instruction_sets()) {
    INFO(name_of(isa));
    const DenseKernels& kernels = dense_kernels(isa);
    double worst = 0;
    for (int i = 0; i <= 40000; ++i) {
      const float x = static_cast<float>(i - 20000) / 200.0F;  // -100 .. 100
      float gate = x;
      const float up = 1.0F;
      kernels.gate(&gate, &up, 1);
      const double expected = static_cast<double>(x) / (1.0 + std::exp(-static_cast<double>(x)));
      worst = std::max(worst, std::abs(static_cast<double>(gate) - expected) / (std::abs(expected) + 1e-30));
      if (x < -80.0F) worst = std::abs(static_cast<double>(gate) - expected) < 1e-30 ? 0.0 : worst;  // below the clamp at exp(88)
    }
    CHECK(worst < 5e-7);

    const std::size_t width = 64;
    std::vector<float> scores(width);
    for (std::size_t i = 0; i < width; ++i) scores[i] = -static_cast<float>(i * i) / 30.0F;
    const std::vector<float> before = scores;
    float largest = -std::numeric_limits<float>::infinity();
    float sum = 0;
    float accumulated = 0;
    kernels.softmax_block(scores.data(), 50, width, &largest, &sum, &accumulated, 1);
    CHECK(largest == 0.0F);
    double total = 0;
    for (std::size_t i = 0; i < width; ++i) {
      const double expected = i < 50 ? std::exp(static_cast<double>(before[i])) : 0.0;
      total += expected;
      CHECK(std::abs(static_cast<double>(scores[i]) - expected) <= 3e-7 * expected + 1.2e-38);
    }
    CHECK(std::abs(static_cast<double>(sum) - total) < 1e-6 * total);
  }
}

TEST_CASE("a whole model equals its formulas in double precision", "[dense]") {
  struct Variant {
    bool bias, qk_norm, tied;
    DataType type;
    int block;
  };
  for (const Variant& variant : {Variant{false, false, false, DataType::f32, 40}, Variant{true, false, true, DataType::bf16, 7},
                                 Variant{false, true, true, DataType::f32, 1}, Variant{true, true, false, DataType::bf16, 25}}) {
    test::MemoryBackend backend;
    const auto weights = weights_for(tiny(variant.bias, variant.qk_norm, variant.tied), variant.type, backend);
    Rows expected;
    for (const Isa isa : instruction_sets()) {
      INFO(name_of(isa) << ", bias " << variant.bias << ", norm " << variant.qk_norm << ", " << name_of(variant.type) << ", block "
                        << variant.block);
      Prompt prompt(weights, 40, 2, isa);
      prompt.run(variant.block);
      if (expected.empty()) expected = prompt.expected();
      double worst = 0;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        worst = std::max(worst, relative_error(prompt.logits.data() + i * at(prompt.config.vocabulary), expected[i]));
      }
      CHECK(worst < 1e-5);
    }
  }
}

TEST_CASE("decode rows give the same bits alone, in a batch, in any place and on any number of threads", "[dense]") {
  test::MemoryBackend backend;
  const auto weights = weights_for(tiny(true, true, true), DataType::bf16, backend);
  const auto run = [&](int first, int rows, int threads) {
    Prompt prompt(weights, 16, threads, detected_isa());
    std::vector<int> positions(16);
    for (int i = 0; i < 16; ++i) positions[at(i)] = 1000 * i;
    prompt.dense->embed(prompt.token.data() + first, prompt.wide(prompt.hidden, first, rows, prompt.config.hidden), kStream);
    for (Layer layer = 0; layer < 2; ++layer) {
      const Tensor h = prompt.wide(prompt.hidden, first, rows, prompt.config.hidden);
      const Tensor q = prompt.heads(prompt.q, first, rows, prompt.config.heads);
      prompt.dense->before_attention(layer, h, positions.data() + first, q, prompt.heads(prompt.k, first, rows, prompt.config.kv_heads),
                                     prompt.heads(prompt.v, first, rows, prompt.config.kv_heads), kStream);
      prompt.dense->after_attention(layer, q, h, kStream);
    }
    prompt.dense->head(prompt.wide(prompt.hidden, first, rows, prompt.config.hidden),
                       prompt.wide(prompt.logits, first, rows, prompt.config.vocabulary), kStream);
    return prompt.logits;
  };
  const std::vector<float> all = run(0, 16, 1);
  for (const int threads : {1, 3}) {
    for (const auto& [first, rows] : std::vector<std::pair<int, int>>{{0, 1}, {15, 1}, {4, 2}, {5, 3}, {3, 13}}) {
      const std::vector<float> some = run(first, rows, threads);
      const std::ptrdiff_t begin = first * 203;
      CHECK(std::equal(some.begin() + begin, some.begin() + begin + rows * 203, all.begin() + begin));
    }
  }
}

TEST_CASE("a null k asks for queries alone", "[dense]") {
  test::MemoryBackend backend;
  Prompt prompt(weights_for(tiny(true, false, true), DataType::f32, backend), 2, 1, detected_isa());
  const int positions[]{3, 4};
  prompt.dense->embed(prompt.token.data(), prompt.wide(prompt.hidden, 0, 2, prompt.config.hidden), kStream);
  const auto before = [&](Tensor k, Tensor v) {
    prompt.dense->before_attention(0, prompt.wide(prompt.hidden, 0, 2, prompt.config.hidden), positions,
                                   prompt.heads(prompt.q, 0, 2, prompt.config.heads), k, v, kStream);
    return prompt.q;
  };
  CHECK(before({}, {}) ==
        before(prompt.heads(prompt.k, 0, 2, prompt.config.kv_heads), prompt.heads(prompt.v, 0, 2, prompt.config.kv_heads)));
}

TEST_CASE("dead rows embed to zero and sample to none", "[dense]") {
  test::MemoryBackend backend;
  Prompt prompt(weights_for(tiny(false, false, true), DataType::bf16, backend), 8, 2, detected_isa());
  const std::vector<Token> tokens{5, -1, 5, 6, -1, 7, -1, -1};
  prompt.dense->embed(tokens.data(), prompt.wide(prompt.hidden, 0, 8, prompt.config.hidden), kStream);
  for (int i = 0; i < prompt.config.hidden; ++i) CHECK(prompt.hidden[at(prompt.config.hidden + i)] == 0.0F);

  // Places: single, dual, resync, idle. Token 11 is likeliest, then 12; the penalty removes it where it has been seen.
  const std::vector<RowMode> modes{RowMode::single, RowMode::dual, RowMode::resync, RowMode::idle};
  const std::vector<int> positions{1, 2, 3, 4};
  const std::vector<Token> ran{5, -1, 5, 11, -1, 7, -1, -1};
  std::vector<SamplingOptions> options(4, {.repetition_penalty = 10.0F});
  std::vector<std::uint64_t> bits(4, 0);
  bits[0] = std::uint64_t{1} << 11U;
  std::uint64_t* const seen[]{bits.data(), nullptr, nullptr, nullptr};
  for (int row = 0; row < 8; ++row) {
    float* logits = prompt.logits.data() + row * prompt.config.vocabulary;
    std::fill_n(logits, prompt.config.vocabulary, 0.0F);
    logits[11] = 3.0F;
    logits[12] = 2.0F;
  }
  const StepView step{.sequences = 4, .rows_per_sequence = 2, .position = positions.data(), .mode = modes.data()};
  std::vector<Token> sampled(8, 77);
  prompt.dense->sample(prompt.wide(prompt.logits, 0, 8, prompt.config.vocabulary), {step, options.data(), ran.data(), seen}, sampled.data(),
                       kStream);
  CHECK(sampled == std::vector<Token>{12, -1, 11, 12, -1, 11, -1, -1});
}

TEST_CASE("a guess row and the later true row draw with the same number", "[dense]") {
  test::MemoryBackend backend;
  Prompt prompt(weights_for(tiny(false, false, true), DataType::bf16, backend), 2, 1, detected_isa());
  const std::vector<float> logits = normal(at(2 * prompt.config.vocabulary), 4);
  const SamplingOptions options{.temperature = 1.5F, .seed = 9};
  const Token ran[]{3, 4};
  const auto sample = [&](RowMode mode, int position) {
    for (int row = 0; row < 2; ++row)
      std::copy_n(logits.data(), prompt.config.vocabulary, prompt.logits.data() + row * prompt.config.vocabulary);
    const StepView step{.sequences = 1, .rows_per_sequence = 2, .position = &position, .mode = &mode};
    std::vector<Token> sampled(2);
    prompt.dense->sample(prompt.wide(prompt.logits, 0, 2, prompt.config.vocabulary), {step, &options, ran, nullptr}, sampled.data(),
                         kStream);
    return sampled;
  };
  for (int position = 0; position < 50; ++position) {
    const Token guessed = sample(RowMode::dual, position)[1];
    CHECK(sample(RowMode::single, position + 1)[0] == guessed);
    CHECK(sample(RowMode::dual, position + 1)[0] == guessed);
    CHECK(sample(RowMode::resync, position + 1)[1] == guessed);
  }
}

TEST_CASE("a dense part takes what its plan says, and nothing when memory runs out", "[dense]") {
  test::MemoryBackend backend;
  const ModelConfig config = tiny(true, true, false);
  const auto weights = weights_for(config, DataType::bf16, backend);
  testing::HeapMemory heap;
  testing::CountingResource counting(heap);
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    for (const DenseLimits& limits : {DenseLimits{}, DenseLimits{.decode_rows = 40, .prefill_rows = 8}}) {
      const MemoryPlan plan = cpu_dense_plan(config, limits, threads, detected_isa());
      const auto dense = make_cpu_dense(weights, limits, {counting, kStream, pool});
      CHECK(counting.live_bytes() == plan.device_bytes());
      CHECK(plan.total_bytes() == plan.device_bytes());
    }
    CHECK(counting.live_bytes() == 0);
    counting.fail_at(0);
    CHECK_THROWS_AS(make_cpu_dense(weights, {}, {counting, kStream, pool}), OutOfMemory);
    CHECK(counting.live_allocations() == 0);
  }
}

TEST_CASE("broken contracts of a dense part are named", "[dense]") {
  test::MemoryBackend backend;
  Prompt prompt(weights_for(tiny(false, false, true), DataType::bf16, backend), 4, 1, detected_isa());
  const int width = prompt.config.hidden;
  const auto refused = [](auto call, std::initializer_list<const char*> parts) { test::expect_error<InvalidArgument>(call, parts); };
  const Token beyond = 203;
  refused([&] { prompt.dense->embed(&beyond, prompt.wide(prompt.hidden, 0, 1, width), kStream); }, {"token = 203", "vocabulary"});
  refused([&] { prompt.dense->embed(&beyond, prompt.wide(prompt.hidden, 0, 9, width), kStream); }, {"hidden = 9", "DenseLimits"});
  refused([&] { prompt.dense->after_attention(2, prompt.heads(prompt.q, 0, 1, 6), prompt.wide(prompt.hidden, 0, 1, width), kStream); },
          {"layer = 2"});
  refused([&] { prompt.dense->head(prompt.wide(prompt.hidden, 0, 2, width), prompt.wide(prompt.logits, 0, 1, 203), kStream); },
          {"logits = 1"});
  const auto attend = [&](int keys, int offset) {
    prompt.dense->prefill_attention(prompt.heads(prompt.q, 0, 1, 6), prompt.heads(prompt.k, 0, keys, 2), prompt.heads(prompt.v, 0, keys, 2),
                                    offset, prompt.heads(prompt.out, 0, 1, 6), kStream);
  };
  refused([&] { attend(2, 0); }, {"keys", "offset + rows"});
  refused([&] { attend(1, -1); }, {"offset = -1"});
  refused([&] { make_cpu_dense(nullptr, {}, {prompt.memory, kStream, prompt.pool}); }, {"weights"});
  refused([&] { make_cpu_dense(prompt.weights, {.decode_rows = 0}, {prompt.memory, kStream, prompt.pool}); }, {"decode_rows = 0"});
}

}  // namespace dualdecoder::cpu
