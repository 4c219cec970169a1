// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/step_graph.hpp"

#include <cuda_runtime_api.h>

#include <shared_mutex>
#include <utility>

#include "cuda/check.hpp"

namespace dualdecoder::cuda {
namespace {

class Graph {
 public:
  explicit Graph(cudaGraph_t graph) : graph_(graph) {}
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  cudaGraph_t get() const noexcept { return graph_; }

 private:
  cudaGraph_t graph_;
};

class CudaStepGraph final : public StepGraph {
 public:
  CudaStepGraph(int device, cudaGraph_t graph, StreamRef stream) : device_(device) {
    check(cudaGraphInstantiateWithFlags(&executable_, graph, 0), "cudaGraphInstantiateWithFlags");
    const cudaError_t status = cudaGraphUpload(executable_, stream.get());  // so that the first launch costs no more than the others
    if (status != cudaSuccess) cudaGraphExecDestroy(executable_);
    check(status, "cudaGraphUpload");
  }
  ~CudaStepGraph() override { cudaGraphExecDestroy(executable_); }

  void launch(StreamRef stream) override {
    const DeviceGuard guard(device_);
    check(cudaGraphLaunch(executable_, stream.get()), "cudaGraphLaunch");
  }

 private:
  int device_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

std::shared_mutex& recordings() noexcept {
  static std::shared_mutex mutex;
  return mutex;
}

std::unique_ptr<StepGraph> record_graph(int device, const std::function<void()>& work, StreamRef stream) {
  const DeviceGuard guard(device);
  const std::shared_lock recording(recordings());
  check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  cudaGraph_t recorded = nullptr;
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream.get(), &recorded);  // of a capture that may be broken already: only its end matters
    const Graph dropped(recorded);
    cudaGetLastError();
    throw;
  }
  const cudaError_t status = cudaStreamEndCapture(stream.get(), &recorded);
  const Graph graph(recorded);
  check(status, "recording a step (cudaStreamEndCapture)");
  return std::make_unique<CudaStepGraph>(device, graph.get(), stream);
}

}  // namespace dualdecoder::cuda
