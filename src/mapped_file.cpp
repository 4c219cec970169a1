// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>

#include "dualdecoder/error.hpp"

namespace dualdecoder::detail {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const char* what, int error) {
  throw IoError(path.string() + ": " + what + ": " + std::generic_category().message(error));
}

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a pipe must not hang; it has no effect on a regular file.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.number < 0) fail(path, "cannot open", errno);
  struct stat status {};
  if (::fstat(file.number, &status) != 0) fail(path, "cannot read its size", errno);
  if (!S_ISREG(status.st_mode)) throw IoError(path.string() + ": not a regular file");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return;
  void* memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number, 0);
  if (memory == MAP_FAILED) fail(path, "cannot map", errno);
  bytes_ = {static_cast<const std::byte*>(memory), size};
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  MappedFile taken(std::move(other));
  std::swap(bytes_, taken.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

void release_pages(std::span<const std::byte> bytes) noexcept {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<std::uintptr_t>(bytes.data()) + page - 1) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(bytes.data() + bytes.size()) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace dualdecoder::detail
