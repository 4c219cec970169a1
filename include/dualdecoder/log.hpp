// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace dualdecoder {

enum class LogLevel : std::uint8_t { debug, info, warning, error };

/// Where the library's words go; without one it is silent. Threading: may be called from any of the library's threads, one call at a time
/// per backend is not promised. An exception thrown from it reaches the caller of the operation that logged.
class LogSink {
 public:
  LogSink() = default;
  LogSink(const LogSink&) = delete;
  LogSink& operator=(const LogSink&) = delete;
  virtual ~LogSink() = default;

  virtual void log(LogLevel level, std::string_view message) = 0;
};

}  // namespace dualdecoder
