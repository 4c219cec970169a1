// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string_view>

namespace dualdecoder {

/// Receives spans and counters of a running session. Threading: called from the compute thread and from the lanes' threads at once, so an
/// implementation locks. Times are of std::chrono::steady_clock. Exceptions thrown from it must not leave: implementations swallow them.
class TraceSink {
 public:
  using Time = std::chrono::steady_clock::time_point;

  TraceSink() = default;
  TraceSink(const TraceSink&) = delete;
  TraceSink& operator=(const TraceSink&) = delete;
  virtual ~TraceSink() = default;

  /// A span on a row of the trace: `track` names the row ("compute", "prefetch", "urgent", "write-back").
  virtual void span(std::string_view track, std::string_view name, Time begin, Time end) noexcept = 0;
  /// A counter's value at a moment ("hit rate", "bytes in flight").
  virtual void counter(std::string_view name, Time at, double value) noexcept = 0;
};

/// Reports the life of the object as a span; does nothing without a sink. `name` and `track` must outlive it.
class TraceSpan {
 public:
  TraceSpan(TraceSink* sink, std::string_view track, std::string_view name) noexcept : sink_(sink), track_(track), name_(name) {
    if (sink_ != nullptr) begin_ = std::chrono::steady_clock::now();
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;
  ~TraceSpan() {
    if (sink_ != nullptr) sink_->span(track_, name_, begin_, std::chrono::steady_clock::now());
  }

 private:
  TraceSink* sink_;
  std::string_view track_;
  std::string_view name_;
  TraceSink::Time begin_;
};

}  // namespace dualdecoder
