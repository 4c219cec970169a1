// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "dualdecoder/load_weights.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/gguf.hpp"
#include "src/dequantize.hpp"
#include "src/load_source_model.hpp"
#include "src/model_files.hpp"
#include "src/weight_layout.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/model_files.hpp"
#include "tests/unit/test_backend.hpp"

namespace dualdecoder::test {
namespace {

constexpr std::uint32_t kF32 = 0;
constexpr std::uint32_t kF16 = 1;
constexpr std::uint32_t kQ8 = 8;
constexpr std::uint32_t kBf16 = 30;

/// The values of a tensor as f32, whatever its type.
std::vector<float> values_of(const ConstTensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.count()));
  const detail::FileType type = tensor.type == DataType::bf16 ? detail::FileType::bf16 : detail::FileType::f32;
  detail::dequantize(type, tensor.as<std::byte>(), values.size(), values.data());
  return values;
}

/// Checks configuration and every tensor against the model that the file was written from.
void check_equal(const ModelWeights& weights, const TinyModel& model, DataType matrix_type) {
  const ModelConfig& got = weights.config();
  const ModelConfig& config = model.config;
  CHECK(got.architecture == config.architecture);
  CHECK(got.layers == config.layers);
  CHECK(got.hidden == config.hidden);
  CHECK(got.intermediate == config.intermediate);
  CHECK(got.heads == config.heads);
  CHECK(got.kv_heads == config.kv_heads);
  CHECK(got.head_dim == config.head_dim);
  CHECK(got.vocabulary == config.vocabulary);
  CHECK(got.context == config.context);
  CHECK(got.rms_epsilon == config.rms_epsilon);
  CHECK(got.attention_bias == config.attention_bias);
  CHECK(got.qk_norm == config.qk_norm);
  CHECK(got.tied_embeddings == config.tied_embeddings);
  CHECK(got.rope.theta == config.rope.theta);
  for (const auto& [key, values] : model.tensors) {
    const auto [role, layer] = key;
    INFO(gguf_name(role, layer));
    const ConstTensor tensor = weights.tensor(role, layer);
    REQUIRE(tensor);
    const std::vector<std::uint64_t> shape = model.shape(role);
    REQUIRE(tensor.rank == static_cast<int>(shape.size()));
    for (int axis = 0; axis < tensor.rank; ++axis)
      CHECK(tensor.dim(axis) == static_cast<std::int64_t>(shape[static_cast<std::size_t>(axis)]));
    CHECK(tensor.type == (tensor.rank == 2 ? matrix_type : DataType::f32));
    CHECK(reinterpret_cast<std::uintptr_t>(tensor.data) % 64 == 0);
    CHECK(values_of(tensor) == values);
  }
}

std::shared_ptr<const ModelWeights> load_gguf(const std::string& bytes, Backend& backend, const LoadOptions& options = {}) {
  const TemporaryFolder folder;
  return load_weights(folder.write("model.gguf", bytes), backend, options);
}

void expect_refused(const std::string& gguf, std::initializer_list<const char*> parts, const LoadOptions& options = {}) {
  MemoryBackend backend;
  expect_error<FormatError>([&] { load_gguf(gguf, backend, options); }, parts);
  CHECK(backend.counting().live_bytes() == 0);
}

/// A tiny model's GGUF after a change to its parsed pieces.
template <class F>
std::string changed_model(const std::string& architecture, F change, std::uint32_t type = kF32) {
  TinyModel model = make_tiny_model(tiny_config(architecture));
  change(model);
  return gguf_bytes(model, type, false);
}

/// Configuration of a llama GGUF with more metadata.
template <class F>
ModelConfig config_with(F more) {
  const TinyModel model = make_tiny_model(tiny_config("llama"));
  GgufWriter file = gguf_metadata(model.config, false);
  more(file);
  const TemporaryFolder folder;
  return read_model_config(folder.write("model.gguf", add_gguf_tensors(file, model).bytes()));
}

ModelConfig json_config(const std::string& more, const std::string& architecture = "llama") {
  const TemporaryFolder folder;
  folder.write("config.json", config_json(tiny_config(architecture), more));
  return read_model_config(folder.path());
}

}  // namespace

