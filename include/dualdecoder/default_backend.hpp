// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/cuda/backend.hpp"

namespace dualdecoder {

/// The CUDA backend when it is built in and a device is present, else the CPU backend with its default options. Needs the CMake target
/// dualdecoder::dualdecoder. Throws as make_cuda_backend and make_cpu_backend.
inline std::shared_ptr<Backend> make_default_backend() {
  return cuda::device_count() > 0 ? cuda::make_cuda_backend() : cpu::make_cpu_backend();
}

}  // namespace dualdecoder
