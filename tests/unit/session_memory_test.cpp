// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// What the process holds, by the kernel's account (/proc/self/statm): sequences that come and go leave nothing behind.
#include <unistd.h>

#include <cstddef>
#include <fstream>

#include "tests/catch.hpp"
#include "tests/unit/session_fixture.hpp"

namespace dualdecoder::test {
namespace {

/// Resident bytes of this process, or 0 where there is no /proc.
std::size_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  std::size_t total = 0;
  std::size_t resident = 0;
  in >> total >> resident;
  return in ? resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) : 0;
}

}  // namespace

TEST_CASE("A thousand sequences added and removed leave the process as large as before", "[session][slow]") {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  DUALDECODER_SKIP("a sanitizer keeps freed memory");
#endif
  if (resident_bytes() == 0) DUALDECODER_SKIP("no /proc/self/statm");
  const SessionModel model(DataType::bf16);
  SessionOptions options = tiny_options();
  options.max_sequences = 2;
  options.kv_type = DataType::bf16;
  auto session = make_session(model.backend, model.weights, options);
  const auto cycle = [&](int number) {
    const SequenceId id = session.add(random_tokens(60 + number % 200, static_cast<std::uint64_t>(number)), {.max_new_tokens = 100});
    for (int step = 0; step < 3; ++step) session.step();
    session.remove(id);
  };
  for (int number = 0; number < 200; ++number) cycle(number);  // every length once, so that the allocator has seen them all
  const std::size_t before = resident_bytes();
  for (int number = 0; number < 1000; ++number) cycle(number);
  const std::size_t after = resident_bytes();
  INFO("resident bytes before " << before << ", after " << after);
  CHECK(after < before + (std::size_t{1} << 20));
}

}  // namespace dualdecoder::test
