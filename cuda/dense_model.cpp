// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/dense_model.hpp"

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/dense_kernels.hpp"
#include "cuda/few_rows.hpp"
#include "cuda/gemm.hpp"
#include "cuda/prefill_attention.hpp"
#include "cuda/sampler.hpp"
#include "cuda/warpgroup_attention.hpp"
#include "dualdecoder/error.hpp"
#include "src/rope_frequencies.hpp"

namespace dualdecoder::cuda {
namespace {

using Bf16 = __nv_bfloat16;

std::size_t at(std::int64_t index) noexcept { return static_cast<std::size_t>(index); }

int most_rows(const DenseLimits& limits) noexcept { return std::max(limits.decode_rows, limits.prefill_rows); }

/// Work space of a model, carved from one buffer.
struct Work {
  std::byte* gemm;   // first, for it asks for 256 bytes of alignment
  float* inverse;    // [head_dim / 2] radians per token
  Bf16* normed;      // [rows, hidden]
  Bf16* gated;       // [rows, intermediate]
  std::byte* stage;  // what a product leaves for the next kernel; one after the other the following three
  float* projected;  // [rows, q_width + 2 kv_width]
  Bf16* attention;   // [rows, q_width], rounded
  Bf16* gate_up;     // [rows, 2, intermediate]
};

Work carve(Carver& carver, const ModelConfig& config, const DenseLimits& limits) {
  const std::size_t rows = at(most_rows(limits));
  const std::size_t projected = at(config.q_width() + 2 * config.kv_width()) * sizeof(float);  // more than what is rounded of it
  const std::size_t gate_up = 2 * at(config.intermediate) * sizeof(Bf16);
  Work work{};
  work.gemm = carver.take<std::byte>(Gemm::kWorkspaceBytes);
  work.inverse = carver.take<float>(at(config.head_dim / 2));
  work.normed = carver.take<Bf16>(rows * at(config.hidden));
  work.gated = carver.take<Bf16>(rows * at(config.intermediate));
  work.stage = carver.take<std::byte>(rows * std::max(projected, gate_up));
  work.projected = reinterpret_cast<float*>(work.stage);
  work.attention = reinterpret_cast<Bf16*>(work.stage);
  work.gate_up = reinterpret_cast<Bf16*>(work.stage);
  return work;
}

void check_shape(const ModelConfig& config, const DenseLimits& limits) {
  detail::require(limits.decode_rows >= 1, "decode_rows", limits.decode_rows, "at least 1");
  detail::require(limits.prefill_rows >= 1, "prefill_rows", limits.prefill_rows, "at least 1");
  detail::require(config.layers >= 1, "layers", config.layers, "at least 1");
  detail::require(config.hidden >= 8 && config.hidden % 8 == 0 && config.hidden <= kMostNormWidth, "hidden", config.hidden,
                  "a multiple of 8 up to 16384 on the CUDA backend");
  detail::require(config.intermediate >= 8 && config.intermediate % 8 == 0, "intermediate", config.intermediate,
                  "a multiple of 8 on the CUDA backend");
  detail::require(config.intermediate <= std::numeric_limits<int>::max() / 2, "intermediate", config.intermediate, "below 2^30");
  detail::require(config.vocabulary >= 1 && config.vocabulary <= kMostSampledVocabulary, "vocabulary", config.vocabulary,
                  "in 1 .. 4194304 on the CUDA backend");
  detail::require(config.kv_heads >= 1, "kv_heads", config.kv_heads, "at least 1");
  detail::require(config.heads >= config.kv_heads && config.heads % config.kv_heads == 0, "heads", config.heads, "a multiple of kv_heads");
  detail::require(has_prefill_attention(config.head_dim), "head_dim", config.head_dim, "64, 80, 96, 128 or 256 on the CUDA backend");
}

/// One layer's weights. Matrices of one product that lie one behind the other in memory are multiplied at once.
struct LayerWeights {
  const float* attention_norm;
  const Bf16 *query, *key, *value;
  bool qkv_in_one;
  const float *query_bias, *key_bias, *value_bias;  // null without biases
  const float *query_norm, *key_norm;               // null without QK norm
  const Bf16* attention_out;
  const float* mlp_norm;
  const Bf16 *gate, *up, *down;
  bool gate_up_in_one;
};

/// The same matrices as products of few rows take them, where the device has such products.
struct LayerTiles {
  WeightTiles qkv;
  WeightTiles attention_out;
  WeightTiles gate_up;
  WeightTiles down;
};

/// Reads tensors of a model and checks that they have the shapes that its configuration says, and types that the kernels read.
class TensorReader {
 public:
  explicit TensorReader(const ModelWeights& weights) : weights_(weights), config_(weights.config()) {}