TEST_CASE("GGUF models load with the values that they were written with", "[load_weights]") {
  const std::string architecture = GENERATE("llama", "qwen2", "qwen3");
  const std::uint32_t type = GENERATE(kF32, kF16, kQ8, kBf16);
  const DataType matrix_type = GENERATE(DataType::f32, DataType::bf16);
  INFO(architecture << " file type " << type << " to " << name_of(matrix_type));
  const TinyModel model = make_tiny_model(tiny_config(architecture));
  MemoryBackend backend;
  LoadOptions options;
  options.matrix_type = matrix_type;
  const auto weights = load_gguf(gguf_bytes(model, type), backend, options);
  check_equal(*weights, model, matrix_type);
  CHECK(weights->config().name == "tiny");
  CHECK(weights->memory().device_bytes() == backend.counting().live_bytes());
  CHECK(weights->memory().device_bytes() == detail::weight_bytes(model.config, matrix_type));
}

TEST_CASE("safetensors models load with the values that they were written with", "[load_weights]") {
  const std::string architecture = GENERATE("llama", "qwen2", "qwen3");
  const std::string type = GENERATE("F32", "F16", "BF16");
  const TinyModel model = make_tiny_model(tiny_config(architecture));
  const TemporaryFolder folder;
  folder.write("config.json", config_json(model.config));
  const auto in_layer = [](Layer wanted) { return [wanted](TensorRole, Layer layer) { return layer == wanted; }; };
  SECTION("one file") { folder.write("model.safetensors", safetensors_bytes(model, type)); }
  SECTION("shards with an index") {
    std::string map;
    for (const auto& [key, values] : model.tensors) {
      map += (map.empty() ? "\"" : ",\"") + hugging_face_name(key.first, key.second) + "\":\"part-" + std::to_string(key.second) +
             ".safetensors\"";
    }
    folder.write("model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
    for (Layer layer : {0, 1})
      folder.write("part-" + std::to_string(layer) + ".safetensors", safetensors_bytes(model, type, in_layer(layer)));
    folder.write("unrelated.safetensors", "not read");
  }
  SECTION("shards without an index") {
    for (Layer layer : {0, 1})
      folder.write("part-" + std::to_string(layer) + ".safetensors", safetensors_bytes(model, type, in_layer(layer)));
  }
  MemoryBackend backend;
  LoadOptions options;
  options.matrix_type = DataType::f32;
  check_equal(*load_weights(folder.path(), backend, options), model, DataType::f32);
}

TEST_CASE("biases of a llama model move with their rows", "[load_weights]") {
  ModelConfig config = tiny_config("llama");
  config.attention_bias = true;
  const TinyModel model = make_tiny_model(config);
  MemoryBackend backend;
  check_equal(*load_gguf(gguf_bytes(model), backend), model, DataType::bf16);
}

TEST_CASE("absent tensors are null and tied heads are the embedding", "[load_weights]") {
  MemoryBackend backend;
  const auto llama = load_gguf(gguf_bytes(make_tiny_model(tiny_config("llama"))), backend);
  CHECK(llama->tensor(TensorRole::head, 0).data == llama->tensor(TensorRole::embedding, 0).data);
  for (TensorRole role : {TensorRole::query_bias, TensorRole::value_bias, TensorRole::query_norm, TensorRole::key_norm}) {
    CHECK_FALSE(llama->tensor(role, 0));
  }
  CHECK_FALSE(llama->tensor(TensorRole::query, 2));
  CHECK_FALSE(llama->tensor(TensorRole::query, -1));
  CHECK(llama->tensor(TensorRole::output_norm, 77));
  const auto qwen2 = load_gguf(gguf_bytes(make_tiny_model(tiny_config("qwen2"))), backend);
  CHECK(qwen2->tensor(TensorRole::head, 0).data != qwen2->tensor(TensorRole::embedding, 0).data);
}

TEST_CASE("matrices of several pieces are the same for any number of threads", "[load_weights]") {
  ModelConfig config = tiny_config("llama");
  config.vocabulary = 80'000;  // 10 MB as f32: more than one piece
  config.hidden = 32;
  const TinyModel model = make_tiny_model(config);
  const std::string bytes = gguf_bytes(model, kF16, false);
  LoadOptions options;
  options.matrix_type = DataType::f32;
  options.threads = GENERATE(0, 1, 3, 16);
  MemoryBackend backend;
  check_equal(*load_gguf(bytes, backend, options), model, DataType::f32);
}

TEST_CASE("progress goes from nothing to everything", "[load_weights]") {
  MemoryBackend backend;
  std::vector<LoadProgress> seen;
  LoadOptions options;
  options.on_progress = [&](const LoadProgress& progress) { seen.push_back(progress); };
  const TinyModel model = make_tiny_model(tiny_config("qwen2"));
  load_gguf(gguf_bytes(model), backend, options);
  REQUIRE(seen.size() == model.tensors.size() + 1);
  CHECK(seen.front().done_bytes == 0);
  CHECK(seen.back().done_bytes == seen.back().total_bytes);
  for (std::size_t i = 1; i < seen.size(); ++i) {
    CHECK(seen[i].done_bytes > seen[i - 1].done_bytes);
    CHECK(seen[i].total_bytes == seen[0].total_bytes);
  }
}

TEST_CASE("an exception from the progress callback frees everything and reaches the caller", "[load_weights]") {
  const std::string bytes = gguf_bytes(make_tiny_model(tiny_config("llama")));
  for (int fail_at = 0; fail_at < 21; ++fail_at) {
    MemoryBackend backend;
    int calls = 0;
    LoadOptions options;
    options.on_progress = [&](const LoadProgress&) {
      if (calls++ == fail_at) throw std::logic_error("stop here");
    };
    expect_error<std::logic_error>([&] { load_gguf(bytes, backend, options); }, {"stop here"});
    CHECK(backend.counting().live_bytes() == 0);
  }
}

TEST_CASE("a failure of each allocation in turn leaves nothing behind", "[load_weights]") {
  const std::string bytes = gguf_bytes(make_tiny_model(tiny_config("llama")));
  MemoryBackend counting;
  load_gguf(bytes, counting);
  REQUIRE(counting.counting().allocations() == 2);
  for (std::uint64_t i = 0; i < counting.counting().allocations(); ++i) {
    MemoryBackend backend;
    backend.counting().fail_at(i);
    expect_error<OutOfMemory>([&] { load_gguf(bytes, backend); }, {"out of memory", "bytes"});
    CHECK(backend.counting().live_bytes() == 0);
  }
}

TEST_CASE("NaN and infinity are refused by tensor and place", "[load_weights]") {
  const float bad =
      GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity());
  const auto place = [&](TensorRole role, std::size_t index) {
    return changed_model("qwen2", [&](TinyModel& model) { model.tensors.at({role, 1})[index] = bad; });
  };
  expect_refused(place(TensorRole::gate, 5 * 32 + 7), {"model.gguf", "'blk.1.ffn_gate.weight'", "row 5, column 7", "finite"});
  expect_refused(place(TensorRole::mlp_norm, 3), {"'blk.1.ffn_norm.weight'", "row 0, column 3", "finite"});
  expect_refused(place(TensorRole::key_bias, 15), {"'blk.1.attn_k.bias'", "column 15", "finite"});
  LoadOptions options;
  options.threads = 8;
  options.matrix_type = DataType::f32;
  expect_refused(place(TensorRole::down, 31 * 64), {"'blk.1.ffn_down.weight'", "row 31, column 0", "finite"}, options);
}

