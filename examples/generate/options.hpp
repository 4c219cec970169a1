// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/session_options.hpp"

namespace dualdecoder::examples {

/// What the command line asks for.
struct GenerateOptions {
  std::filesystem::path model;
  std::string prompt;
  std::filesystem::path prompt_file;
  std::string system;
  bool chat = false;
  bool parse_control = false;

  int max_context = 0;  ///< 0: as much as the prompt and the new tokens need
  int max_new_tokens = 256;
  bool ignore_end = false;
  SamplingOptions sampling;

  SessionOptions session;
  bool oracle = false;  ///< the predictor replays replay_selection
  std::filesystem::path record_selection;
  std::filesystem::path replay_selection;

  std::string device = "auto";
  float yarn = 0.0F;
  DataType weights_type = DataType::bf16;
  int threads = 0;

  std::filesystem::path trace;
  bool json = false;
  bool compare_full = false;
  bool memory_plan = false;
  bool quiet = false;
};

/// Reads the command line. Returns the exit code when the program is to stop here: 0 after --help or --version, 2 after a usage error,
/// which is explained on stderr.
std::optional<int> parse_options(int argc, char** argv, GenerateOptions& options);

}  // namespace dualdecoder::examples
