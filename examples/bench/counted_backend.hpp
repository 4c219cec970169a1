// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>

#include "dualdecoder/testing/counting_resource.hpp"
#include "examples/common/backend_choice.hpp"

namespace dualdecoder::examples {

/// A backend whose device memory is counted: that of another one lies beneath. Must outlive what is made from the backend.
class CountedBackend {
 public:
  explicit CountedBackend(BackendChoice choice)
      : owner_(choose_backend(choice)), device_(owner_->memory(MemoryKind::device)), backend_(choose(choice)) {}
  CountedBackend(const CountedBackend&) = delete;
  CountedBackend& operator=(const CountedBackend&) = delete;

  const std::shared_ptr<Backend>& backend() const noexcept { return backend_; }
  /// The most device memory that was in use at once, weights included; what the driver keeps for itself is not in it.
  std::size_t peak_device_bytes() const { return device_.peak_bytes(); }

 private:
  std::shared_ptr<Backend> choose(BackendChoice choice) {
    choice.device_memory = &device_;
    return choose_backend(choice);
  }

  std::shared_ptr<Backend> owner_;
  testing::CountingResource device_;
  std::shared_ptr<Backend> backend_;
};

}  // namespace dualdecoder::examples
