// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "dualdecoder/export.hpp"

namespace dualdecoder {

/// Root of everything this library throws. Expected outcomes (a finished sequence, an empty batch) are values, not exceptions.
class DUALDECODER_EXPORT Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A broken contract or an option out of range; the message names the field, the value and what is allowed.
class DUALDECODER_EXPORT InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// An allocation that could not be served. The object that asked stays usable or destructible.
class DUALDECODER_EXPORT OutOfMemory : public Error {
 public:
  /// @param what_for the buffer that was asked for; @param asked_bytes its size; @param free_bytes what the resource had left
  OutOfMemory(const std::string& what_for, std::size_t asked_bytes, std::size_t free_bytes)
      : Error("out of memory for " + what_for + ": asked for " + std::to_string(asked_bytes) + " bytes, " + std::to_string(free_bytes) +
              " free"),
        asked_bytes_(asked_bytes),
        free_bytes_(free_bytes) {}

  std::size_t asked_bytes() const noexcept { return asked_bytes_; }
  std::size_t free_bytes() const noexcept { return free_bytes_; }

 private:
  std::size_t asked_bytes_;
  std::size_t free_bytes_;
};

/// A CUDA call failed; the message holds the call, its location and the runtime's own words.
class DUALDECODER_EXPORT CudaError : public Error {
 public:
  using Error::Error;
};

/// A file could not be opened, read or written; the message names the path.
class DUALDECODER_EXPORT IoError : public Error {
 public:
  using Error::Error;
};

/// A file was read but says something that its format does not allow, or that this library does not support.
class DUALDECODER_EXPORT FormatError : public Error {
 public:
  using Error::Error;
};

namespace detail {

/// "field = value: allowed" as an InvalidArgument unless `ok`.
template <class Value>
void require(bool ok, const char* field, const Value& value, const char* allowed) {
  if (ok) return;
  std::string text;
  if constexpr (requires { std::to_string(value); }) {
    text = std::to_string(value);
  } else {
    text = value;
  }
  throw InvalidArgument(std::string(field) + " = " + text + ": must be " + allowed);
}

}  // namespace detail
}  // namespace dualdecoder
