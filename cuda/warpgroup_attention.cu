// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/warpgroup_attention.hpp"

#include <cmath>
#include <cstdint>

#include "cuda/tensor_core.cuh"
#include "cuda/warpgroup.cuh"

namespace dualdecoder::cuda {
namespace {

constexpr int kGroups = 2;              // warpgroups of a block, 64 query rows each
constexpr int kQueries = kGroups * 64;  // of a block
constexpr int kKeys = 128;              // of a stage
constexpr int kThreads = kGroups * 128;
constexpr std::uint32_t kTileBytes = 128 * kTileRowBytes;  // 128 rows of queries, keys or values, 64 columns
constexpr std::uint32_t kTileAlignment = 1024;

/// Bytes of 128 rows of all columns.
constexpr std::uint32_t matrix_bytes(int head_dim) { return static_cast<std::uint32_t>(head_dim / 64) * kTileBytes; }
/// Queries, two stages of keys and two of values; dynamic shared memory may begin anywhere.
constexpr std::uint32_t shared_bytes(int head_dim) { return 5 * matrix_bytes(head_dim) + kTileAlignment; }

/// Rows [first, first + 128) of a tensor's head to swizzled tiles; rows from `count` on become zeros.
template <int kDim>
__device__ void load_tiles(std::uint32_t target, const __nv_bfloat16* head, std::size_t stride, int first, int count) {
  constexpr int kPieces = kDim / 8;
  constexpr int kRowsAtOnce = kThreads / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const int own = static_cast<int>(threadIdx.x) / kPieces;
  static_assert(kRowsAtOnce % 8 == 0, "a thread's rows have one swizzle");
  const std::uint32_t own_target = target + static_cast<std::uint32_t>(piece / 8) * kTileBytes +
                                   static_cast<std::uint32_t>(own) * kTileRowBytes + static_cast<std::uint32_t>((piece ^ own) % 8) * 16;
  const __nv_bfloat16* column = head + piece * 8;
#pragma unroll
  for (int i = 0; i < 128 / kRowsAtOnce; ++i) {
    const int row = first + own + i * kRowsAtOnce;
    const bool present = row < count;
    copy_async(own_target + static_cast<std::uint32_t>(i * kRowsAtOnce) * kTileRowBytes,
               column + static_cast<std::size_t>(present ? row : 0) * stride, present);
  }
}

/// What one thread knows of its two rows, l / 4 and l / 4 + 8 of its warp's 16 for lane l.
template <int kDim>
struct Rows {
  float out[kDim / 2];          // four of every eight columns, as a product leaves them
  std::uint32_t weights[8][4];  // of the block before, by 16 keys, as a product takes them
  float largest[2];             // score, not scaled
  float sum[2];                 // of this lane's columns
};

/// Starts scores = queries * keys^T as a group of its own.
template <int kDim>
__device__ void start_scores(float (&scores)[64], std::uint64_t queries, std::uint64_t keys) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const std::uint64_t step = further(static_cast<std::uint32_t>(k / 4) * kTileBytes + static_cast<std::uint32_t>(k % 4) * 32);
    start_product(scores, queries + step, keys + step, k > 0);
  }
  commit_products();
}

/// Starts out += weights * values as a group of its own.
template <int kDim>
__device__ void start_out(Rows<kDim>& rows, std::uint64_t values) {
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) start_product(rows.out, rows.weights[k], values + further(static_cast<std::uint32_t>(k) * 2048));
  commit_products();
}

/// Scores of keys that a row does not see become -inf; `row` is the thread's first.
__device__ inline void mask(float (&scores)[64], int first_key, int row, const PrefillAttention& job) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // rows beyond the last see what the last sees, and are not stored
    const int last = job.offset + min(row + half * 8, job.rows - 1) - first_key - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      if (n * 8 > last) scores[4 * n + 2 * half] = -INFINITY;
      if (n * 8 + 1 > last) scores[4 * n + 2 * half + 1] = -INFINITY;
    }
  }
}