TEST_CASE("a scale that is not finite is refused", "[load_weights]") {
  const TinyModel model = make_tiny_model(tiny_config("qwen3"));
  std::string bytes = gguf_bytes(model, kQ8, false);
  const GgufHeader header = parse_gguf_header(as_bytes(bytes).data(), bytes.size(), bytes.size());
  for (const GgufTensorInfo& tensor : header.tensors) {
    if (tensor.name == "blk.0.attn_output.weight") std::memcpy(bytes.data() + tensor.offset + 34, "\x00\x7C", 2);
  }
  expect_refused(bytes, {"'blk.0.attn_output.weight'", "row 0, column 32", "finite"});
}

TEST_CASE("finite values that overflow bf16 are refused for bf16 alone", "[load_weights]") {
  const float large = std::numeric_limits<float>::max();
  const std::string bytes = changed_model("llama", [&](TinyModel& model) { model.tensors.at({TensorRole::up, 0})[0] = large; });
  expect_refused(bytes, {"'blk.0.ffn_up.weight'", "row 0, column 0", "finite as bf16"});
  MemoryBackend backend;
  LoadOptions options;
  options.matrix_type = DataType::f32;
  CHECK(load_gguf(bytes, backend, options)->tensor(TensorRole::up, 0).as<float>()[0] == large);
}

