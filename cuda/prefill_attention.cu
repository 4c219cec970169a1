// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/prefill_attention.hpp"

#include <cmath>
#include <cstdint>

#include "cuda/for_head_dim.hpp"
#include "cuda/tensor_core.cuh"

namespace dualdecoder::cuda {
namespace {

/// How a block is cut for a head_dim. A warp owns kTiles * 16 query rows and all of head_dim, so softmax stays within four lanes.
template <int kDim>
struct Shape {
  static constexpr int kQueries = 128;
  static constexpr int kKeys = 64;
  static constexpr int kWarps = kDim > 128 ? 8 : 4;
  static constexpr int kTiles = kQueries / kWarps / 16;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kBlocksPerProcessor = kDim > 128 ? 1 : 2;
  /// Bytes between rows in shared memory: an odd number of 16-byte pieces, so that eight rows of a matrix lie in eight different ones.
  static constexpr int kStride = kDim * 2 + 16;
  static constexpr int kKeyBytes = kKeys * kStride;
  static constexpr int kSharedBytes = kQueries * kStride + 4 * kKeyBytes;  // queries, and two stages of keys and values
};

/// Rows [first, first + kRows) of a tensor's head to shared memory as bf16; rows from `count` on become zeros.
template <int kDim, int kRows, int kThreads>
__device__ void load_rows(std::uint32_t target, const __nv_bfloat16* head, std::size_t stride, int first, int count) {
  constexpr int kPieces = kDim / 8;
#pragma unroll
  for (int i = 0; i < (kRows * kPieces + kThreads - 1) / kThreads; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    if (kRows * kPieces % kThreads != 0 && index >= kRows * kPieces) break;
    const int row = index / kPieces;
    const int piece = index % kPieces;
    const bool present = first + row < count;
    const __nv_bfloat16* source = head + static_cast<std::size_t>(present ? first + row : 0) * stride + piece * 8;
    copy_async(target + static_cast<std::uint32_t>(row * Shape<kDim>::kStride + piece * 16), source, present);
  }
}

template <int kDim, int kRows, int kThreads>
__device__ void load_rows(std::uint32_t target, const float* head, std::size_t stride, int first, int count) {
  constexpr int kPieces = kDim / 8;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < kRows * kPieces; index += kThreads) {
    const int row = index / kPieces;
    const int piece = index % kPieces;
    std::uint32_t words[4] = {};
    if (first + row < count) {
      const auto* source = reinterpret_cast<const float4*>(head + static_cast<std::size_t>(first + row) * stride + piece * 8);
      const float4 low = source[0];
      const float4 high = source[1];
      words[0] = pack_bf16(low.x, low.y);
      words[1] = pack_bf16(low.z, low.w);
      words[2] = pack_bf16(high.x, high.y);
      words[3] = pack_bf16(high.z, high.w);
    }
    store_shared(target + static_cast<std::uint32_t>(row * Shape<kDim>::kStride + piece * 16), words);
  }
}

/// What one warp knows of its rows. Lane l holds, of tile t, rows l / 4 and l / 4 + 8, and of every eight columns 2 (l % 4) and the next.
template <int kDim>
struct Rows {
  static constexpr int kTiles = Shape<kDim>::kTiles;
  float out[kTiles][kDim / 8][4];
  float largest[kTiles][2];  // score, not scaled
  float sum[kTiles][2];      // of this lane's columns
};

template <int kDim>
using Scores = float[Shape<kDim>::kTiles][Shape<kDim>::kKeys / 8][4];

/// scores = queries * keys^T. `queries` and `keys` are what this lane names to load_matrices.
template <int kDim>
__device__ void score(Scores<kDim>& scores, std::uint32_t queries, std::uint32_t keys) {
  using S = Shape<kDim>;
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[t][n][e] = 0.0F;
    }
  }
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    std::uint32_t a[S::kTiles][4];
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) load_matrices(a[t], queries + static_cast<std::uint32_t>(t * 16 * S::kStride + k * 32));
#pragma unroll
    for (int n = 0; n < S::kKeys / 16; ++n) {
      std::uint32_t b[4];
      load_matrices(b, keys + static_cast<std::uint32_t>(n * 16 * S::kStride + k * 32));
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        multiply_add(scores[t][2 * n], a[t], b[0], b[1]);
        multiply_add(scores[t][2 * n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

/// Takes a block of scores into the running softmax: they become weights, and what was summed before is scaled to the new largest score.
template <int kDim>
__device__ void weigh(Scores<kDim>& scores, Rows<kDim>& rows, float scale) {
  using S = Shape<kDim>;
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = rows.largest[t][half];
#pragma unroll
      for (int n = 0; n < S::kKeys / 8; ++n) largest = fmaxf(largest, fmaxf(scores[t][n][2 * half], scores[t][n][2 * half + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 2));
      shrink[half] = power_of_two((rows.largest[t][half] - largest) * scale);
      rows.largest[t][half] = largest;
      const float base = largest * scale;
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < S::kKeys / 8; ++n) {
        scores[t][n][2 * half] = power_of_two(scores[t][n][2 * half] * scale - base);
        scores[t][n][2 * half + 1] = power_of_two(scores[t][n][2 * half + 1] * scale - base);
        sum += scores[t][n][2 * half] + scores[t][n][2 * half + 1];
      }
      rows.sum[t][half] = rows.sum[t][half] * shrink[half] + sum;
    }
    // mostly no row of the warp has met a larger score, and a factor of one changes nothing
    if (__any_sync(0xFFFFFFFFU, shrink[0] != 1.0F || shrink[1] != 1.0F)) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        rows.out[t][n][0] *= shrink[0];
        rows.out[t][n][1] *= shrink[0];
        rows.out[t][n][2] *= shrink[1];
        rows.out[t][n][3] *= shrink[1];
      }
    }
  }
}

