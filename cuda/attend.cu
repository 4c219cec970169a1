// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <climits>
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

/// Of up to 128 dims five blocks of eight columns fit a multiprocessor of compute capability 9.0, or three of sixteen.
template <int kGroups>
inline constexpr int kHalves = kGroups == 1 ? 2 : 3;
template <int kDim, int kGroups>
inline constexpr int kBlocks = kDim > 128 ? 1 : (kGroups == 1 ? 5 : 3);

/// What blocks read of a pass.
struct Pass {
  StoreLayout layout;
  Layer layer;
  StepView view;
  RowsIn queries;
  RowsIn keys;
  RowsIn values;
  Selection by_row;
  int rows;  ///< of a sequence that one block serves
  int chosen_parts;
  int exact_parts;

  /// Whether row 1 attends to row 0's chunks.
  __device__ bool follows(RowMode mode) const { return layout.row1_as_row0 && mode == RowMode::dual; }
  /// The row list whose chunks row `number` of `place` attends to.
  __device__ std::size_t chooser(int place, int number, RowMode mode, int kv_head) const {
    return layout.row_list(place * view.rows_per_sequence + (number == 1 && follows(mode) ? 0 : number), kv_head);
  }
  __device__ const int* chosen(std::size_t chooser) const { return by_row.chunks + chooser * static_cast<std::size_t>(by_row.capacity); }
  __device__ std::size_t slot_list(int slot, int kv_head) const { return layout.slot_list(slot, layer, kv_head, *layout.pass); }
  __device__ float* partial(int row, int kv_head, int part, int head) const {
    const std::size_t at =
        (layout.row_list(row, kv_head) * static_cast<std::size_t>(layout.partial_count()) + static_cast<std::size_t>(part)) *
            static_cast<std::size_t>(layout.group) +
        static_cast<std::size_t>(head);
    return layout.partials + at * static_cast<std::size_t>(layout.dim + 2);
  }
};

/// Bit r: row r of a sequence in this mode is live.
__device__ inline unsigned live_rows(RowMode mode) {
  constexpr unsigned kByMode = [] {
    unsigned bits = 0;
    for (unsigned of = 0; of < 4; ++of) {
      for (unsigned r = 0; r < 2; ++r)
        bits |= static_cast<unsigned>(row_is_live(static_cast<RowMode>(of), static_cast<int>(r))) << (2 * of + r);
    }
    return bits;
  }();
  static_assert(static_cast<int>(RowMode::resync) == 3);
  return kByMode >> (2 * static_cast<unsigned>(mode)) & 3U;
}

/// A block of what rows first_number .. + rows - 1 of the sequence at `place` attend to exactly.
struct ExactBlock {
  int place;
  int first_number;
  int kv_head;
  int part;
  RowMode mode;
  unsigned live;  ///< bit r: row first_number + r
};

/// The chunks of a part, wherever they lie: in shared memory where their keys begin, and which of them the second row attends to.
struct ChunkRows {
  static constexpr int kRun = 4;
  static constexpr int kMost = kPartChunks;
  static_assert(kMost == kAttendThreads && kPartTokens <= 2 * kMost, "a thread finds a chunk");
  const std::byte** keys;
  std::uint32_t* seen_by_second;  ///< bits
  int shift;                      ///< log2 of the chunk's tokens
  std::uint32_t row_bytes;
  std::uint32_t value_offset;
  static constexpr int kTableBytes = kMost * 8 + kMost / 8;

  /// Whether a chunk has kRun tokens: all but those of two have.
  __device__ bool in_runs() const { return 1 << shift >= kRun; }

  __device__ const std::byte* key(int i) const {
    return keys[i >> shift] + (static_cast<std::uint32_t>(i) & ((1U << shift) - 1U)) * row_bytes;
  }
};

/// Which tokens of a tile the lane's columns do not see, bits as of HiddenBehind: a row sees the first `count`, the second row of them
/// those of its own chunks.
template <int kGroups>
struct HiddenFromRow {
  static constexpr unsigned kFirstTokens = kGroups == 2 ? 0x33U : 0x03U;  // the scores of the first of the lane's two tokens
  int count[2];
  unsigned second;  ///< those in columns of the second row
  const std::uint32_t* seen_by_second;
  int shift;

