// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "cuda/attend_tail.cuh"
#include "cuda/attend_tokens.cuh"
#include "cuda/check.hpp"
#include "cuda/join_partials.cuh"
#include "cuda/launch.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/store_kernels.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr int kHalves = 3;  // so that four blocks of 128 dims fit a multiprocessor of compute capability 9.0 exactly

/// What blocks read of a pass.
struct Pass {
  StoreLayout layout;
  Layer layer;
  StepView view;
  RowsIn queries;
  RowsIn keys;
  RowsIn values;
  Selection by_row;
  int tail_rows;  ///< rows of a sequence that one block of the tail serves

  __device__ bool is_live(int row) const {
    const int place = row / view.rows_per_sequence;
    return row_is_live(view.mode[place], row % view.rows_per_sequence);
  }
  /// The row list whose chunks row `number` of `place` attends to.
  __device__ std::size_t chooser(int place, int number, int kv_head) const {
    const bool follows = layout.row1_as_row0 && number == 1 && view.mode[place] == RowMode::dual;
    return layout.row_list(place * view.rows_per_sequence + (follows ? 0 : number), kv_head);
  }
  __device__ const int* chosen(std::size_t chooser) const { return by_row.chunks + chooser * static_cast<std::size_t>(by_row.capacity); }
  __device__ std::size_t slot_list(int slot, int kv_head) const { return layout.slot_list(slot, layer, kv_head, *layout.pass); }
  __device__ int part_chunks() const { return kPartTokens / layout.chunk; }
  __device__ float* partial(int row, int kv_head, int part, int head) const {
    const std::size_t at =
        (layout.row_list(row, kv_head) * static_cast<std::size_t>(layout.partial_count()) + static_cast<std::size_t>(part)) *
            static_cast<std::size_t>(layout.group) +
        static_cast<std::size_t>(head);
    return layout.partials + at * static_cast<std::size_t>(layout.dim + 2);
  }
};

/// Chunks of a part, wherever they lie: shared memory holds where their keys begin.
struct ChunkRows {
  static constexpr bool kTilesAreContiguous = false;
  const std::byte* const* keys;
  int shift;  ///< log2 of the chunk's tokens
  std::uint32_t row_bytes;
  std::uint32_t value_offset;

  __device__ const std::byte* key(int i) const {
    return keys[i >> shift] + (static_cast<std::uint32_t>(i) & ((1U << shift) - 1U)) * row_bytes;
  }
};
constexpr int kPartChunks = kPartTokens / 4;  // at most

template <class Shape, int kDim>
__device__ void stage_row_queries(const Pass& pass, int row, int kv_head) {
  const int group = pass.layout.group;
  const std::size_t first = pass.layout.row_list(row, kv_head) * static_cast<std::size_t>(group * kDim);
  stage_queries<Shape, kDim>(pass.queries, [=](int column) {
    return column < group ? static_cast<std::ptrdiff_t>(first) + column * kDim : static_cast<std::ptrdiff_t>(-1);
  });
}

