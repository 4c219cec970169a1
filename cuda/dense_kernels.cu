// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/dense_kernels.hpp"

#include <algorithm>
#include <cstdint>

#include "cuda/launch.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostNormThreads = 1024;
constexpr int kNormVector = 4;   // elements of a row that a thread holds at a time
constexpr int kVector = 8;       // elements that a thread moves at a time
constexpr int kHeadsAtOnce = 8;  // of one row, a warp each
constexpr int kMostBlocks = 132 * 8;
constexpr unsigned kAll = 0xFFFFFFFFU;

std::size_t at(int index) noexcept { return static_cast<std::size_t>(index); }

struct alignas(16) Floats {
  float value[kVector];
};

__device__ Floats load(const float* source) {
  Floats loaded;
  reinterpret_cast<float4*>(loaded.value)[0] = reinterpret_cast<const float4*>(source)[0];
  reinterpret_cast<float4*>(loaded.value)[1] = reinterpret_cast<const float4*>(source)[1];
  return loaded;
}

__device__ Floats load(const __nv_bfloat16* source) {
  const uint4 packed = *reinterpret_cast<const uint4*>(source);
  const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  Floats loaded;
  for (int i = 0; i < 4; ++i) {
    loaded.value[2 * i] = __uint_as_float(words[i] << 16U);
    loaded.value[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000U);
  }
  return loaded;
}

__device__ void store(float* target, const Floats& values) {
  reinterpret_cast<float4*>(target)[0] = reinterpret_cast<const float4*>(values.value)[0];
  reinterpret_cast<float4*>(target)[1] = reinterpret_cast<const float4*>(values.value)[1];
}

__device__ void store(__nv_bfloat16* target, const Floats& values) {
  std::uint32_t words[4];
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values.value[2 * i], values.value[2 * i + 1]);
    words[i] = reinterpret_cast<const std::uint32_t&>(pair);
  }
  *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ void store(float* target, float value) { *target = value; }
__device__ void store(__nv_bfloat16* target, float value) { *target = __float2bfloat16_rn(value); }

__device__ float sum_of_warp(float value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
  return value;
}

__global__ void __launch_bounds__(kThreads)
    embed_kernel(const Token* tokens, const __nv_bfloat16* embedding, int vocabulary, int width, float* hidden) {
  wait_for_earlier_kernels();
  const Token token = tokens[blockIdx.x];
  const bool known = token >= 0 && token < vocabulary;
  const __nv_bfloat16* source = embedding + static_cast<std::size_t>(known ? token : 0) * static_cast<std::size_t>(width);
  float* target = hidden + static_cast<std::size_t>(blockIdx.x) * static_cast<std::size_t>(width);
  for (int i = static_cast<int>(threadIdx.x) * kVector; i < width; i += kThreads * kVector) {
    store(target + i, known ? load(source + i) : Floats{});
  }
}

__device__ float4 times(float4 x, float scale, float4 weight) {
  return {x.x * scale * weight.x, x.y * scale * weight.y, x.z * scale * weight.z, x.w * scale * weight.w};
}

__device__ void store(__nv_bfloat16* target, float4 values) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(values.x, values.y);
  const __nv_bfloat162 high = __floats2bfloat162_rn(values.z, values.w);
  *reinterpret_cast<uint2*>(target) = {reinterpret_cast<const std::uint32_t&>(low), reinterpret_cast<const std::uint32_t&>(high)};
}

/// A block for a row, of which it reads everything at once and holds it, each thread kHeld vectors. Weights are on their way before the row
/// is there, and those of the product behind it.
template <int kHeld>
__global__ void __launch_bounds__(kMostNormThreads)
    rms_norm_kernel(const float* hidden, const float* weight, float epsilon, int width, __nv_bfloat16* out) {
  __shared__ float sums[32];
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const std::size_t begin = static_cast<std::size_t>(blockIdx.x) * static_cast<std::size_t>(width);
  float4 x[kHeld];
  float4 w[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = (thread + i * threads) * kNormVector;
    w[i] = at < width ? *reinterpret_cast<const float4*>(weight + at) : float4{};
  }
  let_next_kernel_begin();
  wait_for_earlier_kernels();
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = (thread + i * threads) * kNormVector;
    x[i] = at < width ? *reinterpret_cast<const float4*>(hidden + begin + at) : float4{};
  }
  float squares = 0.0F;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) squares += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
  squares = sum_of_warp(squares);
  if (thread % 32 == 0) sums[thread / 32] = squares;
  __syncthreads();
  const float total = sum_of_warp(thread % 32 < threads / 32 ? sums[thread % 32] : 0.0F);
  const float scale = 1.0F / sqrtf(total / static_cast<float>(width) + epsilon);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = (thread + i * threads) * kNormVector;
    if (at < width) store(out + begin + at, times(x[i], scale, w[i]));
  }
}

