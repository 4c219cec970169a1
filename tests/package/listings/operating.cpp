// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The listings of docs/operating.md.
#include <cstddef>
#include <dualdecoder/cuda/backend.hpp>
#include <dualdecoder/decode_session.hpp>
#include <dualdecoder/load_weights.hpp>
#include <dualdecoder/log.hpp>
#include <memory>
#include <vector>

namespace listings {

struct Requests {
  bool empty() const;
  std::vector<dualdecoder::Token> take();
};
void deliver(const dualdecoder::TokenEvent& event);

void serve(dualdecoder::DecodeSession& session, const dualdecoder::SessionOptions& options, Requests& requests,
           const dualdecoder::AddOptions& add, const bool& serving) {
  //! [serving]
  while (serving) {
    while (session.active() < options.max_sequences && !requests.empty()) session.enqueue(requests.take(), add);
    for (const auto& event : session.step().tokens) deliver(event);
  }
  //! [serving]
}

std::size_t planned(const std::shared_ptr<dualdecoder::Backend>& backend, const dualdecoder::SessionOptions& options) {
  //! [plan]
  const auto config = dualdecoder::read_model_config("model.gguf");
  const auto plan = dualdecoder::memory_plan(*backend, config, options);
  //! [plan]
  return plan.device_bytes();
}

void show_progress(std::size_t done, std::size_t total);

std::shared_ptr<dualdecoder::Backend> cuda_backend(dualdecoder::LogSink& log) {
  //! [cuda]
  dualdecoder::cuda::BackendOptions options;
  options.reserve_pinned_bytes = std::size_t{96} << 30U;  // pinned in the background while weights load
  options.on_pinned = [](std::size_t done, std::size_t total) { show_progress(done, total); };
  options.log = &log;
  const auto backend = dualdecoder::cuda::make_cuda_backend(options);
  //! [cuda]
  return backend;
}

}  // namespace listings
