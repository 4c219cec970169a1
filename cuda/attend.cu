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
  __host__ __device__ int part_count() const { return layout.parts + 1 + layout.splits; }
  __device__ float* partial(int row, int kv_head, int part, int head) const {
    const std::size_t at = (layout.row_list(row, kv_head) * static_cast<std::size_t>(part_count()) + static_cast<std::size_t>(part)) *
                               static_cast<std::size_t>(layout.group) +
                           static_cast<std::size_t>(head);
    return layout.partials + at * static_cast<std::size_t>(layout.dim + 2);
  }
};

/// Chunks in slots, of which shared memory holds the numbers.
struct SlotRows {
  static constexpr bool kTilesAreContiguous = false;
  const std::byte* data;  ///< of the slot list
  const std::uint32_t* slots;
  int shift;  ///< log2 of the chunk's tokens
  std::uint32_t row_bytes;
  std::uint32_t chunk_bytes;
  std::uint32_t value_offset;

  __device__ const std::byte* key(int i) const {
    // without a sign, since products of unsigned words take one instruction
    const std::uint32_t in_chunk = (static_cast<std::uint32_t>(i) & ((1U << shift) - 1U)) * row_bytes;
    return data + (std::uint64_t{slots[i >> shift]} * chunk_bytes + in_chunk);
  }
};

/// Sinks, then the window from the first chunk behind the choosable ones on, which the ring holds in one turn.
struct NearRows {
  static constexpr bool kTilesAreContiguous = false;
  const std::byte* sinks;
  const std::byte* window;
  int sink_tokens;
  int window_chunks;
  int first_place;  ///< of that chunk in the ring
  int shift;
  std::uint32_t row_bytes;
  std::uint32_t chunk_bytes;
  std::uint32_t value_offset;

  __device__ const std::byte* key(int i) const {
    const bool sink = i < sink_tokens;
    const int token = sink ? i : i - sink_tokens;
    int place = token >> shift;
    if (!sink) place += first_place;
    if (!sink && place >= window_chunks) place -= window_chunks;
    const std::uint32_t in_chunk = (static_cast<std::uint32_t>(token) & ((1U << shift) - 1U)) * row_bytes;
    return (sink ? sinks : window) + (std::uint64_t{static_cast<std::uint32_t>(place)} * chunk_bytes + in_chunk);
  }
};

template <class Shape, int kDim>
__device__ void stage_row_queries(const Pass& pass, int row, int kv_head) {
  const int group = pass.layout.group;
  const std::size_t first = pass.layout.row_list(row, kv_head) * static_cast<std::size_t>(group * kDim);
  stage_queries<Shape, kDim>(pass.queries, [=](int column) {
    return column < group ? static_cast<std::ptrdiff_t>(first) + column * kDim : static_cast<std::ptrdiff_t>(-1);
  });
}

/// Attends to tokens that all columns see and stores the block's partial result.
template <class Shape, int kDim, int kGroups, class Rows>
__device__ void attend_and_store(const Pass& pass, const Rows& rows, int count, int row, int kv_head, int part) {
  int seen[kGroups][2];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) seen[n][0] = seen[n][1] = count;
  WarpSums<kDim, kGroups> sums;
  const float scale = kLog2e * rsqrtf(static_cast<float>(kDim));
  attend_to_tokens<Shape, kDim, kGroups, kHalves>(rows, count, seen, scale, sums);
  store_partial<Shape, kDim, kGroups>(sums, pass.layout.group, [&](int column) { return pass.partial(row, kv_head, part, column); });
}