TEST_CASE("tensors that are missing, of a wrong shape or unknown are refused", "[load_weights]") {
  expect_refused(changed_model("llama",
                               [](TinyModel& model) {
                                 model.tensors.erase({TensorRole::down, 1});
                               }),
                 {"'blk.1.ffn_down.weight' is missing"});
  expect_refused(changed_model("llama",
                               [](TinyModel& model) {
                                 model.tensors.erase({TensorRole::embedding, 0});
                               }),
                 {"'token_embd.weight' is missing"});
  expect_refused(changed_model("qwen2",
                               [](TinyModel& model) {
                                 model.tensors.erase({TensorRole::key_bias, 1});
                               }),
                 {"'blk.1.attn_k.bias' is missing"});
  const TinyModel model = make_tiny_model(tiny_config("qwen2"));
  GgufWriter deeper = gguf_metadata(model.config, false);
  expect_refused(add_gguf_tensors(deeper, model).tensor("blk.0.attn_output.bias", {32}, std::vector<float>(32)).bytes(),
                 {"'blk.0.attn_output.bias'", "qwen2", "no such tensor"});
  TinyModel wide = model;
  wide.config.intermediate = 96;
  GgufWriter file = gguf_metadata(wide.config, false);
  expect_refused(add_gguf_tensors(file, model).bytes(), {"'blk.0.ffn_gate.weight'", "shape = [64, 32]", "[96, 32]"});
}

TEST_CASE("flipped bits anywhere in a model never do worse than an error", "[load_weights]") {
  const std::string original = gguf_bytes(make_tiny_model(tiny_config("llama")), kF16, false);
  std::mt19937 random(3);
  int loaded = 0;
  for (int round = 0; round < 400; ++round) {
    std::string bytes = original;
    // Half of the flips hit the header, which is short.
    const std::size_t reach = round % 2 == 0 ? 3'000 : bytes.size();
    for (int i = 0; i < 3; ++i) bytes[random() % reach] ^= static_cast<char>(1U << random() % 8);
    MemoryBackend backend;
    try {
      detail::load_source_model(detail::SourceModel::from_gguf(as_bytes(bytes)), backend, {});
      ++loaded;
    } catch (const FormatError&) {
    }
    REQUIRE(backend.counting().live_bytes() == 0);
  }
  CHECK(loaded > 0);
  CHECK(loaded < 400);
}

TEST_CASE("unknown architectures and quantisations are named with what is supported", "[load_weights]") {
  TinyModel model = make_tiny_model(tiny_config("llama"));
  model.config.architecture = "mamba";
  expect_refused(gguf_bytes(model), {"general.architecture", "'mamba'", "llama, qwen2 or qwen3"});
  GgufWriter file = gguf_metadata(tiny_config("llama"), false);
  expect_refused(file.tensor("token_embd.weight", {1, 256}, 23, std::string(136, '\0')).bytes(), {"IQ4_XS", "not supported", "Q6_K"});
  expect_error<FormatError>([] { json_config(",\"quantization_config\":{}"); }, {"quantization_config", "not supported"});
  const TemporaryFolder folder;
  folder.write("config.json", "{\"architectures\":[\"GPT2LMHeadModel\"]}");
  expect_error<FormatError>([&] { read_model_config(folder.path()); }, {"config.json", "'GPT2LMHeadModel'", "LlamaForCausalLM"});
  model = make_tiny_model(tiny_config("llama"));
  folder.write("config.json", config_json(model.config));
  folder.write("model.safetensors", SafetensorsWriter().tensor("model.norm.weight", {32}, "F64", std::string(256, '\0')).bytes());
  MemoryBackend backend;
  expect_error<FormatError>([&] { load_weights(folder.path(), backend); }, {"'model.norm.weight'", "F64", "F32, F16 or BF16"});
}

