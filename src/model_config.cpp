// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/model_config.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "dualdecoder/error.hpp"
#include "src/bounded_json.hpp"
#include "src/dequantize.hpp"
#include "src/in_quotes.hpp"

namespace dualdecoder::detail {
namespace {

using nlohmann::json;

constexpr int kMostLayers = 4'096;
constexpr int kMostWidth = 1 << 20;  // hidden and every projection
constexpr int kMostIntermediate = 1 << 22;
constexpr int kMostHeadDim = 1'024;
constexpr int kMostVocabulary = 1 << 24;
constexpr int kMostContext = 1 << 30;

[[noreturn]] void unsupported(const std::string& what, const std::string& value, const std::string& supported) {
  throw FormatError(what + " = " + in_quotes(value) + ": not supported; supported: " + supported);
}

/// Numbers, strings and switches by key, from metadata or JSON; the message of every error names the key.
class Fields {
 public:
  virtual ~Fields() = default;
  virtual bool has(const std::string& key) const = 0;
  virtual std::optional<std::int64_t> integer(const std::string& key) const = 0;
  virtual std::optional<double> real(const std::string& key) const = 0;
  virtual std::optional<std::string> text(const std::string& key) const = 0;
  virtual std::optional<bool> flag(const std::string& key) const = 0;

  int count(const std::string& key, std::optional<int> otherwise = {}) const {
    const auto value = integer(key);
    if (!value && otherwise) return *otherwise;
    if (!value) throw FormatError(key + ": is missing");
    if (*value < 1 || *value > kMostContext) {
      throw FormatError(key + " = " + std::to_string(*value) + ": must be 1 .. " + std::to_string(kMostContext));
    }
    return static_cast<int>(*value);
  }

  float number(const std::string& key, float otherwise) const {
    const auto value = real(key);
    if (!value) return otherwise;
    if (!(std::abs(*value) <= 1e30)) throw FormatError(key + " = " + std::to_string(*value) + ": must be a finite number, at most 1e30");
    return static_cast<float>(*value);
  }

 protected:
  [[noreturn]] static void wrong_type(const std::string& key, const char* expected) { throw FormatError(key + ": must be " + expected); }
};

class GgufFields final : public Fields {
 public:
  explicit GgufFields(const GgufHeader& header) : header_(header) {}

  bool has(const std::string& key) const override { return header_.metadata.contains(key); }
  std::optional<std::int64_t> integer(const std::string& key) const override {
    if (!has(key)) return {};
    if (const auto* value = header_.find<std::uint64_t>(key)) return static_cast<std::int64_t>(std::min<std::uint64_t>(*value, INT64_MAX));
    if (const auto* value = header_.find<std::int64_t>(key)) return *value;
    wrong_type(key, "an integer");
  }
  std::optional<double> real(const std::string& key) const override {
    if (!has(key)) return {};
    if (const auto* value = header_.find<double>(key)) return *value;
    wrong_type(key, "a floating-point number");
  }
  std::optional<std::string> text(const std::string& key) const override {
    if (!has(key)) return {};
    if (const auto* value = header_.find<std::string>(key)) return *value;
    wrong_type(key, "a string");
  }
  std::optional<bool> flag(const std::string& key) const override {
    if (!has(key)) return {};
    if (const auto* value = header_.find<bool>(key)) return *value;
    wrong_type(key, "a boolean");
  }