  __device__ unsigned operator()(int tile) const {
    unsigned hidden = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tile * kTileTokens + half * 8 + static_cast<int>(threadIdx.x % 32U / 4U);
      const int chunk = token >> shift;
      const bool seen = token < count[1] && (seen_by_second[chunk / 32] >> (chunk % 32) & 1U) != 0;
      hidden |= ((token < count[0] ? 0U : ~second) | (seen ? 0U : second)) << (2 * half) & kFirstTokens << (2 * half);
    }
    return hidden;
  }
};

template <class Shape, int kDim>
__device__ void stage_row_queries(const Pass& pass, const ExactBlock& block) {
  const int group = pass.layout.group;
  const int row = block.place * pass.view.rows_per_sequence + block.first_number;
  const std::size_t first = pass.layout.row_list(row, block.kv_head) * static_cast<std::size_t>(group * kDim);
  const int row_stride = pass.layout.heads * kDim;  // from row to row, where a KV head's queries are group * kDim
  stage_queries<Shape, kDim>(pass.queries, [=, rows = pass.rows](int column) {
    const int r = column >= group && rows == 2 ? 1 : 0;
    const int head = column - r * group;
    return head < group ? static_cast<std::ptrdiff_t>(first) + r * row_stride + head * kDim : static_cast<std::ptrdiff_t>(-1);
  });
}

/// Finds `chunk` among 2^steps ascending ones in shared memory; -1: it is none of them.
__device__ int find_chunk(const int* chunks, int size, int chunk) {
  int at = 0;
  for (int step = size / 2; step > 0; step /= 2) {
    if (chunks[at + step] <= chunk) at += step;
  }
  return chunks[at] == chunk ? at : -1;
}

/// Part of the chunks chosen for the first row, or of those chosen for the second row alone, as far as they are resident, into `rows`;
/// returns the tokens, the same in all threads, or -1 where nobody reads the part's result. What does not depend on one another is asked
/// for at once. Row 0's part is the same whatever row 1 chose.
template <class Shape, int kDim>
__device__ int find_chosen(const Pass& pass, const ExactBlock& block, const ChunkRows& rows) {
  constexpr int kBatch = 2;  // chunks of the other row that a thread asks for at once
  const StoreLayout& layout = pass.layout;
  const int thread = static_cast<int>(threadIdx.x);
  const int capacity = pass.by_row.capacity;
  const bool of_second = block.part >= layout.parts;
  const int each = (of_second ? layout.own_part_tokens() : kPartTokens) >> rows.shift;
  const int first = (of_second ? block.part - layout.parts : block.part) * each;
  const int number = block.first_number + static_cast<int>(of_second);
  const bool follows = pass.rows == 2 && pass.follows(block.mode);
  const std::size_t list = pass.chooser(block.place, number, block.mode, block.kv_head);
  const std::size_t other_list = pass.rows == 2 ? pass.chooser(block.place, 1 - number, block.mode, block.kv_head) : list;
  const int* const others = pass.chosen(other_list);
  const int count = min(pass.by_row.count[list] - first, each);
  int other_count = pass.rows == 2 && !follows && block.live == 3 ? pass.by_row.count[other_list] : 0;
  const int chunk = thread < each && first + thread < capacity ? pass.chosen(list)[first + thread] : 0;
  int other[kBatch];
#pragma unroll
  for (int k = 0; k < kBatch; ++k)
    other[k] = pass.rows == 2 && k * kAttendThreads + thread < capacity ? others[k * kAttendThreads + thread] : 0;
  if (count <= 0 || (block.live >> static_cast<int>(of_second) & 1U) == 0 || (of_second && follows)) return -1;
  const std::size_t slot_list = pass.slot_list(pass.view.slot_of[block.place], block.kv_head);
  const int slot =
      thread < count ? layout.slot_of[slot_list * static_cast<std::size_t>(layout.max_chunks) + static_cast<std::size_t>(chunk)] : -1;
  stage_row_queries<Shape, kDim>(pass, block);  // while the slots are on their way

  // where tiles are to be
  auto* const chunks = reinterpret_cast<int*>(block_memory() + Shape::kTiles);
  auto* const shared = reinterpret_cast<std::uint32_t*>(chunks + ChunkRows::kMost);  // bits of chunks that the other row chose as well
  std::uint32_t* const present = shared + ChunkRows::kMost / 32;
  if (thread < each) chunks[thread] = thread < count ? chunk : INT_MAX;
  if (thread < ChunkRows::kMost / 32) {
    shared[thread] = follows ? 0xFFFFFFFFU : 0U;
    rows.seen_by_second[thread] = of_second ? 0xFFFFFFFFU : 0U;
  }
  __syncthreads();
  const auto mark_shared = [&](int of_other) {
    const int at = find_chunk(chunks, each, of_other);
    if (at >= 0) atomicOr(shared + at / 32, 1U << (at % 32));
  };
#pragma unroll
  for (int k = 0; k < kBatch; ++k) {
    if (k * kAttendThreads + thread < other_count) mark_shared(other[k]);
  }
#pragma unroll 1
  for (int i = kBatch * kAttendThreads + thread; i < other_count; i += kAttendThreads) mark_shared(others[i]);
  __syncthreads();
  const bool is_shared = (shared[thread / 32] >> (thread % 32) & 1U) != 0;
  const unsigned in_warp = __ballot_sync(kAllLanes, static_cast<int>(slot >= 0 && !(of_second && is_shared)));
  if (thread % 32 == 0) present[thread / 32] = in_warp;
  wait_for_copies<0>();
  __syncthreads();  // the block sees its queries, too
  int total = 0;
  int at = 0;
#pragma unroll
  for (int w = 0; w < kAttendWarps; ++w) {
    if (w == thread / 32) at = total + __popc(in_warp & ((1U << (thread % 32)) - 1U));
    total += __popc(present[w]);
  }
  if ((in_warp >> (thread % 32) & 1U) != 0) {
    rows.keys[at] = layout.slot_data(slot_list, slot);
    if (is_shared) atomicOr(rows.seen_by_second + at / 32, 1U << (at % 32));
  }
  __syncthreads();
  return total << rows.shift;
}

