// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "dualdecoder/default_backend.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::examples {

/// Where a program computes, as its command line says.
struct BackendChoice {
  std::string device = "auto";  ///< auto, cpu or cuda
  int threads = 0;              ///< of the CPU backend; 0: as many as the machine has
  LogSink* log = nullptr;
  TraceSink* trace = nullptr;
  MemoryResource* device_memory = nullptr;  ///< serves the backend's device memory; null: the backend's own
};

/// Throws InvalidArgument for another name, and as the backends do.
inline std::shared_ptr<Backend> choose_backend(const BackendChoice& choice) {
  const bool known = choice.device == "auto" || choice.device == "cpu" || choice.device == "cuda";
  if (!known) throw InvalidArgument("--device = " + choice.device + ": must be auto, cpu or cuda");
  if (choice.device == "cuda" || (choice.device == "auto" && cuda::device_count() > 0)) {
    return cuda::make_cuda_backend({.log = choice.log, .trace = choice.trace, .device_memory = choice.device_memory});
  }
  return cpu::make_cpu_backend({.threads = choice.threads, .log = choice.log, .trace = choice.trace, .device = choice.device_memory});
}

}  // namespace dualdecoder::examples
