// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/sampler.hpp"

#include <cstdint>

#include "cuda/launch.hpp"
#include "dualdecoder/counter_random.hpp"
#include "dualdecoder/step_view.hpp"

namespace dualdecoder::cuda {
namespace {

using Mass = unsigned long long;  // a probability in units of 2^-scale of the likeliest one's, or a count

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
constexpr unsigned kAll = 0xFFFFFFFFU;

/// What the threads of one row share.
struct Shared {
  std::uint32_t mass_low[kDigits];  // masses by digit, in two words: 64-bit sums by 32-bit atomics
  std::uint32_t mass_high[kDigits];
  Mass segments[kThreads];
  Mass warps[kWarps];
  float warp_value[kWarps];
  Token warp_token[kWarps];
  float value;
  Token token;
  Mass before;  // mass above the digit that was found
  Mass within;
  int digit;
};

/// Larger floats have larger keys; NaN counts as -inf, -0 as 0.
__device__ std::uint32_t ordered(float value) {
  const std::uint32_t bits = __float_as_uint(isnan(value) ? -INFINITY : value + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

/// The likelier first, of equals the lower token.
__device__ Mass rank_of(std::uint32_t key, int token) { return Mass{key} << 32U | ~static_cast<std::uint32_t>(token); }

__device__ void take_likelier(float& value, Token& token, float other_value, Token other_token) {
  if (other_value > value || (other_value == value && other_token < token)) {
    value = other_value;
    token = other_token;
  }
}

/// Sum of `mass` over the threads before this one; `total` over all of them.
__device__ Mass scan_before(Mass mass, Mass& total, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Mass up_to = mass;
  for (int step = 1; step < 32; step *= 2) {
    const Mass other = __shfl_up_sync(kAll, up_to, step);
    if (lane >= step) up_to += other;
  }
  __syncthreads();  // the words of an earlier scan have been read
  if (lane == 31) shared.warps[warp] = up_to;
  __syncthreads();
  Mass before = up_to - mass;
  total = 0;
  for (int other = 0; other < kWarps; ++other) {
    before += other < warp ? shared.warps[other] : 0;
    total += shared.warps[other];
  }
  return before;
}

/// Logits of tokens seen before are divided or multiplied once, however often they were seen.
__device__ void penalise(float* logits, int vocabulary, float penalty, const std::uint64_t* seen, const Token* pass, int pass_count) {
  const auto apply = [&](int token) { logits[token] = logits[token] > 0.0F ? logits[token] / penalty : logits[token] * penalty; };
  if (seen != nullptr) {
    for (int word = static_cast<int>(threadIdx.x); word * 64 < vocabulary; word += kThreads) {
      for (std::uint64_t bits = seen[word]; bits != 0; bits &= bits - 1) {
        const int token = word * 64 + __ffsll(static_cast<long long>(bits)) - 1;
        if (token < vocabulary) apply(token);
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < pass_count; ++i) {
      const Token token = pass[i];
      if (token < 0 || token >= vocabulary) continue;
      bool known = seen != nullptr && (seen[token / 64] >> (token % 64) & 1U) != 0;
      for (int earlier = 0; earlier < i; ++earlier) known = known || pass[earlier] == token;
      if (!known) apply(token);
    }
  }
  __syncthreads();
}

/// The lowest token with the largest logit, and that logit; token 0 where every logit is NaN or -inf.
__device__ Token likeliest(const float* logits, int vocabulary, float& top, Shared& shared) {
  float value = -INFINITY;
  Token token = 0;
  const auto take = [&](float logit, int i) {
    if (logit > value) {
      value = logit;
      token = i;
    }
  };
  const int vectors = vocabulary % 4 == 0 ? vocabulary / 4 : 0;  // rows of whole vectors begin at 16 bytes
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < vectors; i += kThreads) {
    const float4 four = reinterpret_cast<const float4*>(logits)[i];
    take(four.x, 4 * i);
    take(four.y, 4 * i + 1);
    take(four.z, 4 * i + 2);
    take(four.w, 4 * i + 3);
  }
#pragma unroll 8
  for (int i = 4 * vectors + static_cast<int>(threadIdx.x); i < vocabulary; i += kThreads) take(logits[i], i);
  const auto reduce = [&] {
    for (int step = 16; step > 0; step /= 2) {
      take_likelier(value, token, __shfl_xor_sync(kAll, value, step), __shfl_xor_sync(kAll, token, step));
    }
  };
  reduce();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (lane == 0) {
    shared.warp_value[warp] = value;
    shared.warp_token[warp] = token;
  }
  __syncthreads();
  if (warp == 0) {
    value = shared.warp_value[lane];
    token = shared.warp_token[lane];
    reduce();
    if (lane == 0) {
      shared.value = value;
      shared.token = token;
    }
  }
  __syncthreads();
  top = shared.value;
  return shared.token;
}

__device__ void add_mass(Shared& shared, int digit, Mass mass) {
  const auto low = static_cast<std::uint32_t>(mass);
  const std::uint32_t before = atomicAdd(&shared.mass_low[digit], low);
  const std::uint32_t high = static_cast<std::uint32_t>(mass >> 32U) + (before + low < before ? 1U : 0U);
  if (high != 0) atomicAdd(&shared.mass_high[digit], high);
}

/// The digit, from the largest down, at which the mass reaches `target`; results in shared.digit, before and within.
__device__ void find_digit(Mass target, Shared& shared) {
  const int first = kDigits - 1 - 2 * static_cast<int>(threadIdx.x);  // this thread's two digits, the larger first
  const auto mass_of = [&](int digit) { return Mass{shared.mass_high[digit]} << 32U | shared.mass_low[digit]; };
  const Mass larger = mass_of(first);
  const Mass smaller = mass_of(first - 1);
  Mass total = 0;
  const Mass before = scan_before(larger + smaller, total, shared);
  if (before < target && target <= before + larger) {
    shared.digit = first;
    shared.before = before;
    shared.within = larger;
  } else if (before + larger < target && target <= before + larger + smaller) {
    shared.digit = first - 1;
    shared.before = before + larger;
    shared.within = smaller;
  }
  __syncthreads();
}

/// Every token weighs the same; ordered by logit.
struct ByLogit {
  const float* logits;
  __device__ std::uint32_t key(int token) const { return ordered(logits[token]); }
  __device__ Mass mass(std::uint32_t) const { return 1; }
};

/// Ordered by probability in 0 .. 1, and weighing as much. Such floats use 30 bits, so two more go into the first digit.
struct ByProbability {
  const float* values;
  float scale;
  __device__ std::uint32_t key(int token) const { return __float_as_uint(values[token]) << 2U; }
  __device__ Mass mass(std::uint32_t key) const { return __float2ull_rn(__uint_as_float(key >> 2U) * scale); }
};

/// The rank from which up the masses first reach `target`, which is at least 1 and at most their sum: a radix select from the likeliest
/// down, in which ties go on by token.
template <class Order>
__device__ Mass rank_reaching(int vocabulary, Mass target, const Order& order, Shared& shared) {
  constexpr int kLevels = 5;
  constexpr int kKeyLevels = 3;
  constexpr int kShift[kLevels] = {53, 42, 32, 11, 0};
  constexpr int kWidth[kLevels] = {11, 11, 10, 11, 11};
  Mass prefix = 0;
  for (int level = 0; level < kLevels; ++level) {
    const int shift = kShift[level];
    const int decided = shift + kWidth[level];
    if (level == kKeyLevels) prefix |= 0xFFC00000U;  // tokens are below 2^22, and ranks hold their complement
    for (int digit = static_cast<int>(threadIdx.x); digit < kDigits; digit += kThreads) {
      shared.mass_low[digit] = 0;
      shared.mass_high[digit] = 0;
    }
    __syncthreads();
#pragma unroll 4
    for (int token = static_cast<int>(threadIdx.x); token < vocabulary; token += kThreads) {
      const std::uint32_t key = order.key(token);
      const Mass rank = rank_of(key, token);
      if (decided < 64 && (rank ^ prefix) >> decided != 0) continue;
      const Mass mass = order.mass(key);
      if (mass != 0) add_mass(shared, static_cast<int>(rank >> shift & ((1U << kWidth[level]) - 1)), mass);
    }
    __syncthreads();
    find_digit(target, shared);
    prefix |= static_cast<Mass>(shared.digit) << shift;
    target -= shared.before;
    const Mass within = shared.within;
    __syncthreads();              // all have read before the next level writes
    if (within == target) break;  // all of the digit
    if (level == kKeyLevels - 1 && within == order.mass(static_cast<std::uint32_t>(prefix >> 32U))) break;  // one token
  }
  return prefix;
}

/// e^x for x <= 0, rounded to nearest but for one value in hundreds, so that logits a bit apart are as likely or not as on the CPU, whose
/// order of equals goes by token. 0 below e^-86, which weighs nothing here. Cody and Waite, Software Manual for the Elementary Functions,
/// chapter 6, with the last sum in two floats. Written in intrinsics, which are not contracted.
__device__ float exp_rounded(float x) {
  if (!(x > -86.0F)) return 0.0F;
  const float n = rintf(__fmul_rn(x, 1.44269504F));
  const float upper = __fmaf_rn(n, -0.693359375F, x);  // exact: the constant has 10 bits
  const float r = __fmaf_rn(n, 2.12194440e-4F, upper);
  const float lower = __fmaf_rn(n, 2.12194440e-4F, __fsub_rn(upper, r));
  float p = 1.98412698e-4F;  // Taylor: |r| <= 0.35, so that what is left out is below 2^-29
  p = __fmaf_rn(p, r, 1.38888889e-3F);
  p = __fmaf_rn(p, r, 8.33333333e-3F);
  p = __fmaf_rn(p, r, 4.16666667e-2F);
  p = __fmaf_rn(p, r, 1.66666667e-1F);
  p = __fmaf_rn(p, r, 0.5F);
  const float tail = __fmaf_rn(__fmul_rn(r, r), p, lower);
  const float sum = __fadd_rn(1.0F, r);
  const float rest = __fadd_rn(__fsub_rn(r, __fsub_rn(sum, 1.0F)), tail);
  return __fmul_rn(__fadd_rn(sum, rest), __uint_as_float(static_cast<std::uint32_t>(static_cast<int>(n) + 127) << 23U));
}

/// Turns logits into probabilities up to the factor of the likeliest one's; 0 for what ranks below `least`. Returns their mass.
__device__ Mass exponentiate(float* logits, int vocabulary, float top, float temperature, Mass least, float scale, Shared& shared) {
  Mass mass = 0;
#pragma unroll 4
  for (int token = static_cast<int>(threadIdx.x); token < vocabulary; token += kThreads) {
    const float logit = logits[token];
    const bool kept = !isnan(logit) && rank_of(ordered(logit), token) >= least;
    const float value = kept ? exp_rounded((logit - top) / temperature) : 0.0F;
    logits[token] = value;
    mass += __float2ull_rn(value * scale);
  }
  Mass total = 0;
  scan_before(mass, total, shared);
  return total;
}

/// Goes through the kept tokens in the order of their numbers up to the share `uniform` of their mass. kept(token) is a token's mass, 0 for
/// those that are out; the sum is above 0.
template <class Kept>
__device__ Token draw(int vocabulary, double uniform, const Kept& kept, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int length = ((vocabulary + kThreads - 1) / kThreads + 31) / 32 * 32;  // of a segment; there are kThreads of them
  for (int segment = warp * 32; segment < warp * 32 + 32; ++segment) {
    Mass mass = 0;
    for (int within = lane; within < length; within += 32) {
      const int token = segment * length + within;
      mass += token < vocabulary ? kept(token) : 0;
    }
    for (int step = 16; step > 0; step /= 2) mass += __shfl_xor_sync(kAll, mass, step);
    if (lane == 0) shared.segments[segment] = mass;
  }
  __syncthreads();
  const Mass mass = shared.segments[threadIdx.x];
  Mass total = 0;
  const Mass before = scan_before(mass, total, shared);
  const Mass drawn = min(static_cast<Mass>(uniform * static_cast<double>(total)), total - 1);
  if (before <= drawn && drawn < before + mass) {
    shared.digit = static_cast<int>(threadIdx.x);
    shared.before = before;
  }
  __syncthreads();
  if (warp == 0) {
    Mass passed = shared.before;
    for (int within = lane; within < length; within += 32) {
      const int token = shared.digit * length + within;
      Mass up_to = token < vocabulary ? kept(token) : 0;
      for (int step = 1; step < 32; step *= 2) {
        const Mass other = __shfl_up_sync(kAll, up_to, step);
        if (lane >= step) up_to += other;
      }
      const unsigned beyond = __ballot_sync(kAll, passed + up_to > drawn);
      if (beyond != 0) {
        if (lane == __ffs(static_cast<int>(beyond)) - 1) shared.token = token;
        break;
      }
      passed += __shfl_sync(kAll, up_to, 31);
    }
  }
  __syncthreads();
  return shared.token;
}

__device__ Token sample_row(float* logits, int vocabulary, const SamplingOptions& options, int position, float scale, Shared& shared) {
  float top = 0.0F;
  const Token best = likeliest(logits, vocabulary, top, shared);
  if (options.temperature == 0.0F || options.top_k == 1 || !isfinite(top)) return best;

  Mass least = 0;
  if (options.top_k > 0 && options.top_k < vocabulary) {
    least = rank_reaching(vocabulary, static_cast<Mass>(options.top_k), ByLogit{logits}, shared);
  }
  const Mass sum = exponentiate(logits, vocabulary, top, options.temperature, least, scale, shared);
  __syncthreads();
  const ByProbability order{logits, scale};
  least = 0;
  if (options.top_p < 1.0F) {
    const double target = ceil(static_cast<double>(options.top_p) * static_cast<double>(sum));
    least = rank_reaching(vocabulary, min(max(static_cast<Mass>(target), Mass{1}), sum), order, shared);
  }
  const auto kept = [&](int token) -> Mass {
    const std::uint32_t key = order.key(token);
    return rank_of(key, token) >= least && logits[token] >= options.min_p ? order.mass(key) : 0;
  };
  return draw(vocabulary, detail::counter_uniform(options.seed, static_cast<std::uint64_t>(position)), kept, shared);
}

__global__ void __launch_bounds__(kThreads, 1)
    sample_kernel(float* logits, int vocabulary, const SamplingView sampling, float scale, Token* sampled) {
  __shared__ Shared shared;
  wait_for_earlier_kernels();
  const int row = static_cast<int>(blockIdx.x);
  const StepView& step = sampling.step;
  const int place = row / step.rows_per_sequence;
  const int of_place = row % step.rows_per_sequence;
  const RowMode mode = step.mode[place];
  if (!row_is_live(mode, of_place)) {
    if (threadIdx.x == 0) sampled[row] = -1;
    return;
  }
  const SamplingOptions options = sampling.options[place];
  float* own = logits + static_cast<std::size_t>(row) * static_cast<std::size_t>(vocabulary);
  if (options.repetition_penalty != 1.0F) {
    const std::uint64_t* seen = sampling.seen == nullptr ? nullptr : sampling.seen[place];
    penalise(own, vocabulary, options.repetition_penalty, seen, sampling.tokens + place * step.rows_per_sequence, of_place + 1);
  }
  const Token token = sample_row(own, vocabulary, options, row_position(mode, of_place, step.position[place]), scale, shared);
  if (threadIdx.x == 0) sampled[row] = token;
}

}  // namespace

cudaError_t launch_sample(float* logits, int vocabulary, const SamplingView& sampling, Token* sampled, cudaStream_t stream) {
  if (vocabulary < 1 || vocabulary > kMostSampledVocabulary || sampling.step.rows() < 1) return cudaErrorInvalidValue;
  int bits = 0;
  while ((1 << bits) < vocabulary) ++bits;
  const float scale = static_cast<float>(Mass{1} << (62 - bits));  // the sum of all masses stays below 2^63
  return launch_overlapped(sample_kernel, static_cast<unsigned>(sampling.step.rows()), kThreads, 0, stream, logits, vocabulary, sampling,
                           scale, sampled);
}

}  // namespace dualdecoder::cuda
