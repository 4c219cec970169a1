// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/dense_model.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "dualdecoder/error.hpp"
#include "src/dense_attention.hpp"
#include "src/dense_product.hpp"
#include "src/rope.hpp"
#include "src/sampler.hpp"
#include "src/simd/dense_simd.hpp"

namespace dualdecoder::cpu {
namespace {

constexpr int kRowsPerTask = 8;

std::size_t at(std::int64_t index) noexcept { return static_cast<std::size_t>(index); }

int most_rows(const DenseLimits& limits) noexcept { return std::max(limits.decode_rows, limits.prefill_rows); }

/// Work space of a model, carved from one buffer.
struct Work {
  float* cosine;          // [rows, head_dim / 2]
  float* sine;            // [rows, head_dim / 2]
  int* positions;         // [rows] of the cosines and sines
  float* normed;          // [rows, hidden]
  float* gate;            // [rows, intermediate]
  float* up;              // [rows, intermediate]
  float* scratch;         // [threads, the most that a product or attention takes]
  Candidate* candidates;  // [threads, vocabulary]
};

Work carve(Carver& carver, const ModelConfig& config, const DenseLimits& limits, int threads, const DenseKernels& kernels) {
  const std::size_t rows = at(most_rows(limits));
  const std::size_t scratch =
      std::max(product_scratch(kernels), attention_scratch(kernels, config.heads, config.kv_heads, config.head_dim));
  Work work{};
  work.cosine = carver.take<float>(rows * at(config.head_dim / 2));
  work.sine = carver.take<float>(rows * at(config.head_dim / 2));
  work.positions = carver.take<int>(rows);
  work.normed = carver.take<float>(rows * at(config.hidden));
  work.gate = carver.take<float>(rows * at(config.intermediate));
  work.up = carver.take<float>(rows * at(config.intermediate));
  work.scratch = carver.take<float>(at(threads) * scratch);
  work.candidates = carver.take<Candidate>(at(threads) * at(config.vocabulary));
  return work;
}

void check(const ModelConfig& config, const DenseLimits& limits) {
  detail::require(limits.decode_rows >= 1, "decode_rows", limits.decode_rows, "at least 1");
  detail::require(limits.prefill_rows >= 1, "prefill_rows", limits.prefill_rows, "at least 1");
  detail::require(config.layers >= 1, "layers", config.layers, "at least 1");
  detail::require(config.hidden >= 1, "hidden", config.hidden, "at least 1");
  detail::require(config.intermediate >= 1, "intermediate", config.intermediate, "at least 1");
  detail::require(config.vocabulary >= 1, "vocabulary", config.vocabulary, "at least 1");
  detail::require(config.kv_heads >= 1, "kv_heads", config.kv_heads, "at least 1");
  detail::require(config.heads >= config.kv_heads && config.heads % config.kv_heads == 0, "heads", config.heads, "a multiple of kv_heads");
}

/// One layer's weights.
struct LayerWeights {
  const float* attention_norm;
  MatrixRows query, key, value;
  const float *query_bias, *key_bias, *value_bias;  // null without biases
  const float *query_norm, *key_norm;               // null without QK norm
  MatrixRows attention_out;
  const float* mlp_norm;
  MatrixRows gate, up, down;
};

/// Reads tensors of a model and checks that they have the shapes that its configuration says.
class TensorReader {
 public:
  explicit TensorReader(const ModelWeights& weights) : weights_(weights), config_(weights.config()) {}

  MatrixRows matrix(TensorRole role, const char* name, Layer layer, int rows, int columns) const {
    const ConstTensor tensor = weights_.tensor(role, layer);
    check(tensor, name, layer, std::int64_t{rows} * columns, true);
    return {tensor.data, at(columns), tensor.type == DataType::bf16};
  }
  const float* vector(TensorRole role, const char* name, Layer layer, int count) const {
    const ConstTensor tensor = weights_.tensor(role, layer);
    check(tensor, name, layer, count, false);
    return tensor.as<float>();
  }
  LayerWeights layer(Layer n) const {
    const int q = config_.q_width();
    const int kv = config_.kv_width();
    const bool bias = config_.attention_bias;
    const bool norm = config_.qk_norm;
    LayerWeights w{};
    w.attention_norm = vector(TensorRole::attention_norm, "attention_norm", n, config_.hidden);
    w.query = matrix(TensorRole::query, "query", n, q, config_.hidden);
    w.key = matrix(TensorRole::key, "key", n, kv, config_.hidden);
    w.value = matrix(TensorRole::value, "value", n, kv, config_.hidden);
    w.query_bias = bias ? vector(TensorRole::query_bias, "query_bias", n, q) : nullptr;
    w.key_bias = bias ? vector(TensorRole::key_bias, "key_bias", n, kv) : nullptr;
    w.value_bias = bias ? vector(TensorRole::value_bias, "value_bias", n, kv) : nullptr;
    w.query_norm = norm ? vector(TensorRole::query_norm, "query_norm", n, config_.head_dim) : nullptr;
    w.key_norm = norm ? vector(TensorRole::key_norm, "key_norm", n, config_.head_dim) : nullptr;
    w.attention_out = matrix(TensorRole::attention_out, "attention_out", n, config_.hidden, q);
    w.mlp_norm = vector(TensorRole::mlp_norm, "mlp_norm", n, config_.hidden);
    w.gate = matrix(TensorRole::gate, "gate", n, config_.intermediate, config_.hidden);
    w.up = matrix(TensorRole::up, "up", n, config_.intermediate, config_.hidden);
    w.down = matrix(TensorRole::down, "down", n, config_.hidden, config_.intermediate);
    return w;
  }

