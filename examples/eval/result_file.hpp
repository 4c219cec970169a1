// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace dualdecoder::examples {

/// Results as JSON lines that grow a cell at a time and outlive whatever stops the program. Locked while it is open, so that two programs
/// do not write to one file.
class ResultFile {
 public:
  using Json = nlohmann::ordered_json;

  /// Reads what is there. A line that is torn or no result goes to FILE.corrupt, behind what that holds already, and its cell counts as not
  /// done. Throws IoError (no such folder, not writable, in use by another program).
  explicit ResultFile(std::filesystem::path path);
  ResultFile(const ResultFile&) = delete;
  ResultFile& operator=(const ResultFile&) = delete;
  ~ResultFile();

  /// What tells cells apart: model, context, task, seed, policy, setting and text. Throws FormatError naming a field that is missing.
  static std::string key_of(const Json& line);

  bool holds(const std::string& key) const { return keys_.contains(key); }
  const std::vector<Json>& lines() const { return lines_; }
  std::size_t set_aside() const { return set_aside_; }
  std::filesystem::path corrupt_path() const { return path_.string() + ".corrupt"; }

  /// Writes the line whole and waits until it is on the disk. Throws IoError.
  void append(const Json& line);

 private:
  void read();
  void rewrite(const std::string& good, const std::string& corrupt);

  std::filesystem::path path_;
  int file_ = -1;
  std::vector<Json> lines_;
  std::set<std::string> keys_;
  std::size_t set_aside_ = 0;
};

}  // namespace dualdecoder::examples
