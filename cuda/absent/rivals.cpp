// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "dualdecoder/cuda/rivals.hpp"

#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

[[noreturn]] void refuse() { throw Error("the CUDA backend is not built into this dualdecoder, nor are the stores that decorate its own"); }

}  // namespace

std::unique_ptr<KvStore> rank_by_bounds(std::unique_ptr<KvStore> /*inner*/, const StoreOptions& /*options*/, MemoryResource& /*memory*/,
                                        StreamRef /*stream*/) {
  refuse();
}
void plan_bounds(const StoreOptions& /*options*/, MemoryPlan& /*plan*/) { refuse(); }

std::unique_ptr<KvStore> attend_predicted(std::unique_ptr<KvStore> /*inner*/, const StoreOptions& /*options*/, float /*correct_below*/,
                                          MemoryResource& /*memory*/, StreamRef /*stream*/) {
  refuse();
}
void plan_predicted(const StoreOptions& /*options*/, float /*correct_below*/, MemoryPlan& /*plan*/) { refuse(); }

}  // namespace dualdecoder::cuda