  const Bf16* matrix(TensorRole role, const char* name, Layer layer, int rows, int columns) const {
    const ConstTensor tensor = weights_.tensor(role, layer);
    if (tensor && tensor.type == DataType::f32) {
      throw InvalidArgument("tensor " + std::string(name) + " of layer " + std::to_string(layer) +
                            " = f32: must be bf16 on the CUDA backend; load the model with LoadOptions::matrix_type = bf16");
    }
    check(tensor, name, layer, std::int64_t{rows} * columns, DataType::bf16);
    return tensor.as<Bf16>();
  }
  const float* vector(TensorRole role, const char* name, Layer layer, int count) const {
    const ConstTensor tensor = weights_.tensor(role, layer);
    check(tensor, name, layer, count, DataType::f32);
    return tensor.as<float>();
  }
  LayerWeights layer(Layer n) const {
    const int q = config_.q_width();
    const int kv = config_.kv_width();
    const int hidden = config_.hidden;
    const bool bias = config_.attention_bias;
    const bool norm = config_.qk_norm;
    LayerWeights w{};
    w.attention_norm = vector(TensorRole::attention_norm, "attention_norm", n, hidden);
    w.query = matrix(TensorRole::query, "query", n, q, hidden);
    w.key = matrix(TensorRole::key, "key", n, kv, hidden);
    w.value = matrix(TensorRole::value, "value", n, kv, hidden);
    w.qkv_in_one = w.key == w.query + at(q) * at(hidden) && w.value == w.key + at(kv) * at(hidden);
    w.query_bias = bias ? vector(TensorRole::query_bias, "query_bias", n, q) : nullptr;
    w.key_bias = bias ? vector(TensorRole::key_bias, "key_bias", n, kv) : nullptr;
    w.value_bias = bias ? vector(TensorRole::value_bias, "value_bias", n, kv) : nullptr;
    w.query_norm = norm ? vector(TensorRole::query_norm, "query_norm", n, config_.head_dim) : nullptr;
    w.key_norm = norm ? vector(TensorRole::key_norm, "key_norm", n, config_.head_dim) : nullptr;
    w.attention_out = matrix(TensorRole::attention_out, "attention_out", n, hidden, q);
    w.mlp_norm = vector(TensorRole::mlp_norm, "mlp_norm", n, hidden);
    w.gate = matrix(TensorRole::gate, "gate", n, config_.intermediate, hidden);
    w.up = matrix(TensorRole::up, "up", n, config_.intermediate, hidden);
    w.gate_up_in_one = w.up == w.gate + at(config_.intermediate) * at(hidden);
    w.down = matrix(TensorRole::down, "down", n, hidden, config_.intermediate);
    return w;
  }

 private:
  static void check(const ConstTensor& tensor, const char* name, Layer layer, std::int64_t count, DataType type) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0;
    if (tensor && tensor.type == type && tensor.count() == count && aligned) return;
    throw InvalidArgument("tensor " + std::string(name) + " of layer " + std::to_string(layer) + " = " +
                          (tensor ? std::to_string(tensor.count()) + " elements of " + name_of(tensor.type) : "absent") + ": must be " +
                          std::to_string(count) + " elements of " + name_of(type) + " at 16 bytes");
  }

