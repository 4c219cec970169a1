// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/report.hpp"

#include <fmt/core.h>

#include <cmath>
#include <limits>
#include <map>
#include <tuple>

namespace dualdecoder::examples {
namespace {

using Json = nlohmann::ordered_json;

double ratio(double part, double whole) { return whole > 0 ? part / whole : 0.0; }
double ratio(std::uint64_t part, std::uint64_t whole) { return ratio(static_cast<double>(part), static_cast<double>(whole)); }

/// null where there was nothing to count.
Json share(std::uint64_t part, std::uint64_t whole) { return whole > 0 ? Json(ratio(part, whole)) : Json(nullptr); }

/// "-" for NaN.
std::string text_of(double value) { return std::isnan(value) ? "-" : fmt::format("{:.3f}", value); }

/// Bytes of 16-bit (or kv_type) keys and values of one needed chunk.
double chunk_bytes(const SessionOptions& options, const ModelConfig& config) {
  const int tokens = options.store == StoreKind::specache ? 1 : options.chunk_tokens;
  return 2.0 * tokens * config.head_dim * static_cast<double>(size_of(options.kv_type));
}

Json bytes_by_kind(const MemoryPlan& plan) {
  Json items = Json::object();
  for (const MemoryPlan::Item& item : plan.items) {
    if (item.kind == MemoryKind::device) items[item.what] = items.value(item.what, std::size_t{0}) + item.bytes;
  }
  return items;
}

std::string method_of(const Json& line) {
  const auto setting = line.at("setting").get<std::string>();
  return line.at("policy").get<std::string>() + (setting.empty() ? "" : " " + setting);
}

/// NaN where there is none: NaN and infinity are null in JSON.
double number(const Json& line, const char* key) {
  return line.contains(key) && line.at(key).is_number() ? line.at(key).get<double>() : std::numeric_limits<double>::quiet_NaN();
}

/// Adds up lines.
struct Sums {
  int cells = 0;
  double tokens = 0.0;
  int scored = 0;  // cells of tasks with a right answer
  Summary sum;

