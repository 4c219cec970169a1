// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/check.hpp"

namespace dualdecoder::test {

/// What `enqueue` put on a stream, as a graph: to launch again as a step's graph does, without what the host takes for launches.
class Replay {
 public:
  template <class Enqueue>
  Replay(cudaStream_t stream, Enqueue&& enqueue) {
    cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue();
    cuda::check(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    cuda::check(cudaGraphInstantiate(&program_, graph_, 0), "cudaGraphInstantiate");
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;
  ~Replay() {
    cudaGraphExecDestroy(program_);
    cudaGraphDestroy(graph_);
  }
  void launch(cudaStream_t stream) const { cuda::check(cudaGraphLaunch(program_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t program_ = nullptr;
};

}  // namespace dualdecoder::test
