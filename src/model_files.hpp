// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/model_weights.hpp"
#include "src/dequantize.hpp"
#include "src/mapped_file.hpp"
#include "src/weight_layout.hpp"

namespace dualdecoder::detail {

/// A tensor as it lies in a file; `shape` is outermost first, `bytes` are its blocks.
struct SourceTensor {
  FileType type = FileType::f32;
  std::vector<std::uint64_t> shape;
  std::span<const std::byte> bytes;
};

/// A parsed model whose weights are still in files. The bytes that it was made from must outlive it.
class SourceModel {
 public:
  /// From a whole GGUF file. Throws FormatError.
  static SourceModel from_gguf(std::span<const std::byte> file);
  /// From the text of config.json and whole safetensors files with their names. Throws FormatError.
  static SourceModel from_safetensors(std::span<const std::byte> config_text,
                                      const std::vector<std::pair<std::string, std::span<const std::byte>>>& files);

  const ModelConfig& config() const noexcept { return config_; }
  /// What the file calls the tensor of a role.
  std::string name_of(TensorRole role, Layer layer) const;
  /// The tensor of an entry of the layout, its shape checked. Throws FormatError.
  const SourceTensor& tensor(const WeightEntry& entry) const;
  /// Whether rows of this role have their RoPE pairs side by side, (2i, 2i + 1), and must be moved to (i, i + head_dim/2).
  bool rows_interleaved(TensorRole role) const noexcept;
  /// Throws FormatError when the model holds a tensor that no role asks for: it would be run wrongly without it.
  void refuse_unknown_tensors() const;

 private:
  SourceModel() = default;

  ModelConfig config_;
  bool gguf_ = false;
  std::map<std::string, SourceTensor, std::less<>> tensors_;
};

/// A GGUF file or a folder with config.json and *.safetensors, mapped and parsed. Throws IoError, FormatError; both name the path.
struct ModelFiles {
  explicit ModelFiles(const std::filesystem::path& path);

  std::vector<MappedFile> files;
  SourceModel model;
};

}  // namespace dualdecoder::detail
