// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/result_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "dualdecoder/error.hpp"

namespace dualdecoder::examples {
namespace {

constexpr mode_t kMode = 0644;

IoError failed(const std::filesystem::path& path, const char* what) {
  return IoError(path.string() + ": cannot be " + what + ": " + std::strerror(errno));
}

void write_all(int file, const std::filesystem::path& path, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) throw failed(path, "written");
    if (written > 0) bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  if (::fsync(file) != 0 && errno != EINVAL) throw failed(path, "written");
}

/// Closes a file at the end of a scope.
struct File {
  int number;
  explicit File(int opened) : number(opened) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (number >= 0) ::close(number);
  }
};

std::string read_all(int file, const std::filesystem::path& path) {
  std::string bytes;
  char block[1 << 16];
  for (;;) {
    const ssize_t count = ::read(file, block, sizeof(block));
    if (count == 0) return bytes;
    if (count < 0 && errno != EINTR) throw failed(path, "read");
    if (count > 0) bytes.append(block, static_cast<std::size_t>(count));
  }
}

}  // namespace

std::string ResultFile::key_of(const Json& line) {
  if (!line.is_object()) throw FormatError("no result");
  std::string key;
  for (const char* field : {"model", "context", "task", "seed", "policy", "setting", "text"}) {
    if (!line.contains(field)) throw FormatError(std::string("no \"") + field + "\"");
    key += line.at(field).dump() + ' ';
  }
  return key;
}

ResultFile::ResultFile(std::filesystem::path path) : path_(std::move(path)) {
  file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, kMode);
  if (file_ < 0) throw failed(path_, "opened");
  File guard(file_);
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0) throw IoError(path_.string() + ": another program is writing to it");
  read();
  guard.number = -1;
}

ResultFile::~ResultFile() { ::close(file_); }

void ResultFile::read() {
  const std::string bytes = read_all(file_, path_);
  std::string good;
  std::string corrupt;
  std::string_view rest = bytes;
  while (!rest.empty()) {
    const std::string_view text = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), text.size() + 1));
    if (text.empty()) continue;
    try {
      Json line = Json::parse(text);
      keys_.insert(key_of(line));
      lines_.push_back(std::move(line));
      good.append(text) += '\n';
    } catch (const std::exception&) {
      corrupt.append(text) += '\n';
      ++set_aside_;
    }
  }
  if (good != bytes) rewrite(good, corrupt);
}

/// First the corrupt lines are safe in their own file, then the good ones take the place of all; a stop between the two loses nothing.
void ResultFile::rewrite(const std::string& good, const std::string& corrupt) {
  if (!corrupt.empty()) {
    const File aside(::open(corrupt_path().c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, kMode));
    if (aside.number < 0) throw failed(corrupt_path(), "opened");
    write_all(aside.number, corrupt_path(), corrupt);
  }
  const std::filesystem::path fresh = path_.string() + ".new";
  File file(::open(fresh.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, kMode));
  if (file.number < 0) throw failed(fresh, "opened");
  if (::flock(file.number, LOCK_EX | LOCK_NB) != 0) throw IoError(fresh.string() + ": another program is writing to it");
  write_all(file.number, fresh, good);
  if (std::rename(fresh.c_str(), path_.c_str()) != 0) throw failed(path_, "replaced");
  std::swap(file_, file.number);  // the old one is closed
}

void ResultFile::append(const Json& line) {
  write_all(file_, path_, line.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n');
  keys_.insert(key_of(line));
  lines_.push_back(line);
}

}  // namespace dualdecoder::examples
