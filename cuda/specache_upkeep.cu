// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "cuda/check.hpp"
#include "cuda/fragments.cuh"
#include "cuda/resolve_tools.cuh"
#include "cuda/shared_memory.hpp"
#include "cuda/specache_layout.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // bf16 elements of a 16-byte access

/// Where the tokens of a list are to be had: from an appended block, and before that from the window.
struct TokenSource {
  RowsIn keys;  ///< of the block [tokens, kv_heads, dim]
  RowsIn values;
  int first;  ///< position of the block's first token

  /// An element as the store keeps it, rounded to bf16.
  __device__ float element(const SpeCacheLayout& layout, std::size_t list, int kv_head, int position, bool value, int d) const {
    if (position < first) {
      const auto* const token = reinterpret_cast<const __nv_bfloat16*>(layout.window_token(list, position));
      return __bfloat162float(token[(value ? layout.dim : 0) + d]);
    }
    const std::size_t at = place(layout, kv_head, position) + static_cast<std::size_t>(d);
    const RowsIn& rows = value ? values : keys;
    if (rows.bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(rows.data)[at]);
    return __bfloat162float(__float2bfloat16_rn(static_cast<const float*>(rows.data)[at]));
  }
  /// kVector elements of a token of the block.
  __device__ uint4 vector(const SpeCacheLayout& layout, int kv_head, int position, bool value, int d) const {
    const std::size_t at = place(layout, kv_head, position) + static_cast<std::size_t>(d);
    const RowsIn& rows = value ? values : keys;
    if (rows.bf16) return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(rows.data) + at);
    const auto* const from = reinterpret_cast<const float4*>(static_cast<const float*>(rows.data) + at);
    const float4 a = from[0];
    const float4 b = from[1];
    const __nv_bfloat162 pairs[4] = {__floats2bfloat162_rn(a.x, a.y), __floats2bfloat162_rn(a.z, a.w), __floats2bfloat162_rn(b.x, b.y),
                                     __floats2bfloat162_rn(b.z, b.w)};
    return reinterpret_cast<const uint4&>(pairs);
  }

 private:
  __device__ std::size_t place(const SpeCacheLayout& layout, int kv_head, int position) const {
    return (static_cast<std::size_t>(position - first) * static_cast<std::size_t>(layout.kv_heads) + static_cast<std::size_t>(kv_head)) *
           static_cast<std::size_t>(layout.dim);
  }
};

/// A group's elements in shared memory, one bank off from token to token, and its codes.
struct GroupMemory {
  float* elements;       // [tokens, dim + 1]
  std::uint32_t* codes;  // as in the copy
  float* zeros;          // [dim] of keys, [value_groups, tokens] of values
  float* scales;

  __device__ explicit GroupMemory(const LowBitGroup& group) {
    elements = reinterpret_cast<float*>(block_memory());
    codes = reinterpret_cast<std::uint32_t*>(elements + group.tokens * (group.dim + 1));
    zeros = reinterpret_cast<float*>(codes + group.key_zeros / 4);
    scales = zeros + runs(group);
  }
  __host__ __device__ static int runs(const LowBitGroup& group) { return max_of(group.dim, group.value_groups * group.tokens); }
  static std::size_t bytes(const LowBitGroup& group) {
    return static_cast<std::size_t>(group.tokens * (group.dim + 1) + group.key_zeros / 4 + 2 * runs(group)) * sizeof(float);
  }

 private:
  __host__ __device__ static int max_of(int a, int b) { return a > b ? a : b; }
};

/// Nearest f16; what would be infinite is cut to the largest one.
__device__ __half to_half(float value) { return __float2half_rn(fminf(fmaxf(value, -65504.0F), 65504.0F)); }

/// Zero and scale of `count` elements that lie `stride` apart; as in quantise() of src/low_bit.cpp, without fused products.
__device__ void find_range(const float* from, int stride, int count, int bits, __half& zero, __half& scale) {
  float least = from[0];
  float most = from[0];
  for (int i = 1; i < count; ++i) {
    least = fminf(least, from[i * stride]);
    most = fmaxf(most, from[i * stride]);
  }
  zero = to_half(bits == 1 ? __fadd_rn(__fmul_rn(0.75F, least), __fmul_rn(0.25F, most)) : least);
  scale = to_half(bits == 1 ? __fsub_rn(__fmul_rn(0.5F, most), __fmul_rn(0.5F, least)) : __fdiv_rn(__fsub_rn(most, least), 3.0F));
}