/// out += weights * values; `values` is what this lane names to load_matrices_transposed.
template <int kDim>
__device__ void gather(const Scores<kDim>& weights, Rows<kDim>& rows, std::uint32_t values) {
  using S = Shape<kDim>;
#pragma unroll
  for (int k = 0; k < S::kKeys / 16; ++k) {
    std::uint32_t a[S::kTiles][4];
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) {
      a[t][0] = pack_bf16(weights[t][2 * k][0], weights[t][2 * k][1]);
      a[t][1] = pack_bf16(weights[t][2 * k][2], weights[t][2 * k][3]);
      a[t][2] = pack_bf16(weights[t][2 * k + 1][0], weights[t][2 * k + 1][1]);
      a[t][3] = pack_bf16(weights[t][2 * k + 1][2], weights[t][2 * k + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      std::uint32_t b[4];
      load_matrices_transposed(b, values + static_cast<std::uint32_t>(k * 16 * S::kStride + n * 32));
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        multiply_add(rows.out[t][2 * n], a[t], b[0], b[1]);
        multiply_add(rows.out[t][2 * n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

/// Scores of keys that a row does not see become -inf. `first_key` is of the block, `row` the first of the warp's, in queries.
template <int kDim>
__device__ void mask(Scores<kDim>& scores, int first_key, int row, const PrefillAttention& job) {
  using S = Shape<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // rows beyond the last see what the last sees, and are not stored
      const int last = job.offset + min(row + t * 16 + half * 8 + lane / 4, job.rows - 1);
#pragma unroll
      for (int n = 0; n < S::kKeys / 8; ++n) {
        const int key = first_key + n * 8 + lane % 4 * 2;
        if (key > last) scores[t][n][2 * half] = -INFINITY;
        if (key + 1 > last) scores[t][n][2 * half + 1] = -INFINITY;
      }
    }
  }
}

template <int kDim>
__device__ void store_rows(const Rows<kDim>& rows, int row, int head, const PrefillAttention& job) {
  using S = Shape<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = rows.sum[t][half];
      sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 2);
      const float scale = 1.0F / sum;
      const int own = row + t * 16 + half * 8 + lane / 4;
      if (own >= job.rows) continue;
      const std::size_t begin =
          (static_cast<std::size_t>(own) * static_cast<std::size_t>(job.heads) + static_cast<std::size_t>(head)) * kDim +
          static_cast<std::size_t>(lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float first = rows.out[t][n][2 * half] * scale;
        const float second = rows.out[t][n][2 * half + 1] * scale;
        if (job.out_type == DataType::bf16) {
          *reinterpret_cast<std::uint32_t*>(static_cast<__nv_bfloat16*>(job.out) + begin + n * 8) = pack_bf16(first, second);
        } else {
          *reinterpret_cast<float2*>(static_cast<float*>(job.out) + begin + n * 8) = make_float2(first, second);
        }
      }
    }
  }
}

/// One block: kQueries rows of one head against every key that they see, in blocks of kKeys from key 0 up.
template <int kDim, class Key>
__global__ void __launch_bounds__(Shape<kDim>::kThreads, Shape<kDim>::kBlocksPerProcessor)
    prefill_attention_kernel(const PrefillAttention job, float scale) {
  using S = Shape<kDim>;
  extern __shared__ __align__(128) unsigned char shared[];
  const std::uint32_t queries = shared_address(shared);
  const std::uint32_t stages = queries + S::kQueries * S::kStride;  // keys and values of a stage, then the other's

  const int head = static_cast<int>(blockIdx.x);
  // the last rows see the most keys, so they come first
  const int first_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * S::kQueries;
  const int keys = job.offset + min(first_row + S::kQueries, job.rows);  // that some row of the block sees
  const int blocks = (keys + S::kKeys - 1) / S::kKeys;
  const int whole = (job.offset + first_row + 1) / S::kKeys;  // blocks that every row sees entirely

  const std::size_t kv_stride = static_cast<std::size_t>(job.kv_heads) * kDim;
  const int kv_head = head / (job.heads / job.kv_heads);
  const Key* key_head = static_cast<const Key*>(job.keys) + kv_head * kDim;
  const Key* value_head = static_cast<const Key*>(job.values) + kv_head * kDim;
  const auto load_stage = [&](int block) {
    const std::uint32_t stage = stages + static_cast<std::uint32_t>(block % 2 * 2 * S::kKeyBytes);
    load_rows<kDim, S::kKeys, S::kThreads>(stage, key_head, kv_stride, block * S::kKeys, keys);
    load_rows<kDim, S::kKeys, S::kThreads>(stage + S::kKeyBytes, value_head, kv_stride, block * S::kKeys, keys);
    commit_copies();
  };
  const std::size_t query_stride = static_cast<std::size_t>(job.heads) * kDim;
  if (job.query_type == DataType::bf16) {
    load_rows<kDim, S::kQueries, S::kThreads>(queries, static_cast<const __nv_bfloat16*>(job.queries) + head * kDim, query_stride,
                                              first_row, job.rows);
  } else {
    load_rows<kDim, S::kQueries, S::kThreads>(queries, static_cast<const float*>(job.queries) + head * kDim, query_stride, first_row,
                                              job.rows);
  }
  load_stage(0);

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * S::kTiles * 16;
  const std::uint32_t own_queries = queries + static_cast<std::uint32_t>((warp_row + lane % 16) * S::kStride + lane / 16 * 16);
  const auto own_keys = static_cast<std::uint32_t>((lane / 16 * 8 + lane % 8) * S::kStride + lane / 8 % 2 * 16);
  const auto own_values = static_cast<std::uint32_t>(S::kKeyBytes + lane % 16 * S::kStride + lane / 16 * 16);

  Rows<kDim> rows;
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
    rows.largest[t][0] = rows.largest[t][1] = -INFINITY;
    rows.sum[t][0] = rows.sum[t][1] = 0.0F;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rows.out[t][n][e] = 0.0F;
    }
  }

