// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>

#include "cuda/attend_tokens.cuh"
#include "cuda/check.hpp"
#include "cuda/join_partials.cuh"
#include "cuda/launch.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/store_kernels.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

/// A list's pages: keys [64, dim], then values [64, dim], bf16.
struct PageRows {
  static constexpr int kRun = kTileTokens;
  std::byte* list;
  int first;  ///< token of row 0
  int row_bytes;
  std::uint32_t value_offset;

  static constexpr bool in_runs() { return true; }
  __device__ std::byte* key(int i) const {
    const int token = first + i;
    return list + static_cast<std::size_t>(token / kPageTokens) * (2 * value_offset) + token % kPageTokens * row_bytes;
  }
};

__device__ inline PageRows pages_of(const FullLayout& layout, Layer layer, int slot, int kv_head, int first) {
  const std::uint32_t half = static_cast<std::uint32_t>(kPageTokens * layout.dim * 2);
  const std::size_t list = static_cast<std::size_t>(layer) * static_cast<std::size_t>(layout.kv_heads) + static_cast<std::size_t>(kv_head);
  return {.list = layout.base[slot] + list * static_cast<std::size_t>(layout.pages[slot]) * (2 * half),
          .first = first,
          .row_bytes = layout.dim * 2,
          .value_offset = half};
}

struct Pass {
  FullLayout layout;
  Layer layer;
  StepView view;
  RowsIn queries;
  RowsIn keys;
  RowsIn values;
  int shared_rows;  ///< rows of a sequence that one block serves

  __device__ bool is_live(int place, int number) const { return row_is_live(view.mode[place], number); }
  /// Tokens that a live row sees; storage ends where a guess stands behind a full sequence, at the latest.
  __device__ int seen(int place, int number) const {
    const int capacity = min(layout.pages[view.slot_of[place]] * kPageTokens, layout.splits * layout.split_tokens);
    return min(row_position(view.mode[place], number, view.position[place]) + 1, capacity);
  }
  __device__ std::size_t row_list(int row, int kv_head) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(layout.kv_heads) + static_cast<std::size_t>(kv_head);
  }
  __device__ float* partial(int row, int kv_head, int split, int head) const {
    const std::size_t at = (row_list(row, kv_head) * static_cast<std::size_t>(layout.splits) + static_cast<std::size_t>(split)) *
                               static_cast<std::size_t>(layout.group) +
                           static_cast<std::size_t>(head);
    return layout.partials + at * static_cast<std::size_t>(layout.dim + 2);
  }
};

/// A split of a sequence for `shared_rows` of its rows and the query heads of one KV head. Grid: (split, KV head, place and share).
template <int kDim, int kGroups, int kHalves>
__global__ void __launch_bounds__(kAttendThreads, kDim <= 128 ? 2 : 1) full_attend_kernel(const __grid_constant__ Pass pass) {
  using Shape = AttendShape<kDim, kGroups, kHalves>;
  wait_for_earlier_kernels();
  let_next_kernel_begin();  // the join, whose blocks find room only when all of this kernel have
  const FullLayout& layout = pass.layout;
  const StepView& view = pass.view;
  const int split = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const int shares = view.rows_per_sequence / pass.shared_rows;
  const int place = static_cast<int>(blockIdx.z) / shares;
  const int first_number = static_cast<int>(blockIdx.z) % shares * pass.shared_rows;
  const int first_row = place * view.rows_per_sequence + first_number;
  const int first = split * layout.split_tokens;
  int seen[2] = {0, 0};  // tokens of the split that the block's rows see
  for (int r = 0; r < pass.shared_rows; ++r) {
    if (pass.is_live(place, first_number + r)) seen[r] = min(max(pass.seen(place, first_number + r) - first, 0), layout.split_tokens);
  }
  const int count = max(seen[0], seen[1]);
  if (count == 0) return;
  const PageRows rows = pages_of(layout, pass.layer, view.slot_of[place], kv_head, first);
  // the rows' own tokens; where two blocks share a split both write them, the same bytes
  for (int number = 0; number < first_number + pass.shared_rows; ++number) {
    if (!pass.is_live(place, number)) continue;
    const int token = row_position(view.mode[place], number, view.position[place]) - first;
    if (token < 0 || token >= count) continue;
    std::byte* const key = rows.key(token);
    write_token(pass.keys, pass.values, pass.row_list(place * view.rows_per_sequence + number, kv_head) * kDim, kDim, key,
                key + rows.value_offset);
  }
  stage_queries<Shape, kDim>(pass.queries, [&](int column) {
    const int r = column / layout.group;
    if (r >= pass.shared_rows || seen[r] == 0) return static_cast<std::ptrdiff_t>(-1);
    return static_cast<std::ptrdiff_t>((pass.row_list(first_row + r, kv_head) * static_cast<std::size_t>(layout.group) +
                                        static_cast<std::size_t>(column - r * layout.group)) *
                                       kDim);
  });
  wait_for_copies<0>();
  __syncthreads();  // the block sees its queries and the tokens it wrote
  HiddenBehind<kGroups> hidden;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i;
      hidden.limit[n][i] = column < layout.group ? seen[0] : (pass.shared_rows == 2 && column < 2 * layout.group ? seen[1] : count);
    }
  }
  WarpSums<kDim, kGroups> sums;
  attend_to_tokens<Shape, kDim, kGroups, kHalves>(rows, count, hidden, pass.queries.bf16, sums);
  store_partial<Shape, kDim, kGroups>(sums, pass.shared_rows * layout.group, [&](int column) -> float* {
    const int r = column / layout.group;
    return seen[r] > 0 ? pass.partial(first_row + r, kv_head, split, column - r * layout.group) : nullptr;
  });
}