/// Part of the chosen chunks, as far as they are resident: where their keys begin to `keys`; returns the tokens, the same in all threads,
/// or -1 where nobody reads the part's result. What does not depend on one another is asked for at once.
template <class Shape, int kDim>
__device__ int find_chosen(const Pass& pass, int row, int kv_head, int part, const std::byte** keys, int* present_count) {
  const StoreLayout& layout = pass.layout;
  const int each = pass.part_chunks();
  const int thread = static_cast<int>(threadIdx.x);
  const int place = row / pass.view.rows_per_sequence;
  const int number = row - place * pass.view.rows_per_sequence;
  const bool live = row_is_live(pass.view.mode[place], number);
  const std::size_t slot_list = pass.slot_list(pass.view.slot_of[place], kv_head);
  const std::size_t chooser = pass.chooser(place, number, kv_head);
  const int total = pass.by_row.count[chooser];
  const int* const chosen = pass.chosen(chooser);
  int chunks[2];  // the first warp's
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = part * each + i * 32 + thread;
    chunks[i] = thread < 32 && at < pass.by_row.capacity ? chosen[at] : 0;
  }
  const int count = min(total - part * each, each);
  if (count <= 0 || !live) return -1;
  const int* const slot_of = layout.slot_of + slot_list * static_cast<std::size_t>(layout.max_chunks);
  int slot[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) slot[i] = thread < 32 && i * 32 + thread < count ? slot_of[chunks[i]] : -1;
  stage_row_queries<Shape, kDim>(pass, row, kv_head);  // while the slots are on their way
  if (thread < 32) {
    int before = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned present = __ballot_sync(kAllLanes, static_cast<int>(slot[i] >= 0));
      if (slot[i] >= 0) keys[before + __popc(present & ((1U << thread) - 1U))] = layout.slot_data(slot_list, slot[i]);
      before += __popc(present);
    }
    if (thread == 0) *present_count = before;
  }
  __syncthreads();
  return *present_count * layout.chunk;
}

/// The same of sinks and window, after the row's own token and, for a guess, the true token before it were written to them. All blocks of a
/// sequence that do write the same bytes.
template <class Shape, int kDim>
__device__ int find_near(const Pass& pass, int row, int kv_head, int part, const std::byte** keys) {
  const StoreLayout& layout = pass.layout;
  const StepView& view = pass.view;
  if (!pass.is_live(row)) return -1;
  const int place = row / view.rows_per_sequence;
  const int number = row % view.rows_per_sequence;
  const int length = view.position[place];
  const RowMode mode = view.mode[place];
  const std::size_t list = layout.list(view.slot_of[place], pass.layer, kv_head);
  const int count = min(layout.near_tokens(row_position(mode, number, length) + 1, length) - part * kPartTokens, kPartTokens);
  if (count <= 0) return -1;
#pragma unroll 1
  for (int r = 0; r <= number; ++r) {
    if (!row_is_live(mode, r)) continue;
    const int position = row_position(mode, r, length);
    std::byte* const key = layout.near_chunk(list, position / layout.chunk) + position % layout.chunk * (kDim * 2);
    write_token(pass.keys, pass.values, layout.row_list(row - number + r, kv_head) * kDim, kDim, key, key + layout.chunk_bytes / 2);
  }
  const int i = static_cast<int>(threadIdx.x);
  if (i < pass.part_chunks()) {  // the window follows the sinks
    const int at = part * pass.part_chunks() + i;
    keys[i] = layout.near_chunk(list, at < layout.sink_chunks ? at : at - layout.sink_chunks + layout.range_end(length));
  }
  stage_row_queries<Shape, kDim>(pass, row, kv_head);
  __syncthreads();  // the block sees its queries and the tokens it wrote
  return count;
}

/// A part of what a row attends to exactly: of the chosen chunks, then of sinks and window.
template <class Shape, int kDim, int kGroups>
__device__ void attend_to_part(const Pass& pass, int row, int kv_head, int part) {
  const StoreLayout& layout = pass.layout;
  auto* const keys = reinterpret_cast<const std::byte**>(block_memory());
  static_assert(kPartChunks * sizeof(*keys) <= Shape::kTableBytes);
  auto* const present_count = reinterpret_cast<int*>(block_memory() + Shape::kTableBytes);  // where sums are to be
  const int tokens = part < layout.parts ? find_chosen<Shape, kDim>(pass, row, kv_head, part, keys, present_count)
                                         : find_near<Shape, kDim>(pass, row, kv_head, part - layout.parts, keys);
  if (tokens < 0) return;
  const auto target = [&](int column) { return pass.partial(row, kv_head, part, column); };
  if (tokens == 0) return store_empty_partial(kDim, layout.group, target);
  const ChunkRows rows{.keys = keys, .shift = __ffs(layout.chunk) - 1, .row_bytes = kDim * 2, .value_offset = layout.chunk_bytes / 2};
  int seen[kGroups][2];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) seen[n][0] = seen[n][1] = tokens;
  WarpSums<kDim, kGroups> sums;
  const float scale = kLog2e * rsqrtf(static_cast<float>(kDim));
  attend_to_tokens<Shape, kDim, kGroups, kHalves>(rows, tokens, seen, scale, sums);
  store_partial<Shape, kDim, kGroups>(sums, layout.group, target);
}

