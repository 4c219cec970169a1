// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/bench/batch_run.hpp"
#include "examples/bench/counted_backend.hpp"
#include "examples/bench/runs.hpp"

namespace dualdecoder::examples {

/// What the table of batches is about; see BatchSetting.
struct BatchTable {
  std::string name;                   ///< of the rows: name-b16, name-b16-full
  std::vector<std::string> settings;  ///< as setting_named takes them
  std::vector<int> batches;
  int context = 122880;
  int steps = 48;
  int fidelity_tokens = 96;  ///< teacher-forced on every text beside full attention; 0: agreement and kl stay null
};

/// Every setting on every batch; `emit` receives each row as soon as it is known, without the fields that name machine, commit and command.
/// Their peak_device_bytes is that of the process so far, so a process of its own for each setting tells the most. Throws as the sessions
/// would.
void run_batches(const CountedBackend& counted, const std::shared_ptr<const ModelWeights>& weights, const std::vector<Text>& texts,
                 const BatchTable& table, const std::function<void(const nlohmann::ordered_json&)>& emit);

}  // namespace dualdecoder::examples