  const ModelWeights& weights_;
  const ModelConfig& config_;
};

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

class CudaDense final : public DenseModel {
 public:
  CudaDense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits, const DensePlace& place)
      : weights_(std::move(weights)),
        config_(weights_->config()),
        device_(current_device()),
        rows_limit_(most_rows(limits)),
        buffer_(place.memory, bytes(config_, limits), place.stream),
        work_(carved(buffer_, config_, limits)),
        gemm_(work_.gemm, place.stream.get()) {
    const TensorReader reader(*weights_);
    embedding_ = reader.matrix(TensorRole::embedding, "embedding", 0, config_.vocabulary, config_.hidden);
    output_norm_ = reader.vector(TensorRole::output_norm, "output_norm", 0, config_.hidden);
    head_ = reader.matrix(TensorRole::head, "head", 0, config_.vocabulary, config_.hidden);
    for (Layer layer = 0; layer < config_.layers; ++layer) layers_.push_back(reader.layer(layer));
    prepare_attention();
    if (has_few_rows()) prepare_products();
    const detail::RopeFrequencies rope = detail::rope_frequencies(config_.rope, config_.head_dim);
    attention_factor_ = rope.attention_factor;
    cuda::check(cudaMemcpyAsync(work_.inverse, rope.inverse.data(), rope.inverse.size() * sizeof(float), cudaMemcpyHostToDevice,
                                place.stream.get()),
                "cudaMemcpyAsync of RoPE frequencies");
    cuda::check(cudaStreamSynchronize(place.stream.get()), "cudaStreamSynchronize");
  }

  static std::size_t bytes(const ModelConfig& config, const DenseLimits& limits) {
    Carver counting;
    carve(counting, config, limits);
    return counting.bytes();
  }

  DataType activation_type() const noexcept override { return DataType::bf16; }
  void embed(const Token* tokens, Tensor hidden, StreamRef stream) override;
  void before_attention(Layer layer, ConstTensor hidden, const int* positions, Tensor q, Tensor k, Tensor v, StreamRef stream) override;
  void after_attention(Layer layer, ConstTensor attention, Tensor hidden, StreamRef stream) override;
  void head(ConstTensor hidden, Tensor logits, StreamRef stream) override;
  void prefill_attention(ConstTensor q, ConstTensor keys, ConstTensor values, int offset, Tensor out, StreamRef stream) override;
  void sample(Tensor logits, const SamplingView& sampling, Token* sampled, StreamRef stream) override;

 private:
  static Work carved(const Buffer& buffer, const ModelConfig& config, const DenseLimits& limits) {
    Carver carver(buffer.data());
    return carve(carver, config, limits);
  }
  void prepare_attention() {
    int offered = 0;
    cuda::check(cudaDeviceGetAttribute(&offered, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_), "cudaDeviceGetAttribute");
    const std::size_t asked = prefill_attention_shared_bytes(config_.head_dim);
    if (asked > at(offered)) {
      throw InvalidArgument("head_dim = " + std::to_string(config_.head_dim) + ": its attention takes " + std::to_string(asked) +
                            " bytes of shared memory, this device offers " + std::to_string(offered));
    }
    cuda::check(prepare_prefill_attention(config_.head_dim), "prepare_prefill_attention");
    warpgroups_ = has_warpgroup_attention(config_.head_dim);
    if (warpgroups_) cuda::check(prepare_warpgroup_attention(config_.head_dim), "prepare_warpgroup_attention");
  }

