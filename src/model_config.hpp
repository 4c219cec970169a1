// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "dualdecoder/gguf.hpp"
#include "dualdecoder/model_weights.hpp"

namespace dualdecoder::detail {

/// From the metadata and the tensor table of a GGUF file; `file` is the whole file. Throws FormatError.
ModelConfig config_from_gguf(const GgufHeader& header, std::span<const std::byte> file);

/// From the text of a Hugging Face config.json. Throws FormatError.
ModelConfig config_from_json(std::span<const std::byte> text);

/// What is wrong with a configuration, as "field = value: must be ..."; empty if nothing is.
std::string config_problem(const ModelConfig& config);

}  // namespace dualdecoder::detail
