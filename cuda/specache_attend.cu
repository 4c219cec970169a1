// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <string>

#include "cuda/attend_tokens.cuh"
#include "cuda/check.hpp"
#include "cuda/join_partials.cuh"
#include "cuda/low_bit.cuh"
#include "cuda/shared_memory.hpp"
#include "cuda/specache_layout.hpp"
#include "cuda/specache_pass.cuh"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr int kHalves = 2;  // few blocks attend to tokens that lie in full, and blocks of the copy want company

struct Pass {
  CopyPass copy;
  RowsIn keys;
  RowsIn values;

  __device__ float* partial(int row, int kv_head, int part, int head) const {
    const SpeCacheLayout& layout = copy.layout;
    const std::size_t at = (layout.row_list(row, kv_head) * static_cast<std::size_t>(layout.parts()) + static_cast<std::size_t>(part)) *
                               static_cast<std::size_t>(layout.group) +
                           static_cast<std::size_t>(head);
    return layout.partials + at * static_cast<std::size_t>(layout.dim + 2);
  }
};

/// Fetched tokens: shared memory holds the slots.
struct FetchedRows {
  static constexpr int kRun = 1;
  const std::byte* data;  ///< of the list
  const std::uint16_t* slots;
  std::uint32_t token_bytes;
  std::uint32_t value_offset;

  static constexpr bool in_runs() { return true; }
  __device__ const std::byte* key(int i) const { return data + static_cast<std::size_t>(slots[i]) * token_bytes; }
};

/// Tokens of the window.
struct WindowRows {
  static constexpr int kRun = 1;
  std::byte* data;  ///< of the list
  int first;        ///< position of row 0
  int ring;
  std::uint32_t token_bytes;
  std::uint32_t value_offset;

  static constexpr bool in_runs() { return true; }
  __device__ std::byte* key(int i) const { return data + static_cast<std::size_t>((first + i) % ring) * token_bytes; }
};

/// Where a column's partial result goes.
struct Target {
  const Pass& pass;
  const CopyBlock& block;

  __device__ float* operator()(int column) const {
    const int r = column / pass.copy.layout.group;
    if (!block.is_live(r)) return nullptr;
    return pass.partial(block.first_row + r, block.kv_head, block.part, column % pass.copy.layout.group);
  }
};

