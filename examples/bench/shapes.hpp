// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "dualdecoder/error.hpp"
#include "dualdecoder/model_weights.hpp"

namespace dualdecoder::examples {

/// The shape of a model for made-up weights: 8b (as Llama-3.1-8B, its context stretched) or tiny. Throws InvalidArgument naming --shape.
inline ModelConfig shape_named(const std::string& name) {
  ModelConfig config;
  config.architecture = "llama";
  config.name = name;
  config.context = 1 << 20;
  config.rope.theta = 500000.0F;
  if (name == "8b") {
    config.layers = 32;
    config.hidden = 4096;
    config.intermediate = 14336;
    config.heads = 32;
    config.kv_heads = 8;
    config.head_dim = 128;
    config.vocabulary = 128256;
  } else if (name == "tiny") {
    config.layers = 4;
    config.hidden = 256;
    config.intermediate = 512;
    config.heads = 8;
    config.kv_heads = 2;
    config.head_dim = 64;
    config.vocabulary = 1024;
  } else {
    throw InvalidArgument("--shape = " + name + ": must be 8b or tiny");
  }
  return config;
}

}  // namespace dualdecoder::examples
