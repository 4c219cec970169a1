// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/warpgroup_attention.hpp"

#include <cmath>
#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/for_head_dim.hpp"
#include "cuda/tensor_core.cuh"
#include "cuda/tensor_map.hpp"
#include "cuda/warpgroup.cuh"

namespace dualdecoder::cuda {
namespace {

constexpr int kStages = 2;  // of keys, and as many of values
constexpr std::uint32_t kTileAlignment = 1024;

/// What a block does at a time; its first warpgroup copies, the others compute. Sums, weights and scores have to fit in registers.
template <int kDim>
struct Shape {
  static constexpr int kGroups = kDim == 64 ? 3 : 2;  // that compute, 64 query rows each
  static constexpr int kQueries = kGroups * 64;
  static constexpr int kKeys = kDim == 256 ? 64 : 128;  // of a stage
  static constexpr int kThreads = 128 + kGroups * 128;
  static constexpr int kTiles = (kDim + 63) / 64;  // of a stage or of the queries, 64 columns each; those beyond the last are zeros
  static constexpr std::uint32_t kQueryTileBytes = kQueries * kTileRowBytes;
  static constexpr std::uint32_t kTileBytes = kKeys * kTileRowBytes;
  static constexpr std::uint32_t kStageBytes = kTiles * kTileBytes;
  static constexpr std::uint32_t kSharedBytes = kTiles * kQueryTileBytes + 2 * kStages * kStageBytes + kTileAlignment;
};

struct Tensors {
  CUtensorMap queries;
  CUtensorMap keys;
  CUtensorMap values;
};

/// Barriers of a block, in shared memory.
struct Barriers {
  std::uint64_t queries_here;
  std::uint64_t keys_here[kStages];
  std::uint64_t keys_read[kStages];
  std::uint64_t values_here[kStages];
  std::uint64_t values_read[kStages];
};
/// By one thread; `readers` warps read each stage.
[[maybe_unused]] __device__ inline void start(Barriers& barriers, unsigned readers) {
  start_barrier(&barriers.queries_here, 1);
  for (int stage = 0; stage < kStages; ++stage) {
    start_barrier(&barriers.keys_here[stage], 1);
    start_barrier(&barriers.keys_read[stage], readers);
    start_barrier(&barriers.values_here[stage], 1);
    start_barrier(&barriers.values_read[stage], readers);
  }
  show_barriers();
}
/// Parity of the phase in which the stage of a block of keys holds it.
[[maybe_unused]] __device__ inline unsigned parity_of(int block) { return static_cast<unsigned>(block / kStages % 2); }

/// What one thread knows of its two rows, l / 4 and l / 4 + 8 of its warp's 16 for lane l.
template <int kDim>
struct Rows {
  static constexpr int kKeys = Shape<kDim>::kKeys;
  float out[kDim / 2];                   // four of every eight columns, as a product leaves them
  std::uint32_t weights[kKeys / 16][4];  // of the block before, by 16 keys, as a product takes them
  float largest[2];                      // score, not scaled
  float sum[2];                          // of this lane's columns
};

/// Scores of a thread's rows and a block of keys, as a product leaves them.
template <int kDim>
using Scores = float[Shape<kDim>::kKeys / 2];

/// Starts scores = queries * keys^T as a group of its own.
template <int kDim>
__device__ void start_scores(Scores<kDim>& scores, std::uint64_t queries, std::uint64_t keys) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const auto tile = static_cast<std::uint32_t>(k / 4);
    const auto column = static_cast<std::uint32_t>(k % 4) * 32;
    start_product(scores, queries + further(tile * Shape<kDim>::kQueryTileBytes + column),
                  keys + further(tile * Shape<kDim>::kTileBytes + column), k > 0);
  }
  commit_products();
}