/// A block finishes kHeadsAtOnce heads of one row, which share their angles.
template <class T>
__global__ void __launch_bounds__(kHeadsAtOnce * 32) finish_heads_kernel(const FinishHeads job) {
  constexpr int kPairs = kMostHeadDim / 2;
  constexpr int kPerLane = kPairs / 32;
  __shared__ float cosine[kPairs];
  __shared__ float sine[kPairs];
  static_assert(kPairs <= kHeadsAtOnce * 32);
  const int row = static_cast<int>(blockIdx.x);
  const int half = job.head_dim / 2;
  const int thread = static_cast<int>(threadIdx.x);
  const float turn = thread < half ? job.inverse[thread] : 0.0F;  // a thread for each angle of the row

  const int lane = thread % 32;
  const int index = static_cast<int>(blockIdx.y) * kHeadsAtOnce + thread / 32;  // among q, k and v heads
  const bool lives = index < job.heads + (job.k != nullptr ? 2 * job.kv_heads : 0);
  const bool is_query = index < job.heads;
  const bool is_value = index >= job.heads + job.kv_heads;
  const int head = is_query ? index : (index - job.heads) % job.kv_heads;
  const int width = is_query ? job.heads : job.kv_heads;
  const float* bias = is_query ? job.query_bias : is_value ? job.value_bias : job.key_bias;
  const float* norm = is_query ? job.query_norm : is_value ? nullptr : job.key_norm;
  const float* source = job.projected + static_cast<std::size_t>(row) * static_cast<std::size_t>(job.stride) + index * job.head_dim;
  T* target = static_cast<T*>(is_query   ? job.q
                              : is_value ? job.v
                                         : job.k) +
              (static_cast<std::size_t>(row) * static_cast<std::size_t>(width) + static_cast<std::size_t>(head)) *
                  static_cast<std::size_t>(job.head_dim);

  float first_bias[kPerLane] = {};
  float second_bias[kPerLane] = {};
  float first_norm[kPerLane] = {};
  float second_norm[kPerLane] = {};
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int pair = lane + 32 * i;
    if (!lives || pair >= half) continue;
    if (bias != nullptr) {
      first_bias[i] = bias[head * job.head_dim + pair];
      second_bias[i] = bias[head * job.head_dim + pair + half];
    }
    if (norm != nullptr) {
      first_norm[i] = norm[pair];
      second_norm[i] = norm[pair + half];
    }
  }
  wait_for_earlier_kernels();
  const int position = job.positions[row];
  float first[kPerLane];  // elements lane + 32 i of the head's first half
  float second[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int pair = lane + 32 * i;
    const bool used = lives && pair < half;
    first[i] = used ? source[pair] : 0.0F;
    second[i] = used ? source[pair + half] : 0.0F;
  }
  let_next_kernel_begin();
  if (thread < half) {
    float s = 0.0F;
    float c = 0.0F;
    sincosf(__fmul_rn(static_cast<float>(position), turn), &s, &c);  // the angle as f32 rounds it, as on the CPU
    cosine[thread] = c * job.attention_factor;
    sine[thread] = s * job.attention_factor;
  }
  __syncthreads();
  if (!lives) return;

  float squares = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    first[i] += first_bias[i];
    second[i] += second_bias[i];
    squares += first[i] * first[i] + second[i] * second[i];
  }
  if (norm != nullptr) {
    const float scale = 1.0F / sqrtf(sum_of_warp(squares) / static_cast<float>(job.head_dim) + job.epsilon);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      first[i] = first[i] * scale * first_norm[i];
      second[i] = second[i] * scale * second_norm[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int pair = lane + 32 * i;
    if (pair >= half) continue;
    const float c = is_value ? 1.0F : cosine[pair];
    const float s = is_value ? 0.0F : sine[pair];
    store(target + pair, first[i] * c - second[i] * s);
    store(target + pair + half, second[i] * c + first[i] * s);
  }
}

