// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/attend_tokens.cuh"
#include "cuda/check.hpp"
#include "cuda/join_partials.cuh"
#include "cuda/launch.hpp"
#include "cuda/shadow_kv_kernels.hpp"
#include "cuda/shared_memory.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr int kHalves = 3;
constexpr int kPartChunks = kPartTokens / 4;  // at most

/// Chunks that a row attends to, in this order.
struct Attended {
  int outliers;
  int chosen;
  int window;        ///< chunks
  int window_first;  ///< chunk
  int end;           ///< tokens of the sequence that the row sees

  __device__ int count() const { return outliers + chosen + window; }
};

struct Pass {
  ShadowLayout layout;
  Layer layer;
  StepView view;
  RowsIn queries;
  RowsIn keys;
  RowsIn values;
  Selection by_row;

  __device__ bool is_live(int row) const { return row_is_live(view.mode[row / view.rows_per_sequence], row % view.rows_per_sequence); }
  __device__ std::size_t list(int row, int kv_head) const {
    return layout.store.list(view.slot_of[row / view.rows_per_sequence], layer, kv_head);
  }
  /// The row whose chunks a live row attends to.
  __device__ int chooser(int row) const {
    const bool is_guess = view.mode[row / view.rows_per_sequence] == RowMode::dual && row % view.rows_per_sequence == 1;
    return is_guess && layout.store.row1_as_row0 ? row - 1 : row;
  }
  /// Of a live row.
  __device__ Attended attended(int row, int kv_head) const {
    const int place = row / view.rows_per_sequence;
    const int length = view.position[place];
    Attended chunks;
    chunks.outliers = layout.outlier_count[list(row, kv_head)];
    chunks.chosen = by_row.count_of(chooser(row), kv_head);
    chunks.window_first = layout.store.range_end(length);
    chunks.end = row_position(view.mode[place], row % view.rows_per_sequence, length) + 1;
    chunks.window = (chunks.end + layout.store.chunk - 1) / layout.store.chunk - chunks.window_first;
    return chunks;
  }
  __device__ float* partial(int row, int kv_head, int part, int head) const {
    const StoreLayout& store = layout.store;
    const std::size_t at = (store.row_list(row, kv_head) * static_cast<std::size_t>(layout.parts) + static_cast<std::size_t>(part)) *
                               static_cast<std::size_t>(store.group) +
                           static_cast<std::size_t>(head);
    return layout.partials + at * static_cast<std::size_t>(store.dim + 2);
  }
};

/// Chunks of a part, wherever they lie: shared memory holds where their keys begin.
struct ChunkRows {
  static constexpr int kRun = 4;  // the least of a chunk
  const std::byte* const* keys;
  int shift;  ///< log2 of the chunk's tokens
  std::uint32_t row_bytes;
  std::uint32_t value_offset;

  static constexpr bool in_runs() { return true; }
  __device__ const std::byte* key(int i) const {
    return keys[i >> shift] + (static_cast<std::uint32_t>(i) & ((1U << shift) - 1U)) * row_bytes;
  }
};

/// The row's own token and, for a guess, the true token before it go to the window; all blocks that do it write the same bytes.
template <int kDim>
__device__ void write_rows(const Pass& pass, int row, int kv_head, std::size_t list) {
  const StoreLayout& store = pass.layout.store;
  const int place = row / pass.view.rows_per_sequence;
  const int number = row % pass.view.rows_per_sequence;
  const RowMode mode = pass.view.mode[place];
#pragma unroll 1
  for (int r = 0; r <= number; ++r) {
    if (!row_is_live(mode, r)) continue;
    const int position = row_position(mode, r, pass.view.position[place]);
    std::byte* const key = store.near_chunk(list, position / store.chunk) + position % store.chunk * (kDim * 2);
    write_token(pass.keys, pass.values, store.row_list(row - number + r, kv_head) * kDim, kDim, key, key + store.load_offset);
  }
}

/// Where a chunk of a row's lies, null for a chosen one that has no slot.
__device__ const std::byte* find_chunk(const Pass& pass, const Attended& chunks, std::size_t list, const int* chosen, int at) {
  const StoreLayout& store = pass.layout.store;
  if (at < chunks.outliers) return pass.layout.outlier(list, at);
  at -= chunks.outliers;
  if (at >= chunks.chosen) return store.near_chunk(list, chunks.window_first + at - chunks.chosen);
  const int slot = store.slot_of[list * static_cast<std::size_t>(store.max_chunks) + static_cast<std::size_t>(chosen[at])];
  return slot < 0 ? nullptr : store.slot_data(list, slot);
}

