// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dualdecoder/model_weights.hpp"

/// Writers of small GGUF and safetensors files for tests. Files are strings of bytes, so that a test can break them before it writes them.
namespace dualdecoder::test {

/// A folder under the system's temporary one, removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "dualdecoder-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed for " + pattern);
    path_ = pattern;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const noexcept { return path_; }
  /// Writes a file into the folder and returns its path.
  std::filesystem::path write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

/// Little-endian bytes of a number.
template <class T>
std::string bytes_of(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

inline std::span<const std::byte> as_bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

/// bf16 and f16 of values that both hold exactly; others throw.
inline std::uint16_t exact_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0xFFFFU) != 0) throw std::invalid_argument("not a bf16: " + std::to_string(value));
  return static_cast<std::uint16_t>(bits >> 16U);
}
inline std::uint16_t exact_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16U & 0x8000U);
  if (value == 0.0F) return sign;
  const int exponent = static_cast<int>(bits >> 23U & 0xFFU) - 127 + 15;
  if ((bits & 0x1FFFU) != 0 || exponent < 1 || exponent > 30) throw std::invalid_argument("not a normal f16: " + std::to_string(value));
  return static_cast<std::uint16_t>(sign | static_cast<unsigned>(exponent) << 10U | (bits >> 13U & 0x3FFU));
}

/// Builds a GGUF file. Numbers of types are the format's: metadata u32 4, i32 5, f32 6, bool 7, string 8, array 9, u64 10; tensors F32 0,
/// F16 1, Q8_0 8, BF16 30.
class GgufWriter {
 public:
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;          ///< of the data; state it with number("general.alignment", ...) when it is not 32
  std::uint64_t extra_tensor_count = 0;  ///< added to what the header claims
  std::uint64_t extra_metadata_count = 0;

  /// A metadata entry from its type number and the bytes of its value.
  GgufWriter& raw(const std::string& key, std::uint32_t type, const std::string& value) {
    metadata_ += text_bytes(key) + bytes_of(type) + value;
    ++metadata_count_;
    return *this;
  }
  GgufWriter& number(const std::string& key, std::uint32_t value) { return raw(key, 4, bytes_of(value)); }
  GgufWriter& real(const std::string& key, float value) { return raw(key, 6, bytes_of(value)); }
  GgufWriter& flag(const std::string& key, bool value) { return raw(key, 7, bytes_of(static_cast<std::uint8_t>(value))); }
  GgufWriter& text(const std::string& key, const std::string& value) { return raw(key, 8, text_bytes(value)); }
  GgufWriter& texts(const std::string& key, const std::vector<std::string>& values) {
    std::string bytes = bytes_of(std::uint32_t{8}) + bytes_of(static_cast<std::uint64_t>(values.size()));
    for (const std::string& value : values) bytes += text_bytes(value);
    return raw(key, 9, bytes);
  }
  GgufWriter& numbers(const std::string& key, const std::vector<std::int32_t>& values) {
    std::string bytes = bytes_of(std::uint32_t{5}) + bytes_of(static_cast<std::uint64_t>(values.size()));
    for (std::int32_t value : values) bytes += bytes_of(value);
    return raw(key, 9, bytes);
  }

