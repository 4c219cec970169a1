// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// A small transformer engine that knows nothing of dualdecoder: weights, products, attention and greedy head of its own. Only the
/// attention of its decoding loop differs between engine_dense.cpp and engine_sparse.cpp.
namespace engine {

inline std::size_t at(int index) { return static_cast<std::size_t>(index); }

struct Shape {
  int layers = 3;
  int hidden = 64;
  int heads = 8;
  int kv_heads = 2;
  int head_dim = 16;
  int intermediate = 128;
  int vocabulary = 256;

  int q_width() const { return heads * head_dim; }
  int kv_width() const { return kv_heads * head_dim; }
};

using Floats = std::vector<float>;

/// Queries, keys and values of some rows after RoPE: [rows, heads or kv_heads, head_dim].
struct Projected {
  Floats q, k, v;
};

/// Softmax attention of one row's query heads over the keys and values of `tokens` tokens: [tokens, kv_heads, head_dim].
inline void attend(const Shape& shape, const float* q, const float* keys, const float* values, int tokens, float* out) {
  const float scale = 1.0F / std::sqrt(static_cast<float>(shape.head_dim));
  const int group = shape.heads / shape.kv_heads;
  Floats weight(at(tokens));
  for (int head = 0; head < shape.heads; ++head) {
    const float* query = q + head * shape.head_dim;
    const int offset = head / group * shape.head_dim;
    float largest = -INFINITY;
    for (int token = 0; token < tokens; ++token) {
      const float* key = keys + token * shape.kv_width() + offset;
      float dot = 0.0F;
      for (int i = 0; i < shape.head_dim; ++i) dot += query[i] * key[i];
      weight[at(token)] = dot * scale;
      largest = std::max(largest, weight[at(token)]);
    }
    float sum = 0.0F;
    float* mixed = out + head * shape.head_dim;
    std::fill_n(mixed, shape.head_dim, 0.0F);
    for (int token = 0; token < tokens; ++token) {
      const float share = std::exp(weight[at(token)] - largest);
      const float* value = values + token * shape.kv_width() + offset;
      sum += share;
      for (int i = 0; i < shape.head_dim; ++i) mixed[i] += share * value[i];
    }
    for (int i = 0; i < shape.head_dim; ++i) mixed[i] /= sum;
  }
}

/// The dense part. All blocks are row-major [rows, width]; rows are independent of one another.
class Model {
 public:
  explicit Model(std::uint32_t seed) : random_(seed) {
    embedding_ = matrix(shape_.vocabulary, shape_.hidden);
    head_ = matrix(shape_.vocabulary, shape_.hidden);
    for (int layer = 0; layer < shape_.layers; ++layer) {
      layers_.push_back({.q = matrix(shape_.q_width(), shape_.hidden, 2.0F),
                         .k = matrix(shape_.kv_width(), shape_.hidden, 2.0F),
                         .v = matrix(shape_.kv_width(), shape_.hidden),
                         .o = matrix(shape_.hidden, shape_.q_width(), 2.0F),
                         .gate = matrix(shape_.intermediate, shape_.hidden),
                         .up = matrix(shape_.intermediate, shape_.hidden),
                         .down = matrix(shape_.hidden, shape_.intermediate)});
    }
  }

  const Shape& shape() const { return shape_; }

