// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

/// Launches that overlap with the end of the kernel before them (programmatic dependent launch, compute capability 9.0).
///
/// A kernel that launch_overlapped() starts may begin before the kernels ahead of it in the stream have ended. It promises:
/// - Every thread that reads or writes what another kernel touches calls wait_for_earlier_kernels() first, and at least one thread of every
///   block calls it. So a kernel ends after all ahead of it, and whatever it writes no kernel ahead of it still reads.
/// - Ahead of the wait it reads only its arguments and what no kernel of the step writes: weights, tables.
/// - What others write it reads through pointers without __restrict__ and not by __ldg(): the compiler may move loads of constants ahead of
///   the wait.
/// Such a kernel may be mixed with any other work, as it ends after everything ahead of it has ended: whatever follows without overlap, or
/// waits for an event behind it, sees all of that. An event that the stream waits for ahead of the kernel is waited for as well.
namespace dualdecoder::cuda {

/// Returns when the kernels ahead have ended and what they wrote can be read.
__device__ inline void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel begin, once every block has said so or ended, if it was launched to overlap. Its blocks then hold a place on the
/// device while they wait, so say this where the rest of the block is short. What is written afterwards is visible to it all the same.
/// Said ahead of wait_for_earlier_kernels(), the next kernel may begin while several ahead of it run, to bring what it may read ahead of
/// its own wait; said behind it, all kernels ahead but this one have ended then.
__device__ inline void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Launches kernel<<<grid, block, shared_bytes, stream>>>(arguments...) so that it overlaps; as usual where its code cannot wait, which is
/// so for code compiled from PTX of older devices. Can be recorded.
template <class... Parameters, class... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream,
                              const Arguments&... arguments) {
  cudaFuncAttributes attributes{};
  if (const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel); status != cudaSuccess) return status;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = CUDART_VERSION >= 12030 && attributes.ptxVersion >= 90 ? 1 : 0;  // recordings keep the overlap since CUDA 12.3
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace dualdecoder::cuda