  /// A tensor with its data; `shape` is outermost first.
  GgufWriter& tensor(const std::string& name, const std::vector<std::uint64_t>& shape, std::uint32_t type, const std::string& data) {
    table(name, shape, type, data_.size());
    data_ += data;
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    return *this;
  }
  GgufWriter& tensor(const std::string& name, const std::vector<std::uint64_t>& shape, const std::vector<float>& values) {
    return tensor(name, shape, 0, {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
  }
  /// An entry of the tensor table alone.
  GgufWriter& table(const std::string& name, const std::vector<std::uint64_t>& shape, std::uint32_t type, std::uint64_t offset) {
    table_ += text_bytes(name) + bytes_of(static_cast<std::uint32_t>(shape.size()));
    for (auto extent = shape.rbegin(); extent != shape.rend(); ++extent) table_ += bytes_of(*extent);
    table_ += bytes_of(type) + bytes_of(offset);
    ++tensor_count_;
    return *this;
  }

  std::string bytes() const {
    std::string file = "GGUF" + bytes_of(version) + bytes_of(tensor_count_ + extra_tensor_count) +
                       bytes_of(metadata_count_ + extra_metadata_count) + metadata_ + table_;
    file.resize((file.size() + alignment - 1) / alignment * alignment);
    return file + data_;
  }

  static std::string text_bytes(const std::string& text) { return bytes_of(static_cast<std::uint64_t>(text.size())) + text; }

 private:
  std::uint64_t metadata_count_ = 0;
  std::uint64_t tensor_count_ = 0;
  std::string metadata_;
  std::string table_;
  std::string data_;
};

/// Builds a safetensors file.
class SafetensorsWriter {
 public:
  SafetensorsWriter& tensor(const std::string& name, const std::vector<std::uint64_t>& shape, const std::string& type,
                            const std::string& data) {
    std::string extents;
    for (std::uint64_t extent : shape) extents += (extents.empty() ? "" : ",") + std::to_string(extent);
    return raw("\"" + name + "\":{\"dtype\":\"" + type + "\",\"shape\":[" + extents + "],\"data_offsets\":[" +
                   std::to_string(data_.size()) + "," + std::to_string(data_.size() + data.size()) + "]}",
               data);
  }
  /// A member of the header as it stands, and data to go with it.
  SafetensorsWriter& raw(const std::string& member, const std::string& data = "") {
    header_ += (header_.empty() ? "" : ",") + member;
    data_ += data;
    return *this;
  }
  std::string bytes() const {
    const std::string header = "{" + header_ + "}";
    return bytes_of(static_cast<std::uint64_t>(header.size())) + header + data_;
  }

 private:
  std::string header_;
  std::string data_;
};

/// A small model with values that F32, F16, BF16 and Q8_0 all hold exactly (multiples of 1/64 below 2), in the row order of the library.
struct TinyModel {
  using Key = std::pair<TensorRole, Layer>;  // layer 0 for the model's own tensors

  ModelConfig config;
  std::map<Key, std::vector<float>> tensors;

  std::vector<std::uint64_t> shape(TensorRole role) const {
    const auto n = [](int value) { return static_cast<std::uint64_t>(value); };
    switch (role) {
      case TensorRole::embedding:
      case TensorRole::head: return {n(config.vocabulary), n(config.hidden)};
      case TensorRole::output_norm:
      case TensorRole::attention_norm:
      case TensorRole::mlp_norm: return {n(config.hidden)};
      case TensorRole::query: return {n(config.q_width()), n(config.hidden)};
      case TensorRole::key:
      case TensorRole::value: return {n(config.kv_width()), n(config.hidden)};
      case TensorRole::query_bias: return {n(config.q_width())};
      case TensorRole::key_bias:
      case TensorRole::value_bias: return {n(config.kv_width())};
      case TensorRole::query_norm:
      case TensorRole::key_norm: return {n(config.head_dim)};
      case TensorRole::attention_out: return {n(config.hidden), n(config.q_width())};
      case TensorRole::gate:
      case TensorRole::up: return {n(config.intermediate), n(config.hidden)};
      case TensorRole::down: return {n(config.hidden), n(config.intermediate)};
    }
    return {};
  }
};

/// The byte-level alphabet of GPT-2 (its encoder.py, bytes_to_unicode): printable bytes as themselves, the others from U+0100 on; UTF-8.
inline std::vector<std::string> byte_alphabet() {
  std::vector<std::string> alphabet;
  unsigned other = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    const unsigned code = printable ? byte : other++;
    alphabet.push_back(code < 0x80 ? std::string(1, static_cast<char>(code))
                                   : std::string{static_cast<char>(0xC0U | code >> 6U), static_cast<char>(0x80U | (code & 0x3FU))});
  }
  return alphabet;
}

/// Vocabulary of the tiny models: the byte alphabet, two merges, then end of text, start and end of a chat message.
inline constexpr int kTinyVocabulary = 256 + 2 + 3;
inline constexpr int kTinyEndOfText = 258;

/// 2 layers, 4 query and 2 KV heads; `architecture` is llama, qwen2 (biases) or qwen3 (QK norm, heads wider than hidden / heads).
inline ModelConfig tiny_config(const std::string& architecture) {
  ModelConfig config;
  config.architecture = architecture;
  config.name = "tiny";
  config.layers = 2;
  config.hidden = 32;
  config.intermediate = 64;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = architecture == "qwen3" ? 16 : 8;
  config.vocabulary = kTinyVocabulary;
  config.context = 512;
  config.rms_epsilon = 1e-5F;
  config.attention_bias = architecture == "qwen2";
  config.qk_norm = architecture == "qwen3";
  config.tied_embeddings = architecture == "llama";
  config.rope.theta = 10000.0F;
  return config;
}

inline TinyModel make_tiny_model(const ModelConfig& config, std::uint32_t seed = 1) {
  TinyModel model{config, {}};
  const auto add = [&](TensorRole role, Layer layer, bool norm = false) {
    std::size_t count = 1;
    for (std::uint64_t extent : model.shape(role)) count *= static_cast<std::size_t>(extent);
    std::vector<float>& values = model.tensors[{role, layer}];
    for (std::size_t i = 0; i < count; ++i) {
      seed = seed * 1664525U + 1013904223U;  // Numerical Recipes' quick generator
      const float value = static_cast<float>(static_cast<int>(seed >> 24U) % 64 - 32) / 64.0F;
      values.push_back(norm ? 1.0F + value / 2.0F : value);
    }
  };
  add(TensorRole::embedding, 0);
  add(TensorRole::output_norm, 0, true);
  if (!config.tied_embeddings) add(TensorRole::head, 0);
  for (Layer layer = 0; layer < config.layers; ++layer) {
    for (TensorRole role : {TensorRole::attention_norm, TensorRole::mlp_norm}) add(role, layer, true);
    for (TensorRole role : {TensorRole::query, TensorRole::key, TensorRole::value, TensorRole::attention_out, TensorRole::gate,
                            TensorRole::up, TensorRole::down}) {
      add(role, layer);
    }
    if (config.attention_bias) {
      for (TensorRole role : {TensorRole::query_bias, TensorRole::key_bias, TensorRole::value_bias}) add(role, layer);
    }
    if (config.qk_norm) {
      for (TensorRole role : {TensorRole::query_norm, TensorRole::key_norm}) add(role, layer, true);
    }
  }
  return model;
}

/// Name of a tensor in GGUF and in Hugging Face checkpoints.
inline std::string gguf_name(TensorRole role, Layer layer) {
  const std::string block = "blk." + std::to_string(layer) + ".";
  switch (role) {
    case TensorRole::embedding: return "token_embd.weight";
    case TensorRole::output_norm: return "output_norm.weight";
    case TensorRole::head: return "output.weight";
    case TensorRole::attention_norm: return block + "attn_norm.weight";
    case TensorRole::query: return block + "attn_q.weight";
    case TensorRole::key: return block + "attn_k.weight";
    case TensorRole::value: return block + "attn_v.weight";
    case TensorRole::query_bias: return block + "attn_q.bias";
    case TensorRole::key_bias: return block + "attn_k.bias";
    case TensorRole::value_bias: return block + "attn_v.bias";
    case TensorRole::query_norm: return block + "attn_q_norm.weight";
    case TensorRole::key_norm: return block + "attn_k_norm.weight";
    case TensorRole::attention_out: return block + "attn_output.weight";
    case TensorRole::mlp_norm: return block + "ffn_norm.weight";
    case TensorRole::gate: return block + "ffn_gate.weight";
    case TensorRole::up: return block + "ffn_up.weight";
    case TensorRole::down: return block + "ffn_down.weight";
  }
  return {};
}
inline std::string hugging_face_name(TensorRole role, Layer layer) {
  const std::string block = "model.layers." + std::to_string(layer) + ".";
  switch (role) {
    case TensorRole::embedding: return "model.embed_tokens.weight";
    case TensorRole::output_norm: return "model.norm.weight";
    case TensorRole::head: return "lm_head.weight";
    case TensorRole::attention_norm: return block + "input_layernorm.weight";
    case TensorRole::query: return block + "self_attn.q_proj.weight";
    case TensorRole::key: return block + "self_attn.k_proj.weight";
    case TensorRole::value: return block + "self_attn.v_proj.weight";
    case TensorRole::query_bias: return block + "self_attn.q_proj.bias";
    case TensorRole::key_bias: return block + "self_attn.k_proj.bias";
    case TensorRole::value_bias: return block + "self_attn.v_proj.bias";
    case TensorRole::query_norm: return block + "self_attn.q_norm.weight";
    case TensorRole::key_norm: return block + "self_attn.k_norm.weight";
    case TensorRole::attention_out: return block + "self_attn.o_proj.weight";
    case TensorRole::mlp_norm: return block + "post_attention_layernorm.weight";
    case TensorRole::gate: return block + "mlp.gate_proj.weight";
    case TensorRole::up: return block + "mlp.up_proj.weight";
    case TensorRole::down: return block + "mlp.down_proj.weight";
  }
  return {};
}

/// What llama.cpp's converter does to q and k of llama models: reshape(heads, 2, head_dim / 2, columns).swapaxes(1, 2).
inline std::vector<float> as_llama_converter(const std::vector<float>& values, int heads, int head_dim) {
  const std::size_t rows = static_cast<std::size_t>(heads) * static_cast<std::size_t>(head_dim);
  const std::size_t columns = values.size() / rows;
  std::vector<float> moved;
  for (int head = 0; head < heads; ++head) {
    for (int pair = 0; pair < head_dim / 2; ++pair) {
      for (int part = 0; part < 2; ++part) {
        const auto row = static_cast<std::size_t>(head * head_dim + part * head_dim / 2 + pair);
        const auto begin = values.begin() + static_cast<std::ptrdiff_t>(row * columns);
        moved.insert(moved.end(), begin, begin + static_cast<std::ptrdiff_t>(columns));
      }
    }
  }
  return moved;
}

/// The bytes of values in a GGUF type: F32 0, F16 1, Q8_0 8 (scale 1/64), BF16 30.
inline std::string encode(const std::vector<float>& values, std::uint32_t type) {
  std::string bytes;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (type == 0) bytes += bytes_of(values[i]);
    if (type == 1) bytes += bytes_of(exact_f16(values[i]));
    if (type == 30) bytes += bytes_of(exact_bf16(values[i]));
    if (type == 8) {
      if (i % 32 == 0) bytes += bytes_of(exact_f16(1.0F / 64.0F));
      bytes += bytes_of(static_cast<std::int8_t>(values[i] * 64.0F));
    }
  }
  return bytes;
}

