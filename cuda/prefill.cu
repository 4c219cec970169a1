// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include <algorithm>

#include "cuda/check.hpp"
#include "cuda/store_kernels.hpp"
#include "cuda/summarise.cuh"

namespace dualdecoder::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlockTokens = 64;  // that one block brings to the host tier
constexpr int kVector = 8;        // bf16 elements of a 16-byte access

/// Rows of one KV head of an appended block.
struct HeadRows {
  RowsIn rows;
  int first;     // position of row 0
  int kv_heads;  // of a token
  int kv_head;
  int dim;

  __device__ std::size_t at(int position, int d) const {
    return (static_cast<std::size_t>(position - first) * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(kv_head)) *
               static_cast<std::size_t>(dim) +
           static_cast<std::size_t>(d);
  }
  /// As the store keeps it: rounded to bf16.
  __device__ float element(int position, int d) const {
    if (rows.bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(rows.data)[at(position, d)]);
    return __bfloat162float(__float2bfloat16_rn(static_cast<const float*>(rows.data)[at(position, d)]));
  }
  __device__ uint4 vector(int position, int d) const {
    if (rows.bf16) return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(rows.data) + at(position, d));
    const auto* const from = reinterpret_cast<const float4*>(static_cast<const float*>(rows.data) + at(position, d));
    const float4 a = from[0];
    const float4 b = from[1];
    const __nv_bfloat162 pairs[4] = {__floats2bfloat162_rn(a.x, a.y), __floats2bfloat162_rn(a.z, a.w), __floats2bfloat162_rn(b.x, b.y),
                                     __floats2bfloat162_rn(b.z, b.w)};
    return reinterpret_cast<const uint4&>(pairs);
  }
};

struct Block {
  int slot;
  Layer layer;
  int first;  // position of the first token
  int end;    // one behind the last
  RowsIn keys;
  RowsIn values;

  __device__ HeadRows keys_of(const StoreLayout& layout, int kv_head) const { return {keys, first, layout.kv_heads, kv_head, layout.dim}; }
  __device__ HeadRows values_of(const StoreLayout& layout, int kv_head) const {
    return {values, first, layout.kv_heads, kv_head, layout.dim};
  }
};

/// Writes those tokens of chunks first .. first+count-1 that the block holds into chunk-heads that lie side by side at `target`.
__device__ void write_chunks(const StoreLayout& layout, const Block& block, int kv_head, int first, int count, std::byte* target) {
  const HeadRows keys = block.keys_of(layout, kv_head);
  const HeadRows values = block.values_of(layout, kv_head);
  const int vectors_of_row = layout.dim / kVector;
  const int vectors = count * 2 * layout.chunk * vectors_of_row;
  for (int i = static_cast<int>(threadIdx.x); i < vectors; i += static_cast<int>(blockDim.x)) {
    const int row = i / vectors_of_row;  // keys of a chunk, its values, keys of the next
    const int d = (i - row * vectors_of_row) * kVector;
    const int part = row / layout.chunk;
    const int position = (first + part / 2) * layout.chunk + row % layout.chunk;
    if (position < block.first || position >= block.end) continue;
    reinterpret_cast<uint4*>(target)[i] = part % 2 == 0 ? keys.vector(position, d) : values.vector(position, d);
  }
}

/// Host tier and summaries; a block for `chunks` chunks of a KV head. What an earlier call brought of a chunk is read on the device.
__global__ void __launch_bounds__(kThreads) append_to_host(StoreLayout layout, Block block, int chunks) {
  const int kv_head = static_cast<int>(blockIdx.y);
  const int first = block.first / layout.chunk + static_cast<int>(blockIdx.x) * chunks;
  const int last = min(first + chunks - 1, (block.end - 1) / layout.chunk);
  write_chunks(layout, block, kv_head, first, last - first + 1, layout.host_chunk(block.slot, block.layer, kv_head, first));

  const HeadRows keys = block.keys_of(layout, kv_head);
  const HeadRows values = block.values_of(layout, kv_head);
  const std::size_t list = layout.list(block.slot, block.layer, kv_head);
  for (int j = first + static_cast<int>(threadIdx.x) / kWarpLanes; j <= last; j += kThreads / kWarpLanes) {
    if ((j + 1) * layout.chunk > block.end || j >= layout.max_chunks) continue;
    // of tokens that an earlier call brought what the device has of them
    const auto tokens_of = [&](const HeadRows& rows, int part) {
      return [&layout, rows, list, first = block.first, part](int of) {
        const int begin = of * layout.chunk;
        const auto* const earlier = reinterpret_cast<const __nv_bfloat16*>(layout.near_chunk(list, of)) + part;
        return [dim = layout.dim, rows, first, begin, earlier](int t, int d) {
          return begin + t >= first ? rows.element(begin + t, d) : __bfloat162float(earlier[t * dim + d]);
        };
      };
    };
    summarise_keys(layout, list, j, tokens_of(keys, 0));
    // whoever has the last whole chunk of a value group so far writes the group's mean
    const bool is_last = (j + 1) % layout.value_group == 0 || (j + 2) * layout.chunk > block.end || j + 1 == layout.max_chunks;
    if (is_last) summarise_values(layout, list, j, tokens_of(values, layout.chunk * layout.dim));
  }
}

/// Sinks and window: `sinks` chunks from `first_sink` on, then those from `first_near` on, a block for each.
__global__ void append_near(StoreLayout layout, Block block, int first_sink, int sinks, int first_near) {
  const int kv_head = static_cast<int>(blockIdx.y);
  const int i = static_cast<int>(blockIdx.x);
  const int j = i < sinks ? first_sink + i : first_near + i - sinks;
  write_chunks(layout, block, kv_head, j, 1, layout.near_chunk(layout.list(block.slot, block.layer, kv_head), j));
}

}  // namespace

void append_tokens(const StoreLayout& layout, Layer layer, int slot, int first, int count, RowsIn keys, RowsIn values,
                   cudaStream_t stream) {
  if (count <= 0) return;
  const Block block{slot, layer, first, first + count, keys, values};
  const int first_chunk = first / layout.chunk;
  const int last_chunk = (block.end - 1) / layout.chunk;
  const auto heads = static_cast<unsigned>(layout.kv_heads);

  const int chunks = std::max(1, kBlockTokens / layout.chunk);
  const auto blocks = static_cast<unsigned>((last_chunk - first_chunk) / chunks + 1);
  append_to_host<<<dim3(blocks, heads), kThreads, 0, stream>>>(layout, block, chunks);
  check_launch("append_to_host");

  // after the summaries, since the ring reuses the place of the chunk that an earlier call began
  const int sinks = std::max(0, std::min(layout.sink_chunks, last_chunk + 1) - first_chunk);
  const int first_near = std::max({first_chunk, layout.sink_chunks, last_chunk - layout.window_chunks + 1});
  const int near = std::max(0, last_chunk - first_near + 1);
  append_near<<<dim3(static_cast<unsigned>(sinks + near), heads), kThreads / 2, 0, stream>>>(layout, block, first_chunk, sinks, first_near);
  check_launch("append_near");
}

}  // namespace dualdecoder::cuda