 private:
  const GgufHeader& header_;
};

/// A JSON object; `prefix` stands before the keys in messages. A null counts as absent.
class JsonFields final : public Fields {
 public:
  JsonFields(const json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  bool has(const std::string& key) const override { return find(key) != nullptr; }
  std::optional<std::int64_t> integer(const std::string& key) const override {
    const json* value = find(key);
    if (value == nullptr) return {};
    if (value->is_number_unsigned()) return static_cast<std::int64_t>(std::min<std::uint64_t>(value->get<std::uint64_t>(), INT64_MAX));
    if (value->is_number_integer()) return value->get<std::int64_t>();
    wrong_type(prefix_ + key, "an integer");
  }
  std::optional<double> real(const std::string& key) const override {
    const json* value = find(key);
    if (value == nullptr) return {};
    if (value->is_number()) return value->get<double>();
    wrong_type(prefix_ + key, "a number");
  }
  std::optional<std::string> text(const std::string& key) const override {
    const json* value = find(key);
    if (value == nullptr) return {};
    if (value->is_string()) return value->get<std::string>();
    wrong_type(prefix_ + key, "a string");
  }
  std::optional<bool> flag(const std::string& key) const override {
    const json* value = find(key);
    if (value == nullptr) return {};
    if (value->is_boolean()) return value->get<bool>();
    wrong_type(prefix_ + key, "a boolean");
  }

 private:
  const json* find(const std::string& key) const {
    const auto at = object_.find(key);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }

  const json& object_;
  std::string prefix_;
};

void check(const ModelConfig& config) {
  if (const std::string problem = config_problem(config); !problem.empty()) throw FormatError("model configuration: " + problem);
}

/// The declared context, or what YaRN stretches it to when that is more.
int stretched_context(const ModelConfig& config) {
  if (config.rope.scaling != RopeScaling::yarn) return config.context;
  const float stretched = static_cast<float>(config.rope.original_context) * config.rope.factor;
  return std::max(config.context, static_cast<int>(std::clamp(stretched, 0.0F, static_cast<float>(kMostContext))));
}

const GgufTensorInfo* find_tensor(const GgufHeader& header, std::string_view name) {
  const auto at = std::find_if(header.tensors.begin(), header.tensors.end(), [&](const auto& tensor) { return tensor.name == name; });
  return at == header.tensors.end() ? nullptr : &*at;
}

float default_yarn_attention(float factor) { return 0.1F * std::log(factor) + 1.0F; }

RopeConfig gguf_rope(const GgufFields& fields, const std::string& arch, int context) {
  RopeConfig rope;
  const std::string scaling = arch + "rope.scaling.";
  rope.theta = fields.number(arch + "rope.freq_base", 10000.0F);
  rope.factor = fields.number(scaling + "factor", fields.number(arch + "rope.scale_linear", 1.0F));
  if (rope.factor == 0.0F) rope.factor = 1.0F;  // as the format's own runtime reads it
  const std::string type = fields.text(scaling + "type").value_or(rope.factor == 1.0F ? "none" : "linear");
  if (type == "none" || (type == "linear" && rope.factor == 1.0F)) {
    rope.factor = 1.0F;
  } else if (type == "linear") {
    rope.scaling = RopeScaling::linear;
  } else if (type == "yarn") {
    rope.scaling = RopeScaling::yarn;
    rope.original_context = fields.count(scaling + "original_context_length", context);
    rope.beta_fast = fields.number(scaling + "yarn_beta_fast", rope.beta_fast);
    rope.beta_slow = fields.number(scaling + "yarn_beta_slow", rope.beta_slow);
    // The format's attention factor multiplies YaRN's own.
    const float multiplier = fields.number(scaling + "attn_factor", fields.number(scaling + "yarn_attn_factor", 1.0F));
    if (multiplier != 1.0F) rope.attention_factor = multiplier * default_yarn_attention(rope.factor);
  } else {
    unsupported(scaling + "type", type, "none, linear or yarn");
  }
  return rope;
}

std::vector<float> gguf_frequency_factors(const GgufHeader& header, std::span<const std::byte> file, int head_dim) {
  const GgufTensorInfo* tensor = find_tensor(header, "rope_freqs.weight");
  if (tensor == nullptr) return {};
  const auto pairs = static_cast<std::size_t>(head_dim) / 2;
  if (tensor->type != static_cast<std::uint32_t>(FileType::f32) || tensor->shape != std::vector<std::uint64_t>{pairs}) {
    throw FormatError("tensor 'rope_freqs.weight': must be F32 with shape [" + std::to_string(pairs) + "]");
  }
  std::vector<float> factors(pairs);
  dequantize(FileType::f32, file.data() + tensor->offset, pairs, factors.data());
  return factors;
}

void refuse_gguf_extras(const GgufFields& fields, const std::string& arch, const ModelConfig& config) {
  if (fields.integer(arch + "expert_count").value_or(0) != 0) unsupported(arch + "expert_count", "more than 0", "0 (dense models)");
  const auto window = fields.integer(arch + "attention.sliding_window").value_or(0);
  if (window > 0 && window < config.context) {
    unsupported(arch + "attention.sliding_window", std::to_string(window), "full attention only");
  }
  if (fields.count(arch + "rope.dimension_count", config.head_dim) != config.head_dim) {
    throw FormatError(arch + "rope.dimension_count = " + std::to_string(fields.count(arch + "rope.dimension_count")) +
                      ": must be the head size, " + std::to_string(config.head_dim));
  }
  if (fields.count(arch + "attention.value_length", config.head_dim) != config.head_dim) {
    throw FormatError(arch + "attention.value_length = " + std::to_string(fields.count(arch + "attention.value_length")) +
                      ": must be the key's, " + std::to_string(config.head_dim));
  }
}

float json_yarn_attention(const JsonFields& scaling, float factor) {
  if (scaling.has("attention_factor")) return scaling.number("attention_factor", 0.0F);
  const float mscale = scaling.number("mscale", 0.0F);
  const float mscale_all_dim = scaling.number("mscale_all_dim", 0.0F);
  if (mscale == 0.0F || mscale_all_dim == 0.0F || factor <= 1.0F) return 0.0F;
  const float log_factor = 0.1F * std::log(factor);
  return (log_factor * mscale + 1.0F) / (log_factor * mscale_all_dim + 1.0F);
}

RopeConfig json_rope(const json& root, const JsonFields& fields, int context) {
  RopeConfig rope;
  rope.theta = fields.number("rope_theta", rope.theta);
  // rope_parameters is the newer name; it also holds the base.
  const char* key = fields.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  if (!fields.has(key)) return rope;
  if (!root[key].is_object()) throw FormatError(std::string("config.json: ") + key + ": must be an object");
  const JsonFields scaling(root[key], std::string("config.json: ") + key + ".");
  rope.theta = scaling.number("rope_theta", rope.theta);
  const std::string type = scaling.text("rope_type").value_or(scaling.text("type").value_or("default"));
  if (type == "default") return rope;
  rope.original_context = scaling.count("original_max_position_embeddings", context);
  rope.factor = scaling.number("factor", static_cast<float>(context) / static_cast<float>(rope.original_context));
  if (type == "linear") {
    rope.scaling = RopeScaling::linear;
    rope.original_context = 0;
  } else if (type == "llama3") {
    rope.scaling = RopeScaling::llama3;
    rope.low_freq_factor = scaling.number("low_freq_factor", rope.low_freq_factor);
    rope.high_freq_factor = scaling.number("high_freq_factor", rope.high_freq_factor);
  } else if (type == "yarn") {
    rope.scaling = RopeScaling::yarn;
    rope.beta_fast = scaling.number("beta_fast", rope.beta_fast);
    rope.beta_slow = scaling.number("beta_slow", rope.beta_slow);
    rope.attention_factor = json_yarn_attention(scaling, rope.factor);
    if (!scaling.flag("truncate").value_or(true)) unsupported("config.json: rope_scaling.truncate", "false", "true");
  } else {
    unsupported(std::string("config.json: ") + key + ".rope_type", type, "default, linear, llama3 or yarn");
  }
  return rope;
}

std::string json_architecture(const json& root, const JsonFields& fields) {
  std::string name = fields.text("model_type").value_or("");
  if (const auto list = root.find("architectures"); list != root.end() && list->is_array() && !list->empty() && list->front().is_string()) {
    name = list->front().get<std::string>();
  }
  if (name == "LlamaForCausalLM" || name == "llama") return "llama";
  if (name == "Qwen2ForCausalLM" || name == "qwen2") return "qwen2";
  if (name == "Qwen3ForCausalLM" || name == "qwen3") return "qwen3";
  unsupported("config.json: architecture", name, "LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM");
}

void refuse_json_extras(const json& root, const JsonFields& fields) {
  if (fields.has("quantization_config")) {
    throw FormatError("config.json: quantization_config: quantised safetensors are not supported; supported: F32, F16 or BF16");
  }
  const std::string activation = fields.text("hidden_act").value_or("silu");
  if (activation != "silu" && activation != "swish") unsupported("config.json: hidden_act", activation, "silu");
  if (fields.flag("use_sliding_window").value_or(false)) unsupported("config.json: use_sliding_window", "true", "false");
  if (fields.number("partial_rotary_factor", 1.0F) != 1.0F) unsupported("config.json: partial_rotary_factor", "other than 1", "1");
  if (const auto types = root.find("layer_types"); types != root.end() && types->is_array()) {
    for (const json& type : *types) {
      if (type != "full_attention")
        unsupported("config.json: layer_types", type.is_string() ? type.get<std::string>() : "", "full_attention");
    }
  }
}

int even_share(const char* key, int hidden, int heads) {
  if (hidden % heads != 0) {
    throw FormatError(std::string(key) + " = " + std::to_string(heads) + ": must divide the hidden size " + std::to_string(hidden) +
                      " when no head size is given");
  }
  return hidden / heads;
}

std::string range_problem(const char* field, int value, int least, int most) {
  if (value >= least && value <= most) return {};
  return std::string(field) + " = " + std::to_string(value) + ": must be " + std::to_string(least) + " .. " + std::to_string(most);
}

std::string number_problem(const char* field, float value, float least, float most) {
  if (value >= least && value <= most) return {};
  return std::string(field) + " = " + std::to_string(value) + ": must be " + std::to_string(least) + " .. " + std::to_string(most);
}

std::string rope_problem(const RopeConfig& rope, int head_dim) {
  const bool scaled = rope.scaling != RopeScaling::none;
  const bool has_original = rope.scaling == RopeScaling::llama3 || rope.scaling == RopeScaling::yarn;
  const bool factors_fit = rope.frequency_factors.empty() || rope.frequency_factors.size() == static_cast<std::size_t>(head_dim) / 2;
  for (const std::string& problem : {
           number_problem("rope.theta", rope.theta, 1.0F, 1e12F),
           number_problem("rope.factor", rope.factor, 1.0F, scaled ? 1e6F : 1.0F),
           range_problem("rope.original_context", rope.original_context, has_original ? 1 : 0, kMostContext),
           number_problem("rope.low_freq_factor", rope.low_freq_factor, 1e-6F, 1e6F),
           number_problem("rope.high_freq_factor", rope.high_freq_factor, std::nextafter(rope.low_freq_factor, 1e7F), 1e7F),
           number_problem("rope.beta_slow", rope.beta_slow, 1e-6F, 1e6F),
           number_problem("rope.beta_fast", rope.beta_fast, rope.beta_slow, 1e6F),
           number_problem("rope.attention_factor", rope.attention_factor, 0.0F, 1e3F),
           factors_fit ? std::string()
                       : "rope.frequency_factors has " + std::to_string(rope.frequency_factors.size()) +
                             " entries: must be none or half the head size",
       }) {
    if (!problem.empty()) return problem;
  }
  for (float factor : rope.frequency_factors) {
    if (auto problem = number_problem("rope.frequency_factors", factor, 1e-6F, 1e6F); !problem.empty()) return problem;
  }
  return {};
}

}  // namespace

std::string config_problem(const ModelConfig& config) {
  for (const std::string& problem : {
           range_problem("layers", config.layers, 1, kMostLayers),
           range_problem("hidden", config.hidden, 1, kMostWidth),
           range_problem("intermediate", config.intermediate, 1, kMostIntermediate),
           range_problem("head_dim", config.head_dim, 2, kMostHeadDim),
           range_problem("heads", config.heads, 1, kMostWidth / std::max(config.head_dim, 1)),
           range_problem("kv_heads", config.kv_heads, 1, config.heads),
           range_problem("vocabulary", config.vocabulary, 1, kMostVocabulary),
           range_problem("context", config.context, 1, kMostContext),
           number_problem("rms_epsilon", config.rms_epsilon, 0.0F, 1.0F),
       }) {
    if (!problem.empty()) return problem;
  }
  if (config.head_dim % 2 != 0) return "head_dim = " + std::to_string(config.head_dim) + ": must be even";
  if (config.heads % config.kv_heads != 0) {
    return "kv_heads = " + std::to_string(config.kv_heads) + ": must divide heads = " + std::to_string(config.heads);
  }
  return rope_problem(config.rope, config.head_dim);
}

ModelConfig config_from_gguf(const GgufHeader& header, std::span<const std::byte> file) {
  const GgufFields fields(header);
  ModelConfig config;
  const auto architecture = fields.text("general.architecture");
  if (!architecture) throw FormatError("general.architecture: is missing");
  config.architecture = *architecture;
  if (config.architecture != "llama" && config.architecture != "qwen2" && config.architecture != "qwen3") {
    unsupported("general.architecture", config.architecture, "llama, qwen2 or qwen3");
  }
  const std::string arch = config.architecture + ".";
  config.name = fields.text("general.name").value_or("");
  config.layers = fields.count(arch + "block_count");
  config.hidden = fields.count(arch + "embedding_length");
  config.intermediate = fields.count(arch + "feed_forward_length");
  config.heads = fields.count(arch + "attention.head_count");
  config.kv_heads = fields.count(arch + "attention.head_count_kv", config.heads);
  config.head_dim = fields.has(arch + "attention.key_length") ? fields.count(arch + "attention.key_length")
                                                              : even_share("attention.head_count", config.hidden, config.heads);
  config.rms_epsilon = fields.number(arch + "attention.layer_norm_rms_epsilon", 1e-5F);
  config.context = fields.count(arch + "context_length");
  config.rope = gguf_rope(fields, arch, config.context);
  config.context = stretched_context(config);

  const GgufTensorInfo* embedding = find_tensor(header, "token_embd.weight");
  if (embedding == nullptr) throw FormatError("tensor 'token_embd.weight' is missing");
  config.vocabulary = static_cast<int>(std::min<std::uint64_t>(embedding->shape.front(), INT32_MAX));
  if (const int declared = fields.count(arch + "vocab_size", config.vocabulary); declared != config.vocabulary) {
    throw FormatError(arch + "vocab_size = " + std::to_string(declared) + ": must be the rows of 'token_embd.weight', " +
                      std::to_string(config.vocabulary));
  }
  config.tied_embeddings = find_tensor(header, "output.weight") == nullptr;
  config.attention_bias = find_tensor(header, "blk.0.attn_q.bias") != nullptr;
  config.qk_norm = config.architecture == "qwen3";
  refuse_gguf_extras(fields, arch, config);
  check(config);
  config.rope.frequency_factors = gguf_frequency_factors(header, file, config.head_dim);
  check(config);
  return config;
}

ModelConfig config_from_json(std::span<const std::byte> text) {
  const json root = parse_bounded_json(text, "config.json", 16);
  const JsonFields fields(root, "config.json: ");
  ModelConfig config;
  config.architecture = json_architecture(root, fields);
  refuse_json_extras(root, fields);
  config.name = fields.text("_name_or_path").value_or("");
  config.layers = fields.count("num_hidden_layers");
  config.hidden = fields.count("hidden_size");
  config.intermediate = fields.count("intermediate_size");
  config.heads = fields.count("num_attention_heads");
  config.kv_heads = fields.count("num_key_value_heads", config.heads);
  const int other_head_dim = config.architecture == "qwen3" ? 128 : 0;  // the reference implementation's default
  config.head_dim = fields.has("head_dim") ? fields.count("head_dim")
                    : other_head_dim > 0   ? other_head_dim
                                           : even_share("config.json: num_attention_heads", config.hidden, config.heads);
  config.vocabulary = fields.count("vocab_size");
  config.context = fields.count("max_position_embeddings");
  config.rms_epsilon = fields.number("rms_norm_eps", 1e-6F);
  config.attention_bias = config.architecture == "qwen2" || fields.flag("attention_bias").value_or(false);
  config.qk_norm = config.architecture == "qwen3";
  config.tied_embeddings = fields.flag("tie_word_embeddings").value_or(false);
  config.rope = json_rope(root, fields, config.context);
  config.context = stretched_context(config);
  check(config);
  return config;
}

}  // namespace dualdecoder::detail