 private:
  static void check(const ConstTensor& tensor, const char* name, Layer layer, std::int64_t count, bool matrix) {
    const bool type = tensor.type == DataType::f32 || (matrix && tensor.type == DataType::bf16);
    if (tensor && type && tensor.count() == count) return;
    throw InvalidArgument("tensor " + std::string(name) + " of layer " + std::to_string(layer) + " = " +
                          (tensor ? std::to_string(tensor.count()) + " elements of " + name_of(tensor.type) : "absent") + ": must be " +
                          std::to_string(count) + " elements of f32" + (matrix ? " or bf16" : ""));
  }

  const ModelWeights& weights_;
  const ModelConfig& config_;
};

class CpuDense final : public DenseModel {
 public:
  CpuDense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits, const DensePlace& place)
      : weights_(std::move(weights)), config_(weights_->config()), kernels_(dense_kernels(place.isa)), pool_(place.pool) {
    check(config_, limits);
    rows_limit_ = most_rows(limits);
    rope_ = rope_frequencies(config_.rope, config_.head_dim);
    const TensorReader reader(*weights_);
    embedding_ = reader.matrix(TensorRole::embedding, "embedding", 0, config_.vocabulary, config_.hidden);
    output_norm_ = reader.vector(TensorRole::output_norm, "output_norm", 0, config_.hidden);
    head_ = reader.matrix(TensorRole::head, "head", 0, config_.vocabulary, config_.hidden);
    for (Layer layer = 0; layer < config_.layers; ++layer) layers_.push_back(reader.layer(layer));
    Carver counting;
    carve(counting, config_, limits, pool_.size(), kernels_);
    buffer_ = Buffer(place.memory, counting.bytes(), place.stream);
    Carver carver(buffer_.data());
    work_ = carve(carver, config_, limits, pool_.size(), kernels_);
  }

  void embed(const Token* tokens, Tensor hidden, StreamRef) override;
  void before_attention(Layer layer, ConstTensor hidden, const int* positions, Tensor q, Tensor k, Tensor v, StreamRef) override;
  void after_attention(Layer layer, ConstTensor attention, Tensor hidden, StreamRef) override;
  void head(ConstTensor hidden, Tensor logits, StreamRef) override;
  void prefill_attention(ConstTensor q, ConstTensor keys, ConstTensor values, int offset, Tensor out, StreamRef) override;
  void sample(Tensor logits, const SamplingView& sampling, Token* sampled, StreamRef) override;

 private:
  /// Rows of a tensor of f32 [rows, ...] with `width` elements a row; throws InvalidArgument unless it is one, within the limits.
  int rows_of(const ConstTensor& tensor, const char* name, int width) const {
    detail::require(tensor.data != nullptr && tensor.type == DataType::f32, name, name_of(tensor.type), "memory of f32");
    const std::int64_t rows = tensor.dim(0);
    detail::require(rows >= 1 && rows <= rows_limit_, name, rows, "at least one row and no more than DenseLimits");
    detail::require(tensor.count() == rows * width, name, tensor.count(), "rows times its width in elements");
    return static_cast<int>(rows);
  }
  void require_rows(const ConstTensor& tensor, const char* name, int width, int rows) const {
    detail::require(rows_of(tensor, name, width) == rows, name, tensor.dim(0), "as many rows as the other tensors");
  }
  const LayerWeights& weights_of(Layer layer) const {
    detail::require(layer >= 0 && layer < config_.layers, "layer", layer, "a layer of the model");
    return layers_[at(layer)];
  }
  /// f(row) for every row; on all threads where a pass has many.
  template <class F>
  void for_rows(int rows, F&& f) {
    if (rows <= kStreamedRows) {
      for (int row = 0; row < rows; ++row) f(row);
      return;
    }
    pool_.parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int task) {
      for (int row = task * kRowsPerTask; row < std::min((task + 1) * kRowsPerTask, rows); ++row) f(row);
    });
  }
  void normalise(const float* hidden, const float* weight, int rows) {
    for_rows(rows, [&](int row) {
      const std::size_t begin = at(row) * at(config_.hidden);
      kernels_.rms_norm(hidden + begin, weight, config_.rms_epsilon, at(config_.hidden), work_.normed + begin);
    });
  }
  void products(const float* x, int rows, int inner, std::span<const Product> list) {
    run_products(kernels_, pool_, x, rows, at(inner), list, work_.scratch);
  }
  void prepare_angles(const int* positions, int rows);
  void finish_heads(float* row, int heads, const float* bias, const float* norm, const float* cosine, const float* sine) const;

  std::shared_ptr<const ModelWeights> weights_;
  const ModelConfig& config_;
  const DenseKernels& kernels_;
  ThreadPool& pool_;
  int rows_limit_ = 0;
  RopeFrequencies rope_;
  MatrixRows embedding_;
  const float* output_norm_ = nullptr;
  MatrixRows head_;
  std::vector<LayerWeights> layers_;
  Buffer buffer_;
  Work work_{};
  int angle_rows_ = 0;  // of Work::positions that hold
};