/// Metadata of a tiny model: configuration and, when asked for, a byte-level BPE tokenizer of kTinyVocabulary tokens.
inline GgufWriter gguf_metadata(const ModelConfig& config, bool tokenizer = true) {
  const auto n = [](int value) { return static_cast<std::uint32_t>(value); };
  const std::string arch = config.architecture + ".";
  GgufWriter file;
  file.text("general.architecture", config.architecture).text("general.name", config.name);
  file.number(arch + "block_count", n(config.layers)).number(arch + "embedding_length", n(config.hidden));
  file.number(arch + "feed_forward_length", n(config.intermediate)).number(arch + "context_length", n(config.context));
  file.number(arch + "attention.head_count", n(config.heads)).number(arch + "attention.head_count_kv", n(config.kv_heads));
  file.number(arch + "attention.key_length", n(config.head_dim)).number(arch + "attention.value_length", n(config.head_dim));
  file.real(arch + "attention.layer_norm_rms_epsilon", config.rms_epsilon).real(arch + "rope.freq_base", config.rope.theta);
  if (!tokenizer) return file;
  std::vector<std::string> tokens = byte_alphabet();
  std::vector<std::int32_t> types(tokens.size() + 2, 1);
  for (const char* token : {"he", "ll", "<|endoftext|>", "<|im_start|>", "<|im_end|>"}) tokens.emplace_back(token);
  types.insert(types.end(), {3, 3, 3});
  file.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", config.architecture == "llama" ? "smollm" : "qwen2");
  file.texts("tokenizer.ggml.tokens", tokens).numbers("tokenizer.ggml.token_type", types);
  file.texts("tokenizer.ggml.merges", {"h e", "l l"}).number("tokenizer.ggml.eos_token_id", kTinyEndOfText + 2);
  file.number("tokenizer.ggml.bos_token_id", kTinyEndOfText).flag("tokenizer.ggml.add_bos_token", false);
  file.text("tokenizer.chat_template",
            "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}");
  return file;
}