/// Takes a block of scores into the running softmax: they become weights. `shrink` is what was summed before must be multiplied with.
template <int kDim>
__device__ void weigh(float (&scores)[64], Rows<kDim>& rows, float scale, float (&shrink)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = rows.largest[half];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) largest = fmaxf(largest, fmaxf(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 2));
    shrink[half] = power_of_two((rows.largest[half] - largest) * scale);
    rows.largest[half] = largest;
    const float base = largest * scale;
    float sum = 0.0F;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      float& first = scores[4 * n + 2 * half];
      float& second = scores[4 * n + 2 * half + 1];
      first = power_of_two(first * scale - base);
      second = power_of_two(second * scale - base);
      sum += first + second;
    }
    rows.sum[half] = rows.sum[half] * shrink[half] + sum;
  }
}

/// Ends the product before, shrinks its sums, and rounds the weights for the next one.
template <int kDim>
__device__ void take_weights(const float (&scores)[64], Rows<kDim>& rows, const float (&shrink)[2]) {
  // Mostly no row of the warp has met a larger score, and a factor of one changes nothing. Sums are above zero: asking them here makes the
  // branch, and with it the wait, come after the softmax, which else would be moved behind both.
  const bool grown = shrink[0] != 1.0F || shrink[1] != 1.0F || !(rows.sum[0] > 0.0F) || !(rows.sum[1] > 0.0F);
  if (__any_sync(0xFFFFFFFFU, grown)) {
    wait_for_products<0>();
    pin(rows.out);
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) rows.out[i] *= shrink[i % 4 / 2];
  }
  wait_for_products<0>();
  pin(rows.out);
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) rows.weights[k][i] = pack_bf16(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
  }
}

template <int kDim>
__device__ void store_rows(const Rows<kDim>& rows, int row, int head, const PrefillAttention& job) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 2);
    const float scale = 1.0F / sum;
    const int own = row + half * 8;
    if (own >= job.rows) continue;
    const std::size_t begin =
        (static_cast<std::size_t>(own) * static_cast<std::size_t>(job.heads) + static_cast<std::size_t>(head)) * kDim +
        static_cast<std::size_t>(lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float first = rows.out[4 * n + 2 * half] * scale;
      const float second = rows.out[4 * n + 2 * half + 1] * scale;
      if (job.out_type == DataType::bf16) {
        *reinterpret_cast<std::uint32_t*>(static_cast<__nv_bfloat16*>(job.out) + begin + n * 8) = pack_bf16(first, second);
      } else {
        *reinterpret_cast<float2*>(static_cast<float*>(job.out) + begin + n * 8) = make_float2(first, second);
      }
    }
  }
}

/// One block: kQueries rows of one head against every key that they see. The scores of a block of keys and the output of the block before
/// start together, so that the softmax of the one runs beside the product of the other (FlashAttention-3, arXiv 2407.08608, section 3.2).
template <int kDim>
__global__ void __launch_bounds__(kThreads, 1) warpgroup_attention_kernel(const PrefillAttention job, float scale) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr std::uint32_t kMatrix = matrix_bytes(kDim);
  extern __shared__ unsigned char shared[];
  const std::uint32_t queries = (shared_address(shared) + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  const std::uint32_t key_stages = queries + kMatrix;
  const std::uint32_t value_stages = key_stages + 2 * kMatrix;

  const int head = static_cast<int>(blockIdx.x);
  // the last rows see the most keys, so they come first
  const int first_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kQueries;
  const int keys = job.offset + min(first_row + kQueries, job.rows);  // that some row of the block sees
  const int blocks = (keys + kKeys - 1) / kKeys;
  const int group_row = first_row + static_cast<int>(threadIdx.x) / 128 * 64;
  const int whole = (job.offset + group_row + 1) / kKeys;  // blocks that every row of the warpgroup sees entirely
  const int own_row = first_row + static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;

  const std::size_t stride = static_cast<std::size_t>(job.kv_heads) * kDim;
  const int kv_head = head / (job.heads / job.kv_heads);
  const auto load_keys = [&](int block) {
    load_tiles<kDim>(key_stages + static_cast<std::uint32_t>(block % 2) * kMatrix,
                     static_cast<const __nv_bfloat16*>(job.keys) + kv_head * kDim, stride, block * kKeys, keys);
  };
  const auto load_values = [&](int block) {
    load_tiles<kDim>(value_stages + static_cast<std::uint32_t>(block % 2) * kMatrix,
                     static_cast<const __nv_bfloat16*>(job.values) + kv_head * kDim, stride, block * kKeys, keys);
  };
  const std::uint64_t own_queries = inner_contiguous(queries + static_cast<std::uint32_t>(threadIdx.x / 128) * 64 * kTileRowBytes);
  const auto keys_of = [&](int block) { return inner_contiguous(key_stages + static_cast<std::uint32_t>(block % 2) * kMatrix); };
  const auto values_of = [&](int block) {
    return outputs_contiguous(value_stages + static_cast<std::uint32_t>(block % 2) * kMatrix, kTileBytes);
  };

  load_tiles<kDim>(queries, static_cast<const __nv_bfloat16*>(job.queries) + head * kDim, static_cast<std::size_t>(job.heads) * kDim,
                   first_row, job.rows);
  load_keys(0);
  commit_copies();
  load_values(0);
  if (blocks > 1) load_keys(1);
  commit_copies();

  Rows<kDim> rows;
  rows.largest[0] = rows.largest[1] = -INFINITY;
  rows.sum[0] = rows.sum[1] = 0.0F;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) rows.out[i] = 0.0F;
  float shrink[2];
  {
    float scores[64];
    wait_for_copies<1>();
    show_to_products();
    __syncthreads();
    before_products();
    start_scores<kDim>(scores, own_queries, keys_of(0));
    wait_for_products<0>();
    pin(scores);
    if (whole < 1) mask(scores, 0, own_row, job);
    weigh<kDim>(scores, rows, scale, shrink);
    take_weights<kDim>(scores, rows, shrink);
  }
