// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "dualdecoder/testing/forwarding.hpp"

namespace dualdecoder::test {

/// What an AsynchronousBackend has seen.
struct Seen {
  int outstanding = 0;       // readbacks that nobody has waited for
  int most_outstanding = 0;  // at once
  int misused = 0;           // enqueued again before a wait
  int graphs = 0;
  int launches = 0;
};

/// A readback whose bytes arrive when they are waited for and not before: until then the target holds rubbish.
class LateReadback final : public Readback {
 public:
  explicit LateReadback(Seen& seen) : seen_(seen) {}
  ~LateReadback() override { wait(); }

  void enqueue(void* target, const void* source, std::size_t bytes, StreamRef) override {
    if (!staged_.empty()) ++seen_.misused;
    const auto* const from = static_cast<const std::byte*>(source);
    staged_.assign(from, from + bytes);
    target_ = static_cast<std::byte*>(target);
    std::fill_n(target_, bytes, std::byte{0xAA});
    seen_.most_outstanding = std::max(seen_.most_outstanding, ++seen_.outstanding);
  }
  void wait() override {
    if (staged_.empty()) return;
    std::copy(staged_.begin(), staged_.end(), target_);
    staged_.clear();
    --seen_.outstanding;
  }

 private:
  Seen& seen_;
  std::vector<std::byte> staged_;
  std::byte* target_ = nullptr;
};

/// Calls what it was given again at every launch.
class CallingGraph final : public StepGraph {
 public:
  CallingGraph(std::function<void()> work, Seen& seen) : work_(std::move(work)), seen_(seen) {}
  void launch(StreamRef) override {
    ++seen_.launches;
    work_();
  }

 private:
  std::function<void()> work_;
  Seen& seen_;
};

/// Another backend that behaves as one that works beside the host: it records passes, and outcomes arrive late. `seen` outlives it.
class AsynchronousBackend final : public testing::ForwardingBackend {
 public:
  AsynchronousBackend(std::shared_ptr<Backend> inner, Seen& seen) : ForwardingBackend(std::move(inner)), seen_(seen) {}

  std::unique_ptr<StepGraph> record(const std::function<void()>& work, StreamRef) override {
    ++seen_.graphs;
    return std::make_unique<CallingGraph>(work, seen_);
  }
  std::unique_ptr<Readback> make_readback() override { return std::make_unique<LateReadback>(seen_); }

 private:
  Seen& seen_;
};

}  // namespace dualdecoder::test
