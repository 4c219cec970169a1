// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "tests/unit/test_backend.hpp"

namespace dualdecoder::test {

/// A CPU backend whose device and pinned memory count and can be made to fail.
struct Counted {
  HostMemory host;
  testing::CountingResource device{host};
  testing::CountingResource pinned{host};
  std::shared_ptr<Backend> backend =
      cpu::make_cpu_backend({.threads = 2, .log = nullptr, .trace = nullptr, .device = &device, .pinned = &pinned, .pageable = nullptr});

  std::size_t live_bytes() const { return device.live_bytes() + pinned.live_bytes(); }
  std::size_t live_allocations() const { return device.live_allocations() + pinned.live_allocations(); }
  std::uint64_t allocations() const { return device.allocations() + pinned.allocations(); }
};

}  // namespace dualdecoder::test
