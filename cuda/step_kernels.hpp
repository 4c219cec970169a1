// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "dualdecoder/retrieval_predictor.hpp"

namespace dualdecoder::cuda {

/// StepKernels for memory of one device: each call but the copies enqueues one small kernel. HostStepKernels is its twin. Throws CudaError,
/// and InvalidArgument as the twin does. Threading: stateless, so any thread.
class CudaStepKernels final : public StepKernels {
 public:
  explicit CudaStepKernels(int device) : device_(device) {}

  void copy_row(const StepView& view, const Selection& from, int row, const Selection& to, StreamRef stream) override;
  void advance(const StepState& state, const Outcome& outcome, const AdvanceRule& rule, StreamRef stream) override;
  void lay_out(const StepState& state, Token* tokens, int* positions, StreamRef stream) override;
  void force(const StepState& state, const Token* forced, Token* sampled, StreamRef stream) override;
  void mark_seen(const StepState& state, std::uint64_t* const* seen, StreamRef stream) override;
  void upload(void* target, const void* source, std::size_t bytes, StreamRef stream) override;
  void copy(void* target, const void* source, std::size_t bytes, StreamRef stream) override;
  void download(void* target, const void* source, std::size_t bytes, StreamRef stream) override;

 private:
  int device_;
};

}  // namespace dualdecoder::cuda