/// Starts out += weights * values as a group of its own.
template <int kDim>
__device__ void start_out(Rows<kDim>& rows, std::uint64_t values) {
#pragma unroll
  for (int k = 0; k < Shape<kDim>::kKeys / 16; ++k)
    start_product<kDim>(rows.out, rows.weights[k], values + further(static_cast<std::uint32_t>(k) * 2048));
  commit_products();
}

/// Scores of keys that a row does not see become -inf; `row` is the thread's first.
template <int kDim>
__device__ void mask(Scores<kDim>& scores, int first_key, int row, const PrefillAttention& job) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // rows beyond the last see what the last sees, and are not stored
    const int last = job.offset + min(row + half * 8, job.rows - 1) - first_key - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < Shape<kDim>::kKeys / 8; ++n) {
      if (n * 8 > last) scores[4 * n + 2 * half] = -INFINITY;
      if (n * 8 + 1 > last) scores[4 * n + 2 * half + 1] = -INFINITY;
    }
  }
}

/// Takes a block of scores into the running softmax: they become weights. `shrink` is what was summed before must be multiplied with.
template <int kDim>
__device__ void weigh(Scores<kDim>& scores, Rows<kDim>& rows, float scale, float (&shrink)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = rows.largest[half];
#pragma unroll
    for (int n = 0; n < Shape<kDim>::kKeys / 8; ++n)
      largest = fmaxf(largest, fmaxf(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, 2));
    shrink[half] = power_of_two((rows.largest[half] - largest) * scale);
    rows.largest[half] = largest;
    const float base = largest * scale;
    float sum = 0.0F;
#pragma unroll
    for (int n = 0; n < Shape<kDim>::kKeys / 8; ++n) {
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
__device__ void take_weights(const Scores<kDim>& scores, Rows<kDim>& rows, const float (&shrink)[2], int group) {
  // Mostly no row of the group has met a larger score, and a factor of one changes nothing. Sums are above zero: asking them makes the
  // barrier, and with it the wait, come after the softmax, which else would be moved behind the wait.
  const bool grown = shrink[0] != 1.0F || shrink[1] != 1.0F || !(rows.sum[0] > 0.0F) || !(rows.sum[1] > 0.0F);
  const bool shrinks = any_of_warpgroup(grown, 1 + group);
  wait_for_products<0>();
  pin(rows.out);
  if (shrinks) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) rows.out[i] *= shrink[i % 4 / 2];
  }
#pragma unroll
  for (int k = 0; k < Shape<kDim>::kKeys / 16; ++k) {
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

/// The part of a block: kQueries rows of one head against every key that they see.
template <int kDim>
struct Part {
  int head;
  int kv_head;
  int first_row;
  int blocks;  // of keys that some row sees

  __device__ Part(const PrefillAttention& job, int own_head, int row_block)
      : head(own_head),
        kv_head(own_head / (job.heads / job.kv_heads)),
        first_row(row_block * Shape<kDim>::kQueries),
        blocks((job.offset + min(first_row + Shape<kDim>::kQueries, job.rows) + Shape<kDim>::kKeys - 1) / Shape<kDim>::kKeys) {}
};

/// Shared memory of a block, by address.
template <int kDim>
struct Stages {
  std::uint32_t queries;
  __device__ std::uint32_t keys(int block) const {
    return queries + Shape<kDim>::kTiles * Shape<kDim>::kQueryTileBytes +
           static_cast<std::uint32_t>(block % kStages) * Shape<kDim>::kStageBytes;
  }
  __device__ std::uint32_t values(int block) const { return keys(block) + kStages * Shape<kDim>::kStageBytes; }
};

/// One thread: brings queries, then keys and values in the order in which they are used, each once its place has been read.
template <int kDim>
__device__ void copy_all(const Tensors& tensors, const Part<kDim>& part, const Stages<kDim>& stages, Barriers& barriers) {
  using S = Shape<kDim>;
  const auto copy = [&](std::uint32_t target, std::uint32_t tile_bytes, const CUtensorMap& map, int head, int row, std::uint64_t* barrier) {
    arrive_and_expect(barrier, S::kTiles * tile_bytes);
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      copy_tile(target + static_cast<std::uint32_t>(tile) * tile_bytes, map, tile * 64, head, row, barrier);
    }
  };
  const auto copy_keys = [&](int block) {
    wait_for_phase(&barriers.keys_read[block % kStages], parity_of(block) ^ 1);
    copy(stages.keys(block), S::kTileBytes, tensors.keys, part.kv_head, block * S::kKeys, &barriers.keys_here[block % kStages]);
  };
  const auto copy_values = [&](int block) {
    wait_for_phase(&barriers.values_read[block % kStages], parity_of(block) ^ 1);
    copy(stages.values(block), S::kTileBytes, tensors.values, part.kv_head, block * S::kKeys, &barriers.values_here[block % kStages]);
  };
  copy(stages.queries, S::kQueryTileBytes, tensors.queries, part.head, part.first_row, &barriers.queries_here);
  copy_keys(0);
#pragma unroll 1
  for (int block = 1; block < part.blocks; ++block) {
    copy_keys(block);
    copy_values(block - 1);
  }
  copy_values(part.blocks - 1);
}

/// A warpgroup that computes, `group` of kGroups: 64 rows. The scores of a block of keys and the output of the block before start together,
/// so that the softmax of the one runs beside the product of the other (FlashAttention-3, arXiv 2407.08608, section 3.2). Groups that are
/// told to take turns with their products, as in section 3.1 there, are no faster: they fall into turns by themselves.
template <int kDim>
__device__ void attend(const PrefillAttention& job, float scale, const Part<kDim>& part, const Stages<kDim>& stages, Barriers& barriers,
                       int group) {
  using S = Shape<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group_row = part.first_row + group * 64;
  const int own_row = group_row + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;
  const int whole = (job.offset + group_row + 1) / S::kKeys;  // blocks that every row of the warpgroup sees entirely
  const std::uint64_t queries = inner_contiguous(stages.queries + static_cast<std::uint32_t>(group) * 64 * kTileRowBytes);
  const auto release = [&](std::uint64_t* barrier) {
    if (lane == 0) arrive(barrier);
  };

  Rows<kDim> rows;
  rows.largest[0] = rows.largest[1] = -INFINITY;
  rows.sum[0] = rows.sum[1] = 0.0F;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) rows.out[i] = 0.0F;
  Scores<kDim> scores;
  float shrink[2];

  wait_for_phase(&barriers.queries_here, 0);
  wait_for_phase(&barriers.keys_here[0], 0);
  before_products();
  start_scores<kDim>(scores, queries, inner_contiguous(stages.keys(0)));
  wait_for_products<0>();
  pin(scores);
  release(&barriers.keys_read[0]);
  if (whole < 1) mask<kDim>(scores, 0, own_row, job);
  weigh<kDim>(scores, rows, scale, shrink);
  take_weights<kDim>(scores, rows, shrink, group);
#pragma unroll 1
  for (int block = 1; block < part.blocks; ++block) {
    wait_for_phase(&barriers.keys_here[block % kStages], parity_of(block));
    before_products();
    start_scores<kDim>(scores, queries, inner_contiguous(stages.keys(block)));
    wait_for_phase(&barriers.values_here[(block - 1) % kStages], parity_of(block - 1));
    before_products();
    start_out<kDim>(rows, outputs_contiguous(stages.values(block - 1), S::kTileBytes));
    wait_for_products<1>();
    pin(scores);
    release(&barriers.keys_read[block % kStages]);
    if (block >= whole) mask<kDim>(scores, block * S::kKeys, own_row, job);
    weigh<kDim>(scores, rows, scale, shrink);
    take_weights<kDim>(scores, rows, shrink, group);
    release(&barriers.values_read[(block - 1) % kStages]);
  }
  wait_for_phase(&barriers.values_here[(part.blocks - 1) % kStages], parity_of(part.blocks - 1));
  before_products();
  start_out<kDim>(rows, outputs_contiguous(stages.values(part.blocks - 1), S::kTileBytes));
  wait_for_products<0>();
  pin(rows.out);
  store_rows<kDim>(rows, own_row, part.head, job);
}