void CpuDense::embed(const Token* tokens, Tensor hidden, StreamRef) {
  const int rows = rows_of(hidden, "hidden", config_.hidden);
  for (int row = 0; row < rows; ++row) {
    detail::require(tokens[row] >= -1 && tokens[row] < config_.vocabulary, "token", tokens[row], "-1 (none) or below the vocabulary");
  }
  const std::size_t width = at(config_.hidden);
  for_rows(rows, [&](int row) {
    float* target = hidden.as<float>() + at(row) * width;
    const std::size_t source = at(std::max(tokens[row], 0)) * width;
    if (tokens[row] < 0) {
      std::fill_n(target, width, 0.0F);
    } else if (embedding_.bf16) {
      kernels_.widen(static_cast<const std::uint16_t*>(embedding_.data) + source, width, target);
    } else {
      std::copy_n(static_cast<const float*>(embedding_.data) + source, width, target);
    }
  });
}

void CpuDense::prepare_angles(const int* positions, int rows) {
  // Every layer of a pass has the same positions.
  if (angle_rows_ == rows && std::equal(positions, positions + rows, work_.positions)) return;
  std::copy_n(positions, rows, work_.positions);
  angle_rows_ = rows;
  const int half = config_.head_dim / 2;
  for_rows(rows, [&](int row) {
    const std::size_t begin = at(row) * at(half);
    rope_angles(rope_.inverse.data(), half, rope_.attention_factor, positions[row], work_.cosine + begin, work_.sine + begin);
  });
}

void CpuDense::finish_heads(float* row, int heads, const float* bias, const float* norm, const float* cosine, const float* sine) const {
  const std::size_t width = at(config_.head_dim);
  if (bias != nullptr) kernels_.add(row, bias, at(heads) * width);
  for (int head = 0; head < heads; ++head, row += width) {
    if (norm != nullptr) kernels_.rms_norm(row, norm, config_.rms_epsilon, width, row);
    kernels_.rotate(row, cosine, sine, width / 2);
  }
}

void CpuDense::before_attention(Layer layer, ConstTensor hidden, const int* positions, Tensor q, Tensor k, Tensor v, StreamRef) {
  const LayerWeights& w = weights_of(layer);
  const int rows = rows_of(hidden, "hidden", config_.hidden);
  require_rows(q, "q", config_.q_width(), rows);
  const bool all = static_cast<bool>(k);
  if (all) {
    require_rows(k, "k", config_.kv_width(), rows);
    require_rows(v, "v", config_.kv_width(), rows);
  }
  normalise(hidden.as<float>(), w.attention_norm, rows);
  const std::size_t q_width = at(config_.q_width());
  const std::size_t kv_width = at(config_.kv_width());
  const std::array list{Product{w.query, config_.q_width(), q.as<float>(), q_width},
                        Product{w.key, config_.kv_width(), k.as<float>(), kv_width},
                        Product{w.value, config_.kv_width(), v.as<float>(), kv_width}};
  products(work_.normed, rows, config_.hidden, std::span(list).first(all ? 3 : 1));
  prepare_angles(positions, rows);
  for_rows(rows, [&](int row) {
    const std::size_t angles = at(row) * at(config_.head_dim / 2);
    finish_heads(q.as<float>() + at(row) * q_width, config_.heads, w.query_bias, w.query_norm, work_.cosine + angles, work_.sine + angles);
    if (!all) return;
    finish_heads(k.as<float>() + at(row) * kv_width, config_.kv_heads, w.key_bias, w.key_norm, work_.cosine + angles, work_.sine + angles);
    if (w.value_bias != nullptr) kernels_.add(v.as<float>() + at(row) * kv_width, w.value_bias, kv_width);
  });
}