/// Adds the tensors of a tiny model; matrices in `matrix_type`, vectors in F32. `change` may alter a tensor's values before they are
/// stored.
inline GgufWriter& add_gguf_tensors(GgufWriter& file, const TinyModel& model, std::uint32_t matrix_type = 0) {
  for (const auto& [key, values] : model.tensors) {
    const auto [role, layer] = key;
    std::vector<float> stored = values;
    if (model.config.architecture == "llama") {
      const bool query = role == TensorRole::query || role == TensorRole::query_bias;
      const bool key_rows = role == TensorRole::key || role == TensorRole::key_bias;
      if (query || key_rows) stored = as_llama_converter(values, query ? model.config.heads : model.config.kv_heads, model.config.head_dim);
    }
    const std::uint32_t type = model.shape(role).size() == 2 ? matrix_type : 0;
    file.tensor(gguf_name(role, layer), model.shape(role), type, encode(stored, type));
  }
  return file;
}

/// A complete GGUF file.
inline std::string gguf_bytes(const TinyModel& model, std::uint32_t matrix_type = 0, bool tokenizer = true) {
  GgufWriter file = gguf_metadata(model.config, tokenizer);
  return add_gguf_tensors(file, model, matrix_type).bytes();
}

/// The config.json of a tiny model; `more` are further members, each with a comma in front.
inline std::string config_json(const ModelConfig& config, const std::string& more = "") {
  const std::string class_name = config.architecture == "llama" ? "Llama" : config.architecture == "qwen2" ? "Qwen2" : "Qwen3";
  const auto n = [](auto value) { return std::to_string(value); };
  return "{\"architectures\":[\"" + class_name + "ForCausalLM\"],\"model_type\":\"" + config.architecture +
         "\",\"num_hidden_layers\":" + n(config.layers) + ",\"hidden_size\":" + n(config.hidden) +
         ",\"intermediate_size\":" + n(config.intermediate) + ",\"num_attention_heads\":" + n(config.heads) +
         ",\"num_key_value_heads\":" + n(config.kv_heads) + ",\"head_dim\":" + n(config.head_dim) +
         ",\"vocab_size\":" + n(config.vocabulary) + ",\"max_position_embeddings\":" + n(config.context) +
         ",\"rms_norm_eps\":1e-05,\"rope_theta\":" + n(config.rope.theta) +
         ",\"hidden_act\":\"silu\",\"tie_word_embeddings\":" + (config.tied_embeddings ? "true" : "false") + more + "}";
}

/// The tensors of a tiny model as one safetensors file, or those for which `chosen` is true. `type` is F32, F16 or BF16.
inline std::string safetensors_bytes(const TinyModel& model, const std::string& type = "F32",
                                     const std::function<bool(TensorRole, Layer)>& chosen = {}) {
  SafetensorsWriter file;
  const std::uint32_t number = type == "F32" ? 0U : type == "F16" ? 1U : 30U;
  for (const auto& [key, values] : model.tensors) {
    if (chosen && !chosen(key.first, key.second)) continue;
    file.tensor(hugging_face_name(key.first, key.second), model.shape(key.first), type, encode(values, number));
  }
  return file.bytes();
}

}  // namespace dualdecoder::test
