// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/common/setting.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>

#include "dualdecoder/error.hpp"

namespace dualdecoder::examples {
namespace {

constexpr int kAnyToken = -1;  // stands for the size of the vocabulary until that is put in

/// How one key changes the options; false when the value is none of its own.
struct Key {
  std::string values;
  std::function<bool(SessionOptions&, std::string_view)> apply;
};

template <class Number>
bool read(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

template <class Number>
Key number(Number SessionOptions::*member) {
  return {"N", [member](SessionOptions& options, std::string_view text) { return read(text, options.*member); }};
}

template <class Choice>
Key choice(const std::map<std::string, Choice, std::less<>>& choices, const std::function<void(SessionOptions&, Choice)>& set) {
  std::string values;
  for (const auto& [name, value] : choices) values += (values.empty() ? "" : "|") + name;
  return {values, [choices, set](SessionOptions& options, std::string_view text) {
            const auto found = choices.find(text);
            if (found == choices.end()) return false;
            set(options, found->second);
            return true;
          }};
}

const std::map<std::string, Key, std::less<>>& keys() {
  enum class Tail { drop, plain, calibrated };
  static const std::map<std::string, Key, std::less<>> all = {
      {"budget", number(&SessionOptions::budget_tokens)},
      {"chunk", number(&SessionOptions::chunk_tokens)},
      {"sink", number(&SessionOptions::sink_tokens)},
      {"local", number(&SessionOptions::local_tokens)},
      {"slots", number(&SessionOptions::slots_per_budget)},
      {"bias_scale", number(&SessionOptions::bias_scale)},
      {"value_group", number(&SessionOptions::value_group_chunks)},
      {"prefetch_bytes", number(&SessionOptions::prefetch_bytes_per_step)},
      {"tail", choice<Tail>({{"drop", Tail::drop}, {"plain", Tail::plain}, {"calibrated", Tail::calibrated}},
                            [](SessionOptions& options, Tail tail) {
                              options.tail_estimate = tail != Tail::drop;
                              options.calibrate_tail = tail == Tail::calibrated;
                            })},
      {"miss", choice<MissPolicy>({{"wait", MissPolicy::wait}, {"estimate", MissPolicy::estimate}},
                                  [](SessionOptions& options, MissPolicy miss) { options.miss_policy = miss; })},
      {"resync", choice<Resync>({{"never", Resync::never}, {"always", Resync::always}, {"automatic", Resync::automatic}},
                                [](SessionOptions& options, Resync resync) { options.resync = resync; })},
      {"store", choice<StoreKind>({{"resident", StoreKind::resident}, {"ping-pong", StoreKind::ping_pong}},
                                  [](SessionOptions& options, StoreKind kind) { options.store = kind; })},
      {"predictor", choice<PredictorKind>({{"none", PredictorKind::none},
                                           {"previous-step", PredictorKind::previous_step},
                                           {"layer-ahead", PredictorKind::layer_ahead},
                                           {"published", PredictorKind::published_dual_row},
                                           {"front-runner", PredictorKind::front_runner}},
                                          [](SessionOptions& options, PredictorKind kind) { options.predictor = kind; })},
      {"first_guess", choice<bool>({{"true", false}, {"random", true}},
                                   [](SessionOptions& options, bool random) { options.random_guess_below = random ? kAnyToken : 0; })},
      {"kv", choice<DataType>({{"bf16", DataType::bf16}, {"f32", DataType::f32}},
                              [](SessionOptions& options, DataType type) { options.kv_type = type; })}};
  return all;
}

std::map<std::string, std::string, std::less<>> items_of(std::string_view text) {
  std::map<std::string, std::string, std::less<>> items;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const std::size_t equals = item.find('=');
    const std::string key(item.substr(0, equals));
    if (equals == std::string_view::npos || !keys().contains(key)) {
      throw InvalidArgument("setting = " + std::string(item) + ": must be one of " + setting_keys());
    }
    if (!items.emplace(key, item.substr(equals + 1)).second)
      throw InvalidArgument("setting = " + std::string(item) + ": stands there twice");
  }
  return items;
}

}  // namespace

std::string setting_keys() {
  std::string out;
  for (const auto& [name, key] : keys()) out += fmt::format("{}{}={}", out.empty() ? "" : ", ", name, key.values);
  return out;
}

std::string canonical_setting(std::string_view text) {
  std::string out;
  for (const auto& [key, value] : items_of(text)) out += fmt::format("{}{}={}", out.empty() ? "" : ",", key, value);
  return out;
}

SessionOptions with_setting(SessionOptions options, std::string_view setting, int vocabulary) {
  for (const auto& [name, value] : items_of(setting)) {
    const Key& key = keys().at(name);
    if (!key.apply(options, value)) throw InvalidArgument(fmt::format("setting = {0}={1}: must be {0}={2}", name, value, key.values));
  }
  if (options.random_guess_below == kAnyToken) options.random_guess_below = vocabulary;
  return options;
}

}  // namespace dualdecoder::examples
