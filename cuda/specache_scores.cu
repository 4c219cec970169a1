// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <string>

#include "cuda/attend_tokens.cuh"
#include "cuda/check.hpp"
#include "cuda/low_bit.cuh"
#include "cuda/specache_layout.hpp"
#include "cuda/specache_pass.cuh"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

template <int kDim, int kGroups>
struct ScoreMemory {
  static constexpr int kColumns = kGroups * 8;
  alignas(16) float queries[kColumns][kDim + 8];  // rows lie 8 banks apart, so that the pairs of half a warp lie in different ones
  float largest[kAttendWarps][kColumns];
  float sum[kAttendWarps][kColumns];
  std::uint32_t fetched[kSplitWords];
};

/// Queries as the second operand of mma.m16n8k16, as the sum of two bf16: to 2^-17 of themselves.
template <int kDim, int kGroups>
struct QueryFragments {
  std::uint32_t high[kDim / 16][kGroups][2];
  std::uint32_t low[kDim / 16][kGroups][2];

  /// Queries times `scales`. Adds to `rest[n]` what queries times `zeros` come to without what queries times scales do, as they are
  /// rounded, over the dims of the lane.
  template <class Memory, class Scales, class Zeros>
  __device__ void fold(const Memory& memory, int lane, Scales scales, Zeros zeros, float (&rest)[kGroups]) {
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = j * 16 + half * 8 + lane % 4 * 2;
        const float2 scale = scales(d);
        const float2 zero = zeros(d);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          const float2 query = *reinterpret_cast<const float2*>(&memory.queries[n * 8 + lane / 4][d]);
          const float2 exact = {query.x * scale.x, query.y * scale.y};
          high[j][n][half] = pack_bf16(exact.x, exact.y);
          const float2 taken = unpack_bf16(high[j][n][half]);
          low[j][n][half] = pack_bf16(exact.x - taken.x, exact.y - taken.y);
          const float2 left = unpack_bf16(low[j][n][half]);
          rest[n] += query.x * zero.x - taken.x - left.x;
          rest[n] += query.y * zero.y - taken.y - left.y;
        }
      }
    }
  }
  __device__ void multiply(const std::uint32_t (&tokens)[4], int j, int n, float (&scores)[4]) const {
    multiply_add(scores, tokens, high[j][n][0], high[j][n][1]);
    multiply_add(scores, tokens, low[j][n][0], low[j][n][1]);
  }
};

/// Scores of the columns 2t and 2t + 1 of every group of 8, as lane l = 4g + t has them for tokens g and g + 8 of tiles.
template <int kGroups>
struct ColumnScores {
  float* target[kGroups][2];  // the column's scores, null for a column without a live row
  float largest[kGroups][2];
  float sum[kGroups][2];

  template <class Target>
  __device__ explicit ColumnScores(Target&& target_of) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        target[n][i] = target_of(n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i);
        largest[n][i] = lowest();
        sum[n][i] = 0.0F;
      }
    }
  }
  /// Counts scores of kCount tokens of a column, of which those that do not count are -inf.
  template <int kCount>
  __device__ void count(int n, int i, const float (&scores)[kCount]) {
    float top = largest[n][i];
#pragma unroll
    for (int k = 0; k < kCount; ++k) top = fmaxf(top, scores[k]);
    const float reference = top == lowest() ? 0.0F : top;
    sum[n][i] *= power_of_two(largest[n][i] - reference);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum[n][i] += power_of_two(scores[k] - reference);
    largest[n][i] = top;
  }
  /// Joins the lanes' counts and leaves the warp's in shared memory.
  template <class Memory>
  __device__ void leave(Memory& memory) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = largest[n][i];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
        float total = top == lowest() ? 0.0F : sum[n][i] * power_of_two(largest[n][i] - top);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(kAllLanes, total, step);
        const int column = n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i;
        if (threadIdx.x % 32 < 4) {
          memory.largest[warp][column] = top;
          memory.sum[warp][column] = total;
        }
      }
    }
  }
};