template <int kDim>
__global__ void __launch_bounds__(Shape<kDim>::kThreads, 1)
    warpgroup_attention_kernel(const __grid_constant__ Tensors tensors, const __grid_constant__ PrefillAttention job, float scale) {
  if constexpr (kHasWarpgroups) {
    extern __shared__ unsigned char shared[];
    __shared__ Barriers barriers;
    const Stages<kDim> stages{(shared_address(shared) + kTileAlignment - 1) / kTileAlignment * kTileAlignment};
    // the last rows see the most keys, so they come first
    const Part<kDim> part(job, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.y - 1 - blockIdx.y));
    if (threadIdx.x == 0) start(barriers, Shape<kDim>::kGroups * 4);
    __syncthreads();
    const int role = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 128, 0);  // the same in a warp, and the compiler knows it
    if (role == 0) {
      give_registers_up<24>();
      if (threadIdx.x == 0) copy_all<kDim>(tensors, part, stages, barriers);
    } else {
      take_registers<Shape<kDim>::kGroups == 3 ? 160 : 240>();  // of the 65536 of a processor
      attend<kDim>(job, scale, part, stages, barriers, role - 1);
    }
  }
}

template <int kDim>
cudaError_t launch(const PrefillAttention& job, cudaStream_t stream) {
  using S = Shape<kDim>;
  Tensors tensors{};
  const auto describe_all = [&]() -> cudaError_t {
    const int tokens = job.offset + job.rows;
    if (const cudaError_t status = describe({job.queries, job.rows, job.heads, kDim}, S::kQueries, tensors.queries)) return status;
    if (const cudaError_t status = describe({job.keys, tokens, job.kv_heads, kDim}, S::kKeys, tensors.keys)) return status;
    return describe({job.values, tokens, job.kv_heads, kDim}, S::kKeys, tensors.values);
  };
  if (const cudaError_t status = describe_all()) return status;
  const float scale = 1.44269504F / std::sqrt(static_cast<float>(kDim));  // scores become powers of two
  const dim3 grid(static_cast<unsigned>(job.heads), static_cast<unsigned>((job.rows + S::kQueries - 1) / S::kQueries));
  warpgroup_attention_kernel<kDim><<<grid, S::kThreads, S::kSharedBytes, stream>>>(tensors, job, scale);
  return cudaGetLastError();
}

template <int kDim>
cudaError_t prepare() {
  return cudaFuncSetAttribute(warpgroup_attention_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape<kDim>::kSharedBytes);
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
  return major == 9 && minor == 0 && for_head_dim(head_dim, [](auto dim) { return dim > 0; });
#else
  static_cast<void>(head_dim);
  return false;
#endif
}

cudaError_t prepare_warpgroup_attention(int head_dim) {
  return for_head_dim(head_dim, [](auto dim) {
    if constexpr (dim == 0) {
      return cudaErrorInvalidValue;
    } else {
      return prepare<dim>();
    }
  });
}

cudaError_t launch_warpgroup_attention(const PrefillAttention& job, cudaStream_t stream) {
  if (job.rows < 1 || job.offset < 0 || job.kv_heads < 1 || job.heads % job.kv_heads != 0) return cudaErrorInvalidValue;
  if (job.query_type != DataType::bf16 || job.key_type != DataType::bf16) return cudaErrorInvalidValue;
  return for_head_dim(job.head_dim, [&](auto dim) {
    if constexpr (dim == 0) {
      return cudaErrorInvalidValue;
    } else {
      return launch<dim>(job, stream);
    }
  });
}

}  // namespace dualdecoder::cuda