  void prepare_products() {
    cuda::check(prepare_few_rows(), "prepare_few_rows");
    const auto cut = [](std::initializer_list<WeightMatrix> matrices, int inner, bool gated = false) {
      WeightTiles tiles;
      cuda::check(cut_weights(std::span(matrices.begin(), matrices.size()), inner, gated, tiles), "cut_weights");
      return tiles;
    };
    const int hidden = config_.hidden;
    const int q = config_.q_width();
    const int kv = config_.kv_width();
    const int width = config_.intermediate;
    for (const LayerWeights& w : layers_) {
      tiles_.push_back(
          {.qkv = w.qkv_in_one ? cut({{w.query, q + 2 * kv}}, hidden) : cut({{w.query, q}, {w.key, kv}, {w.value, kv}}, hidden),
           .attention_out = cut({{w.attention_out, hidden}}, q),
           .gate_up = cut({{w.gate, width}, {w.up, width}}, hidden, true),
           .down = cut({{w.down, hidden}}, width)});
    }
  }
  /// Whether so many rows are multiplied by our own products; by cuBLAS otherwise.
  bool are_few(int rows) const noexcept { return !tiles_.empty() && rows <= kMostFewRows; }
  static void multiply_few(const WeightTiles& weights, const FewRows& rows, StreamRef stream) {
    cuda::check(launch_few_rows(weights, rows, stream.get()), "launch_few_rows");
  }

  /// Rows of a tensor [rows, ...] with `width` elements a row; throws InvalidArgument unless it is one, within the limits, of f32 or, where
  /// `activation` says so, bf16.
  int rows_of(const ConstTensor& tensor, const char* name, int width, bool activation) const {
    require_memory(tensor, name, activation);
    const std::int64_t rows = tensor.dim(0);
    detail::require(rows >= 1 && rows <= rows_limit_, name, rows, "at least one row and no more than DenseLimits");
    detail::require(tensor.count() == rows * width, name, tensor.count(), "rows times its width in elements");
    return static_cast<int>(rows);
  }
  void require_rows(const ConstTensor& tensor, const char* name, int width, bool activation, int rows) const {
    detail::require(rows_of(tensor, name, width, activation) == rows, name, tensor.dim(0), "as many rows as the other tensors");
  }
  static void require_memory(const ConstTensor& tensor, const char* name, bool activation) {
    const bool type = tensor.type == DataType::f32 || (activation && tensor.type == DataType::bf16);
    detail::require(tensor.data != nullptr && type, name, name_of(tensor.type), activation ? "memory of f32 or bf16" : "memory of f32");
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
    detail::require(address % 16 == 0, name, address, "an address at 16 bytes");
  }
  void require_layer(Layer layer) const { detail::require(layer >= 0 && layer < config_.layers, "layer", layer, "a layer of the model"); }
  void normalise(const ConstTensor& hidden, const float* weight, int rows, StreamRef stream) {
    cuda::check(launch_rms_norm(hidden.as<float>(), weight, config_.rms_epsilon, rows, config_.hidden, work_.normed, stream.get()),
                "launch_rms_norm");
  }
  void project(Layer layer, int rows, bool all, int stride, StreamRef stream);
  void finish_layer_of_few(Layer layer, const Bf16* attention, Tensor hidden, int rows, StreamRef stream);
  void finish_layer(Layer layer, const Bf16* attention, Tensor hidden, int rows, StreamRef stream);

  std::shared_ptr<const ModelWeights> weights_;
  const ModelConfig& config_;
  int device_;
  int rows_limit_;
  Buffer buffer_;
  Work work_;
  Gemm gemm_;
  const Bf16* embedding_ = nullptr;
  const float* output_norm_ = nullptr;
  const Bf16* head_ = nullptr;
  std::vector<LayerWeights> layers_;
  std::vector<LayerTiles> tiles_;  // of every layer, or none
  float attention_factor_ = 1.0F;
  bool warpgroups_ = false;  // whether this device and build have Hopper's attention for head_dim
};

void CudaDense::embed(const Token* tokens, Tensor hidden, StreamRef stream) {
  const DeviceGuard guard(device_);
  const int rows = rows_of(hidden, "hidden", config_.hidden, false);
  cuda::check(launch_embed(tokens, rows, embedding_, config_.vocabulary, config_.hidden, hidden.as<float>(), stream.get()), "launch_embed");
}