/// A split of the tail for the rows of a sequence.
template <int kDim, int kGroups>
__device__ void attend_to_estimated(const Pass& pass, int place, int first_number, int kv_head, int split) {
  const StoreLayout& layout = pass.layout;
  const StepView& view = pass.view;
  const int length = view.position[place];
  TailBlock block;
  block.slot = view.slot_of[place];
  block.kv_head = kv_head;
  block.rows = pass.tail_rows;
  block.place = place;
  block.first_number = first_number;
  block.first = split * kSplitChunks;
  block.begin = max(block.first, layout.range_begin());
  block.end = min(block.first + kSplitChunks, layout.range_end(length));
  block.live = 0;
  const RowMode mode = view.mode[place];
#pragma unroll
  for (int r = 0; r < 2; ++r) block.live |= static_cast<unsigned>(r < block.rows && row_is_live(mode, first_number + r)) << r;
  if (block.live == 0 || block.begin >= block.end) return;
  block.list = layout.list(block.slot, pass.layer, kv_head);
  block.slot_list = pass.slot_list(block.slot, kv_head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool live = (block.live >> r & 1U) != 0;
    const std::size_t chooser = pass.chooser(place, live ? first_number + r : first_number, kv_head);
    block.chosen[r] = pass.chosen(chooser);
    block.chosen_count[r] = live ? pass.by_row.count[chooser] : 0;
  }
  WarpSums<kDim, kGroups> sums;
  attend_to_tail<kDim, kGroups>(layout, pass.layer, block, sums);
  store_partial<TailShape<kDim, kGroups>, kDim, kGroups>(sums, block.rows * layout.group, [&](int column) -> float* {
    const int r = column < layout.group ? 0 : 1;
    if ((block.live >> r & 1U) == 0) return nullptr;
    return pass.partial(place * view.rows_per_sequence + first_number + r, kv_head, layout.parts + layout.near_parts() + split,
                        column - r * layout.group);
  });
}

/// Blocks of both kinds in one grid, so that none waits for another kind: parts of what every row list attends to exactly, and splits of
/// the tail. The kinds are spread evenly over the grid, since one is bound by memory and the other not: block b comes behind b * exact_step
/// / 2^32 blocks of the former.
template <int kDim, int kGroups, int kTailGroups>
__global__ void __launch_bounds__(kAttendThreads, kDim > 128 ? 1 : (kTailGroups == 1 ? 4 : 3))
    attend_kernel(const __grid_constant__ Pass pass, std::uint64_t exact_step) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();  // the join, whose blocks find room only when all of this kernel have
  const int kv_heads = pass.layout.kv_heads;
  const auto exact_before = [=](unsigned block) { return static_cast<int>(block * exact_step >> 32); };
  int index = exact_before(blockIdx.x);
  if (exact_before(blockIdx.x + 1) > index) {
    const int parts = pass.layout.parts + pass.layout.near_parts();
    const int part = index % parts;
    index /= parts;
    attend_to_part<AttendShape<kDim, kGroups, kHalves>, kDim, kGroups>(pass, index / kv_heads, index % kv_heads, part);
    return;
  }
  index = static_cast<int>(blockIdx.x) - index;
  const int split = index % pass.layout.splits;
  index /= pass.layout.splits;
  const int kv_head = index % kv_heads;
  index /= kv_heads;
  const int shares = pass.view.rows_per_sequence / pass.tail_rows;
  attend_to_estimated<kDim, kTailGroups>(pass, index / shares, index % shares * pass.tail_rows, kv_head, split);
}

/// Which partial results a row list has.
struct AttendPlan {
  Pass pass;