/// Scores a split of the copy.
template <int kDim, int kGroups, int kBits>
__device__ void score_split(const SpeCacheLayout& layout, const CopyBlock& block, Layer layer, int first, int end,
                            const ScoreMemory<kDim, kGroups>& memory, ColumnScores<kGroups>& columns) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int units = layout.copy.tokens / LowBitGroup::kUnit;
  for (int at = first + warp * layout.copy.tokens; at < end; at += kAttendWarps * layout.copy.tokens) {
    const std::byte* const group = layout.copied_group(block.slot, layer, block.kv_head, at);
    UnitCodes<kDim, kBits> next;
    next.load(group, 0, lane);
    float rest[kGroups] = {};
    QueryFragments<kDim, kGroups> queries;
    queries.fold(
        memory, lane,
        [&](int d) {
          const float2 scale = load_halves(group + layout.copy.key_scales, d);
          return float2{scale.x * CodeBits<kBits>::kStep, scale.y * CodeBits<kBits>::kStep};
        },
        [&](int d) { return load_halves(group + layout.copy.key_zeros, d); }, rest);
    float constant[kGroups][2];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      rest[n] += __shfl_xor_sync(kAllLanes, rest[n], 1);
      rest[n] += __shfl_xor_sync(kAllLanes, rest[n], 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) constant[n][i] = __shfl_sync(kAllLanes, rest[n], (lane % 4 * 2 + i) * 4);
    }
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
      const UnitCodes<kDim, kBits> codes = next;
      if (unit + 1 < units) next.load(group, unit + 1, lane);
      float scores[2][kGroups][4] = {};
#pragma unroll
      for (int j = 0; j < kDim / 16; ++j) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          std::uint32_t tokens[4];
          codes.widen(j, tile, tokens);
#pragma unroll
          for (int n = 0; n < kGroups; ++n) queries.multiply(tokens, j, n, scores[tile][n]);
        }
      }
      const int token = at + unit * LowBitGroup::kUnit + lane / 4;
      const std::uint32_t fetched = memory.fetched[(at - first) / 32 + unit] >> (lane / 4);
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float* const target = columns.target[n][i];
          float own[4];  // of tokens 0, 8, 16, 24 from the lane's first on
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            own[k] = scores[k / 2][n][k % 2 * 2 + i] + constant[n][i];
            const bool replaced = (fetched >> (8 * k) & 1U) != 0;
            if (target != nullptr && !replaced) target[token + 8 * k] = own[k];
            if (replaced) own[k] = lowest();
          }
          columns.count(n, i, own);
        }
      }
    }
  }
}

/// Scores tokens that lie in full: `key(i)` is where the key of token i begins, `place(i)` where its score goes among a column's, or -1.
template <int kDim, int kGroups, class Key, class Place>
__device__ void score_tokens(int count, const ScoreMemory<kDim, kGroups>& memory, ColumnScores<kGroups>& columns, Key key, Place place) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float rest[kGroups] = {};
  QueryFragments<kDim, kGroups> queries;
  const auto one = [](int) { return float2{1.0F, 1.0F}; };
  queries.fold(memory, lane, one, one, rest);
  for (int first = warp * kTileTokens; first < count; first += kAttendWarps * kTileTokens) {
    const int token[2] = {first + lane / 4, first + lane / 4 + 8};
    const std::uint32_t* rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = reinterpret_cast<const std::uint32_t*>(key(min(token[r], count - 1))) + lane % 4;
    float scores[kGroups][4] = {};
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
      const std::uint32_t tokens[4] = {rows[0][j * 8], rows[1][j * 8], rows[0][j * 8 + 4], rows[1][j * 8 + 4]};
#pragma unroll
      for (int n = 0; n < kGroups; ++n) queries.multiply(tokens, j, n, scores[n]);
    }
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float own[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          own[r] = token[r] < count ? scores[n][r * 2 + i] : lowest();
          if (token[r] >= count || columns.target[n][i] == nullptr) continue;
          const int to = place(token[r]);
          if (to >= 0) columns.target[n][i][to] = own[r];
        }
        columns.count(n, i, own);
      }
    }
  }
}