void CudaDense::project(Layer layer, int rows, bool all, int stride, StreamRef stream) {
  if (are_few(rows)) {
    return multiply_few(tiles_[at(layer)].qkv,
                        {.x = work_.normed, .rows = rows, .out = work_.projected, .stride = stride, .outputs = stride}, stream);
  }
  const LayerWeights& w = layers_[at(layer)];
  const int q = config_.q_width();
  const int kv = config_.kv_width();
  const auto multiply = [&](const Bf16* weights, int outputs, int first) {
    gemm_.multiply(work_.normed, rows, weights, config_.hidden, outputs, {work_.projected + first, DataType::f32, stride}, false,
                   stream.get());
  };
  if (all && w.qkv_in_one) return multiply(w.query, stride, 0);
  multiply(w.query, q, 0);
  if (!all) return;
  multiply(w.key, kv, q);
  multiply(w.value, kv, q + kv);
}

void CudaDense::before_attention(Layer layer, ConstTensor hidden, const int* positions, Tensor q, Tensor k, Tensor v, StreamRef stream) {
  const DeviceGuard guard(device_);
  require_layer(layer);
  const LayerWeights& w = layers_[at(layer)];
  const int rows = rows_of(hidden, "hidden", config_.hidden, false);
  require_rows(q, "q", config_.q_width(), true, rows);
  const bool all = static_cast<bool>(k);
  if (all) {
    require_rows(k, "k", config_.kv_width(), true, rows);
    require_rows(v, "v", config_.kv_width(), true, rows);
    detail::require(k.type == q.type && v.type == q.type, "k and v", name_of(k.type == q.type ? v.type : k.type), "of the type of q");
  }
  normalise(hidden, w.attention_norm, rows, stream);
  const int stride = config_.q_width() + (all ? 2 * config_.kv_width() : 0);
  project(layer, rows, all, stride, stream);
  const FinishHeads job{.rows = rows,
                        .heads = config_.heads,
                        .kv_heads = config_.kv_heads,
                        .head_dim = config_.head_dim,
                        .projected = work_.projected,
                        .stride = stride,
                        .positions = positions,
                        .inverse = work_.inverse,
                        .attention_factor = attention_factor_,
                        .epsilon = config_.rms_epsilon,
                        .query_bias = w.query_bias,
                        .key_bias = w.key_bias,
                        .value_bias = w.value_bias,
                        .query_norm = w.query_norm,
                        .key_norm = w.key_norm,
                        .q = q.data,
                        .k = all ? k.data : nullptr,
                        .v = all ? v.data : nullptr,
                        .type = q.type};
  cuda::check(launch_finish_heads(job, stream.get()), "launch_finish_heads");
}

void CudaDense::after_attention(Layer layer, ConstTensor attention, Tensor hidden, StreamRef stream) {
  const DeviceGuard guard(device_);
  require_layer(layer);
  const int rows = rows_of(hidden, "hidden", config_.hidden, false);
  require_rows(attention, "attention", config_.q_width(), true, rows);
  const Bf16* attended = attention.as<Bf16>();
  if (attention.type == DataType::f32) {
    cuda::check(launch_round(attention.as<float>(), at(attention.count()), work_.attention, stream.get()), "launch_round");
    attended = work_.attention;
  }
  if (are_few(rows)) {
    finish_layer_of_few(layer, attended, hidden, rows, stream);
  } else {
    finish_layer(layer, attended, hidden, rows, stream);
  }
}

void CudaDense::finish_layer_of_few(Layer layer, const Bf16* attention, Tensor hidden, int rows, StreamRef stream) {
  const LayerTiles& tiles = tiles_[at(layer)];
  const auto to_hidden = [&](const Bf16* x) {
    return FewRows{.x = x, .rows = rows, .out = hidden.data, .stride = config_.hidden, .add = true};
  };
  multiply_few(tiles.attention_out, to_hidden(attention), stream);
  normalise(hidden, layers_[at(layer)].mlp_norm, rows, stream);
  multiply_few(tiles.gate_up, {.x = work_.normed, .rows = rows, .out = work_.gated, .stride = config_.intermediate}, stream);
  multiply_few(tiles.down, to_hidden(work_.gated), stream);
}

