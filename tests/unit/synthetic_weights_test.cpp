// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/load_weights.hpp"
#include "src/dequantize.hpp"
#include "src/weight_layout.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/model_files.hpp"
#include "tests/unit/test_backend.hpp"

namespace dualdecoder::test {
namespace {

std::vector<float> make(TensorRole role, Layer layer, std::uint64_t seed, int threads = 1) {
  MemoryBackend backend;
  LoadOptions options;
  options.matrix_type = DataType::f32;
  options.threads = threads;
  ModelConfig config = tiny_config("qwen3");
  config.intermediate = 4096;
  const auto weights = make_synthetic_weights(config, seed, backend, options);
  const ConstTensor tensor = weights->tensor(role, layer);
  return {tensor.as<float>(), tensor.as<float>() + tensor.count()};
}

struct Moments {
  double mean = 0;
  double variance = 0;
  double kurtosis = 0;
};

Moments moments(const std::vector<float>& values) {
  Moments of;
  const auto count = static_cast<double>(values.size());
  for (double value : values) of.mean += value / count;
  double fourth = 0;
  for (double value : values) {
    of.variance += std::pow(value - of.mean, 2) / count;
    fourth += std::pow(value - of.mean, 4) / count;
  }
  of.kurtosis = fourth / (of.variance * of.variance);
  return of;
}

}  // namespace

TEST_CASE("synthetic weights depend on the seed alone", "[synthetic_weights]") {
  const std::vector<float> first = make(TensorRole::gate, 1, 42);
  CHECK(make(TensorRole::gate, 1, 42) == first);
  CHECK(make(TensorRole::gate, 1, 42, 3) == first);
  CHECK(make(TensorRole::gate, 1, 43) != first);
  CHECK(make(TensorRole::gate, 0, 42) != first);
  CHECK(make(TensorRole::up, 1, 42) != first);
}

TEST_CASE("synthetic weights have the spread that the header states", "[synthetic_weights]") {
  // 131,072 values: the mean's deviation is 1/362, the variance's sqrt(2)/362 of what they are.
  const Moments wide = moments(make(TensorRole::gate, 0, 7));  // fan-in 32
  CHECK(std::abs(wide.mean * std::sqrt(32.0)) < 0.015);
  CHECK(wide.variance * 32 == Approx(1.0).epsilon(0.02));
  CHECK(wide.kurtosis == Approx(2.7).epsilon(0.02));           // 3 - 6 / (5 n) for a sum of n = 4 uniforms
  const Moments tall = moments(make(TensorRole::down, 0, 7));  // fan-in 4096
  CHECK(tall.variance * 4096 == Approx(1.0).epsilon(0.02));
  const std::vector<float> norm = make(TensorRole::attention_norm, 1, 7);
  for (float value : norm) CHECK(std::abs(value - 1.0F) < 0.36F);
}

TEST_CASE("synthetic bf16 weights are the f32 ones rounded", "[synthetic_weights]") {
  MemoryBackend backend;
  const auto weights = make_synthetic_weights(tiny_config("qwen3"), 5, backend);
  LoadOptions options;
  options.matrix_type = DataType::f32;
  const auto exact = make_synthetic_weights(tiny_config("qwen3"), 5, backend, options);
  const ConstTensor rounded = weights->tensor(TensorRole::embedding, 0);
  REQUIRE(rounded.type == DataType::bf16);
  std::vector<std::uint16_t> expected(static_cast<std::size_t>(rounded.count()));
  detail::round_to_bf16(exact->tensor(TensorRole::embedding, 0).as<float>(), expected.size(), expected.data());
  CHECK(std::memcmp(rounded.data, expected.data(), rounded.bytes()) == 0);
}

TEST_CASE("every tensor of a synthetic model has its shape", "[synthetic_weights]") {
  const ModelConfig config = tiny_config(GENERATE("llama", "qwen2", "qwen3"));
  MemoryBackend backend;
  const auto weights = make_synthetic_weights(config, 1, backend);
  const TinyModel model = make_tiny_model(config);
  for (const auto& [key, values] : model.tensors) {
    INFO(gguf_name(key.first, key.second));
    CHECK(weights->tensor(key.first, key.second).count() == static_cast<std::int64_t>(values.size()));
  }
  CHECK(weights->memory().device_bytes() == detail::weight_bytes(config, DataType::bf16));
  CHECK(backend.counting().live_bytes() == weights->memory().device_bytes());
}

TEST_CASE("synthetic models of impossible shapes are refused", "[synthetic_weights]") {
  MemoryBackend backend;
  ModelConfig config = tiny_config("llama");
  config.kv_heads = 3;
  expect_error<InvalidArgument>([&] { make_synthetic_weights(config, 1, backend); }, {"kv_heads = 3", "divide heads"});
  config = tiny_config("llama");
  config.layers = 0;
  expect_error<InvalidArgument>([&] { make_synthetic_weights(config, 1, backend); }, {"layers = 0", "1 .. 4096"});
  config = tiny_config("llama");
  config.rope.frequency_factors = {1.0F};
  expect_error<InvalidArgument>([&] { make_synthetic_weights(config, 1, backend); }, {"frequency_factors", "half the head size"});
  CHECK(backend.counting().live_bytes() == 0);
}

TEST_CASE("synthetic weights report progress and stop when told", "[synthetic_weights]") {
  MemoryBackend backend;
  LoadOptions options;
  std::uint64_t last = 0;
  options.on_progress = [&](const LoadProgress& progress) {
    CHECK(progress.done_bytes >= last);
    CHECK(progress.done_bytes <= progress.total_bytes);
    last = progress.done_bytes;
  };
  const auto weights = make_synthetic_weights(tiny_config("llama"), 1, backend, options);
  CHECK(last == weights->memory().device_bytes());
  options.on_progress = [](const LoadProgress&) { throw std::logic_error("stop here"); };
  MemoryBackend other;
  expect_error<std::logic_error>([&] { make_synthetic_weights(tiny_config("llama"), 1, other, options); }, {"stop here"});
  CHECK(other.counting().live_bytes() == 0);
}

}  // namespace dualdecoder::test
