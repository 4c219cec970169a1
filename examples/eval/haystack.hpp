// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "examples/eval/random.hpp"

namespace dualdecoder::examples {

/// Text that facts are hidden in, as pieces of about a sentence. A text goes round when more is asked for than it has.
class Haystack {
 public:
  /// The same few sentences over and over.
  static Haystack noise();
  /// The files' text, cut behind sentences and empty lines; made-up prose without files. Throws IoError, InvalidArgument (no text in them).
  static Haystack essay(const std::vector<std::filesystem::path>& files);
  /// Pieces of `text`; public for tests. Joined they are the text, apart from blanks at the cuts.
  static std::vector<std::string> split(std::string_view text);

  /// `count` pieces from a place of the seed on, with `hidden` among them in that order at places of the seed.
  std::string text(Random& random, std::size_t count, const std::vector<std::string>& hidden = {}) const;

  /// Tells texts apart: "noise", "made up", or the files' names and a checksum of their contents.
  const std::string& name() const { return name_; }

 private:
  Haystack(std::string name, std::vector<std::string> pieces) : name_(std::move(name)), pieces_(std::move(pieces)) {}

  std::string name_;
  std::vector<std::string> pieces_;
};

}  // namespace dualdecoder::examples