void CpuDense::after_attention(Layer layer, ConstTensor attention, Tensor hidden, StreamRef) {
  const LayerWeights& w = weights_of(layer);
  const int rows = rows_of(hidden, "hidden", config_.hidden);
  require_rows(attention, "attention", config_.q_width(), rows);
  const std::size_t width = at(config_.hidden);
  const std::size_t inner_width = at(config_.intermediate);
  const Product out{w.attention_out, config_.hidden, hidden.as<float>(), width, true};
  products(attention.as<float>(), rows, config_.q_width(), {&out, 1});
  normalise(hidden.as<float>(), w.mlp_norm, rows);
  const std::array gated{Product{w.gate, config_.intermediate, work_.gate, inner_width},
                         Product{w.up, config_.intermediate, work_.up, inner_width}};
  products(work_.normed, rows, config_.hidden, gated);
  for_rows(rows, [&](int row) {
    const std::size_t begin = at(row) * inner_width;
    kernels_.gate(work_.gate + begin, work_.up + begin, inner_width);
  });
  const Product down{w.down, config_.hidden, hidden.as<float>(), width, true};
  products(work_.gate, rows, config_.intermediate, {&down, 1});
}

void CpuDense::head(ConstTensor hidden, Tensor logits, StreamRef) {
  const int rows = rows_of(hidden, "hidden", config_.hidden);
  require_rows(logits, "logits", config_.vocabulary, rows);
  normalise(hidden.as<float>(), output_norm_, rows);
  const Product product{head_, config_.vocabulary, logits.as<float>(), at(config_.vocabulary)};
  products(work_.normed, rows, config_.hidden, {&product, 1});
}

void CpuDense::prefill_attention(ConstTensor q, ConstTensor keys, ConstTensor values, int offset, Tensor out, StreamRef) {
  const int rows = rows_of(q, "q", config_.q_width());
  require_rows(out, "out", config_.q_width(), rows);
  detail::require(offset >= 0, "offset", offset, "0 or more");
  const auto context = [&](const ConstTensor& tensor, const char* name) {
    const bool type = tensor.type == DataType::f32 || tensor.type == DataType::bf16;
    detail::require(tensor.data != nullptr && type, name, name_of(tensor.type), "memory of f32 or bf16");
    detail::require(tensor.count() == (std::int64_t{offset} + rows) * config_.kv_width(), name, tensor.count(),
                    "(offset + rows) * kv_heads * head_dim elements");
    return MatrixRows{tensor.data, at(config_.kv_width()), tensor.type == DataType::bf16};
  };
  const DenseAttention attention{.heads = config_.heads,
                                 .kv_heads = config_.kv_heads,
                                 .head_dim = config_.head_dim,
                                 .rows = rows,
                                 .offset = offset,
                                 .queries = q.as<float>(),
                                 .keys = context(keys, "keys"),
                                 .values = context(values, "values"),
                                 .out = out.as<float>()};
  run_attention(kernels_, pool_, attention, work_.scratch);
}

void CpuDense::sample(Tensor logits, const SamplingView& sampling, Token* sampled, StreamRef) {
  const StepView& step = sampling.step;
  const std::size_t vocabulary = at(config_.vocabulary);
  require_rows(logits, "logits", config_.vocabulary, step.rows());
  pool_.parallel_for(step.rows(), [&](int index, int worker) {
    const int place = index / step.rows_per_sequence;
    const int row = index % step.rows_per_sequence;
    const RowMode mode = step.mode[place];
    if (!row_is_live(mode, row)) {
      sampled[index] = -1;
      return;
    }
    const Token* first = sampling.tokens + place * step.rows_per_sequence;
    const RowHistory history{sampling.seen == nullptr ? nullptr : sampling.seen[place], {first, at(row) + 1}};
    sampled[index] =
        sample_row({logits.as<float>() + at(index) * vocabulary, vocabulary}, sampling.options[place],
                   row_position(mode, row, step.position[place]), history, {work_.candidates + at(worker) * vocabulary, vocabulary});
  });
}

}  // namespace

std::unique_ptr<DenseModel> make_cpu_dense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits,
                                           const DensePlace& place) {
  if (weights == nullptr) throw InvalidArgument("weights = null: must be a model");
  return std::make_unique<CpuDense>(std::move(weights), limits, place);
}

MemoryPlan cpu_dense_plan(const ModelConfig& config, const DenseLimits& limits, int threads, Isa isa) {
  check(config, limits);
  Carver counting;
  carve(counting, config, limits, threads, dense_kernels(isa));
  MemoryPlan plan;
  plan.add("work space of the dense part", MemoryKind::device, counting.bytes());
  return plan;
}

}  // namespace dualdecoder::cpu
