// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/generate/report.hpp"

#include <fmt/core.h>
#include <sys/resource.h>

#include <iterator>
#include <nlohmann/json.hpp>

#include "examples/common/terminal.hpp"

namespace dualdecoder::examples {
namespace {

using Json = nlohmann::ordered_json;

double seconds(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

double ratio(double part, double whole) { return whole > 0 ? part / whole : 0.0; }

double ratio(std::uint64_t part, std::uint64_t whole) { return ratio(static_cast<double>(part), static_cast<double>(whole)); }

std::string bytes_text(std::uint64_t bytes) { return in_bytes(static_cast<double>(bytes)); }

std::uint64_t peak_process_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::uint64_t>(usage.ru_maxrss) * 1024;
}

const char* name_of(StoreKind kind) {
  switch (kind) {
    case StoreKind::resident: return "resident";
    case StoreKind::ping_pong: return "ping-pong";
    case StoreKind::full: return "full";
    case StoreKind::shadow_kv: return "shadow-kv";
    case StoreKind::specache: return "specache";
    case StoreKind::automatic: return "automatic";
  }
  return "";
}

const char* name_of(MissPolicy policy) { return policy == MissPolicy::wait ? "wait" : "estimate"; }

const char* name_of(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::device: return "device";
    case MemoryKind::pinned: return "pinned";
    case MemoryKind::pageable: return "pageable";
  }
  return "";
}

Json plan_json(const MemoryPlan& plan) {
  return {{"device_bytes", plan.device_bytes()}, {"pinned_bytes", plan.pinned_bytes()}, {"pageable_bytes", plan.pageable_bytes()}};
}

Json lane_json(const LaneStatistics& lane) {
  return {{"items", lane.moved_items},
          {"bytes", lane.moved_bytes},
          {"busy_seconds", seconds(lane.busy)},
          {"stall_seconds", seconds(lane.stalled)}};
}

/// Bytes of JSON that may hold text from a file: ill-formed UTF-8 becomes U+FFFD.
std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace

double Report::prefill_tokens_per_second() const { return ratio(static_cast<double>(session.prompt_tokens), seconds(session.prefill)); }
double Report::tokens_per_second() const { return ratio(static_cast<double>(session.generated_tokens), seconds(session.decode)); }
double Report::hit_rate() const { return ratio(store.predicted_hit, store.predictable); }
double Report::resident_rate() const { return ratio(store.resident_hit, store.needed); }
double Report::stall_seconds() const { return seconds(urgent.stalled) + seconds(prefetch.stalled) + seconds(write_back.stalled); }

std::string to_text(const Report& r) {
  std::string out;
  const auto line = [&out](const char* label, const std::string& text) {
    fmt::format_to(std::back_inserter(out), "{:<14}{}\n", label, text);
  };
  line("model", fmt::format("{}, {} store, {} predictor, {} on a miss", r.model, name_of(r.options.store), r.predictor,
                            name_of(r.options.miss_policy)));
  line("prompt",
       fmt::format("{} tokens in {:.2f} s, {:.1f} tokens/s", r.prompt_tokens, seconds(r.session.prefill), r.prefill_tokens_per_second()));
  line("generated", fmt::format("{} tokens in {:.2f} s, {:.1f} tokens/s, ended by {}", r.session.generated_tokens,
                                seconds(r.session.decode), r.tokens_per_second(), r.finish));
  line("chunks", r.store.needed == 0 ? "none needed: the whole context is resident"
                                     : fmt::format("{} needed, {:.2f} % predicted, {:.2f} % resident, {} estimated", r.store.needed,
                                                   100 * r.hit_rate(), 100 * r.resident_rate(), r.store.estimated));
  line("guesses", fmt::format("{} of {} right, {} resyncs in {} passes", r.session.right_guesses, r.session.guesses, r.session.resyncs,
                              r.session.passes));
  line("moved", fmt::format("{} urgent, {} prefetched, {} written back", bytes_text(r.store.urgent_bytes),
                            bytes_text(r.store.prefetch_bytes), bytes_text(r.store.write_back_bytes)));
  line("stall", fmt::format("{:.3f} s waiting for loads", r.stall_seconds()));
  line("memory", fmt::format("{} weights, {} device, {} pinned, {} process peak", bytes_text(r.weights.total_bytes()),
                             bytes_text(r.plan.device_bytes()), bytes_text(r.plan.pinned_bytes()), bytes_text(peak_process_bytes())));
  if (const auto& c = r.comparison) {
    line("against full",
         fmt::format("{:.2f} % same argmax, KL {:.5f} mean, {:.5f} worst, over {} tokens; full attention ran {:.1f} tokens/s",
                     100 * c->agreement, c->mean_kl, c->max_kl, c->tokens, c->full_tokens_per_second));
  }
  return out;
}

std::string to_json(const Report& r) {
  Json json = {
      {"event", "report"},
      {"model", r.model},
      {"store", name_of(r.options.store)},
      {"predictor", r.predictor},
      {"miss_policy", name_of(r.options.miss_policy)},
      {"budget_tokens", r.options.budget_tokens},
      {"chunk_tokens", r.options.chunk_tokens},
      {"max_context", r.options.max_context},
      {"finish", r.finish},
      {"prompt_tokens", r.prompt_tokens},
      {"generated_tokens", r.session.generated_tokens},
      {"load_seconds", r.load_seconds},
      {"prefill_seconds", seconds(r.session.prefill)},
      {"prefill_tokens_per_second", r.prefill_tokens_per_second()},
      {"decode_seconds", seconds(r.session.decode)},
      {"tokens_per_second", r.tokens_per_second()},
      {"passes", r.session.passes},
      {"resyncs", r.session.resyncs},
      {"guesses", r.session.guesses},
      {"right_guesses", r.session.right_guesses},
      {"needed_chunks", r.store.needed},
      {"estimated_chunks", r.store.estimated},
      {"prefetch_dropped_chunks", r.store.prefetch_dropped},
      {"hit_rate", r.hit_rate()},
      {"resident_rate", r.resident_rate()},
      {"urgent_bytes", r.store.urgent_bytes},
      {"prefetch_bytes", r.store.prefetch_bytes},
      {"write_back_bytes", r.store.write_back_bytes},
      {"stall_seconds", r.stall_seconds()},
      {"lanes", {{"urgent", lane_json(r.urgent)}, {"prefetch", lane_json(r.prefetch)}, {"write_back", lane_json(r.write_back)}}},
      {"resident_bytes", r.plan.device_bytes()},
      {"weights", plan_json(r.weights)},
      {"session", plan_json(r.plan)},
      {"process_peak_bytes", peak_process_bytes()},
  };
  if (const auto& c = r.comparison) {
    json["compare_full"] = {{"tokens", c->tokens},
                            {"agreement", c->agreement},
                            {"mean_kl", c->mean_kl},
                            {"max_kl", c->max_kl},
                            {"full_tokens_per_second", c->full_tokens_per_second}};
  }
  return dump(json);
}

std::string to_text(const MemoryPlan& plan) {
  std::string out;
  const auto line = [&out](const std::string& what, const char* kind, std::size_t bytes) {
    fmt::format_to(std::back_inserter(out), "{:<36} {:<9} {:>12} {:>15}\n", what, kind, in_bytes(static_cast<double>(bytes)), bytes);
  };
  for (const auto& item : plan.items) line(item.what, name_of(item.kind), item.bytes);
  for (const auto kind : {MemoryKind::device, MemoryKind::pinned, MemoryKind::pageable}) line("total", name_of(kind), plan.bytes(kind));
  line("total", "all", plan.total_bytes());
  return out;
}

std::string to_json(const MemoryPlan& plan) {
  Json json = {{"event", "memory_plan"}};
  json.update(plan_json(plan));
  json["total_bytes"] = plan.total_bytes();
  json["items"] = Json::array();
  for (const auto& item : plan.items) json["items"].push_back({{"what", item.what}, {"kind", name_of(item.kind)}, {"bytes", item.bytes}});
  return dump(json);
}

}  // namespace dualdecoder::examples
