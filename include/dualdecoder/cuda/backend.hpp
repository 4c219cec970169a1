// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/export.hpp"

namespace dualdecoder::cuda {

/// Devices that make_cuda_backend() can use: 0 in a build without the CUDA backend, without a driver or without a device. Never throws.
DUALDECODER_EXPORT int device_count() noexcept;

/// The CUDA backend on `device` (0 .. device_count()-1). Throws InvalidArgument for a device that is not there, and Error in a build
/// without the CUDA backend.
DUALDECODER_EXPORT std::shared_ptr<Backend> make_cuda_backend(int device = 0);

}  // namespace dualdecoder::cuda
