// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dualdecoder/decode_session.hpp"
#include "examples/common/fidelity.hpp"
#include "examples/common/policies.hpp"

namespace dualdecoder::examples {

/// A setting under a name that stands in the results.
struct Setting {
  std::string name;
  SessionOptions options;
  const Policy* policy = nullptr;  ///< null: none that has a name

  /// The backend that a session with these options is made on.
  std::shared_ptr<Backend> backend(const std::shared_ptr<Backend>& plain) const {
    return policy == nullptr ? plain : backend_of(*policy, plain);
  }
};

/// What one run measured.
struct Measured {
  double prefill_seconds = 0.0;
  double decode_seconds = 0.0;
  int generated = 0;
  double agreement = 0.0;  ///< share of steps with the reference's likeliest token
  double kl = 0.0;         ///< mean KL(reference || run), nats
  double kl95 = 0.0;       ///< its 95th percentile
  SessionStatistics session;
  StoreStatistics store;
  double stall_seconds = 0.0;
  double median_step_seconds = 0.0;
  double fast_step_seconds = 0.0;  ///< that a tenth of the steps took at most
  double step_bytes = 0.0;         ///< that a pass cannot do without, see bytes_of_step
  std::size_t plan_device_bytes = 0;
  std::size_t plan_host_bytes = 0;
  std::size_t program_bytes = 0;  ///< resident before the session was made, weights included
  std::size_t peak_bytes = 0;     ///< the most that was resident until the first step had run
  std::size_t decode_bytes = 0;   ///< resident then
};

/// Bytes that one pass over a context of `tokens` must read or write however well it caches: every weight that a product uses, then keys
/// and values of the whole context (full attention), or all summaries, the exact tokens once, and `moved_bytes` from the host tier and
/// back.
double bytes_of_step(const ModelWeights& weights, const SessionOptions& options, double tokens, double moved_bytes);

/// Greedy text of `count` tokens by full attention.
Reference make_reference(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                         std::span<const Token> prompt, int count);

/// One setting over a prompt: the constructor prefills, step() runs passes until it says that there is nothing left, finish() says what was
/// measured. Teacher-forced on the reference with its logits compared, or free for `count` tokens without one.
class Run {
 public:
  Run(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights, std::span<const Token> prompt,
      const SessionOptions& options, int count, const Reference* reference);
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  bool step();
  Measured finish();

 private:
  void compare(std::span<const float> logits);

  std::shared_ptr<const ModelWeights> weights_;
  SessionOptions options_;
  double tokens_;  // in the middle of the run
  const Reference* reference_;
  Measured measured_;
  std::vector<double> steps_;  // seconds
  FidelityMeter meter_;
  std::optional<DecodeSession> session_;
};

/// "POLICY[ KEY=VALUE,...]", see policies() and setting_keys(), or CHUNK:BUDGET:drop|plain|calibrated:wait|estimate[:BIAS_SCALE], for a
/// model of that vocabulary. Throws InvalidArgument naming --setting or the item.
Setting setting_named(const std::string& name, int vocabulary);

/// Settings of the decode table, of the prediction table, and of the fidelity table.
std::vector<Setting> decode_settings();
std::vector<Setting> prediction_settings(int vocabulary);
std::vector<Setting> fidelity_settings();

}  // namespace dualdecoder::examples
