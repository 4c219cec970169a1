// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/dense_kernels.hpp"

#include <algorithm>
#include <cstdint>

namespace dualdecoder::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kNormThreads = 512;
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
  const Token token = tokens[blockIdx.x];
  const bool known = token >= 0 && token < vocabulary;
  const __nv_bfloat16* source = embedding + static_cast<std::size_t>(known ? token : 0) * static_cast<std::size_t>(width);
  float* target = hidden + static_cast<std::size_t>(blockIdx.x) * static_cast<std::size_t>(width);
  for (int i = static_cast<int>(threadIdx.x) * kVector; i < width; i += kThreads * kVector) {
    store(target + i, known ? load(source + i) : Floats{});
  }
}

__global__ void __launch_bounds__(kNormThreads)
    rms_norm_kernel(const float* hidden, const float* weight, float epsilon, int width, __nv_bfloat16* out) {
  __shared__ float sums[kNormThreads / 32];
  const std::size_t begin = static_cast<std::size_t>(blockIdx.x) * static_cast<std::size_t>(width);
  const float* row = hidden + begin;
  float squares = 0.0F;
  for (int i = static_cast<int>(threadIdx.x) * kVector; i < width; i += kNormThreads * kVector) {
    const Floats x = load(row + i);
    for (float value : x.value) squares += value * value;
  }
  squares = sum_of_warp(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0.0F;
  for (float sum : sums) total += sum;
  const float scale = 1.0F / sqrtf(total / static_cast<float>(width) + epsilon);
  for (int i = static_cast<int>(threadIdx.x) * kVector; i < width; i += kNormThreads * kVector) {
    Floats x = load(row + i);
    const Floats w = load(weight + i);
    for (int j = 0; j < kVector; ++j) x.value[j] = x.value[j] * scale * w.value[j];
    store(out + begin + i, x);
  }
}

/// A block finishes kHeadsAtOnce heads of one row, which share their angles.
template <class T>
__global__ void __launch_bounds__(kHeadsAtOnce * 32) finish_heads_kernel(const FinishHeads job) {
  constexpr int kPairs = kMostHeadDim / 2;
  constexpr int kPerLane = kPairs / 32;
  __shared__ float cosine[kPairs];
  __shared__ float sine[kPairs];
  const int row = static_cast<int>(blockIdx.x);
  const int half = job.head_dim / 2;
  const auto position = static_cast<float>(job.positions[row]);
  for (int pair = static_cast<int>(threadIdx.x); pair < half; pair += kHeadsAtOnce * 32) {
    float s = 0.0F;
    float c = 0.0F;
    sincosf(__fmul_rn(position, job.inverse[pair]), &s, &c);  // the angle as f32 rounds it, as on the CPU
    cosine[pair] = c * job.attention_factor;
    sine[pair] = s * job.attention_factor;
  }
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int index = static_cast<int>(blockIdx.y) * kHeadsAtOnce + static_cast<int>(threadIdx.x) / 32;  // among q, k and v heads
  const int all = job.heads + (job.k != nullptr ? 2 * job.kv_heads : 0);
  if (index >= all) return;
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

  float first[kPerLane];  // elements lane + 32 i of the head's first half
  float second[kPerLane];
  float squares = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int pair = lane + 32 * i;
    const bool used = pair < half;
    first[i] = used ? source[pair] : 0.0F;
    second[i] = used ? source[pair + half] : 0.0F;
    if (used && bias != nullptr) {
      first[i] += bias[head * job.head_dim + pair];
      second[i] += bias[head * job.head_dim + pair + half];
    }
    squares += first[i] * first[i] + second[i] * second[i];
  }
  if (norm != nullptr) {
    const float scale = 1.0F / sqrtf(sum_of_warp(squares) / static_cast<float>(job.head_dim) + job.epsilon);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int pair = lane + 32 * i;
      if (pair >= half) continue;
      first[i] = first[i] * scale * norm[pair];
      second[i] = second[i] * scale * norm[pair + half];
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
  embed_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(tokens, embedding, vocabulary, width, hidden);
  return cudaGetLastError();
}

cudaError_t launch_rms_norm(const float* hidden, const float* weight, float epsilon, int rows, int width, __nv_bfloat16* out,
                            cudaStream_t stream) {
  if (rows < 1 || width % kVector != 0) return cudaErrorInvalidValue;
  rms_norm_kernel<<<static_cast<unsigned>(rows), kNormThreads, 0, stream>>>(hidden, weight, epsilon, width, out);
  return cudaGetLastError();
}

cudaError_t launch_finish_heads(const FinishHeads& job, cudaStream_t stream) {
  if (job.rows < 1 || job.head_dim % 2 != 0 || job.head_dim > kMostHeadDim) return cudaErrorInvalidValue;
  const int all = job.heads + (job.k != nullptr ? 2 * job.kv_heads : 0);
  const dim3 grid(static_cast<unsigned>(job.rows), static_cast<unsigned>((all + kHeadsAtOnce - 1) / kHeadsAtOnce));
  if (job.type == DataType::f32) {
    finish_heads_kernel<float><<<grid, kHeadsAtOnce * 32, 0, stream>>>(job);
  } else if (job.type == DataType::bf16) {
    finish_heads_kernel<__nv_bfloat16><<<grid, kHeadsAtOnce * 32, 0, stream>>>(job);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t launch_gate(const __nv_bfloat16* gate_up, int rows, int width, __nv_bfloat16* out, cudaStream_t stream) {
  if (rows < 1 || width % kVector != 0) return cudaErrorInvalidValue;
  const std::size_t vectors = at(rows) * at(width / kVector);
  gate_kernel<<<blocks_for(vectors), kThreads, 0, stream>>>(gate_up, vectors, width, out);
  return cudaGetLastError();
}

cudaError_t launch_round(const float* values, std::size_t count, __nv_bfloat16* out, cudaStream_t stream) {
  if (count == 0 || count % kVector != 0) return cudaErrorInvalidValue;
  round_kernel<<<blocks_for(count / kVector), kThreads, 0, stream>>>(values, count / kVector, out);
  return cudaGetLastError();
}

}  // namespace dualdecoder::cuda