TEST_CASE("absurd configurations are refused by field, value and range", "[load_weights]") {
  const auto refused = [](std::initializer_list<const char*> parts, auto change) {
    const TinyModel model = make_tiny_model(tiny_config("llama"));
    TinyModel claimed = model;
    change(claimed.config);
    GgufWriter file = gguf_metadata(claimed.config, false);
    expect_refused(add_gguf_tensors(file, model).bytes(), parts);
  };
  refused({"llama.block_count = 0", "1 .. "}, [](ModelConfig& config) { config.layers = 0; });
  refused({"layers = 1000000", "1 .. 4096"}, [](ModelConfig& config) { config.layers = 1'000'000; });
  refused({"llama.block_count = 4294967295"}, [](ModelConfig& config) { config.layers = -1; });
  refused({"hidden = 1000000000"}, [](ModelConfig& config) { config.hidden = 1'000'000'000; });
  refused({"intermediate = 1000000000"}, [](ModelConfig& config) { config.intermediate = 1'000'000'000; });
  refused({"kv_heads = 3", "must divide heads = 4"}, [](ModelConfig& config) { config.kv_heads = 3; });
  refused({"kv_heads = 8", "1 .. 4"}, [](ModelConfig& config) { config.kv_heads = 8; });
  refused({"heads = 1000000"}, [](ModelConfig& config) { config.heads = 1'000'000; });
  refused({"head_dim = 7", "even"}, [](ModelConfig& config) { config.head_dim = 7; });
  refused({"head_dim = 2048"}, [](ModelConfig& config) { config.head_dim = 2048; });
  refused({"rms_epsilon = -1"}, [](ModelConfig& config) { config.rms_epsilon = -1.0F; });
  refused({"layer_norm_rms_epsilon = nan"}, [](ModelConfig& config) { config.rms_epsilon = std::nanf(""); });
  refused({"rope.theta = 0"}, [](ModelConfig& config) { config.rope.theta = 0.0F; });
  refused({"rope.freq_base = inf"}, [](ModelConfig& config) { config.rope.theta = INFINITY; });
  refused({"llama.context_length = 0"}, [](ModelConfig& config) { config.context = 0; });
}

TEST_CASE("GGUF metadata of a wrong type, missing or unsupported is refused", "[load_weights]") {
  const auto refused = [](std::initializer_list<const char*> parts, auto more) {
    expect_error<FormatError>([&] { config_with(more); }, parts);
  };
  refused({"llama.expert_count", "dense"}, [](GgufWriter& file) { file.number("llama.expert_count", 8); });
  refused({"llama.attention.sliding_window", "'64'"}, [](GgufWriter& file) { file.number("llama.attention.sliding_window", 64); });
  refused({"llama.rope.dimension_count = 4", "head size, 8"}, [](GgufWriter& file) { file.number("llama.rope.dimension_count", 4); });
  refused({"llama.vocab_size = 5", "token_embd.weight"}, [](GgufWriter& file) { file.number("llama.vocab_size", 5); });
  refused({"llama.rope.scaling.type", "'longrope'"}, [](GgufWriter& file) { file.text("llama.rope.scaling.type", "longrope"); });
  refused({"llama.rope.scaling.factor", "floating-point"}, [](GgufWriter& file) { file.number("llama.rope.scaling.factor", 2); });
  refused({"llama.vocab_size", "an integer"}, [](GgufWriter& file) { file.text("llama.vocab_size", "many"); });
  refused({"rope_freqs.weight", "shape [4]"}, [](GgufWriter& file) { file.tensor("rope_freqs.weight", {5}, std::vector<float>(5, 1.0F)); });
  refused({"frequency_factors", "0.0"}, [](GgufWriter& file) { file.tensor("rope_freqs.weight", {4}, std::vector<float>(4, 0.0F)); });
  expect_refused(GgufWriter().bytes(), {"general.architecture", "missing"});
  expect_refused(GgufWriter().text("general.architecture", "llama").bytes(), {"llama.block_count", "missing"});
}

TEST_CASE("RoPE scaling from GGUF", "[load_weights]") {
  ModelConfig config = config_with([](GgufWriter&) {});
  CHECK(config.rope.scaling == RopeScaling::none);
  CHECK(config.context == 512);

  config = config_with([](GgufWriter& file) { file.text("llama.rope.scaling.type", "linear").real("llama.rope.scaling.factor", 4.0F); });
  CHECK(config.rope.scaling == RopeScaling::linear);
  CHECK(config.rope.factor == 4.0F);

  config = config_with([](GgufWriter& file) { file.real("llama.rope.scaling.factor", 2.0F); });
  CHECK(config.rope.scaling == RopeScaling::linear);  // as the format's own runtime reads a factor without a type

  config = config_with([](GgufWriter& file) {
    file.text("llama.rope.scaling.type", "yarn").real("llama.rope.scaling.factor", 4.0F);
    file.number("llama.rope.scaling.original_context_length", 512);
  });
  CHECK(config.rope.scaling == RopeScaling::yarn);
  CHECK(config.rope.original_context == 512);
  CHECK(config.rope.attention_factor == 0.0F);
  CHECK(config.context == 2048);

  config = config_with([](GgufWriter& file) {
    file.text("llama.rope.scaling.type", "yarn").real("llama.rope.scaling.factor", 4.0F).real("llama.rope.scaling.attn_factor", 0.5F);
    file.real("llama.rope.scaling.yarn_beta_fast", 16.0F).real("llama.rope.scaling.yarn_beta_slow", 2.0F);
  });
  CHECK(config.rope.original_context == 512);
  CHECK(config.rope.attention_factor == Approx(0.5 * (0.1 * std::log(4.0) + 1.0)));
  CHECK(config.rope.beta_fast == 16.0F);
  CHECK(config.rope.beta_slow == 2.0F);

  const std::vector<float> factors{1.0F, 1.0F, 3.5F, 8.0F};
  config = config_with([&](GgufWriter& file) { file.tensor("rope_freqs.weight", {4}, factors); });
  CHECK(config.rope.scaling == RopeScaling::none);
  CHECK(config.rope.frequency_factors == factors);
}

TEST_CASE("RoPE scaling from config.json", "[load_weights]") {
  CHECK(json_config("").rope.scaling == RopeScaling::none);
  CHECK(json_config(",\"rope_scaling\":null").rope.scaling == RopeScaling::none);
  CHECK(json_config(",\"rope_scaling\":{\"type\":\"default\"}").rope.scaling == RopeScaling::none);
  CHECK(json_config(",\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":5e5}").rope.theta == 500'000.0F);

  ModelConfig config = json_config(",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}");
  CHECK(config.rope.scaling == RopeScaling::linear);
  CHECK(config.rope.factor == 2.0F);

  config = json_config(
      ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.5,\"high_freq_factor\":4.5,"
      "\"original_max_position_embeddings\":128}");
  CHECK(config.rope.scaling == RopeScaling::llama3);
  CHECK(config.rope.factor == 8.0F);
  CHECK(config.rope.low_freq_factor == 1.5F);
  CHECK(config.rope.high_freq_factor == 4.5F);
  CHECK(config.rope.original_context == 128);
  CHECK(config.context == 512);

  config = json_config(",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":512}", "qwen2");
  CHECK(config.rope.scaling == RopeScaling::yarn);
  CHECK(config.rope.factor == 4.0F);
  CHECK(config.rope.original_context == 512);
  CHECK(config.context == 2048);

  config = json_config(",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"mscale\":1.0,\"mscale_all_dim\":0.5}");
  CHECK(config.rope.attention_factor == Approx((0.1 * std::log(4.0) + 1.0) / (0.05 * std::log(4.0) + 1.0)));
  CHECK(json_config(",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"attention_factor\":1.25}").rope.attention_factor == 1.25F);

  const auto refused = [](const std::string& more, std::initializer_list<const char*> parts) {
    expect_error<FormatError>([&] { json_config(more); }, parts);
  };
  refused(",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}", {"rope_scaling.rope_type", "'dynamic'", "yarn"});
  refused(",\"rope_scaling\":7", {"rope_scaling", "object"});
  refused(",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0.5}", {"rope.factor = 0.5"});
  refused(",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":-1e30}", {"rope.factor"});
  refused(",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2,\"truncate\":false}", {"truncate"});
  refused(",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":2,\"low_freq_factor\":4,\"high_freq_factor\":4}", {"high_freq_factor = 4"});
  refused(",\"partial_rotary_factor\":0.5", {"partial_rotary_factor"});
}

TEST_CASE("config.json that is wrong or asks for what is not there is refused", "[load_weights]") {
  const auto refused = [](const std::string& text, std::initializer_list<const char*> parts) {
    const TemporaryFolder folder;
    folder.write("config.json", text);
    expect_error<FormatError>([&] { read_model_config(folder.path()); }, parts);
  };
  refused("", {"config.json", "not valid JSON"});
  refused("{\"architectures\":[\"LlamaForCausalLM\"]}", {"num_hidden_layers", "missing"});
  refused("{\"model_type\":\"llama\",\"num_hidden_layers\":\"two\"}", {"config.json: num_hidden_layers", "an integer"});
  refused("{\"model_type\":\"llama\",\"num_hidden_layers\":18446744073709551615}", {"num_hidden_layers = 9223372036854775807"});
  refused("{\"model_type\":\"llama\",\"num_hidden_layers\":-1}", {"num_hidden_layers = -1"});
  refused("{\"model_type\":\"llama\",\"a\":" + std::string(1000, '['), {"nested deeper than 16"});
  refused("{\"model_type\":\"llama\",\"num_hidden_layers\":1,\"num_hidden_layers\":1}", {"'num_hidden_layers'", "twice"});
  const auto with = [](const std::string& more) { return config_json(tiny_config("qwen2"), more); };
  refused(with(",\"use_sliding_window\":true"), {"use_sliding_window"});
  refused(with(",\"layer_types\":[\"full_attention\",\"sliding_attention\"]"), {"layer_types", "'sliding_attention'"});
  std::string gelu = with("");
  gelu.replace(gelu.find("silu"), 4, "gelu");
  refused(gelu, {"hidden_act", "'gelu'", "silu"});
  const std::string shape =
      "{\"model_type\":\"llama\",\"num_hidden_layers\":1,\"intermediate_size\":8,\"vocab_size\":8,"
      "\"max_position_embeddings\":8,\"hidden_size\":30,\"num_attention_heads\":4}";
  refused(shape, {"num_attention_heads = 4", "divide the hidden size 30"});
  refused(std::string((std::size_t{16} << 20U) + 1, ' '), {"bytes of JSON", "at most 16777216"});
}

TEST_CASE("defaults of config.json are those of the reference implementation", "[load_weights]") {
  const std::string shape =
      "\"num_hidden_layers\":1,\"intermediate_size\":8,\"vocab_size\":8,\"max_position_embeddings\":8,"
      "\"hidden_size\":32,\"num_attention_heads\":4,\"head_dim\":null}";
  const TemporaryFolder folder;
  folder.write("config.json", "{\"model_type\":\"llama\"," + shape);
  const ModelConfig llama = read_model_config(folder.path());
  CHECK(llama.kv_heads == 4);
  CHECK(llama.head_dim == 8);
  CHECK(llama.rms_epsilon == 1e-6F);
  CHECK(llama.rope.theta == 10'000.0F);
  CHECK_FALSE(llama.tied_embeddings);
  CHECK_FALSE(llama.attention_bias);
  folder.write("config.json", "{\"model_type\":\"qwen3\"," + shape);
  CHECK(read_model_config(folder.path()).head_dim == 128);
  CHECK(json_config(",\"attention_bias\":true").attention_bias);
  CHECK(json_config("", "qwen2").attention_bias);
}

TEST_CASE("safetensors folders that do not fit together are refused", "[load_weights]") {
  const TinyModel model = make_tiny_model(tiny_config("llama"));
  const TemporaryFolder folder;
  MemoryBackend backend;
  expect_error<IoError>([&] { load_weights(folder.path(), backend); }, {"config.json", "No such file"});
  folder.write("config.json", config_json(model.config));
  expect_error<IoError>([&] { load_weights(folder.path(), backend); }, {"holds no *.safetensors"});
  folder.write("a.safetensors", safetensors_bytes(model));
  folder.write("b.safetensors", safetensors_bytes(model, "F32", [](TensorRole role, Layer) { return role == TensorRole::output_norm; }));
  expect_error<FormatError>([&] { load_weights(folder.path(), backend); }, {"'model.norm.weight'", "'b.safetensors'", "file before it"});
  folder.write("b.safetensors", "short");
  expect_error<FormatError>([&] { load_weights(folder.path(), backend); }, {"b.safetensors", "at least 8"});
  folder.write("model.safetensors.index.json", "{\"weight_map\":{\"x\":\"c.safetensors\"}}");
  expect_error<IoError>([&] { load_weights(folder.path(), backend); }, {"c.safetensors", "No such file"});
  CHECK(backend.counting().live_bytes() == 0);
}

TEST_CASE("a tied head and old frequency tables in a checkpoint are passed over", "[load_weights]") {
  const TinyModel model = make_tiny_model(tiny_config("llama"));
  const TemporaryFolder folder;
  folder.write("config.json", config_json(model.config));
  folder.write("1.safetensors", safetensors_bytes(model));
  SafetensorsWriter more;
  more.tensor("lm_head.weight", {1, 1}, "F32", std::string(4, '\0'));
  more.tensor("model.layers.0.self_attn.rotary_emb.inv_freq", {4}, "F64", std::string(32, '\0'));
  folder.write("2.safetensors", more.bytes());
  MemoryBackend backend;
  check_equal(*load_weights(folder.path(), backend), model, DataType::bf16);
}

TEST_CASE("load options out of range are refused", "[load_weights]") {
  MemoryBackend backend;
  LoadOptions options;
  options.matrix_type = DataType::i8;
  expect_error<InvalidArgument>([&] { load_weights("unread.gguf", backend, options); }, {"matrix_type = i8", "f32 or bf16"});
  options = {};
  options.threads = GENERATE(-1, 1'025);
  expect_error<InvalidArgument>([&] { load_weights("unread.gguf", backend, options); }, {"threads", "0 .. 1024"});
  expect_error<IoError>([&] { load_weights("/nowhere/model.gguf", backend); }, {"/nowhere/model.gguf"});
  expect_error<IoError>([&] { read_model_config("/nowhere/model.gguf"); }, {"/nowhere/model.gguf"});
}

TEST_CASE("YaRN stretches the context of a file that does not scale its positions", "[load_weights]") {
  const TemporaryFolder folder;
  const auto path = folder.write("model.gguf", gguf_bytes(make_tiny_model(tiny_config("llama")), kF32, false));
  const ModelConfig plain = read_model_config(path);
  const ModelConfig config = read_model_config(path, 4.0F);
  CHECK(config.rope.scaling == RopeScaling::yarn);
  CHECK(config.rope.factor == 4.0F);
  CHECK(config.rope.original_context == plain.context);
  CHECK(config.context == 4 * plain.context);
  MemoryBackend backend;
  LoadOptions options;
  options.yarn_factor = 4.0F;
  CHECK(load_weights(path, backend, options)->config().context == 4 * plain.context);
  expect_error<InvalidArgument>([&] { read_model_config(path, 0.5F); }, {"yarn_factor", "0.5", "above 1"});
  const TemporaryFolder scaled;
  scaled.write("config.json", config_json(tiny_config("llama"), R"(,"rope_scaling":{"rope_type":"linear","factor":2.0})"));
  expect_error<InvalidArgument>([&] { read_model_config(scaled.path(), 4.0F); }, {"yarn_factor", "scales its positions already"});
}

TEST_CASE("a published model loads with the values of the gguf package", "[load_weights][real_model]") {
  const std::filesystem::path path = std::filesystem::path(DUALDECODER_MODEL_DIR) / "SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!std::filesystem::exists(path)) DUALDECODER_SKIP("no SmolLM2-135M (scripts/get-model.sh smollm2)");
  MemoryBackend backend;
  LoadOptions options;
  options.matrix_type = DataType::f32;
  const auto weights = load_weights(path, backend, options);
  CHECK(weights->config().layers == 30);
  CHECK(weights->config().rope.theta == 100'000.0F);
  CHECK(weights->config().tied_embeddings);
  // Sums of bits(value i) * (2 i + 1) modulo 2^64 over what gguf 0.19.0 dequantises; rows of q and k as in the Hugging Face checkpoint,
  // reshape(heads, 32, 2, 576).swapaxes(1, 2).
  struct Expected {
    TensorRole role;
    Layer layer;
    std::uint64_t sum;
  };
  for (const Expected& expected :
       {Expected{TensorRole::embedding, 0, 0xee6fa1c00885e840U}, Expected{TensorRole::output_norm, 0, 0x144868d320000U},
        Expected{TensorRole::down, 0, 0x7b2ad7026db98c00U}, Expected{TensorRole::value, 29, 0x65baa2a1cc15a000U},
        Expected{TensorRole::query, 7, 0x8ea5055690fc1200U}, Expected{TensorRole::key, 15, 0x652d03e506ee8a00U}}) {
    INFO(gguf_name(expected.role, expected.layer));
    const ConstTensor tensor = weights->tensor(expected.role, expected.layer);
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(tensor.count()); ++i) sum += tensor.as<std::uint32_t>()[i] * (2 * i + 1);
    CHECK(sum == expected.sum);
  }
}

}  // namespace dualdecoder::test