void CudaDense::finish_layer(Layer layer, const Bf16* attention, Tensor hidden, int rows, StreamRef stream) {
  const LayerWeights& w = layers_[at(layer)];
  const GemmOut residual{hidden.data, DataType::f32, config_.hidden};
  gemm_.multiply(attention, rows, w.attention_out, config_.q_width(), config_.hidden, residual, true, stream.get());
  normalise(hidden, w.mlp_norm, rows, stream);
  const int width = config_.intermediate;
  const auto multiply = [&](const Bf16* weights, int outputs, int first) {
    gemm_.multiply(work_.normed, rows, weights, config_.hidden, outputs, {work_.gate_up + first, DataType::bf16, 2 * width}, false,
                   stream.get());
  };
  if (w.gate_up_in_one) {
    multiply(w.gate, 2 * width, 0);
  } else {
    multiply(w.gate, width, 0);
    multiply(w.up, width, width);
  }
  cuda::check(launch_gate(work_.gate_up, rows, width, work_.gated, stream.get()), "launch_gate");
  gemm_.multiply(work_.gated, rows, w.down, width, config_.hidden, residual, true, stream.get());
}

void CudaDense::head(ConstTensor hidden, Tensor logits, StreamRef stream) {
  const DeviceGuard guard(device_);
  const int rows = rows_of(hidden, "hidden", config_.hidden, false);
  require_rows(logits, "logits", config_.vocabulary, false, rows);
  normalise(hidden, output_norm_, rows, stream);
  gemm_.multiply(work_.normed, rows, head_, config_.hidden, config_.vocabulary, {logits.data, DataType::f32, config_.vocabulary}, false,
                 stream.get());
}

void CudaDense::prefill_attention(ConstTensor q, ConstTensor keys, ConstTensor values, int offset, Tensor out, StreamRef stream) {
  const DeviceGuard guard(device_);
  const int rows = rows_of(q, "q", config_.q_width(), true);
  require_rows(out, "out", config_.q_width(), true, rows);
  detail::require(offset >= 0, "offset", offset, "0 or more");
  for (const auto& [tensor, name] : {std::pair{keys, "keys"}, std::pair{values, "values"}}) {
    require_memory(tensor, name, true);
    detail::require(tensor.count() == (std::int64_t{offset} + rows) * config_.kv_width(), name, tensor.count(),
                    "(offset + rows) * kv_heads * head_dim elements");
  }
  detail::require(keys.type == values.type, "values", name_of(values.type), "of the type of keys");
  const PrefillAttention job{.heads = config_.heads,
                             .kv_heads = config_.kv_heads,
                             .head_dim = config_.head_dim,
                             .rows = rows,
                             .offset = offset,
                             .queries = q.data,
                             .keys = keys.data,
                             .values = values.data,
                             .out = out.data,
                             .query_type = q.type,
                             .key_type = keys.type,
                             .out_type = out.type};
  if (warpgroups_ && q.type == DataType::bf16 && keys.type == DataType::bf16) {
    cuda::check(launch_warpgroup_attention(job, stream.get()), "launch_warpgroup_attention");
  } else {
    cuda::check(launch_prefill_attention(job, stream.get()), "launch_prefill_attention");
  }
}

void CudaDense::sample(Tensor logits, const SamplingView& sampling, Token* sampled, StreamRef stream) {
  const DeviceGuard guard(device_);
  require_rows(logits, "logits", config_.vocabulary, false, sampling.step.rows());
  cuda::check(launch_sample(logits.as<float>(), config_.vocabulary, sampling, sampled, stream.get()), "launch_sample");
}

}  // namespace

std::unique_ptr<DenseModel> make_cuda_dense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits,
                                            const DensePlace& place) {
  if (weights == nullptr) throw InvalidArgument("weights = null: must be a model");
  check_shape(weights->config(), limits);
  return std::make_unique<CudaDense>(std::move(weights), limits, place);
}

MemoryPlan cuda_dense_plan(const ModelConfig& config, const DenseLimits& limits) {
  check_shape(config, limits);
  MemoryPlan plan;
  plan.add("work space of the dense part", MemoryKind::device, CudaDense::bytes(config, limits));
  return plan;
}

}  // namespace dualdecoder::cuda
