// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/step_kernels.hpp"

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/check.hpp"
#include "cuda/launch.hpp"
#include "cuda/memory.hpp"
#include "dualdecoder/detail/advance_place.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/step_view.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr int kThreads = 128;

// A block for each list of `to`.
__global__ void __launch_bounds__(kThreads) copy_row_kernel(StepView view, Selection from, int row, Selection to) {
  const int place = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const bool live = row < view.rows_per_sequence && row_is_live(view.mode[place], row);
  const int from_row = place * view.rows_per_sequence + row;
  const int count = live ? from.count_of(from_row, head) : 0;
  if (threadIdx.x == 0) to.count_of(place, head) = count;
  const bool scores = from.scores != nullptr && to.scores != nullptr;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    to.chunks_of(place, head)[i] = from.chunks_of(from_row, head)[i];
    if (scores) to.scores_of(place, head)[i] = from.scores_of(from_row, head)[i];
  }
}

__device__ int place_of_thread() { return static_cast<int>(blockIdx.x * kThreads + threadIdx.x); }

__global__ void __launch_bounds__(kThreads) advance_kernel(StepState state, const Token* sampled, AdvanceRule rule) {
  wait_for_earlier_kernels();
  const int place = place_of_thread();
  if (place < state.sequences)
    detail::advance_place(state, place, sampled + static_cast<std::ptrdiff_t>(place) * state.rows_per_sequence, rule);
}

__global__ void __launch_bounds__(kThreads) lay_out_kernel(StepState state, Token* tokens, int* positions) {
  wait_for_earlier_kernels();
  const int place = place_of_thread();
  if (place >= state.sequences) return;
  const RowMode mode = state.mode[place];
  for (int row = 0; row < state.rows_per_sequence; ++row) {
    const int at = place * state.rows_per_sequence + row;
    const bool live = row_is_live(mode, row);
    const bool guess = mode == RowMode::dual && row == 1;
    tokens[at] = live ? (guess ? state.guess : state.token)[place] : -1;
    positions[at] = live ? row_position(mode, row, state.position[place]) : 0;
  }
}

__global__ void __launch_bounds__(kThreads) force_kernel(StepState state, const Token* forced, Token* sampled) {
  wait_for_earlier_kernels();
  const int place = place_of_thread();
  if (place >= state.sequences || !row_is_live(state.mode[place], 0)) return;
  if (forced[place] >= 0) sampled[place * state.rows_per_sequence] = forced[place];
}

// Places may share a set of seen tokens, so the bits are set atomically.
__global__ void __launch_bounds__(kThreads) mark_seen_kernel(StepState state, std::uint64_t* const* seen) {
  static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
  wait_for_earlier_kernels();
  const int place = place_of_thread();
  if (place >= state.sequences || !row_is_live(state.mode[place], 0) || seen[place] == nullptr) return;
  const auto token = static_cast<std::uint32_t>(state.token[place]);
  atomicOr(reinterpret_cast<unsigned long long*>(seen[place]) + token / 64, 1ULL << (token % 64));
}

unsigned blocks_for(int places) { return static_cast<unsigned>((places + kThreads - 1) / kThreads); }

}  // namespace

void CudaStepKernels::copy_row(const StepView& view, const Selection& from, int row, const Selection& to, StreamRef stream) {
  dualdecoder::detail::require(to.kv_heads == from.kv_heads, "to.kv_heads", to.kv_heads, "the same as from.kv_heads");
  dualdecoder::detail::require(to.capacity >= from.capacity, "to.capacity", to.capacity, "at least from.capacity");
  if (view.sequences <= 0 || to.kv_heads <= 0) return;
  const DeviceGuard guard(device_);
  const dim3 grid(static_cast<unsigned>(view.sequences), static_cast<unsigned>(to.kv_heads));
  // behind an event as a rule, so that there is no kernel whose end it could overlap
  copy_row_kernel<<<grid, kThreads, 0, stream.get()>>>(view, from, row, to);
  check_launch("copy_row");
}

void CudaStepKernels::advance(const StepState& state, const Outcome& outcome, const AdvanceRule& rule, StreamRef stream) {
  dualdecoder::detail::require(!rule.dual || state.rows_per_sequence == 2, "rows_per_sequence", state.rows_per_sequence,
                               "2 for a dual rule");
  if (state.sequences <= 0) return;
  const DeviceGuard guard(device_);
  check(launch_overlapped(advance_kernel, blocks_for(state.sequences), kThreads, 0, stream.get(), state, outcome.sampled, rule), "advance");
}

void CudaStepKernels::lay_out(const StepState& state, Token* tokens, int* positions, StreamRef stream) {
  if (state.sequences <= 0) return;
  const DeviceGuard guard(device_);
  check(launch_overlapped(lay_out_kernel, blocks_for(state.sequences), kThreads, 0, stream.get(), state, tokens, positions), "lay_out");
}

void CudaStepKernels::force(const StepState& state, const Token* forced, Token* sampled, StreamRef stream) {
  if (state.sequences <= 0) return;
  const DeviceGuard guard(device_);
  check(launch_overlapped(force_kernel, blocks_for(state.sequences), kThreads, 0, stream.get(), state, forced, sampled), "force");
}

void CudaStepKernels::mark_seen(const StepState& state, std::uint64_t* const* seen, StreamRef stream) {
  if (state.sequences <= 0) return;
  const DeviceGuard guard(device_);
  check(launch_overlapped(mark_seen_kernel, blocks_for(state.sequences), kThreads, 0, stream.get(), state, seen), "mark_seen");
}

void CudaStepKernels::upload(void* target, const void* source, std::size_t bytes, StreamRef stream) {
  if (bytes == 0) return;
  const DeviceGuard guard(device_);
  copy_async(target, source, bytes, stream);
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, source), "cudaPointerGetAttributes");
  // pageable memory has been staged by now, everything else is read when the stream gets there
  if (attributes.type != cudaMemoryTypeUnregistered) check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
}

void CudaStepKernels::copy(void* target, const void* source, std::size_t bytes, StreamRef stream) {
  if (bytes == 0) return;
  const DeviceGuard guard(device_);
  copy_async(target, source, bytes, stream);
}

void CudaStepKernels::download(void* target, const void* source, std::size_t bytes, StreamRef stream) {
  if (bytes == 0) return;
  const DeviceGuard guard(device_);
  copy_async(target, source, bytes, stream);
  check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
}

}  // namespace dualdecoder::cuda