#pragma unroll 1
  for (int block = 1; block < blocks; ++block) {
    wait_for_copies<0>();
    show_to_products();
    __syncthreads();  // keys of this block and values of the last are there for all; the other stages have been read by all
    if (block + 1 < blocks) load_keys(block + 1);
    load_values(block);
    commit_copies();
    float scores[64];
    before_products();
    start_scores<kDim>(scores, own_queries, keys_of(block));
    start_out<kDim>(rows, values_of(block - 1));
    wait_for_products<1>();
    pin(scores);
    if (block >= whole) mask(scores, block * kKeys, own_row, job);
    weigh<kDim>(scores, rows, scale, shrink);
    take_weights<kDim>(scores, rows, shrink);
  }
  wait_for_copies<0>();
  show_to_products();
  __syncthreads();
  before_products();
  start_out<kDim>(rows, values_of(blocks - 1));
  wait_for_products<0>();
  pin(rows.out);
  store_rows<kDim>(rows, own_row, head, job);
#endif
}

template <int kDim>
cudaError_t launch(const PrefillAttention& job, cudaStream_t stream) {
  const float scale = 1.44269504F / std::sqrt(static_cast<float>(kDim));  // scores become powers of two
  const dim3 grid(static_cast<unsigned>(job.heads), static_cast<unsigned>((job.rows + kQueries - 1) / kQueries));
  warpgroup_attention_kernel<kDim><<<grid, kThreads, shared_bytes(kDim), stream>>>(job, scale);
  return cudaGetLastError();
}

template <int kDim>
cudaError_t prepare() {
  return cudaFuncSetAttribute(warpgroup_attention_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes(kDim));
}

}  // namespace

bool has_warpgroup_attention(int head_dim) noexcept {
#ifdef DUALDECODER_CUDA_SM90A
  int device = 0;
  int major = 0;
  int minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) return false;
  return major == 9 && minor == 0 && (head_dim == 64 || head_dim == 128);
#else
  static_cast<void>(head_dim);
  return false;
#endif
}

cudaError_t prepare_warpgroup_attention(int head_dim) {
  return head_dim == 64 ? prepare<64>() : head_dim == 128 ? prepare<128>() : cudaErrorInvalidValue;
}

cudaError_t launch_warpgroup_attention(const PrefillAttention& job, cudaStream_t stream) {
  if (job.rows < 1 || job.offset < 0 || job.kv_heads < 1 || job.heads % job.kv_heads != 0) return cudaErrorInvalidValue;
  if (job.query_type != DataType::bf16 || job.key_type != DataType::bf16) return cudaErrorInvalidValue;
  return job.head_dim == 64 ? launch<64>(job, stream) : job.head_dim == 128 ? launch<128>(job, stream) : cudaErrorInvalidValue;
}

}  // namespace dualdecoder::cuda
