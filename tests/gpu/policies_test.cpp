// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Every policy of the examples decodes on the CUDA backend as it does on the CPU backend, up to what rounding decides, in the memory that
// its plan names. The model is made up.
#include "examples/common/policies.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/cuda/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "tests/gpu/check.hpp"
#include "tests/gpu/small_config.hpp"

namespace dualdecoder::test {
namespace {

using examples::backend_of;
using examples::options_of;
using examples::policies;
using examples::Policy;

constexpr int kPrompt = 900;
const int kGenerated = small_run() ? 16 : 48;
// Of what the CPU backend keeps of its own tokens when keys and values are not rounded to bf16: the logits of a made-up model lie close
// together, and a copy of one or two bits a value changes by whole levels where a value lies between two. Beside an error it is 1 in 1,024.
constexpr double kLeastAgreement = 0.75;

/// Tokens that a session gives.
std::vector<Token> generate(DecodeSession& session, const AddOptions& add) {
  std::mt19937_64 random(9);
  std::uniform_int_distribution<Token> token(0, small_config().vocabulary - 1);
  std::vector<Token> prompt(kPrompt);
  for (Token& one : prompt) one = token(random);
  session.add(prompt, add);
  std::vector<Token> tokens;
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) tokens.push_back(event.token);
  }
  return tokens;
}

/// Tokens of `expected` that a session finds likeliest too, fed with them.
int agreement(DecodeSession& session, AddOptions add, const std::vector<Token>& expected) {
  int agreed = 0;
  std::size_t step = 0;
  add.forced = expected;
  add.on_logits = [&](std::span<const float> logits) {
    const auto best = static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    agreed += best == expected[step++] ? 1 : 0;
  };
  const std::vector<Token> tokens = generate(session, add);
  DUALDECODER_EXPECT(tokens == expected, "%zu tokens, %zu forced", tokens.size(), expected.size());
  return agreed;
}

void check_policy(const Policy& policy, const std::shared_ptr<Backend>& cuda, testing::CountingResource& device,
                  const std::shared_ptr<Backend>& cpu) {
  SessionOptions base;
  base.max_context = 1024;
  base.budget_tokens = policy.budget(1024) >= 512 ? 256 : 0;  // so that there is something to choose
  const SessionOptions options = options_of(policy, base, small_config());
  AddOptions add;
  add.max_new_tokens = kGenerated;
  std::vector<Token> expected;
  int unrounded = 0;
  {
    const auto weights = make_synthetic_weights(small_config(), 5, *cpu);
    DecodeSession session = make_session(backend_of(policy, cpu), weights, options);
    expected = generate(session, add);
    SessionOptions exact = options;
    exact.kv_type = DataType::f32;
    DecodeSession other = make_session(backend_of(policy, cpu), weights, exact);
    unrounded = agreement(other, add, expected);
  }
  const auto weights = make_synthetic_weights(small_config(), 5, *cuda);
  const std::size_t before = device.live_bytes();
  const std::shared_ptr<Backend> backend = backend_of(policy, cuda);
  DecodeSession session = make_session(backend, weights, options);
  const int agreed = agreement(session, add, expected);
  const std::size_t used = device.peak_bytes() - before;
  const StoreStatistics statistics = session.store_statistics();
  const std::size_t planned = memory_plan(*backend, small_config(), options).device_bytes();
  DUALDECODER_EXPECT(agreed >= kLeastAgreement * unrounded,
                     "%s: agrees with the CPU backend in %d of %d tokens, that one with itself in %d", policy.name, agreed, kGenerated,
                     unrounded);
  DUALDECODER_EXPECT(used <= planned && used * 100 >= planned * 98, "%s: %zu bytes, planned %zu", policy.name, used, planned);
  std::printf(
      "%-22s %d of %d tokens as on the CPU (%d there without rounding), %llu needed, %llu resident, %llu estimated, urgent %.1f MB, "
      "prefetch %.1f MB, %zu bytes at most, %zu planned\n",
      policy.name, agreed, kGenerated, unrounded, static_cast<unsigned long long>(statistics.needed),
      static_cast<unsigned long long>(statistics.resident_hit), static_cast<unsigned long long>(statistics.estimated),
      static_cast<double>(statistics.urgent_bytes) * 1e-6, static_cast<double>(statistics.prefetch_bytes) * 1e-6, used, planned);
}

}  // namespace
}  // namespace dualdecoder::test

int main() {
  using namespace dualdecoder;
  return test::run_on_device([] {
    auto own = cuda::make_cuda_backend();
    const std::shared_ptr<Backend> cpu = cpu::make_cpu_backend();
    for (const examples::Policy& policy : examples::policies()) {
#ifndef DUALDECODER_HAS_LOW_RANK_KEYS
      if (policy.name == std::string_view("shadowkv")) {
        std::printf("%s: left out, as this build has not both LAPACK and cuSOLVER\n", policy.name);
        continue;
      }
#endif
      testing::CountingResource device(own->memory(MemoryKind::device));
      const std::shared_ptr<Backend> cuda = cuda::make_cuda_backend({.device_memory = &device});
      test::check_policy(policy, cuda, device, cpu);
    }
  });
}