/// A block attends to a part of a row's chunks. Grid: (parts, KV heads, rows).
template <int kDim, int kGroups>
__global__ void __launch_bounds__(kAttendThreads, kDim > 128 ? 1 : 3) attend_kernel(const __grid_constant__ Pass pass) {
  using Shape = AttendShape<kDim, kGroups, kHalves>;
  __shared__ int present_count;
  auto* const keys = reinterpret_cast<const std::byte**>(block_memory());
  static_assert(kPartChunks * sizeof(*keys) <= Shape::kTableBytes);
  wait_for_earlier_kernels();
  let_next_kernel_begin();  // the join, whose blocks find room only when all of this kernel have
  const StoreLayout& store = pass.layout.store;
  const int part = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const int row = static_cast<int>(blockIdx.z);
  if (!pass.is_live(row)) return;
  const Attended chunks = pass.attended(row, kv_head);
  const int each = kPartTokens / store.chunk;
  const int first = part * each;
  const int count = min(chunks.count() - first, each);
  if (count <= 0) return;
  const std::size_t list = pass.list(row, kv_head);
  const bool holds_window = first + count > chunks.outliers + chunks.chosen;
  const bool holds_end = first + count == chunks.count();
  if (holds_window) write_rows<kDim>(pass, row, kv_head, list);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 32) {
    const int* const chosen = pass.by_row.chunks_of(pass.chooser(row), kv_head);
    const std::byte* from[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      from[i] = i * 32 + thread < count ? find_chunk(pass, chunks, list, chosen, first + i * 32 + thread) : nullptr;
    }
    int before = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned present = __ballot_sync(kAllLanes, static_cast<int>(from[i] != nullptr));
      if (from[i] != nullptr) keys[before + __popc(present & ((1U << thread) - 1U))] = from[i];
      before += __popc(present);
    }
    if (thread == 0) present_count = before;
  }
  const int group = store.group;
  const std::size_t first_query = store.row_list(row, kv_head) * static_cast<std::size_t>(group * kDim);
  stage_queries<Shape, kDim>(pass.queries, [=](int column) {
    return column < group ? static_cast<std::ptrdiff_t>(first_query) + column * kDim : static_cast<std::ptrdiff_t>(-1);
  });
  wait_for_copies<0>();
  __syncthreads();  // the block sees its table, its queries and the tokens it wrote
  // the last chunk of the window, which comes last and has its place in the table, may be unfinished
  const int open = holds_end ? (chunks.window_first + chunks.window) * store.chunk - chunks.end : 0;
  const int tokens = present_count * store.chunk - open;
  const auto target = [&](int column) { return pass.partial(row, kv_head, part, column); };
  if (tokens == 0) return store_empty_partial(kDim, group, target);
  const ChunkRows rows{.keys = keys, .shift = store.chunk_shift(), .row_bytes = kDim * 2, .value_offset = store.load_offset};
  HiddenBehind<kGroups> hidden;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) hidden.limit[n][0] = hidden.limit[n][1] = tokens;
  WarpSums<kDim, kGroups> sums;
  attend_to_tokens<Shape, kDim, kGroups, kHalves>(rows, tokens, hidden, pass.queries.bf16, sums);
  store_partial<Shape, kDim, kGroups>(sums, group, target);
}

/// Which partial results a row list has.
struct AttendPlan {
  Pass pass;

  __device__ LiveParts operator()(int row, int kv_head) const {
    LiveParts live = {};
    if (!pass.is_live(row)) return live;
    const int each = kPartTokens / pass.layout.store.chunk;
    live.end[0] = (pass.attended(row, kv_head).count() + each - 1) / each;
    return live;
  }
};

template <int kDim, int kGroups>
void launch(const Pass& pass, cudaStream_t stream) {
  constexpr int kBytes = AttendShape<kDim, kGroups, kHalves>::kBytes;
  const auto kernel = attend_kernel<kDim, kGroups>;
  allow_shared_memory(kernel, kBytes, "attend_shadow: shared memory of a block for this head_dim");
  const dim3 grid(static_cast<unsigned>(pass.layout.parts), static_cast<unsigned>(pass.layout.store.kv_heads),
                  static_cast<unsigned>(pass.view.rows()));
  check(launch_overlapped(kernel, grid, dim3(kAttendThreads), kBytes, stream, pass), "attend_shadow");
}

template <int kDim>
void launch_for_group(const Pass& pass, cudaStream_t stream) {
  if (pass.layout.store.group > 8) return launch<kDim, 2>(pass, stream);
  launch<kDim, 1>(pass, stream);
}

}  // namespace

void attend_shadow(const ShadowLayout& layout, Layer layer, const StepView& view, RowsIn queries, RowsIn keys, RowsIn values,
                   const Selection& by_row, RowsOut out, cudaStream_t stream) {
  const StoreLayout& store = layout.store;
  if (view.rows() == 0) return;
  const Pass pass = {layout, layer, view, queries, keys, values, by_row};
  switch (store.dim) {
    case 64: launch_for_group<64>(pass, stream); break;
    case 80: launch_for_group<80>(pass, stream); break;
    case 96: launch_for_group<96>(pass, stream); break;
    case 128: launch_for_group<128>(pass, stream); break;
    case 256: launch_for_group<256>(pass, stream); break;
    default: throw InvalidArgument("head_dim = " + std::to_string(store.dim) + ": must be 64, 80, 96, 128 or 256");
  }
  launch_join(layout.partials, layout.parts, view.rows(), store.kv_heads, store.group, store.dim, AttendPlan{pass}, out, stream);
}

}  // namespace dualdecoder::cuda