  void add(const Json& line) {
    ++cells;
    const double n = number(line, "n");
    tokens += n;
    if (!std::isnan(number(line, "score"))) {
      ++scored;
      sum.score += number(line, "score");
      sum.full_score += number(line, "full_score");
    }
    sum.agreement += n * number(line, "agreement");
    sum.kl += n * number(line, "kl");
    sum.hit += number(line, "hit");
    sum.traffic += number(line, "traffic");
  }
  Summary mean() const {
    Summary mean = sum;
    mean.cells = cells;
    for (double* by_score : {&mean.score, &mean.full_score}) *by_score = ratio(*by_score, scored);
    for (double* by_cell : {&mean.hit, &mean.traffic}) *by_cell = ratio(*by_cell, cells);
    for (double* by_token : {&mean.agreement, &mean.kl}) *by_token = ratio(*by_token, tokens);
    return mean;
  }
};

}  // namespace

Json line_head(const LineHead& head) {
  return {{"model", head.model},   {"context", head.context}, {"task", head.task}, {"seed", head.seed},
          {"policy", head.policy}, {"setting", head.setting}, {"text", head.text}};
}

std::string in_short(const Json& line) {
  return fmt::format("score {} of full attention's {}, agreement {:.4f}, KL {:.5f}, hit {}", text_of(number(line, "score")),
                     text_of(number(line, "full_score")), number(line, "agreement"), number(line, "kl"), text_of(number(line, "hit")));
}

void add_result(Json& line, const CellResult& result, const SessionOptions& options, const ModelConfig& config) {
  const double selected_bytes = static_cast<double>(result.store.needed) * chunk_bytes(options, config);
  const auto urgent = static_cast<double>(result.store.urgent_bytes);
  const auto prefetch = static_cast<double>(result.store.prefetch_bytes);
  const auto one_of_batch = [&](double together) { return together / result.batch; };
  const auto of_thirds = [&](double Fidelity::*member) {
    Json values = Json::array();
    for (const Fidelity& third : result.thirds) values.push_back(third.*member);
    return values;
  };
  line["n"] = result.fidelity.tokens;
  line["agreement"] = result.fidelity.agreement;
  line["kl"] = result.fidelity.mean_kl;
  line["kl95"] = result.fidelity.kl95;
  line["first_divergence"] = result.first_divergence;
  line["agreement_thirds"] = of_thirds(&Fidelity::agreement);
  line["kl_thirds"] = of_thirds(&Fidelity::mean_kl);
  line["hit"] = share(result.store.predicted_hit, result.store.predictable);
  line["hit_thirds"] = result.hits;
  line["resident"] = ratio(result.store.resident_hit, result.store.needed);
  line["estimated"] = ratio(result.store.estimated, result.store.needed);
  line["guesses_right"] = share(result.session.right_guesses, result.session.guesses);
  line["resyncs"] = ratio(result.session.resyncs, result.session.passes);
  line["urgent"] = ratio(urgent, selected_bytes);
  line["traffic"] = ratio(urgent + prefetch, selected_bytes);
  line["urgent_gb"] = 1e-9 * one_of_batch(urgent);
  line["traffic_gb"] = 1e-9 * one_of_batch(urgent + prefetch);
  line["selected_gb"] = 1e-9 * one_of_batch(selected_bytes);
  line["device_bytes"] = result.plan.device_bytes();
  line["device_bytes_by_kind"] = bytes_by_kind(result.plan);
  line["device_bytes_measured"] = result.measured_device_bytes / static_cast<std::size_t>(result.batch);
  line["host_bytes"] = result.plan.pinned_bytes() + result.plan.pageable_bytes();
  line["batch"] = result.batch;
  line["seconds"] = one_of_batch(result.seconds);
}

std::vector<Summary> summarize(const std::vector<Json>& lines) {
  std::map<std::tuple<std::string, int, std::string>, Sums> sums;
  std::vector<std::tuple<std::string, int, std::string>> order;
  for (const Json& line : lines) {
    const std::tuple key(line.at("model").get<std::string>(), line.at("context").get<int>(), method_of(line));
    const auto [at, is_new] = sums.try_emplace(key);
    if (is_new) order.push_back(key);
    at->second.add(line);
  }
  std::vector<Summary> out;
  for (const auto& key : order) {
    out.push_back(sums.at(key).mean());
    std::tie(out.back().model, out.back().context, out.back().method) = key;
  }
  return out;
}

std::string to_table(const std::vector<Summary>& summaries) {
  std::string out = fmt::format("{:<36} {:>7} {:<40} {:>5} {:>6} {:>6} {:>9} {:>8} {:>6} {:>8}\n", "model", "context", "method", "cells",
                                "score", "full", "agreement", "KL", "hit", "traffic");
  for (const Summary& s : summaries) {
    out += fmt::format("{:<36} {:>7} {:<40} {:>5} {:>6.3f} {:>6.3f} {:>9.4f} {:>8.5f} {:>6} {:>8.4f}\n", s.model, s.context, s.method,
                       s.cells, s.score, s.full_score, s.agreement, s.kl, text_of(s.hit), s.traffic);
  }
  return out;
}

std::vector<std::string> broken(const std::vector<Bound>& bounds, const std::vector<Json>& lines) {
  std::vector<std::string> sentences;
  for (const Bound& bound : bounds) {
    Sums sums;
    for (const Json& line : lines) {
      if (method_of(line) == bound.method) sums.add(line);
    }
    const Summary mean = sums.mean();
    const auto must = [&](bool holds, const char* what, double value, const char* side, double limit) {
      if (!holds) sentences.push_back(fmt::format("{}: {} = {:.5f}: must be at {} {:.5f}", bound.method, what, value, side, limit));
    };
    const double loss = mean.full_score - mean.score;
    must(mean.cells > 0, "cells", mean.cells, "least", 1);
    must(mean.kl <= bound.most_kl, "mean KL", mean.kl, "most", bound.most_kl);
    must(mean.agreement >= bound.least_agreement, "agreement", mean.agreement, "least", bound.least_agreement);
    must(loss <= bound.most_score_loss, "score below full attention's", loss, "most", bound.most_score_loss);
  }
  return sentences;
}

}  // namespace dualdecoder::examples
