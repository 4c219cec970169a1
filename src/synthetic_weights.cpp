// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "dualdecoder/error.hpp"
#include "dualdecoder/load_weights.hpp"
#include "src/dequantize.hpp"
#include "src/load_options.hpp"
#include "src/model_config.hpp"
#include "src/weight_layout.hpp"
#include "src/weight_writer.hpp"

namespace dualdecoder {
namespace {

using detail::WeightEntry;

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words whose outputs for consecutive inputs pass as random.
std::uint64_t mix(std::uint64_t x) noexcept {
  x ^= x >> 30U;
  x *= 0xBF58476D1CE4E5B9U;
  x ^= x >> 27U;
  x *= 0x94D049BB133111EBU;
  return x ^ x >> 31U;
}

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15U;

/// Element `index` of the stream `key`: the sum of four 16-bit uniforms, centred, with variance 1 (Irwin-Hall; at most 3.5). Integers
/// until the last multiplication, so every machine draws the same bits.
float draw(std::uint64_t key, std::uint64_t index) noexcept {
  const std::uint64_t bits = mix(key + kGolden * index);
  const auto sum = static_cast<std::int32_t>((bits & 0xFFFFU) + (bits >> 16U & 0xFFFFU) + (bits >> 32U & 0xFFFFU) + (bits >> 48U));
  constexpr float kDeviation = 37837.23F;  // sqrt(4 (65536^2 - 1) / 12)
  return static_cast<float>(sum - 2 * 65535) * (1.0F / kDeviation);
}

/// Mean and standard deviation of a tensor's values.
struct Spread {
  float mean;
  float deviation;
};

Spread spread(const WeightEntry& entry) {
  if (entry.matrix) return {0.0F, 1.0F / std::sqrt(static_cast<float>(entry.columns))};
  const bool bias = entry.role == TensorRole::query_bias || entry.role == TensorRole::key_bias || entry.role == TensorRole::value_bias;
  return bias ? Spread{0.0F, 0.1F} : Spread{1.0F, 0.1F};
}

void draw_rows(const WeightEntry& entry, DataType type, std::uint64_t key, std::int64_t begin, std::int64_t end, std::byte* out) {
  const auto [mean, deviation] = spread(entry);
  const auto last = static_cast<std::uint64_t>(end * entry.columns);
  std::array<float, 2048> piece;
  for (auto first = static_cast<std::uint64_t>(begin * entry.columns); first < last;) {
    const std::size_t count = std::min<std::uint64_t>(piece.size(), last - first);
    for (std::size_t i = 0; i < count; ++i) piece[i] = mean + deviation * draw(key, first + i);
    if (type == DataType::bf16) {
      detail::round_to_bf16(piece.data(), count, reinterpret_cast<std::uint16_t*>(out));
    } else {
      std::copy_n(piece.data(), count, reinterpret_cast<float*>(out));
    }
    first += count;
    out += count * size_of(type);
  }
}

}  // namespace

std::shared_ptr<const ModelWeights> make_synthetic_weights(const ModelConfig& config, std::uint64_t seed, Backend& backend,
                                                           const LoadOptions& options) {
  detail::check_load_options(options);
  if (const std::string problem = detail::config_problem(config); !problem.empty()) throw InvalidArgument("ModelConfig: " + problem);
  auto weights = std::make_shared<detail::PackedWeights>(config, options.matrix_type, backend);
  detail::WeightWriter writer(backend, config, options.matrix_type, options.threads);
  LoadProgress progress{0, weights->memory().device_bytes()};
  const auto report = [&](std::uint64_t done_bytes) {
    progress.done_bytes = done_bytes;
    if (options.on_progress) options.on_progress(progress);
  };
  report(0);
  std::uint64_t before = 0;
  for (const WeightEntry& entry : detail::weight_entries(config)) {
    const Tensor target = weights->writable(entry);
    const std::uint64_t key =
        mix(mix(seed) + kGolden * (static_cast<std::uint64_t>(entry.role) << 32U | static_cast<std::uint32_t>(entry.layer)));
    writer.write(
        target, [&](std::int64_t begin, std::int64_t end, std::byte* out) { draw_rows(entry, target.type, key, begin, end, out); },
        [&](std::int64_t rows) {
          report(before + target.bytes() / static_cast<std::uint64_t>(entry.rows) * static_cast<std::uint64_t>(rows));
        });
    before += target.bytes();
  }
  report(progress.total_bytes);
  return weights;
}

}  // namespace dualdecoder
