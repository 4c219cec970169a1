// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "dualdecoder/backend.hpp"

namespace dualdecoder::cuda {

/// Readbacks of memory of `device`: a copy and an event behind it. Throws CudaError.
std::unique_ptr<Readback> make_cuda_readback(int device);

}  // namespace dualdecoder::cuda