/// Part of the chosen chunks, as far as they are resident.
template <class Shape, int kDim, int kGroups>
__device__ void attend_to_chosen(const Pass& pass, int row, int kv_head, int part) {
  const StoreLayout& layout = pass.layout;
  const int each = pass.part_chunks();
  const int thread = static_cast<int>(threadIdx.x);
  // what does not depend on one another is asked for at once
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
  if (count <= 0 || !live) return;  // nobody reads its partial result
  const int* const slot_of = layout.slot_of + slot_list * static_cast<std::size_t>(layout.max_chunks);
  int slot[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) slot[i] = thread < 32 && i * 32 + thread < count ? slot_of[chunks[i]] : -1;
  stage_row_queries<Shape, kDim>(pass, row, kv_head);  // while the slots are on their way
  auto* const slots = reinterpret_cast<std::uint32_t*>(block_memory());
  auto* const present_count = reinterpret_cast<int*>(slots + kPartTokens / 4);
  if (thread < 32) {
    int before = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned present = __ballot_sync(kAllLanes, static_cast<int>(slot[i] >= 0));
      if (slot[i] >= 0) slots[before + __popc(present & ((1U << thread) - 1U))] = static_cast<std::uint32_t>(slot[i]);
      before += __popc(present);
    }
    if (thread == 0) *present_count = before;
  }
  __syncthreads();
  const int tokens = *present_count * layout.chunk;
  if (tokens == 0) {
    store_empty_partial(kDim, layout.group, [&](int column) { return pass.partial(row, kv_head, part, column); });
    return;
  }
  const SlotRows rows{.data = layout.slot_data(slot_list, 0),
                      .slots = slots,
                      .shift = __ffs(layout.chunk) - 1,
                      .row_bytes = kDim * 2,
                      .chunk_bytes = layout.chunk_bytes,
                      .value_offset = layout.chunk_bytes / 2};
  attend_and_store<Shape, kDim, kGroups>(pass, rows, tokens, row, kv_head, part);
}

/// Sinks and window, after the row's own token and, for a guess, the true token before it were written to them. Both blocks of a dual
/// sequence write the true token, the same bytes.
template <class Shape, int kDim, int kGroups>
__device__ void attend_to_near(const Pass& pass, int row, int kv_head) {
  const StoreLayout& layout = pass.layout;
  const StepView& view = pass.view;
  if (!pass.is_live(row)) return;
  const int place = row / view.rows_per_sequence;
  const int number = row % view.rows_per_sequence;
  const int length = view.position[place];
  const RowMode mode = view.mode[place];
  const std::size_t list = layout.list(view.slot_of[place], pass.layer, kv_head);
  for (int r = 0; r <= number; ++r) {
    if (!row_is_live(mode, r)) continue;
    const int position = row_position(mode, r, length);
    std::byte* const key = layout.near_chunk(list, position / layout.chunk) + position % layout.chunk * (kDim * 2);
    write_token(pass.keys, pass.values, layout.row_list(row - number + r, kv_head) * kDim, kDim, key, key + layout.chunk_bytes / 2);
  }
  stage_row_queries<Shape, kDim>(pass, row, kv_head);
  __syncthreads();  // the block sees its queries and the tokens it wrote
  const int end = row_position(mode, number, length) + 1;
  const int window_first = layout.range_end(length) * layout.chunk;
  const int sink_tokens = min(layout.sink_chunks * layout.chunk, end);
  const NearRows rows{.sinks = layout.near_chunk(list, 0),
                      .window = layout.window + list * static_cast<std::size_t>(layout.window_chunks) * layout.chunk_bytes,
                      .sink_tokens = sink_tokens,
                      .window_chunks = layout.window_chunks,
                      .first_place = layout.range_end(length) % layout.window_chunks,
                      .shift = __ffs(layout.chunk) - 1,
                      .row_bytes = kDim * 2,
                      .chunk_bytes = layout.chunk_bytes,
                      .value_offset = layout.chunk_bytes / 2};
  attend_and_store<Shape, kDim, kGroups>(pass, rows, sink_tokens + max(0, end - window_first), row, kv_head, layout.parts);
}

/// A split of the tail for the rows of a sequence.
template <class Shape, int kDim, int kGroups>
__device__ void attend_to_estimated(const Pass& pass, int place, int first_number, int kv_head, int split) {
  const StoreLayout& layout = pass.layout;
  const StepView& view = pass.view;
  const int length = view.position[place];
  TailBlock block;
  block.slot = view.slot_of[place];
  block.kv_head = kv_head;
  block.rows = pass.tail_rows;
  block.first_row = place * view.rows_per_sequence + first_number;
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
  std::byte* const own = block_memory() + Shape::kTiles + threadIdx.x / 32 * Shape::kWarpBytes;
  constexpr int kScaleBytes = kWarpChunks * 4;
  constexpr int kRing = std::min((Shape::kWarpBytes - kScaleBytes) / (kDim * kTileChunks / 2), kWarpTiles);
  WarpSums<kDim, kGroups> sums;
  attend_to_tail<kDim, kGroups, kRing>(layout, pass.layer, block, reinterpret_cast<std::uint32_t*>(block_memory()),
                                       reinterpret_cast<float*>(own), own + kScaleBytes, sums);
  store_partial<Shape, kDim, kGroups>(sums, block.rows * layout.group, [&](int column) -> float* {
    const int r = column < layout.group ? 0 : 1;
    if ((block.live >> r & 1U) == 0) return nullptr;
    return pass.partial(block.first_row + r, kv_head, layout.parts + 1 + split, column - r * layout.group);
  });
}

