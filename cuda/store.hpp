// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "dualdecoder/error.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "dualdecoder/stream.hpp"
#include "dualdecoder/tensor.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder::cuda {

/// What a store of the CUDA backend works with; everything outlives it.
struct StoreResources {
  MemoryResource* device;  ///< slots, summaries, sinks, window, work space; a full store's keys and values
  MemoryResource* host;    ///< the host tier: pinned, readable and writable by the device at the same address
  StreamRef stream;        ///< orders what the constructor enqueues and what statistics() reads
  int ordinal = 0;         ///< of the device
};

/// A store of the kind that the options name. Its calls read nothing that a pass leaves on the device, so passes can be recorded and
/// replayed; that a place's slot is sealed, at its position and below its capacity is the caller's to see to. All calls of a sequence are
/// given one stream. Throws InvalidArgument naming the option, OutOfMemory, CudaError.
std::unique_ptr<KvStore> make_cuda_store(const StoreOptions& options, const StoreResources& resources);

/// What make_cuda_store and max_sequences sequences of max_context tokens take. Needs no device. Throws InvalidArgument naming the option.
MemoryPlan cuda_store_plan(const StoreOptions& options);

/// Throws InvalidArgument where kernels do not read or write the type.
inline void check_rows(const ConstTensor& rows, const char* field) {
  dualdecoder::detail::require(rows.type == DataType::f32 || rows.type == DataType::bf16, field, name_of(rows.type), "f32 or bf16");
}

}  // namespace dualdecoder::cuda