/// The same of sinks and window, after the rows' own tokens and, for a guess, the true token before it were written to them: blocks that
/// write the same token write the same bytes. `seen`: how many tokens of the part each row sees.
template <class Shape, int kDim>
__device__ int find_near(const Pass& pass, const ExactBlock& block, const ChunkRows& rows, int (&seen)[2]) {
  const StoreLayout& layout = pass.layout;
  const StepView& view = pass.view;
  const int length = view.position[block.place];
  const RowMode mode = block.mode;
  const std::size_t list = layout.list(view.slot_of[block.place], pass.layer, block.kv_head);
  const int part = block.part - pass.chosen_parts;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int end = row_position(mode, block.first_number + r, length) + 1;
    seen[r] = (block.live >> r & 1U) != 0 ? min(layout.near_tokens(end, length) - part * kPartTokens, kPartTokens) : 0;
  }
  const int count = max(seen[0], seen[1]);
  if (count <= 0) return -1;
  stage_row_queries<Shape, kDim>(pass, block);
#pragma unroll 1
  for (int r = 0; r < block.first_number + pass.rows; ++r) {
    if (!row_is_live(mode, r)) continue;
    const int position = row_position(mode, r, length);
    std::byte* const key = layout.near_chunk(list, position >> rows.shift) + (position & (layout.chunk - 1)) * (kDim * 2);
    const int row = block.place * view.rows_per_sequence + r;
    write_token(pass.keys, pass.values, layout.row_list(row, block.kv_head) * kDim, kDim, key, key + layout.chunk_bytes / 2);
  }
  const int i = static_cast<int>(threadIdx.x);
  if (i < kPartTokens >> rows.shift) {  // the window follows the sinks
    const int at = (part * kPartTokens >> rows.shift) + i;
    rows.keys[i] = layout.near_chunk(list, at < layout.sink_chunks ? at : at - layout.sink_chunks + layout.range_end(length));
  }
  if (i < ChunkRows::kMost / 32) rows.seen_by_second[i] = 0xFFFFFFFFU;
  wait_for_copies<0>();
  __syncthreads();  // the block sees its queries and the tokens it wrote
  return count;
}