/// Quantises the group that begins at `position`; called by a whole block.
__device__ void quantise_group(const SpeCacheLayout& layout, const TokenSource& source, std::size_t list, int kv_head, int position,
                               std::byte* target) {
  const LowBitGroup& group = layout.copy;
  const GroupMemory memory(group);
  const int thread = static_cast<int>(threadIdx.x);
  const int dim = group.dim;
  const int code_words = group.key_zeros / 4;
  for (const bool value : {false, true}) {
    __syncthreads();  // the keys are done with
    for (int i = thread; i < group.tokens * dim; i += kThreads) {
      const int token = i / dim;
      memory.elements[token * (dim + 1) + i % dim] = source.element(layout, list, kv_head, position + token, value, i % dim);
    }
    for (int i = thread; i < code_words; i += kThreads) memory.codes[i] = 0;
    __syncthreads();
    auto* const zeros = reinterpret_cast<__half*>(target + (value ? group.value_zeros : group.key_zeros));
    auto* const scales = reinterpret_cast<__half*>(target + (value ? group.value_scales : group.key_scales));
    const int runs = value ? group.value_groups * group.tokens : dim;
    for (int i = thread; i < runs; i += kThreads) {
      const int first = value ? i / group.tokens * group.channels : 0;
      const float* const from = memory.elements + (value ? i % group.tokens * (dim + 1) + first : i);
      __half zero;
      __half scale;
      find_range(from, value ? 1 : dim + 1, value ? min(group.channels, dim - first) : group.tokens, group.bits, zero, scale);
      zeros[i] = zero;
      scales[i] = scale;
      memory.zeros[i] = __half2float(zero);  // codes are nearest to what is stored, not to what was meant
      memory.scales[i] = __half2float(scale);
    }
    __syncthreads();
    const float last = group.bits == 1 ? 1.0F : 3.0F;
    for (int i = thread; i < group.tokens * dim; i += kThreads) {
      const int token = i / dim;
      const int d = i % dim;
      const int run = value ? d / group.channels * group.tokens + token : d;
      const float scale = memory.scales[run];
      const float level =
          scale > 0.0F ? rintf(__fdiv_rn(__fsub_rn(memory.elements[token * (dim + 1) + d], memory.zeros[run]), scale)) : 0.0F;
      const auto code = static_cast<std::uint32_t>(fminf(fmaxf(level, 0.0F), last));
      const CodePlace at = value ? value_code_place(group, token, d) : key_code_place(group, token, d);
      if (code != 0) atomicOr(memory.codes + at.word, code << at.shift);
    }
    __syncthreads();
    auto* const codes = reinterpret_cast<std::uint32_t*>(target + (value ? group.value_codes : 0));
    for (int i = thread; i < code_words; i += kThreads) codes[i] = memory.codes[i];
  }
}

/// Grid: (groups, KV heads).
__global__ void __launch_bounds__(kThreads)
    quantise_kernel(SpeCacheLayout layout, Layer layer, int slot, int first_group, TokenSource source) {
  const int kv_head = static_cast<int>(blockIdx.y);
  const int position = first_group + static_cast<int>(blockIdx.x) * layout.copy.tokens;
  quantise_group(layout, source, layout.list(slot, layer, kv_head), kv_head, position, layout.copied_group(slot, layer, kv_head, position));
}

/// Tokens of an appended block to the host tier, and those from `window_first` on to the window. A thread moves a vector. Grid: (tokens of
/// kThreads vectors, KV heads).
__global__ void __launch_bounds__(kThreads)
    place_tokens(SpeCacheLayout layout, Layer layer, int slot, int count, int window_first, TokenSource source) {
  const int kv_head = static_cast<int>(blockIdx.y);
  const int vectors = 2 * layout.dim / kVector;  // of a token
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i / vectors >= count) return;
  const int position = source.first + i / vectors;
  const int d = i % vectors * kVector;
  const uint4 vector = source.vector(layout, kv_head, position, d >= layout.dim, d % layout.dim);
  reinterpret_cast<uint4*>(layout.host_token(slot, layer, kv_head, position))[i % vectors] = vector;
  if (position < window_first) return;
  reinterpret_cast<uint4*>(layout.window_token(layout.list(slot, layer, kv_head), position))[i % vectors] = vector;
}

/// Grid: (layers and KV heads, places).
__global__ void __launch_bounds__(kThreads) commit_kernel(SpeCacheLayout layout, StepView view, TransferList write_back) {
  const int layer = static_cast<int>(blockIdx.x) / layout.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % layout.kv_heads;
  const int place = static_cast<int>(blockIdx.y);
  if (!row_is_live(view.mode[place], 0)) return;
  const int length = view.position[place] + 1;
  const int slot = view.slot_of[place];
  const std::size_t list = layout.list(slot, layer, kv_head);
  const int copied = layout.copied(length - 1);
  if (layout.copied(length) > copied) {
    const TokenSource window{.keys = {}, .values = {}, .first = length};
    quantise_group(layout, window, list, kv_head, copied, layout.copied_group(slot, layer, kv_head, copied));
  }
  if (length % layout.copy.tokens != 0 || threadIdx.x != 0) return;
  const int first = length - layout.copy.tokens;
  const std::uint32_t bytes = static_cast<std::uint32_t>(layout.copy.tokens) * layout.token_bytes;
  write_back.items[atomicAdd(write_back.count, 1)] = {layout.window_token(list, first), layout.host_token(slot, layer, kv_head, first),
                                                      bytes, 0.0F};
  add_to(layout, Counter::write_back_bytes, bytes);
}