  /// A negative token, which is a row that computes nothing, gives zeros.
  Floats embed(const std::vector<std::int32_t>& tokens) const {
    Floats hidden(tokens.size() * at(shape_.hidden));
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      if (tokens[row] < 0) continue;
      std::copy_n(embedding_.data() + at(tokens[row]) * at(shape_.hidden), shape_.hidden, hidden.data() + row * at(shape_.hidden));
    }
    return hidden;
  }
  Projected before_attention(int layer, const Floats& hidden, const std::vector<int>& positions) const {
    const Layer& weights = layers_[at(layer)];
    const Floats normed = norm(hidden);
    Projected rows{.q = product(normed, weights.q, shape_.hidden),
                   .k = product(normed, weights.k, shape_.hidden),
                   .v = product(normed, weights.v, shape_.hidden)};
    rotate(rows.q, shape_.heads, positions);
    rotate(rows.k, shape_.kv_heads, positions);
    return rows;
  }
  void after_attention(int layer, const Floats& attention, Floats& hidden) const {
    const Layer& weights = layers_[at(layer)];
    add(hidden, product(attention, weights.o, shape_.q_width()));
    const Floats normed = norm(hidden);
    Floats inner = product(normed, weights.gate, shape_.hidden);
    const Floats up = product(normed, weights.up, shape_.hidden);
    for (std::size_t i = 0; i < inner.size(); ++i) inner[i] *= up[i] / (1.0F + std::exp(-inner[i]));
    add(hidden, product(inner, weights.down, shape_.intermediate));
  }
  /// The likeliest token after each row; -1 after a row that computes nothing.
  std::vector<std::int32_t> greedy(const Floats& hidden, const std::vector<std::int32_t>& tokens) const {
    const Floats logits = product(norm(hidden), head_, shape_.hidden);
    std::vector<std::int32_t> likeliest(tokens.size(), -1);
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      const float* scores = logits.data() + row * at(shape_.vocabulary);
      if (tokens[row] >= 0) likeliest[row] = static_cast<std::int32_t>(std::max_element(scores, scores + shape_.vocabulary) - scores);
    }
    return likeliest;
  }
  /// A prompt of `count` seeded tokens.
  std::vector<std::int32_t> prompt(int count) {
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(static_cast<std::int32_t>(random_() % static_cast<unsigned>(shape_.vocabulary)));
    return tokens;
  }

 private:
  struct Layer {
    Floats q, k, v, o, gate, up, down;  // [outputs, inputs]
  };

  float uniform() { return static_cast<float>(random_() >> 8U) * 0x1p-23F - 1.0F; }  // in -1 .. 1
  Floats matrix(int outputs, int inputs, float gain = 1.0F) {
    Floats weights(at(outputs) * at(inputs));
    const float scale = gain * std::sqrt(3.0F / static_cast<float>(inputs));  // keeps the variance of the inputs, times gain squared
    for (float& weight : weights) weight = uniform() * scale;
    return weights;
  }
  Floats norm(const Floats& hidden) const {
    Floats normed(hidden.size());
    for (std::size_t row = 0; row < hidden.size(); row += at(shape_.hidden)) {
      float squares = 0.0F;
      for (std::size_t i = row; i < row + at(shape_.hidden); ++i) squares += hidden[i] * hidden[i];
      const float factor = 1.0F / std::sqrt(squares / static_cast<float>(shape_.hidden) + 1e-5F);
      for (std::size_t i = row; i < row + at(shape_.hidden); ++i) normed[i] = hidden[i] * factor;
    }
    return normed;
  }
  static Floats product(const Floats& inputs, const Floats& weights, int width) {
    const std::size_t rows = inputs.size() / at(width);
    const std::size_t outputs = weights.size() / at(width);
    Floats result(rows * outputs);
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t output = 0; output < outputs; ++output) {
        float sum = 0.0F;
        for (std::size_t i = 0; i < at(width); ++i) sum += inputs[row * at(width) + i] * weights[output * at(width) + i];
        result[row * outputs + output] = sum;
      }
    }
    return result;
  }
  static void add(Floats& hidden, const Floats& update) {
    for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] += update[i];
  }
  void rotate(Floats& rows, int heads, const std::vector<int>& positions) const {
    const int half = shape_.head_dim / 2;
    for (int i = 0; i < half; ++i) {
      const float frequency = std::pow(10000.0F, -static_cast<float>(i) / static_cast<float>(half));
      for (std::size_t row = 0; row < positions.size(); ++row) {
        const float angle = static_cast<float>(positions[row]) * frequency;
        for (int head = 0; head < heads; ++head) {
          float* pair = rows.data() + (row * at(heads) + at(head)) * at(shape_.head_dim) + i;
          const float first = pair[0] * std::cos(angle) - pair[half] * std::sin(angle);
          pair[half] = pair[0] * std::sin(angle) + pair[half] * std::cos(angle);
          pair[0] = first;
        }
      }
    }
  }

  Shape shape_;
  std::mt19937 random_;
  Floats embedding_, head_;
  std::vector<Layer> layers_;
};

/// Causal attention of a whole prompt.
inline Floats prompt_attention(const Shape& shape, const Projected& rows, int tokens) {
  Floats out(rows.q.size());
  for (int row = 0; row < tokens; ++row) {
    attend(shape, rows.q.data() + row * shape.q_width(), rows.k.data(), rows.v.data(), row + 1, out.data() + row * shape.q_width());
  }
  return out;
}

/// The command line: `--name value` pairs of integers of 1 or more. The dense form has no use for the last two.
struct Options {
  int prompt_tokens = 300;
  int new_tokens = 40;
  int budget_tokens = 64;  ///< tokens of the context that a step attends to exactly
  int rows = 1;            ///< per sequence; 2: a guess runs ahead and names what the next step needs

  /// Throws std::invalid_argument.
  Options(int argc, char** argv) {
    const std::pair<std::string, int*> known[] = {
        {"--prompt-tokens", &prompt_tokens}, {"--new-tokens", &new_tokens}, {"--budget-tokens", &budget_tokens}, {"--rows", &rows}};
    for (int i = 1; i < argc; i += 2) {
      const auto* option = std::find_if(std::begin(known), std::end(known), [&](const auto& one) { return one.first == argv[i]; });
      if (option == std::end(known)) throw std::invalid_argument(std::string(argv[i]) + ": no such option");
      char* end = nullptr;
      const long value = i + 1 < argc ? std::strtol(argv[i + 1], &end, 10) : 0;
      if (value < 1 || value > 100'000 || *end != '\0') throw std::invalid_argument(option->first + ": needs an integer in 1 .. 100000");
      *option->second = static_cast<int>(value);
    }
  }
};

inline void print(const std::vector<std::int32_t>& tokens) {
  for (std::int32_t token : tokens) std::printf("%d ", token);
  std::printf("\n");
}

inline void print_share(const char* what, std::uint64_t part, std::uint64_t whole) {
  std::fprintf(stderr, "%s %.3f\n", what, whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole));
}

}  // namespace engine