/// A part of what rows attend to exactly: of the chosen chunks, then of sinks and window.
template <class Shape, int kDim, int kGroups>
__device__ void attend_to_part(const Pass& pass, const ExactBlock& block) {
  const StoreLayout& layout = pass.layout;
  static_assert(ChunkRows::kTableBytes <= Shape::kTableBytes);
  auto* const keys = reinterpret_cast<const std::byte**>(block_memory());
  const ChunkRows rows{.keys = keys,
                       .seen_by_second = reinterpret_cast<std::uint32_t*>(keys + ChunkRows::kMost),
                       .shift = layout.chunk_shift(),
                       .row_bytes = kDim * 2,
                       .value_offset = layout.chunk_bytes / 2};
  int seen[2];
  int tokens;
  if (block.part < pass.chosen_parts) {
    tokens = find_chosen<Shape, kDim>(pass, block, rows);
    seen[0] = block.part < layout.parts ? tokens : 0;
    seen[1] = pass.rows == 2 ? tokens : 0;
  } else {
    tokens = find_near<Shape, kDim>(pass, block, rows, seen);
  }
  if (tokens < 0) return;
  const bool of_second = block.part >= layout.parts && block.part < pass.chosen_parts;
  const auto target = [&](int column) -> float* {
    const int r = column >= layout.group ? 1 : 0;
    if ((block.live >> r & 1U) == 0 || (r == 0 && of_second)) return nullptr;
    const int row = block.place * pass.view.rows_per_sequence + block.first_number + r;
    return pass.partial(row, block.kv_head, block.part, column - r * layout.group);
  };
  const int columns = pass.rows * layout.group;
  if (tokens == 0) return store_empty_partial(kDim, columns, target);
  HiddenFromRow<kGroups> hidden{.count = {seen[0], seen[1]}, .second = 0, .seen_by_second = rows.seen_by_second, .shift = rows.shift};
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = n * 8 + static_cast<int>(threadIdx.x % 4U) * 2 + i;
      if (pass.rows == 2 && column >= layout.group) hidden.second |= 1U << (n * 4 + i);
    }
  }
  WarpSums<kDim, kGroups> sums;
  attend_to_tokens<Shape, kDim, kGroups, kHalves<kGroups>>(rows, tokens, hidden, pass.queries.bf16, sums);
  store_partial<Shape, kDim, kGroups>(sums, columns, target);
}

/// A split of the tail for the rows of a sequence.
template <int kDim, int kGroups, int kValueGroup>
__device__ void attend_to_estimated(const Pass& pass, int place, int first_number, int kv_head, int split) {
  const StoreLayout& layout = pass.layout;
  const StepView& view = pass.view;
  const int length = view.position[place];
  const RowMode mode = view.mode[place];
  TailBlock block;
  block.slot = view.slot_of[place];
  block.kv_head = kv_head;
  block.rows = pass.rows;
  block.place = place;
  block.first_number = first_number;
  block.first = split * kSplitChunks;
  block.begin = max(block.first, layout.range_begin());
  block.end = min(block.first + kSplitChunks, layout.range_end(length));
  block.live = live_rows(mode) >> first_number & (block.rows == 2 ? 3U : 1U);
  if (block.live == 0 || block.begin >= block.end) return;
  block.list = layout.list(block.slot, pass.layer, kv_head);
  block.slot_list = pass.slot_list(block.slot, kv_head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool live = (block.live >> r & 1U) != 0;
    const std::size_t chooser = pass.chooser(place, live ? first_number + r : first_number, mode, kv_head);
    block.chosen[r] = pass.chosen(chooser);
    block.chosen_count[r] = live ? pass.by_row.count[chooser] : 0;
  }
  WarpSums<kDim, kGroups> sums;
  attend_to_tail<kDim, kGroups, kValueGroup>(layout, pass.layer, block, sums);
  store_partial<TailShape<kDim, kGroups, kValueGroup>, kDim, kGroups>(sums, block.rows * layout.group, [&](int column) -> float* {
    const int r = column < layout.group ? 0 : 1;
    if ((block.live >> r & 1U) == 0) return nullptr;
    return pass.partial(place * view.rows_per_sequence + first_number + r, kv_head, pass.exact_parts + split, column - r * layout.group);
  });
}

/// Blocks of both kinds in one grid, so that none waits for another kind, with those of a KV head of rows side by side: parts of what they
/// attend to exactly, then splits of the tail. The kinds alternate over the grid, since one is bound by memory and the other not. Grid:
/// (part or split, KV head, rows).
template <int kDim, int kGroups, int kValueGroup>
__global__ void __launch_bounds__(kAttendThreads, kBlocks<kDim, kGroups>) attend_kernel(const __grid_constant__ Pass pass) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();  // the join, whose blocks find room only when all of this kernel have
  const int rows = static_cast<int>(blockIdx.z);
  const bool shares = pass.view.rows_per_sequence != pass.rows;  // two blocks with a row of a sequence each
  const int place = shares ? rows / 2 : rows;
  const int first_number = shares ? rows % 2 : 0;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int part = static_cast<int>(blockIdx.x);
  if (part >= pass.exact_parts) {
    return attend_to_estimated<kDim, kGroups, kValueGroup>(pass, place, first_number, kv_head, part - pass.exact_parts);
  }
  const RowMode mode = pass.view.mode[place];
  const ExactBlock block{.place = place,
                         .first_number = first_number,
                         .kv_head = kv_head,
                         .part = part,
                         .mode = mode,
                         .live = live_rows(mode) >> first_number & (pass.rows == 2 ? 3U : 1U)};
  attend_to_part<AttendShape<kDim, kGroups, kHalves<kGroups>>, kDim, kGroups>(pass, block);
}

