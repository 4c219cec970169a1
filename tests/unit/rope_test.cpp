// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/rope.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dualdecoder/error.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"

namespace dualdecoder::cpu {
namespace {

using Json = nlohmann::json;

RopeScaling scaling_of(const std::string& kind) {
  if (kind == "linear") return RopeScaling::linear;
  if (kind == "llama3") return RopeScaling::llama3;
  return kind == "yarn" ? RopeScaling::yarn : RopeScaling::none;
}

RopeConfig config_of(const Json& golden) {
  RopeConfig rope;
  rope.theta = golden["theta"];
  rope.scaling = scaling_of(golden["kind"]);
  rope.factor = golden["factor"];
  rope.original_context = golden["original_context"];
  rope.low_freq_factor = golden["low_freq_factor"];
  rope.high_freq_factor = golden["high_freq_factor"];
  rope.beta_fast = golden["beta_fast"];
  rope.beta_slow = golden["beta_slow"];
  rope.attention_factor = golden["attention_factor_given"];
  return rope;
}

}  // namespace

// tests/data/rope_golden.json: transformers' modeling_rope_utils on torch in float32, made by scripts/make_rope_golden.py. Its power and
// ours may round differently by one float32 step, and a long position multiplies that step into the angle.
TEST_CASE("frequencies and angles equal those of transformers", "[rope]") {
  std::ifstream file(std::filesystem::path(DUALDECODER_TEST_DATA_DIR) / "rope_golden.json");
  const Json golden = Json::parse(file);
  REQUIRE(golden["cases"].size() >= 12);
  for (const Json& one : golden["cases"]) {
    INFO("kind " << one["kind"] << ", theta " << one["theta"] << ", head_dim " << one["head_dim"] << ", factor " << one["factor"]);
    const int half = one["head_dim"].get<int>() / 2;
    const RopeFrequencies made = rope_frequencies(config_of(one), 2 * half);
    CHECK(std::abs(made.attention_factor - one["attention_factor"].get<float>()) <= 1.2e-7F * made.attention_factor);
    REQUIRE(made.inverse.size() == static_cast<std::size_t>(half));
    float worst = 0.0F;
    for (std::size_t i = 0; i < made.inverse.size(); ++i) {
      const float theirs = one["inv_freq"][i];
      worst = std::max(worst, std::abs(made.inverse[i] - theirs) / theirs);
    }
    CHECK(worst <= 2.4e-7F);  // two steps of float32

    for (const Json& rotation : one["rotations"]) {
      const int position = rotation["position"];
      std::vector<float> cosine(made.inverse.size());
      std::vector<float> sine(made.inverse.size());
      rope_angles(made.inverse.data(), half, made.attention_factor, position, cosine.data(), sine.data());
      for (std::size_t i = 0; i < made.inverse.size(); ++i) {
        INFO("position " << position << ", pair " << i);
        const float angle_step = static_cast<float>(position) * std::abs(made.inverse[i] - one["inv_freq"][i].get<float>());
        const float rounding =
            static_cast<float>(position) * made.inverse[i] * (made.inverse[i] == one["inv_freq"][i].get<float>() ? 0.0F : 1.2e-7F);
        const float bound = made.attention_factor * (2e-7F + angle_step + rounding);
        CHECK(std::abs(cosine[i] - rotation["cos"][i].get<float>()) <= bound);
        CHECK(std::abs(sine[i] - rotation["sin"][i].get<float>()) <= bound);
      }
    }
  }
}

TEST_CASE("frequency factors divide the frequencies as they stand", "[rope]") {
  RopeConfig rope;
  const std::vector<float> plain = rope_frequencies(rope, 8).inverse;
  rope.frequency_factors = {1.0F, 2.0F, 4.0F, 8.0F};
  const std::vector<float> divided = rope_frequencies(rope, 8).inverse;
  for (std::size_t i = 0; i < 4; ++i) CHECK(divided[i] == plain[i] / rope.frequency_factors[i]);
}

TEST_CASE("rotary options out of range are named", "[rope]") {
  const auto refused = [](auto change, const char* field) {
    RopeConfig rope;
    rope.original_context = 4096;
    change(rope);
    test::expect_error<InvalidArgument>([&] { rope_frequencies(rope, 64); }, {field, "must be"});
  };
  refused([](RopeConfig& rope) { rope.theta = 1.0F; }, "theta");
  refused([](RopeConfig& rope) { rope.theta = std::numeric_limits<float>::quiet_NaN(); }, "theta");
  refused([](RopeConfig& rope) { rope.factor = 0.5F; }, "factor");
  refused([](RopeConfig& rope) { rope.frequency_factors = {1.0F}; }, "frequency_factors");
  refused([](RopeConfig& rope) { rope.frequency_factors.assign(32, 0.0F); }, "frequency_factors");
  refused(
      [](RopeConfig& rope) {
        rope.scaling = RopeScaling::yarn;
        rope.original_context = 0;
      },
      "original_context");
  refused(
      [](RopeConfig& rope) {
        rope.scaling = RopeScaling::llama3;
        rope.high_freq_factor = rope.low_freq_factor;
      },
      "high_freq_factor");
  refused(
      [](RopeConfig& rope) {
        rope.scaling = RopeScaling::yarn;
        rope.beta_slow = 0.0F;
      },
      "beta");
  test::expect_error<InvalidArgument>([] { rope_frequencies({}, 7); }, {"head_dim = 7"});
}

}  // namespace dualdecoder::cpu
