// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <span>
#include <string>

namespace dualdecoder::examples {

/// The command as it stands in results: files without their folders, so that rows of two machines compare.
inline std::string command_line(std::span<char* const> arguments) {
  std::string line;
  for (const char* argument : arguments) {
    if (!line.empty()) line += ' ';
    line += std::filesystem::path(argument).filename().string();
  }
  return line;
}

}  // namespace dualdecoder::examples