/// Which partial results a row list has.
struct AttendPlan {
  Pass pass;

  __device__ LiveParts operator()(int row, int kv_head) const {
    const StoreLayout& layout = pass.layout;
    LiveParts live = {};
    const int place = row / pass.view.rows_per_sequence;
    const int number = row - place * pass.view.rows_per_sequence;
    const RowMode mode = pass.view.mode[place];
    if (!row_is_live(mode, number)) return live;
    const auto parts_of = [&](int of_number, int tokens) {
      return (pass.by_row.count[pass.chooser(place, of_number, mode, kv_head)] * layout.chunk + tokens - 1) / tokens;
    };
    const bool second = pass.rows == 2 && number == 1;
    if (!second || row_is_live(mode, 0)) live.end[0] = parts_of(second ? 0 : number, kPartTokens);
    live.first[1] = live.end[1] = layout.parts;
    if (second && !pass.follows(mode)) live.end[1] += parts_of(1, layout.own_part_tokens());
    const int length = pass.view.position[place];
    const int own = row_position(mode, number, length);
    live.first[2] = pass.chosen_parts;
    live.end[2] = live.first[2] + (layout.near_tokens(own + 1, length) + kPartTokens - 1) / kPartTokens;
    const int end = layout.range_end(length);
    if (layout.tail && end > layout.range_begin()) {
      live.first[3] = pass.exact_parts + layout.range_begin() / kSplitChunks;
      live.end[3] = pass.exact_parts + (end + kSplitChunks - 1) / kSplitChunks;
    }
    return live;
  }
};

template <int kDim, int kGroups, int kValueGroup>
void launch(const Pass& pass, cudaStream_t stream) {
  constexpr int kExactBytes = AttendShape<kDim, kGroups, kHalves<kGroups>>::kBytes;
  const int tail_bytes = TailShape<kDim, kGroups, kValueGroup>::bytes(pass.layout.columns());
  const auto bytes = static_cast<std::size_t>(std::max(kExactBytes, tail_bytes));
  const StoreLayout& layout = pass.layout;
  const auto kernel = attend_kernel<kDim, kGroups, kValueGroup>;
  allow_shared_memory(kernel, bytes, "attend_chunks: shared memory of a block for this head_dim");
  const dim3 grid(static_cast<unsigned>(pass.exact_parts + (layout.tail ? layout.splits : 0)), static_cast<unsigned>(layout.kv_heads),
                  static_cast<unsigned>(pass.view.rows() / pass.rows));
  check(launch_overlapped(kernel, grid, dim3(kAttendThreads), bytes, stream, pass), "attend_chunks");
}

template <int kDim, int kGroups>
void launch_for_values(const Pass& pass, cudaStream_t stream) {
  switch (pass.layout.tail ? pass.layout.value_group : 1) {
    case 1: return launch<kDim, kGroups, 1>(pass, stream);
    case 2: return launch<kDim, kGroups, 2>(pass, stream);
    default: return launch<kDim, kGroups, 4>(pass, stream);
  }
}

template <int kDim>
void launch_for_group(const Pass& pass, cudaStream_t stream) {
  if (pass.layout.group * pass.rows > 8) return launch_for_values<kDim, 2>(pass, stream);
  launch_for_values<kDim, 1>(pass, stream);
}

}  // namespace

void attend_chunks(const StoreLayout& layout, Layer layer, const StepView& view, RowsIn queries, RowsIn keys, RowsIn values,
                   const Selection& by_row, RowsOut out, cudaStream_t stream) {
  detail::require(layout.group >= 1 && layout.group <= 16, "heads / kv_heads", layout.group, "in 1 .. 16");
  if (view.rows() == 0) return;
  const Pass pass{.layout = layout,
                  .layer = layer,
                  .view = view,
                  .queries = queries,
                  .keys = keys,
                  .values = values,
                  .by_row = by_row,
                  .rows = layout.rows_together(),
                  .chosen_parts = layout.parts + layout.own_parts(),
                  .exact_parts = layout.exact_parts()};
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
