// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Every policy of the examples builds a session and generates; the figures are those of the publications that the policies name.
#include "examples/common/policies.hpp"

#include <set>
#include <string>

#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/session_fixture.hpp"

using namespace dualdecoder;
using namespace dualdecoder::examples;

TEST_CASE("every policy generates") {
  const test::SessionModel model;
  SessionOptions base;
  base.max_context = 512;
  base.budget_tokens = 0;
  base.kv_type = DataType::f32;
  AddOptions add;
  add.max_new_tokens = 12;
  std::set<std::string> names;
  for (const Policy& policy : policies()) {
    INFO(policy.name);
    CHECK(names.insert(policy.name).second);
    const SessionOptions options = options_of(policy, base, test::tiny_config());
#ifndef DUALDECODER_HAS_LAPACK
    if (options.store == StoreKind::shadow_kv) {
      test::expect_error<InvalidArgument>([&] { make_session(backend_of(policy, model.backend), model.weights, options); }, {"LAPACK"});
      continue;
    }
#endif
    DecodeSession session = make_session(backend_of(policy, model.backend), model.weights, options);
    const std::vector<test::Text> texts = test::generate(session, {test::random_tokens(300, 5)}, add);
    CHECK(texts[0].tokens.size() == 12);
    CHECK(texts[0].reason == FinishReason::max_tokens);
  }
}

TEST_CASE("a policy keeps what is no policy and takes the source's budget for 0") {
  SessionOptions base;
  base.max_context = 131072;
  base.max_sequences = 3;
  base.budget_tokens = 0;
  base.link_bytes_per_second = 5e9;
  base.tail_estimate = false;  // a policy's own matter
  const SessionOptions published = options_of(find_policy("dualdecoder-published"), base);
  CHECK(published.max_sequences == 3);
  CHECK(published.link_bytes_per_second == 5e9);
  CHECK(published.budget_tokens == 2048);  // 1.56 % of 128K
  CHECK(published.store == StoreKind::ping_pong);
  CHECK_FALSE(published.tail_estimate);
  CHECK(options_of(find_policy("dualdecoder"), base).tail_estimate);
  CHECK(options_of(find_policy("infinigen"), base).budget_tokens == 26214);  // 20 %
  CHECK(options_of(find_policy("specache-1bit"), base).specache.bits == 1);
  CHECK(options_of(find_policy("shadowkv"), base, test::tiny_config()).shadow_kv.rank == 32);  // all columns of the tiny model
  base.budget_tokens = 256;
  CHECK(options_of(find_policy("hisparse"), base).budget_tokens == 256);
}

TEST_CASE("a policy that there is not is named with those that there are") {
  test::expect_error<InvalidArgument>([] { find_policy("fastest"); }, {"policy = fastest", "must be one of full, dualdecoder"});
}
