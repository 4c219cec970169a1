// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/model_files.hpp"

#include <algorithm>
#include <set>
#include <string_view>
#include <system_error>

#include "dualdecoder/error.hpp"
#include "dualdecoder/gguf.hpp"
#include "src/in_quotes.hpp"
#include "src/model_config.hpp"
#include "src/safetensors.hpp"

namespace dualdecoder::detail {
namespace {

namespace fs = std::filesystem;

/// Names of a role in GGUF and in Hugging Face checkpoints; those of a layer come after "blk.N." and "model.layers.N.".
struct RoleNames {
  std::string_view gguf;
  std::string_view hugging_face;
};

RoleNames names(TensorRole role) {
  switch (role) {
    case TensorRole::embedding: return {"token_embd.weight", "model.embed_tokens.weight"};
    case TensorRole::output_norm: return {"output_norm.weight", "model.norm.weight"};
    case TensorRole::head: return {"output.weight", "lm_head.weight"};
    case TensorRole::attention_norm: return {"attn_norm.weight", "input_layernorm.weight"};
    case TensorRole::query: return {"attn_q.weight", "self_attn.q_proj.weight"};
    case TensorRole::key: return {"attn_k.weight", "self_attn.k_proj.weight"};
    case TensorRole::value: return {"attn_v.weight", "self_attn.v_proj.weight"};
    case TensorRole::query_bias: return {"attn_q.bias", "self_attn.q_proj.bias"};
    case TensorRole::key_bias: return {"attn_k.bias", "self_attn.k_proj.bias"};
    case TensorRole::value_bias: return {"attn_v.bias", "self_attn.v_proj.bias"};
    case TensorRole::query_norm: return {"attn_q_norm.weight", "self_attn.q_norm.weight"};
    case TensorRole::key_norm: return {"attn_k_norm.weight", "self_attn.k_norm.weight"};
    case TensorRole::attention_out: return {"attn_output.weight", "self_attn.o_proj.weight"};
    case TensorRole::mlp_norm: return {"ffn_norm.weight", "post_attention_layernorm.weight"};
    case TensorRole::gate: return {"ffn_gate.weight", "mlp.gate_proj.weight"};
    case TensorRole::up: return {"ffn_up.weight", "mlp.up_proj.weight"};
    case TensorRole::down: return {"ffn_down.weight", "mlp.down_proj.weight"};
  }
  return {};
}

/// Tensors that some files hold although nothing needs them: RoPE frequencies (configuration has them) and the copy of a tied head.
bool is_harmless(std::string_view name, bool gguf, bool tied) {
  if (gguf) return name == "rope_freqs.weight";
  return name.ends_with(".rotary_emb.inv_freq") || (tied && name == "lm_head.weight");
}

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

FileType safetensors_type(const SafetensorsInfo& tensor) {
  if (tensor.type == "F32") return FileType::f32;
  if (tensor.type == "F16") return FileType::f16;
  if (tensor.type == "BF16") return FileType::bf16;
  throw FormatError("safetensors: tensor " + in_quotes(tensor.name) + ": dtype = " + tensor.type + ": must be F32, F16 or BF16");
}

/// Runs f; a FormatError from it gets the path in front.
template <class F>
auto naming(const fs::path& path, F&& f) {
  try {
    return f();
  } catch (const FormatError& error) {
    throw FormatError(path.string() + ": " + error.what());
  }
}

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// Files of a folder that hold weights: those of the index, else model.safetensors, else every *.safetensors.
std::vector<std::string> shard_names(const fs::path& folder) {
  if (const fs::path index = folder / "model.safetensors.index.json"; is_there(index)) {
    const MappedFile text(index);
    std::set<std::string> unique;
    for (const auto& [tensor, file] : naming(folder, [&] { return parse_safetensors_index(text.bytes()); })) unique.insert(file);
    return {unique.begin(), unique.end()};
  }
  if (is_there(folder / "model.safetensors")) return {"model.safetensors"};
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (at->path().extension() == ".safetensors") found.push_back(at->path().filename().string());
  }
  if (error) throw IoError(folder.string() + ": cannot list the folder: " + error.message());
  if (found.empty()) throw IoError(folder.string() + ": holds no *.safetensors file");
  std::sort(found.begin(), found.end());
  return found;
}

SourceModel open_model(const fs::path& path, std::vector<MappedFile>& files) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    files.emplace_back(path);
    return naming(path, [&] { return SourceModel::from_gguf(files.front().bytes()); });
  }
  const MappedFile config(path / "config.json");
  const std::vector<std::string> shards = shard_names(path);
  std::vector<std::pair<std::string, std::span<const std::byte>>> contents;
  for (const std::string& shard : shards) contents.emplace_back(shard, files.emplace_back(path / shard).bytes());
  return naming(path, [&] { return SourceModel::from_safetensors(config.bytes(), contents); });
}

}  // namespace

