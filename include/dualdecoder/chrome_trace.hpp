// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "dualdecoder/trace.hpp"

namespace dualdecoder {

/// Writes spans and counters in the Chrome trace-event format (JSON object form), for chrome://tracing and Perfetto: one row per track, in
/// order of first use, times in microseconds since construction. Does not own the stream, which must outlive it; nobody else may write to
/// it meanwhile. The text is complete JSON after close() or destruction; later events are dropped. Threading: any thread.
class ChromeTrace final : public TraceSink {
 public:
  explicit ChromeTrace(std::ostream& out, std::string_view process_name = "dualdecoder")
      : out_(out), origin_(std::chrono::steady_clock::now()) {
    text_ = R"({"displayTimeUnit":"ms","traceEvents":[)";
    text_ += "\n";
    text_ += R"({"ph":"M","name":"process_name","pid":1,"tid":0,"args":{"name":)";
    append_string(process_name);
    text_ += "}}";
    write();
  }
  ~ChromeTrace() override { close(); }

  void span(std::string_view track, std::string_view name, Time begin, Time end) noexcept override {
    event([&] {
      const std::size_t row = row_of(track);
      text_ += R"({"ph":"X","name":)";
      append_string(name);
      text_ += R"(,"pid":1,"tid":)" + std::to_string(row) + R"(,"ts":)";
      append_microseconds(begin - origin_);
      text_ += R"(,"dur":)";
      append_microseconds(std::max(end - begin, Time::duration::zero()));
      text_ += "}";
    });
  }

  /// A value that is not finite has no JSON and is left out.
  void counter(std::string_view name, Time at, double value) noexcept override {
    if (!std::isfinite(value)) return;
    event([&] {
      separate();
      text_ += R"({"ph":"C","name":)";
      append_string(name);
      text_ += R"(,"pid":1,"ts":)";
      append_microseconds(at - origin_);
      text_ += R"(,"args":{"value":)";
      char digits[32];
      text_.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
      text_ += "}}";
    });
  }

  /// Ends the JSON and flushes; may be called again.
  void close() noexcept {
    event([&] {
      closed_ = true;
      text_ += "\n]}\n";
    });
    try {
      out_.flush();
    } catch (...) {  // the stream keeps its error state for its owner
    }
  }

 private:
  template <class Compose>
  void event(Compose&& compose) noexcept {
    try {
      const std::scoped_lock lock(mutex_);
      if (closed_) return;
      text_.clear();
      const std::size_t rows = rows_.size();
      try {
        compose();
      } catch (...) {
        rows_.resize(rows);  // a track whose name was not written is announced again next time
        throw;
      }
      write();
    } catch (...) {  // TraceSink: exceptions do not leave
    }
  }

  void write() { out_.write(text_.data(), static_cast<std::streamsize>(text_.size())); }
  void separate() { text_ += ",\n"; }

  // Row of the track, announced on first use; leaves the separator for the event itself behind.
  std::size_t row_of(std::string_view track) {
    const auto known = std::find(rows_.begin(), rows_.end(), track);
    const auto row = static_cast<std::size_t>(known - rows_.begin()) + 1;
    if (known == rows_.end()) {
      rows_.emplace_back(track);
      const std::string place = R"("pid":1,"tid":)" + std::to_string(row);
      separate();
      text_ += R"({"ph":"M","name":"thread_name",)" + place + R"(,"args":{"name":)";
      append_string(track);
      text_ += "}}";
      separate();
      text_ += R"({"ph":"M","name":"thread_sort_index",)" + place + R"(,"args":{"sort_index":)" + std::to_string(row) + "}}";
    }
    separate();
    return row;
  }

  // Three decimals without a double, so neither precision nor the locale matters.
  void append_microseconds(std::chrono::nanoseconds time) {
    const std::int64_t count = time.count();
    const std::uint64_t magnitude = count < 0 ? 0 - static_cast<std::uint64_t>(count) : static_cast<std::uint64_t>(count);
    const std::string thousandths = std::to_string(magnitude % 1000);
    if (count < 0) text_ += "-";
    text_ += std::to_string(magnitude / 1000) + "." + std::string(3 - thousandths.size(), '0') + thousandths;
  }

  void append_string(std::string_view text) {
    text_ += '"';
    for (std::size_t i = 0; i < text.size();) {
      const auto byte = static_cast<unsigned char>(text[i]);
      const std::size_t length = byte < 0x80 ? 1 : utf8_length(text.substr(i));
      if (length == 0) {
        text_ += "\\ufffd";  // JSON is UTF-8 throughout
        ++i;
        continue;
      }
      if (length == 1) {
        append_ascii(byte);
      } else {
        text_ += text.substr(i, length);
      }
      i += length;
    }
    text_ += '"';
  }

  void append_ascii(unsigned char byte) {
    constexpr char kHex[] = "0123456789abcdef";
    if (byte == '"' || byte == '\\') {
      text_ += '\\';
      text_ += static_cast<char>(byte);
    } else if (byte < 0x20 || byte == 0x7f) {
      text_ += "\\u00";
      text_ += kHex[byte >> 4];
      text_ += kHex[byte & 15];
    } else {
      text_ += static_cast<char>(byte);
    }
  }

  // Bytes of the well-formed multi-byte sequence that the text starts with (Unicode 15, table 3-7); 0 if there is none.
  static std::size_t utf8_length(std::string_view text) {
    const auto at = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
    const auto tail = [&](std::size_t i) { return at(i) >= 0x80 && at(i) <= 0xbf; };
    const unsigned first = at(0);
    const unsigned second = at(1);
    if (first >= 0xc2 && first <= 0xdf) return tail(1) ? 2 : 0;
    if (first >= 0xe0 && first <= 0xef) {
      const bool legal = tail(1) && !(first == 0xe0 && second < 0xa0) && !(first == 0xed && second > 0x9f);
      return legal && tail(2) ? 3 : 0;
    }
    if (first >= 0xf0 && first <= 0xf4) {
      const bool legal = tail(1) && !(first == 0xf0 && second < 0x90) && !(first == 0xf4 && second > 0x8f);
      return legal && tail(2) && tail(3) ? 4 : 0;
    }
    return 0;
  }

  std::ostream& out_;
  Time origin_;
  std::mutex mutex_;
  bool closed_ = false;
  std::string text_;               // of the event being written
  std::vector<std::string> rows_;  // tracks by row, the first is row 1
};

}  // namespace dualdecoder
