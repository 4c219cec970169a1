// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "dualdecoder/cuda/backend.hpp"

#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {

int device_count() noexcept { return 0; }

std::shared_ptr<Backend> make_cuda_backend(const BackendOptions& /*options*/) {
  throw Error("the CUDA backend is not built into this dualdecoder; use dualdecoder::cpu::make_cpu_backend()");
}

std::shared_ptr<Backend> make_cuda_backend(int /*device*/) { return make_cuda_backend(BackendOptions{}); }

}  // namespace dualdecoder::cuda
