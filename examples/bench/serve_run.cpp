// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/bench/serve_run.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <utility>

#include "dualdecoder/counter_random.hpp"
#include "examples/bench/statistics.hpp"

namespace dualdecoder::examples {
namespace {

SessionOptions sized(SessionOptions options, const ServedRequest& request) {
  options.max_context = request.prompt_tokens + request.answer_tokens + 1;
  return options;
}

/// Seconds, ascending from 0.
std::vector<double> arrival_times(const Arrivals& arrivals) {
  std::vector<double> times;
  double now = 0.0;
  for (int i = 0; i < arrivals.count; ++i) {
    times.push_back(now);
    const double uniform = detail::counter_uniform(arrivals.seed, static_cast<std::uint64_t>(i));
    now -= std::log(1.0 - uniform) / arrivals.per_second;
  }
  return times;
}

}  // namespace

SessionServer::SessionServer(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                             const std::vector<Text>& texts, SessionOptions options, const ServedRequest& request, bool prefill_counts)
    : texts_(texts),
      request_(request),
      prefill_counts_(prefill_counts),
      places_(options.max_sequences),
      session_(make_session(backend, weights, sized(std::move(options), request))) {}

void SessionServer::start(int request) {
  constexpr int kWindows = 32;  // of each text, in turn
  const int texts = static_cast<int>(texts_.size());
  const Text& text = texts_[static_cast<std::size_t>(request % texts)];
  const auto prompt = window(text.tokens, static_cast<std::size_t>(request_.prompt_tokens), request / texts % kWindows, kWindows);
  const AddOptions options{.max_new_tokens = request_.answer_tokens};
  requests_.emplace(prefill_counts_ ? session_.enqueue(prompt, options) : session_.add(prompt, options), request);
}

Server::Step SessionServer::step() {
  Step step;
  const auto begin = std::chrono::steady_clock::now();
  const StepResult& result = session_.step();
  step.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (const TokenEvent& event : result.tokens) {
    if (event.error) std::rethrow_exception(event.error);
    if (event.finished) step.finished.push_back(requests_.extract(event.sequence).mapped());
  }
  return step;
}

MeasuredServer::MeasuredServer(std::map<int, Point> points, int answer_tokens) : points_(std::move(points)), answer_tokens_(answer_tokens) {
  if (points_.empty()) throw InvalidArgument("steps: there must be a measured batch");
}

MeasuredServer::Point MeasuredServer::point_of(int batch) const {
  const auto above = points_.lower_bound(batch);
  if (above == points_.begin())
    return {.seconds = above->second.seconds, .tokens_per_step = above->second.tokens_per_step * batch / above->first};
  const auto below = std::prev(above);
  const double share = static_cast<double>(batch - below->first) / (above->first - below->first);
  return {.seconds = std::lerp(below->second.seconds, above->second.seconds, share),
          .tokens_per_step = std::lerp(below->second.tokens_per_step, above->second.tokens_per_step, share)};
}

Server::Step MeasuredServer::step() {
  const int batch = static_cast<int>(left_.size());
  const Point point = point_of(batch);
  Step step{.seconds = point.seconds, .finished = {}};
  for (auto& [request, tokens] : left_) {
    tokens -= point.tokens_per_step / batch;
    if (tokens < 1e-9) step.finished.push_back(request);
  }
  for (int request : step.finished) left_.erase(request);
  return step;
}

Served serve(Server& server, const Arrivals& arrivals) {
  const std::vector<double> arrived = arrival_times(arrivals);
  std::vector<double> took;
  double now = 0.0;
  std::size_t next = 0;
  int running = 0;
  while (took.size() < arrived.size()) {
    if (running == 0 && now < arrived[next]) now = arrived[next];
    for (; next < arrived.size() && arrived[next] <= now && running < server.places(); ++running) server.start(static_cast<int>(next++));
    const Server::Step step = server.step();
    now += step.seconds;
    for (int request : step.finished) took.push_back(now - arrived[static_cast<std::size_t>(request)]);
    running -= static_cast<int>(step.finished.size());
  }
  Served served;
  served.seconds = now;
  served.in_limit = static_cast<int>(std::count_if(took.begin(), took.end(), [&](double s) { return s <= arrivals.limit_seconds; }));
  served.seconds_50 = quantile(took, 0.5);
  served.seconds_99 = quantile(took, 0.99);
  return served;
}

}  // namespace dualdecoder::examples