/// Weighs and adds the values of a warp's groups of a split, by the scores that select left. `fetched`: bits of the tokens that something
/// lies over.
template <int kDim, int kGroups, int kBits>
__device__ void attend_to_groups(const SpeCacheLayout& layout, const CopyBlock& block, Layer layer, int first, int end,
                                 const std::uint32_t* fetched, WarpSums<kDim, kGroups>& sums) {
  constexpr int kRuns = (kDim + 31) / 32;  // of 32 channels
  constexpr float kStep = CodeBits<kBits>::kStep;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int units = layout.copy.tokens / LowBitGroup::kUnit;
  const float* scores[kGroups];  // of column lane / 4 of each group of columns, null where it has no live row
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const int column = n * 8 + lane / 4;
    const int r = column / layout.group;
    scores[n] = nullptr;
    if (block.is_live(r)) {
      scores[n] = layout.scores_of(layout.score_list(layer, block.first_row + r, block.kv_head), column % layout.group) + lane % 4 * 2;
    }
  }
  // scores of the lane's column for its eight tokens of a unit; those that do not count are -inf
  const auto read = [&](int n, int token, float2(&four)[4]) {
    const std::uint32_t replaced = fetched[(token - first) / 32] >> (lane % 4 * 2);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      four[k] = {lowest(), lowest()};
      if (scores[n] != nullptr) four[k] = *reinterpret_cast<const float2*>(scores[n] + token + 8 * k);
      if ((replaced >> (8 * k) & 1U) != 0) four[k].x = lowest();
      if ((replaced >> (8 * k) & 2U) != 0) four[k].y = lowest();
    }
  };
  float largest[kGroups];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    largest[n] = lowest();
    for (int at = first + warp * layout.copy.tokens; at < end; at += kAttendWarps * layout.copy.tokens) {
      for (int unit = 0; unit < units; ++unit) {
        float2 four[4];
        read(n, at + unit * LowBitGroup::kUnit, four);
#pragma unroll
        for (int k = 0; k < 4; ++k) largest[n] = fmaxf(largest[n], fmaxf(four[k].x, four[k].y));
      }
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) largest[n] = fmaxf(largest[n], __shfl_xor_sync(kAllLanes, largest[n], step));
  }
  float total[kGroups] = {};
  float rest[kGroups][kRuns] = {};  // what a value is besides scale * code, over the lane's tokens
  for (int at = first + warp * layout.copy.tokens; at < end; at += kAttendWarps * layout.copy.tokens) {
    const std::byte* const group = layout.copied_group(block.slot, layer, block.kv_head, at);
#pragma unroll 1
    for (int unit = 0; unit < units; ++unit) {
      UnitCodes<kDim, kBits> codes;
      codes.load(group + layout.copy.value_codes, unit, lane);
      float2 weights[kGroups][4];
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        read(n, at + unit * LowBitGroup::kUnit, weights[n]);
        const float reference = largest[n] == lowest() ? 0.0F : largest[n];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          weights[n][k] = {power_of_two(weights[n][k].x - reference), power_of_two(weights[n][k].y - reference)};
          total[n] += weights[n][k].x + weights[n][k].y;
        }
      }
      std::uint32_t scaled[kGroups][4];
      float left[kGroups];
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) {
        if (m % 2 == 0 && m * 16 % layout.copy.channels == 0) {  // other zeros and scales begin
          const int run = m * 16 / layout.copy.channels * layout.copy.tokens + unit * LowBitGroup::kUnit + lane % 4 * 2;
#pragma unroll
          for (int n = 0; n < kGroups; ++n) left[n] = 0.0F;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float2 zero = load_halves(group + layout.copy.value_zeros, run + 8 * k);
            const float2 scale = load_halves(group + layout.copy.value_scales, run + 8 * k);
#pragma unroll
            for (int n = 0; n < kGroups; ++n) {
              const float2 weight = weights[n][k];
              scaled[n][k] = pack_bf16(weight.x * scale.x * kStep, weight.y * scale.y * kStep);
              const float2 taken = unpack_bf16(scaled[n][k]);
              left[n] += weight.x * zero.x - taken.x;
              left[n] += weight.y * zero.y - taken.y;
            }
          }
        }
        if (m % 2 == 0) {
#pragma unroll
          for (int n = 0; n < kGroups; ++n) rest[n][m / 2] += left[n];
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          std::uint32_t values[4];
          codes.widen(m, tile, values);
#pragma unroll
          for (int n = 0; n < kGroups; ++n) multiply_add(sums.values[m][n], values, scaled[n][tile * 2], scaled[n][tile * 2 + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const auto over_tokens = [](float& value) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) value += __shfl_xor_sync(kAllLanes, value, step);
    };
    over_tokens(total[n]);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) over_tokens(rest[n][run]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int owner = (lane % 4 * 2 + i) * 4;  // a lane that read the column
      sums.largest[n][i] = __shfl_sync(kAllLanes, largest[n], owner);
      sums.sum[n][i] = __shfl_sync(kAllLanes, total[n], owner);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const float more = __shfl_sync(kAllLanes, rest[n][run], owner);
#pragma unroll
        for (int m = run * 2; m < min(run * 2 + 2, kDim / 16); ++m) {
          sums.values[m][n][i] += more;
          sums.values[m][n][i + 2] += more;
        }
      }
    }
  }
}

/// A split of the copy.
template <class Shape, int kDim, int kGroups, int kBits>
__device__ void attend_to_split(const Pass& pass, const CopyBlock& block) {
  const SpeCacheLayout& layout = pass.copy.layout;
  const int first = block.part * layout.split_tokens;
  const int end = min(first + layout.split_tokens, block.copied);
  if (first >= end) return;
  auto* const fetched = reinterpret_cast<std::uint32_t*>(block_memory());
  static_assert(kSplitWords * sizeof(*fetched) <= Shape::kTableBytes);
  if (threadIdx.x < kSplitWords) fetched[threadIdx.x] = 0;
  __syncthreads();
  mark_fetched(layout, block.list, first, end, fetched);
  __syncthreads();
  WarpSums<kDim, kGroups> sums;
  sums.clear();
  attend_to_groups<kDim, kGroups, kBits>(layout, block, pass.copy.layer, first, end, fetched, sums);
  store_partial<Shape, kDim, kGroups>(sums, pass.copy.shared_rows * layout.group, Target{pass, block});
}

