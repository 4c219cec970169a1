// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <string>

#include "tests/catch.hpp"

namespace dualdecoder::test {

/// Runs f, which must throw an E whose message holds every part.
template <class E, class F>
void expect_error(F&& f, std::initializer_list<const char*> parts) {
  std::string message = "(nothing was thrown)";
  bool right_type = false;
  try {
    f();
  } catch (const E& error) {
    right_type = true;
    message = error.what();
  } catch (const std::exception& error) {
    message = std::string("(another type) ") + error.what();
  }
  INFO(message);
  CHECK(right_type);
  for (const char* part : parts) {
    INFO("must say: " << part);
    CHECK(message.find(part) != std::string::npos);
  }
}

}  // namespace dualdecoder::test
