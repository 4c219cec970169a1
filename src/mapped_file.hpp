// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace dualdecoder::detail {

/// A regular file mapped read-only and privately for as long as the object lives. An empty file has an empty span.
/// The file must not be shortened meanwhile.
class MappedFile {
 public:
  /// Throws IoError, which names the path.
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

/// Takes the whole pages inside `bytes`, a part of a mapped file, out of resident memory; they may be read again, from the file.
void release_pages(std::span<const std::byte> bytes) noexcept;

}  // namespace dualdecoder::detail