/// Attends to `rows`, of which the block's rows see the first `seen[r]`; the block is not yet synchronised.
template <class Shape, int kDim, int kGroups, class Rows>
__device__ void attend_to_rows(const Pass& pass, const CopyBlock& block, const Rows& rows, const int (&seen)[2]) {
  const int group = pass.copy.layout.group;
  stage_queries<Shape, kDim>(pass.copy.queries, [&](int column) { return block.query(pass.copy.layout, column); });
  wait_for_copies<0>();
  __syncthreads();  // the block sees its queries, and the tokens or slots that it wrote
  const int count = max(seen[0], seen[1]);
  HiddenBehind<kGroups> hidden;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i;
      hidden.limit[n][i] = column < group ? seen[0] : (column < 2 * group && pass.copy.shared_rows == 2 ? seen[1] : count);
    }
  }
  WarpSums<kDim, kGroups> sums;
  attend_to_tokens<Shape, kDim, kGroups, kHalves>(rows, count, hidden, pass.copy.queries.bf16, sums);
  store_partial<Shape, kDim, kGroups>(sums, pass.copy.shared_rows * group, [&](int column) -> float* {
    return seen[column / group] > 0 ? Target{pass, block}(column) : nullptr;
  });
}

template <class Shape, int kDim, int kGroups>
__device__ void attend_to_fetched(const Pass& pass, const CopyBlock& block) {
  const SpeCacheLayout& layout = pass.copy.layout;
  const int first = (block.part - layout.splits) * kPartTokens;
  const int count = min(layout.fetched_count[block.list] - first, kPartTokens);
  if (count <= 0) return;
  auto* const slots = reinterpret_cast<std::uint16_t*>(block_memory());
  static_assert(kPartTokens * sizeof(*slots) <= Shape::kTableBytes);
  const int* const from = layout.fetched_slot + block.list * static_cast<std::size_t>(layout.selected) + first;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kAttendThreads) slots[i] = static_cast<std::uint16_t>(from[i]);
  const FetchedRows rows{layout.fetched_data(block.list, 0), slots, layout.token_bytes, layout.token_bytes / 2};
  const int seen[2] = {block.is_live(0) ? count : 0, block.is_live(1) ? count : 0};
  attend_to_rows<Shape, kDim, kGroups>(pass, block, rows, seen);
}

template <class Shape, int kDim, int kGroups>
__device__ void attend_to_window(const Pass& pass, const CopyBlock& block) {
  const SpeCacheLayout& layout = pass.copy.layout;
  const StepView& view = pass.copy.view;
  const int first = block.copied + (block.part - layout.splits - layout.fetched_parts()) * kPartTokens;
  const RowMode mode = view.mode[block.place];
  int seen[2] = {0, 0};
  for (int r = 0; r < pass.copy.shared_rows; ++r) {
    if (!block.is_live(r)) continue;
    seen[r] = min(max(row_position(mode, block.first_number + r, block.length) + 1 - first, 0), kPartTokens);
  }
  const int count = max(seen[0], seen[1]);
  if (count == 0) return;
  const WindowRows rows{layout.window_token(block.list, 0), first, layout.ring, layout.token_bytes, layout.token_bytes / 2};
  // the rows' own tokens; where two blocks share a part both write them, the same bytes
  for (int number = 0; number < block.first_number + pass.copy.shared_rows; ++number) {
    if (!row_is_live(mode, number)) continue;
    const int token = row_position(mode, number, block.length) - first;
    if (token < 0 || token >= count) continue;
    std::byte* const key = rows.key(token);
    write_token(pass.keys, pass.values, layout.row_list(block.place * view.rows_per_sequence + number, block.kv_head) * kDim, kDim, key,
                key + rows.value_offset);
  }
  attend_to_rows<Shape, kDim, kGroups>(pass, block, rows, seen);
}