SourceModel SourceModel::from_gguf(std::span<const std::byte> file) {
  SourceModel model;
  const GgufHeader header = parse_gguf_header(file.data(), file.size(), file.size());
  model.gguf_ = true;
  model.config_ = config_from_gguf(header, file);
  for (const GgufTensorInfo& tensor : header.tensors) {
    model.tensors_.emplace(tensor.name,
                           SourceTensor{static_cast<FileType>(tensor.type), tensor.shape,
                                        file.subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(tensor.bytes))});
  }
  return model;
}

SourceModel SourceModel::from_safetensors(std::span<const std::byte> config_text,
                                          const std::vector<std::pair<std::string, std::span<const std::byte>>>& files) {
  SourceModel model;
  model.config_ = config_from_json(config_text);
  for (const auto& [name, file] : files) {
    for (const SafetensorsInfo& tensor : naming(name, [&bytes = file] { return parse_safetensors(bytes); })) {
      if (is_harmless(tensor.name, false, model.config_.tied_embeddings)) continue;
      const SourceTensor source{safetensors_type(tensor), tensor.shape,
                                file.subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(tensor.bytes))};
      if (!model.tensors_.emplace(tensor.name, source).second) {
        throw FormatError("safetensors: tensor " + in_quotes(tensor.name) + " is in " + in_quotes(name) + " and in a file before it");
      }
    }
  }
  return model;
}

std::string SourceModel::name_of(TensorRole role, Layer layer) const {
  std::string name(gguf_ ? names(role).gguf : names(role).hugging_face);
  if (role < TensorRole::attention_norm) return name;
  return (gguf_ ? "blk." : "model.layers.") + std::to_string(layer) + "." + name;
}

const SourceTensor& SourceModel::tensor(const WeightEntry& entry) const {
  const std::string name = name_of(entry.role, entry.layer);
  const auto at = tensors_.find(name);
  if (at == tensors_.end()) throw FormatError("tensor " + in_quotes(name) + " is missing");
  std::vector<std::uint64_t> shape{static_cast<std::uint64_t>(entry.columns)};
  if (entry.matrix) shape.insert(shape.begin(), static_cast<std::uint64_t>(entry.rows));
  if (at->second.shape != shape) {
    throw FormatError("tensor " + in_quotes(name) + ": shape = " + shape_text(at->second.shape) + ": must be " + shape_text(shape));
  }
  return at->second;
}

bool SourceModel::rows_interleaved(TensorRole role) const noexcept {
  // Only llama's converter to GGUF moves rows; see the rope types of the GGUF runtime.
  if (!gguf_ || config_.architecture != "llama") return false;
  return role == TensorRole::query || role == TensorRole::key || role == TensorRole::query_bias || role == TensorRole::key_bias;
}

void SourceModel::refuse_unknown_tensors() const {
  std::set<std::string> known;
  for (const WeightEntry& entry : weight_entries(config_)) known.insert(name_of(entry.role, entry.layer));
  for (const auto& [name, tensor] : tensors_) {
    if (!known.contains(name) && !is_harmless(name, gguf_, config_.tied_embeddings)) {
      throw FormatError("tensor " + in_quotes(name) + ": a " + config_.architecture + " model of this configuration has no such tensor");
    }
  }
}

ModelFiles::ModelFiles(const fs::path& path) : model(open_model(path, files)) {}

}  // namespace dualdecoder::detail
