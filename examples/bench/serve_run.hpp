// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "dualdecoder/decode_session.hpp"
#include "examples/bench/prompts.hpp"

namespace dualdecoder::examples {

/// Something that decodes requests side by side, a step at a time. Requests are numbered from 0.
class Server {
 public:
  struct Step {
    double seconds = 0.0;       ///< that it took
    std::vector<int> finished;  ///< requests
  };

  Server() = default;
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  virtual ~Server() = default;

  virtual int places() const = 0;  ///< requests at once
  virtual void start(int request) = 0;
  virtual Step step() = 0;
};

/// Requests of one size.
struct ServedRequest {
  int prompt_tokens = 2048;
  int answer_tokens = 128;
};

/// A session over windows of the texts, timed by the clock of the host.
class SessionServer final : public Server {
 public:
  /// `options` says how many requests run at once (max_sequences). `prefill_counts`: prompts are enqueued and prefilled between steps, and
  /// their time counts; else another machine is taken to do it, and only decoding counts. Throws as the session would. `texts` must outlive
  /// the server.
  SessionServer(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights, const std::vector<Text>& texts,
                SessionOptions options, const ServedRequest& request, bool prefill_counts);

  int places() const override { return places_; }
  void start(int request) override;
  Step step() override;

 private:
  const std::vector<Text>& texts_;
  ServedRequest request_;
  bool prefill_counts_;
  int places_;
  DecodeSession session_;
  std::map<SequenceId, int> requests_;
};

/// The same from times of steps that were measured by batch, straight lines between them, and those of the smallest one for batches below
/// it; prefill takes no time.
class MeasuredServer final : public Server {
 public:
  struct Point {
    double seconds = 0.0;          ///< of a step
    double tokens_per_step = 0.0;  ///< of the whole batch
  };

  /// `points` by batch, at least one; the largest batch is the number of places.
  MeasuredServer(std::map<int, Point> points, int answer_tokens);

  int places() const override { return points_.rbegin()->first; }
  void start(int request) override { left_.emplace(request, answer_tokens_); }
  Step step() override;

 private:
  Point point_of(int batch) const;

  std::map<int, Point> points_;
  int answer_tokens_;
  std::map<int, double> left_;  // tokens, by request
};

/// When requests come, and how long one may take from then until its last token.
struct Arrivals {
  double per_second = 1.0;
  int count = 32;
  std::uint64_t seed = 1;
  double limit_seconds = 60.0;
};

struct Served {
  double seconds = 0.0;  ///< from the first arrival to the last token
  int in_limit = 0;      ///< requests
  double seconds_50 = 0.0;
  double seconds_99 = 0.0;  ///< of a request, the 99th percentile
};

/// Requests with exponential gaps, first come first served. The clock is that of the server's steps, so that waiting for the next arrival
/// takes no time.
Served serve(Server& server, const Arrivals& arrivals);

}  // namespace dualdecoder::examples