template <int kDim, int kGroups, int kBits>
__global__ void __launch_bounds__(kAttendThreads, kDim* kGroups <= 128 ? 4 : (kDim * kGroups <= 256 ? 2 : 1))
    attend_kernel(const __grid_constant__ Pass pass) {
  using Shape = AttendShape<kDim, kGroups, kHalves>;
  const SpeCacheLayout& layout = pass.copy.layout;
  const CopyBlock block(pass.copy);
  if (block.live == 0) return;
  if (block.part < layout.splits) return attend_to_split<Shape, kDim, kGroups, kBits>(pass, block);
  if (block.part < layout.splits + layout.fetched_parts()) return attend_to_fetched<Shape, kDim, kGroups>(pass, block);
  attend_to_window<Shape, kDim, kGroups>(pass, block);
}

/// Which partial results a row list has.
struct AttendPlan {
  CopyPass pass;

  __device__ LiveParts operator()(int row, int kv_head) const {
    const SpeCacheLayout& layout = pass.layout;
    const StepView& view = pass.view;
    LiveParts live = {};
    const int place = row / view.rows_per_sequence;
    const int number = row % view.rows_per_sequence;
    if (!row_is_live(view.mode[place], number)) return live;
    const int length = view.position[place];
    const int copied = layout.copied(length);
    const auto parts = [](int tokens, int each) { return (tokens + each - 1) / each; };
    live.end[0] = parts(copied, layout.split_tokens);
    live.first[1] = layout.splits;
    live.end[1] = layout.splits + parts(layout.fetched_count[layout.list(view.slot_of[place], pass.layer, kv_head)], kPartTokens);
    live.first[2] = layout.splits + layout.fetched_parts();
    live.end[2] = live.first[2] + parts(row_position(view.mode[place], number, length) + 1 - copied, kPartTokens);
    return live;
  }
};

template <int kDim, int kGroups>
void launch_for_bits(const Pass& pass, cudaStream_t stream) {
  constexpr int kBytes = AttendShape<kDim, kGroups, kHalves>::kBytes;
  const auto kernel = pass.copy.layout.copy.bits == 1 ? attend_kernel<kDim, kGroups, 1> : attend_kernel<kDim, kGroups, 2>;
  allow_shared_memory(kernel, kBytes, "attend_copy: shared memory of a block for this head_dim");
  kernel<<<pass.copy.grid(), kAttendThreads, kBytes, stream>>>(pass);
  check_launch("attend_copy");
}

template <int kDim>
void launch(const Pass& pass, cudaStream_t stream) {
  if (pass.copy.layout.group * pass.copy.shared_rows > 8) return launch_for_bits<kDim, 2>(pass, stream);
  launch_for_bits<kDim, 1>(pass, stream);
}

}  // namespace

void attend_copy(const SpeCacheLayout& layout, Layer layer, const StepView& view, RowsIn queries, RowsIn keys, RowsIn values, RowsOut out,
                 cudaStream_t stream) {
  detail::require(layout.group >= 1 && layout.group <= 16, "heads / kv_heads", layout.group, "in 1 .. 16");
  if (view.rows() == 0) return;
  const Pass pass{CopyPass(layout, layer, view, queries), keys, values};
  switch (layout.dim) {
    case 64: launch<64>(pass, stream); break;
    case 80: launch<80>(pass, stream); break;
    case 96: launch<96>(pass, stream); break;
    case 128: launch<128>(pass, stream); break;
    case 256: launch<256>(pass, stream); break;
    default: throw InvalidArgument("head_dim = " + std::to_string(layout.dim) + ": must be 64, 80, 96, 128 or 256");
  }
  launch_join(layout.partials, layout.parts(), view.rows(), layout.kv_heads, layout.group, layout.dim, AttendPlan{pass.copy}, out, stream);
}

}  // namespace dualdecoder::cuda