/// Which partial results a row list has.
struct FullPlan {
  Pass pass;

  __device__ LiveParts operator()(int row, int) const {
    LiveParts live = {};
    const int place = row / pass.view.rows_per_sequence;
    const int number = row % pass.view.rows_per_sequence;
    if (pass.is_live(place, number)) live.end[0] = (pass.seen(place, number) + pass.layout.split_tokens - 1) / pass.layout.split_tokens;
    return live;
  }
};

template <int kDim, int kGroups, int kHalves>
void launch(const Pass& pass, cudaStream_t stream) {
  constexpr int kBytes = AttendShape<kDim, kGroups, kHalves>::kBytes;
  const auto kernel = full_attend_kernel<kDim, kGroups, kHalves>;
  allow_shared_memory(kernel, kBytes, "attend_full: shared memory of a block for this head_dim");
  const dim3 grid(static_cast<unsigned>(pass.layout.splits), static_cast<unsigned>(pass.layout.kv_heads),
                  static_cast<unsigned>(pass.view.rows() / pass.shared_rows));
  check(launch_overlapped(kernel, grid, dim3(kAttendThreads), kBytes, stream, pass), "attend_full");
}

/// With room for six halves two and a half tiles of every warp are on their way while it works; small devices have room for four.
template <int kDim, int kGroups>
void launch_for_device(const Pass& pass, cudaStream_t stream) {
  if (AttendShape<kDim, kGroups, 6>::kBytes <= offered_shared_memory()) return launch<kDim, kGroups, 6>(pass, stream);
  launch<kDim, kGroups, 4>(pass, stream);
}

template <int kDim>
void launch_for_group(const Pass& pass, cudaStream_t stream) {
  if (pass.layout.group * pass.shared_rows > 8) return launch_for_device<kDim, 2>(pass, stream);
  launch_for_device<kDim, 1>(pass, stream);
}

/// A thread copies a pair of elements of a key or a value. Grid: (tokens, KV heads).
__global__ void append_full_kernel(const FullLayout layout, Layer layer, int slot, int first, RowsIn keys, RowsIn values) {
  const int token = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const PageRows rows = pages_of(layout, layer, slot, kv_head, first);
  std::byte* const key = rows.key(token);
  const std::size_t source =
      (static_cast<std::size_t>(token) * static_cast<std::size_t>(layout.kv_heads) + static_cast<std::size_t>(kv_head)) *
      static_cast<std::size_t>(layout.dim);
  write_token(keys, values, source, layout.dim, key, key + rows.value_offset);
}

}  // namespace

void append_full(const FullLayout& layout, Layer layer, int slot, int first, int count, RowsIn keys, RowsIn values, cudaStream_t stream) {
  if (count == 0) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(count), static_cast<unsigned>(layout.kv_heads));
  config.blockDim = dim3(kAttendThreads);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, append_full_kernel, layout, layer, slot, first, keys, values), "append_full");
}

void attend_full(const FullLayout& layout, Layer layer, const StepView& view, RowsIn queries, RowsIn keys, RowsIn values, RowsOut out,
                 cudaStream_t stream) {
  detail::require(layout.group >= 1 && layout.group <= 16, "heads / kv_heads", layout.group, "in 1 .. 16");
  if (view.rows() == 0) return;
  Pass pass = {layout, layer, view, queries, keys, values, view.rows_per_sequence};
  if (pass.shared_rows * layout.group > 16) pass.shared_rows = 1;
  switch (layout.dim) {
    case 64: launch_for_group<64>(pass, stream); break;
    case 80: launch_for_group<80>(pass, stream); break;
    case 96: launch_for_group<96>(pass, stream); break;
    case 128: launch_for_group<128>(pass, stream); break;
    case 256: launch_for_group<256>(pass, stream); break;
    default: throw InvalidArgument("head_dim = " + std::to_string(layout.dim) + ": must be 64, 80, 96, 128 or 256");
  }
  launch_join(layout.partials, layout.splits, view.rows(), layout.kv_heads, layout.group, layout.dim, FullPlan{pass}, out, stream);
}

}  // namespace dualdecoder::cuda