/// Blocks of all kinds in one grid, so that none waits for another kind: parts of the chosen chunks and, as one part more, sinks and window
/// of every row list; and splits of the tail. The kinds are spread evenly over the grid, since one is bound by memory and the other not:
/// block b comes behind b * exact_step / 2^32 blocks of the former.
template <int kDim, int kGroups, int kTailGroups>
__global__ void __launch_bounds__(kAttendThreads, kDim > 128 ? 1 : (kTailGroups == 1 ? 4 : 3))
    attend_kernel(const __grid_constant__ Pass pass, std::uint64_t exact_step) {
  let_next_kernel_begin();  // the join, whose blocks find room only when all of this kernel have
  const int kv_heads = pass.layout.kv_heads;
  const auto exact_before = [=](unsigned block) { return static_cast<int>(block * exact_step >> 32); };
  int index = exact_before(blockIdx.x);
  if (exact_before(blockIdx.x + 1) > index) {
    const int parts = pass.layout.parts + 1;
    const int part = index % parts;
    index /= parts;
    using Shape = AttendShape<kDim, kGroups, kHalves>;
    if (part < pass.layout.parts) {
      attend_to_chosen<Shape, kDim, kGroups>(pass, index / kv_heads, index % kv_heads, part);
    } else {
      attend_to_near<Shape, kDim, kGroups>(pass, index / kv_heads, index % kv_heads);
    }
    return;
  }
  index = static_cast<int>(blockIdx.x) - index;
  const int split = index % pass.layout.splits;
  index /= pass.layout.splits;
  const int kv_head = index % kv_heads;
  index /= kv_heads;
  const int shares = pass.view.rows_per_sequence / pass.tail_rows;
  attend_to_estimated<AttendShape<kDim, kTailGroups, kHalves>, kDim, kTailGroups>(pass, index / shares, index % shares * pass.tail_rows,
                                                                                  kv_head, split);
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
    live.first[1] = layout.parts;
    live.end[1] = layout.parts + 1;
    const int end = layout.range_end(pass.view.position[place]);
    if (layout.tail && end > layout.range_begin()) {
      live.first[2] = layout.parts + 1 + layout.range_begin() / kSplitChunks;
      live.end[2] = layout.parts + 1 + (end + kSplitChunks - 1) / kSplitChunks;
    }
    return live;
  }
};

template <int kDim, int kGroups, int kTailGroups>
void launch(const Pass& pass, cudaStream_t stream) {
  constexpr int kExactBytes = AttendShape<kDim, kGroups, kHalves>::kBytes;
  constexpr int kTailBytes = AttendShape<kDim, kTailGroups, kHalves>::kBytes;
  constexpr int kBytes = kExactBytes > kTailBytes ? kExactBytes : kTailBytes;
  const StoreLayout& layout = pass.layout;
  const int lists = pass.view.rows() * layout.kv_heads;
  const int exact_blocks = lists * (layout.parts + 1);
  const int tail_blocks = layout.tail ? lists / pass.tail_rows * layout.splits : 0;
  const auto kernel = attend_kernel<kDim, kGroups, kTailGroups>;
  allow_shared_memory(kernel, kBytes, "attend_chunks: shared memory of a block for this head_dim");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(exact_blocks + tail_blocks));
  const std::uint64_t exact_step = ((std::uint64_t{static_cast<unsigned>(exact_blocks)} << 32) + config.gridDim.x - 1) / config.gridDim.x;
  config.blockDim = dim3(kAttendThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, pass, exact_step), "attend_chunks");
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
  launch_join(layout.partials, pass.part_count(), view.rows(), layout.kv_heads, layout.group, layout.dim, AttendPlan{pass}, out, stream);
}

}  // namespace dualdecoder::cuda