#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    wait_for_copies<0>();
    __syncthreads();  // this stage is there for all, and the other has been read by all
    if (block + 1 < blocks) load_stage(block + 1);
    const std::uint32_t stage = stages + static_cast<std::uint32_t>(block % 2 * 2 * S::kKeyBytes);
    Scores<kDim> scores;
    score<kDim>(scores, own_queries, stage + own_keys);
    if (block >= whole) mask<kDim>(scores, block * S::kKeys, first_row + warp_row, job);
    weigh<kDim>(scores, rows, scale);
    gather<kDim>(scores, rows, stage + own_values);
  }
  store_rows<kDim>(rows, first_row + warp_row, head, job);
}

template <int kDim, class Key>
cudaError_t launch(const PrefillAttention& job, cudaStream_t stream) {
  using S = Shape<kDim>;
  const float scale = 1.44269504F / std::sqrt(static_cast<float>(kDim));  // scores become powers of two
  const dim3 grid(static_cast<unsigned>(job.heads), static_cast<unsigned>((job.rows + S::kQueries - 1) / S::kQueries));
  prefill_attention_kernel<kDim, Key><<<grid, S::kThreads, S::kSharedBytes, stream>>>(job, scale);
  return cudaGetLastError();
}

template <int kDim, class Key>
cudaError_t prepare() {
  return cudaFuncSetAttribute(prefill_attention_kernel<kDim, Key>, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape<kDim>::kSharedBytes);
}

}  // namespace

bool has_prefill_attention(int head_dim) noexcept { return prefill_attention_shared_bytes(head_dim) > 0; }

std::size_t prefill_attention_shared_bytes(int head_dim) noexcept {
  return for_head_dim(head_dim, [](auto dim) -> std::size_t {
    constexpr int kDim = dim;
    if constexpr (kDim == 0) {
      return 0;
    } else {
      return Shape<kDim>::kSharedBytes;
    }
  });
}

cudaError_t prepare_prefill_attention(int head_dim) {
  return for_head_dim(head_dim, [](auto dim) -> cudaError_t {
    constexpr int kDim = dim;
    if constexpr (kDim == 0) {
      return cudaErrorInvalidValue;
    } else {
      const cudaError_t status = prepare<kDim, __nv_bfloat16>();
      return status != cudaSuccess ? status : prepare<kDim, float>();
    }
  });
}

cudaError_t launch_prefill_attention(const PrefillAttention& job, cudaStream_t stream) {
  if (job.rows < 1 || job.offset < 0 || job.kv_heads < 1 || job.heads % job.kv_heads != 0) return cudaErrorInvalidValue;
  return for_head_dim(job.head_dim, [&](auto dim) -> cudaError_t {
    constexpr int kDim = dim;
    if constexpr (kDim == 0) {
      return cudaErrorInvalidValue;
    } else {
      return job.key_type == DataType::bf16 ? launch<kDim, __nv_bfloat16>(job, stream) : launch<kDim, float>(job, stream);
    }
  });
}

}  // namespace dualdecoder::cuda