/// Positions first .. first + grid - 1 of a storage slot from the host tier. Grid: (tokens, layers and KV heads).
__global__ void restore_tokens(SpeCacheLayout layout, int slot, int first) {
  const int position = first + static_cast<int>(blockIdx.x);
  const int layer = static_cast<int>(blockIdx.y) / layout.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.y) % layout.kv_heads;
  const auto* const from = reinterpret_cast<const uint4*>(layout.host_token(slot, layer, kv_head, position));
  auto* const to = reinterpret_cast<uint4*>(layout.window_token(layout.list(slot, layer, kv_head), position));
  for (unsigned i = threadIdx.x; i < layout.token_bytes / sizeof(uint4); i += blockDim.x) to[i] = from[i];
}

/// Forgets predictions, and fetched tokens from `first` on, of lists first_list .. first_list + lists - 1; a thread for each.
__global__ void forget_tokens(SpeCacheLayout layout, std::size_t first_list, int lists, int first) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= lists) return;
  const std::size_t list = first_list + static_cast<std::size_t>(i);
  const int* const tokens = layout.fetched_token + list * static_cast<std::size_t>(layout.selected);
  int count = layout.fetched_count[list];
  while (count > 0 && tokens[count - 1] >= first) --count;
  layout.fetched_count[list] = count;
  layout.predicted_count[list] = -1;
}

void forget_from(const SpeCacheLayout& layout, int slot, int first, cudaStream_t stream) {
  const int lists = layout.layers * layout.kv_heads;
  forget_tokens<<<static_cast<unsigned>((lists + kThreads - 1) / kThreads), kThreads, 0, stream>>>(layout, layout.list(slot, 0, 0), lists,
                                                                                                   first);
  check_launch("forget_fetched");
}

}  // namespace

void append_to_copy(const SpeCacheLayout& layout, Layer layer, int slot, int first, int count, RowsIn keys, RowsIn values,
                    cudaStream_t stream) {
  if (count == 0) return;
  const TokenSource source{keys, values, first};
  const auto kv_heads = static_cast<unsigned>(layout.kv_heads);
  const int copied = layout.copied(first);
  const int groups = (layout.copied(first + count) - copied) / layout.copy.tokens;
  if (groups > 0) {  // before the window, from which it reads, moves on
    const std::size_t bytes = GroupMemory::bytes(layout.copy);
    allow_shared_memory(quantise_kernel, bytes, "append_to_copy: shared memory of a group");
    quantise_kernel<<<dim3(static_cast<unsigned>(groups), kv_heads), kThreads, bytes, stream>>>(layout, layer, slot, copied, source);
    check_launch("append_to_copy: quantise");
  }
  const int vectors = count * (2 * layout.dim / kVector);
  place_tokens<<<dim3(static_cast<unsigned>((vectors + kThreads - 1) / kThreads), kv_heads), kThreads, 0, stream>>>(
      layout, layer, slot, count, layout.copied(first + count), source);
  check_launch("append_to_copy: place");
}

void commit_to_copy(const SpeCacheLayout& layout, const StepView& view, const TransferList& write_back, cudaStream_t stream) {
  check(cudaMemsetAsync(write_back.count, 0, sizeof(int), stream), "commit_to_copy: cudaMemsetAsync");
  if (view.sequences == 0) return;
  const std::size_t bytes = GroupMemory::bytes(layout.copy);
  allow_shared_memory(commit_kernel, bytes, "commit_to_copy: shared memory of a group");
  commit_kernel<<<dim3(static_cast<unsigned>(layout.layers * layout.kv_heads), static_cast<unsigned>(view.sequences)), kThreads, bytes,
                  stream>>>(layout, view, write_back);
  check_launch("commit_to_copy");
}

void cut_copy(const SpeCacheLayout& layout, int slot, int tokens, int before, cudaStream_t stream) {
  const int first = layout.copied(tokens);
  const int end = std::min(tokens, layout.copied(before));
  if (end > first) {
    const dim3 grid(static_cast<unsigned>(end - first), static_cast<unsigned>(layout.layers * layout.kv_heads));
    restore_tokens<<<grid, 64, 0, stream>>>(layout, slot, first);
    check_launch("cut_copy");
  }
  forget_from(layout, slot, first, stream);
}

void forget_fetched(const SpeCacheLayout& layout, int slot, cudaStream_t stream) { forget_from(layout, slot, 0, stream); }

}  // namespace dualdecoder::cuda