  __device__ LiveParts operator()(int row, int kv_head) const {
    const StoreLayout& layout = pass.layout;
    LiveParts live = {};
    if (!pass.is_live(row)) return live;
    const int each = pass.part_chunks();
    const int place = row / pass.view.rows_per_sequence;
    live.end[0] = (pass.by_row.count[pass.chooser(place, row - place * pass.view.rows_per_sequence, kv_head)] + each - 1) / each;
    const int length = pass.view.position[place];
    const int own = row_position(pass.view.mode[place], row - place * pass.view.rows_per_sequence, length);
    live.first[1] = layout.parts;
    live.end[1] = layout.parts + (layout.near_tokens(own + 1, length) + kPartTokens - 1) / kPartTokens;
    const int end = layout.range_end(length);
    if (layout.tail && end > layout.range_begin()) {
      const int first = layout.parts + layout.near_parts();
      live.first[2] = first + layout.range_begin() / kSplitChunks;
      live.end[2] = first + (end + kSplitChunks - 1) / kSplitChunks;
    }
    return live;
  }
};

template <int kDim, int kGroups, int kTailGroups>
void launch(const Pass& pass, cudaStream_t stream) {
  constexpr int kExactBytes = AttendShape<kDim, kGroups, kHalves>::kBytes;
  const int tail_bytes = TailShape<kDim, kTailGroups>::bytes(pass.layout.columns());
  const auto bytes = static_cast<std::size_t>(std::max(kExactBytes, tail_bytes));
  const StoreLayout& layout = pass.layout;
  const int lists = pass.view.rows() * layout.kv_heads;
  const int exact_blocks = lists * (layout.parts + layout.near_parts());
  const int tail_blocks = layout.tail ? lists / pass.tail_rows * layout.splits : 0;
  const auto kernel = attend_kernel<kDim, kGroups, kTailGroups>;
  allow_shared_memory(kernel, bytes, "attend_chunks: shared memory of a block for this head_dim");
  const auto blocks = static_cast<unsigned>(exact_blocks + tail_blocks);
  const std::uint64_t exact_step = ((std::uint64_t{static_cast<unsigned>(exact_blocks)} << 32) + blocks - 1) / blocks;
  check(launch_overlapped(kernel, dim3(blocks), dim3(kAttendThreads), bytes, stream, pass, exact_step), "attend_chunks");
}

template <int kDim>
void launch_for_group(const Pass& pass, cudaStream_t stream) {
  if (pass.layout.group > 8) return launch<kDim, 2, 2>(pass, stream);
  if (pass.layout.group * pass.tail_rows > 8) return launch<kDim, 1, 2>(pass, stream);
  launch<kDim, 1, 1>(pass, stream);
}

}  // namespace

void attend_chunks(const StoreLayout& layout, Layer layer, const StepView& view, RowsIn queries, RowsIn keys, RowsIn values,
                   const Selection& by_row, RowsOut out, cudaStream_t stream) {
  detail::require(layout.group >= 1 && layout.group <= 16, "heads / kv_heads", layout.group, "in 1 .. 16");
  if (view.rows() == 0) return;
  Pass pass = {layout, layer, view, queries, keys, values, by_row, view.rows_per_sequence};
  if (pass.tail_rows * layout.group > 16) pass.tail_rows = 1;
  switch (layout.dim) {
    case 64: launch_for_group<64>(pass, stream); break;
    case 80: launch_for_group<80>(pass, stream); break;
    case 96: launch_for_group<96>(pass, stream); break;
    case 128: launch_for_group<128>(pass, stream); break;
    case 256: launch_for_group<256>(pass, stream); break;
    default: throw InvalidArgument("head_dim = " + std::to_string(layout.dim) + ": must be 64, 80, 96, 128 or 256");
  }
  launch_join(layout.partials, layout.partial_count(), view.rows(), layout.kv_heads, layout.group, layout.dim, AttendPlan{pass}, out,
              stream);
}

}  // namespace dualdecoder::cuda