__global__ void __launch_bounds__(kThreads) gate_kernel(const __nv_bfloat16* gate_up, std::size_t vectors, int width, __nv_bfloat16* out) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * kThreads;
  const auto vectors_per_row = static_cast<std::size_t>(width / kVector);
  wait_for_earlier_kernels();
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(kThreads) + threadIdx.x; i < vectors; i += step) {
    const std::size_t row = i / vectors_per_row;
    const std::size_t column = i % vectors_per_row * kVector;
    const __nv_bfloat16* source = gate_up + row * 2 * static_cast<std::size_t>(width) + column;
    Floats gate = load(source);
    const Floats up = load(source + width);
    for (int j = 0; j < kVector; ++j) gate.value[j] = gate.value[j] / (1.0F + expf(-gate.value[j])) * up.value[j];
    store(out + i * kVector, gate);
  }
}

__global__ void __launch_bounds__(kThreads) round_kernel(const float* values, std::size_t vectors, __nv_bfloat16* out) {
  wait_for_earlier_kernels();
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * kThreads;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(kThreads) + threadIdx.x; i < vectors; i += step) {
    store(out + i * kVector, load(values + i * kVector));
  }
}

unsigned blocks_for(std::size_t vectors) noexcept {
  return static_cast<unsigned>(std::clamp<std::size_t>((vectors + kThreads - 1) / kThreads, 1, kMostBlocks));
}

}  // namespace

cudaError_t launch_embed(const Token* tokens, int rows, const __nv_bfloat16* embedding, int vocabulary, int width, float* hidden,
                         cudaStream_t stream) {
  if (rows < 1 || width % kVector != 0) return cudaErrorInvalidValue;
  return launch_overlapped(embed_kernel, static_cast<unsigned>(rows), kThreads, 0, stream, tokens, embedding, vocabulary, width, hidden);
}

cudaError_t launch_rms_norm(const float* hidden, const float* weight, float epsilon, int rows, int width, __nv_bfloat16* out,
                            cudaStream_t stream) {
  if (rows < 1 || width % kVector != 0) return cudaErrorInvalidValue;
  const int vectors = width / kNormVector;
  const auto launch = [&](auto* kernel) {
    const auto threads = static_cast<unsigned>(std::min(kMostNormThreads, (vectors + 31) / 32 * 32));
    return launch_overlapped(kernel, static_cast<unsigned>(rows), threads, 0, stream, hidden, weight, epsilon, width, out);
  };
  if (vectors <= kMostNormThreads) return launch(rms_norm_kernel<1>);
  if (vectors <= 2 * kMostNormThreads) return launch(rms_norm_kernel<2>);
  return vectors <= 4 * kMostNormThreads ? launch(rms_norm_kernel<4>) : cudaErrorInvalidValue;
}

cudaError_t launch_finish_heads(const FinishHeads& job, cudaStream_t stream) {
  if (job.rows < 1 || job.head_dim % 2 != 0 || job.head_dim > kMostHeadDim) return cudaErrorInvalidValue;
  const int all = job.heads + (job.k != nullptr ? 2 * job.kv_heads : 0);
  const dim3 grid(static_cast<unsigned>(job.rows), static_cast<unsigned>((all + kHeadsAtOnce - 1) / kHeadsAtOnce));
  if (job.type == DataType::f32) {
    return launch_overlapped(finish_heads_kernel<float>, grid, kHeadsAtOnce * 32, 0, stream, job);
  }
  if (job.type != DataType::bf16) return cudaErrorInvalidValue;
  return launch_overlapped(finish_heads_kernel<__nv_bfloat16>, grid, kHeadsAtOnce * 32, 0, stream, job);
}

cudaError_t launch_gate(const __nv_bfloat16* gate_up, int rows, int width, __nv_bfloat16* out, cudaStream_t stream) {
  if (rows < 1 || width % kVector != 0) return cudaErrorInvalidValue;
  const std::size_t vectors = at(rows) * at(width / kVector);
  return launch_overlapped(gate_kernel, blocks_for(vectors), kThreads, 0, stream, gate_up, vectors, width, out);
}

cudaError_t launch_round(const float* values, std::size_t count, __nv_bfloat16* out, cudaStream_t stream) {
  if (count == 0 || count % kVector != 0) return cudaErrorInvalidValue;
  return launch_overlapped(round_kernel, blocks_for(count / kVector), kThreads, 0, stream, values, count / kVector, out);
}

}  // namespace dualdecoder::cuda