template <int kDim, int kGroups, int kBits>
__global__ void __launch_bounds__(kAttendThreads, kDim* kGroups <= 128 ? 4 : 1)
    score_kernel(const __grid_constant__ CopyPass pass, bool laid) {
  __shared__ ScoreMemory<kDim, kGroups> memory;
  const SpeCacheLayout& layout = pass.layout;
  const CopyBlock block(pass);
  if (block.live == 0) return;
  const bool lies_over = laid && !block.waits(pass);
  const int part = block.part;
  // what the part holds
  const int first_fetched = layout.splits;
  const int first_window = layout.splits + layout.fetched_parts();
  int first = 0;
  int count = 0;
  if (part < first_fetched) {
    first = part * layout.split_tokens;
    count = min(block.copied - first, layout.split_tokens);
  } else if (part < first_window) {
    first = (part - first_fetched) * kPartTokens;
    count = lies_over ? min(layout.fetched_count[block.list] - first, kPartTokens) : 0;
  } else {
    first = (part - first_window) * kPartTokens;
    count = min(block.length - block.copied - first, kPartTokens);
  }
  if (count <= 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kColumns = kGroups * 8;
  const float scale = kLog2e * rsqrtf(static_cast<float>(kDim));
  for (int i = thread; i < kColumns * (kDim / 2); i += kAttendThreads) {
    const int column = i / (kDim / 2);
    const int d = i % (kDim / 2) * 2;
    const std::ptrdiff_t from = block.query(layout, column);
    const float2 query = from < 0 ? float2{0.0F, 0.0F} : load_pair(pass.queries, static_cast<std::size_t>(from + d));
    memory.queries[column][d] = query.x * scale;
    memory.queries[column][d + 1] = query.y * scale;
  }
  if (part < first_fetched) {
    if (thread < kSplitWords) memory.fetched[thread] = 0;
    __syncthreads();
    if (lies_over) mark_fetched(layout, block.list, first, first + count, memory.fetched);
  }
  __syncthreads();
  ColumnScores<kGroups> columns([&](int column) -> float* {
    const int r = column / layout.group;
    if (!block.is_live(r)) return nullptr;
    return layout.scores_of(layout.score_list(pass.layer, block.first_row + r, block.kv_head), column % layout.group);
  });
  if (part < first_fetched) {
    score_split<kDim, kGroups, kBits>(layout, block, pass.layer, first, first + count, memory, columns);
  } else if (part < first_window) {
    const std::size_t at = block.list * static_cast<std::size_t>(layout.selected) + static_cast<std::size_t>(first);
    score_tokens<kDim, kGroups>(
        count, memory, columns,
        [&](int i) { return layout.fetched_data(block.list, layout.fetched_slot[at + static_cast<std::size_t>(i)]); },
        [&](int i) { return layout.fetched_token[at + static_cast<std::size_t>(i)]; });
  } else {
    score_tokens<kDim, kGroups>(
        count, memory, columns, [&](int i) { return layout.window_token(block.list, block.copied + first + i); }, [](int) { return -1; });
  }
  columns.leave(memory);
  __syncthreads();
  if (thread >= pass.shared_rows * layout.group || !block.is_live(thread / layout.group)) return;
  float top = lowest();
  for (int w = 0; w < kAttendWarps; ++w) top = fmaxf(top, memory.largest[w][thread]);
  float sum = 0.0F;
  for (int w = 0; w < kAttendWarps; ++w)
    sum += top == lowest() ? 0.0F : memory.sum[w][thread] * power_of_two(memory.largest[w][thread] - top);
  const std::size_t score_list = layout.score_list(pass.layer, block.first_row + thread / layout.group, block.kv_head);
  const std::size_t to = layout.part_sums(score_list, part) + static_cast<std::size_t>(thread % layout.group);
  layout.score_max[to] = top;
  layout.score_sum[to] = sum;
}

template <int kDim, int kGroups>
void launch_for_bits(const CopyPass& pass, bool laid, cudaStream_t stream) {
  const auto kernel = pass.layout.copy.bits == 1 ? score_kernel<kDim, kGroups, 1> : score_kernel<kDim, kGroups, 2>;
  kernel<<<pass.grid(), kAttendThreads, 0, stream>>>(pass, laid);
  check_launch("score_copy");
}

template <int kDim>
void launch(const CopyPass& pass, bool laid, cudaStream_t stream) {
  if (pass.layout.group * pass.shared_rows > 8) return launch_for_bits<kDim, 2>(pass, laid, stream);
  launch_for_bits<kDim, 1>(pass, laid, stream);
}

}  // namespace

void score_copy(const SpeCacheLayout& layout, Layer layer, const StepView& view, RowsIn queries, bool laid, cudaStream_t stream) {
  detail::require(layout.group >= 1 && layout.group <= 16, "heads / kv_heads", layout.group, "in 1 .. 16");
  if (view.rows() == 0) return;
  const CopyPass pass(layout, layer, view, queries);
  switch (layout.dim) {
    case 64: return launch<64>(pass, laid, stream);
    case 80: return launch<80>(pass, laid, stream);
    case 96: return launch<96>(pass, laid, stream);
    case 128: return launch<128>(pass, laid, stream);
    case 256: return launch<256>(pass, laid, stream);
    default: throw InvalidArgument("head_dim = " + std::to_string(layout.dim) + ": must be 64, 80, 96, 128 or 256");
  }
}

}  // namespace dualdecoder::cuda
