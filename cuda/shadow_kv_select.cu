// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/attend_tokens.cuh"
#include "cuda/check.hpp"
#include "cuda/launch.hpp"
#include "cuda/shadow_kv_kernels.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/top_chunks.cuh"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr int kStages = 4;  // tiles of landmarks of a warp, three of them on their way
constexpr int kAhead = kStages - 1;

/// Largest score and the sum of exp(score - largest) of a query head, of what one lane saw.
struct LaneSoftmax {
  float largest = lowest();
  float sum = 0.0F;

  __device__ void add(float other_largest, float other_sum) {
    const float top = fmaxf(largest, other_largest);
    if (top == lowest()) return;
    sum = sum * power_of_two((largest - top) * kLog2e) + other_sum * power_of_two((other_largest - top) * kLog2e);
    largest = top;
  }
};

/// One block scores kScoreChunks landmarks for the query heads of a row and KV head; every warp has every fourth tile of 16 of them.
/// Grid: (splits, KV heads, rows).
template <int kDim, int kGroups>
__global__ void __launch_bounds__(kAttendThreads)
    score_kernel(const __grid_constant__ ShadowLayout layout, Layer layer, StepView view, RowsIn queries, float scale) {
  using Shape = AttendShape<kDim, kGroups, kStages>;
  constexpr unsigned kPieces = kDim / 8;
  wait_for_earlier_kernels();
  const StoreLayout& store = layout.store;
  const int split = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const int row = static_cast<int>(blockIdx.z);
  const int place = row / view.rows_per_sequence;
  if (!row_is_live(view.mode[place], row % view.rows_per_sequence)) return;
  const int first = split * kScoreChunks;
  const int count = min(store.range_end(view.position[place]) - first, kScoreChunks);
  if (count <= 0) return;  // nobody reads the split
  const std::size_t list = store.list(view.slot_of[place], layer, kv_head);
  const std::size_t row_list = store.row_list(row, kv_head);
  const int group = store.group;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int tiles = (count + kTileChunks - 1) / kTileChunks;
  const std::uint32_t memory = shared_address(block_memory() + Shape::kTiles + warp * Shape::kWarpBytes);
  const auto* const landmarks = reinterpret_cast<const std::byte*>(layout.landmark(list, first));
  const auto bring = [&](int tile, int stage) {  // what is behind the end is there, since max_chunks are whole tiles, and does not count
    if (tile < tiles) {
#pragma unroll
      for (int i = 0; i < kTileChunks * kDim / 256; ++i) {
        const unsigned index = static_cast<unsigned>(i) * 32U + static_cast<unsigned>(lane);
        const std::uint32_t to = memory + static_cast<std::uint32_t>(stage * Shape::kHalfBytes) +
                                 index / kPieces * static_cast<unsigned>(Shape::kStride) + index % kPieces * 16U;
        copy_async(to, landmarks + static_cast<std::size_t>(tile) * (kTileChunks * kDim * 2) + index * 16U, true);
      }
    }
    commit_copies();
  };
  stage_queries<Shape, kDim>(queries, [=](int column) {
    const std::size_t head = row_list * static_cast<std::size_t>(group) + static_cast<std::size_t>(column);
    return column < group ? static_cast<std::ptrdiff_t>(head * kDim) : static_cast<std::ptrdiff_t>(-1);
  });
#pragma unroll
  for (int h = 0; h < kAhead; ++h) bring(warp + h * kAttendWarps, h);
  wait_for_copies<kAhead>();
  __syncthreads();
  Queries<Shape, kDim, kGroups> held;
  held.whole = queries.bf16;
  held.keep();
  const std::uint32_t* const marks = layout.outlier_bits_of(list);
  float* const scores = layout.scores + row_list * static_cast<std::size_t>(group) * static_cast<std::size_t>(store.max_chunks);
  LaneSoftmax softmax[kGroups][2];
  int stage = 0;
  for (int tile = warp; tile < tiles; tile += kAttendWarps) {
    wait_for_copies<kAhead - 1>();
    __syncwarp();  // the copies of all lanes have arrived, and all lanes are done with the tile before
    bring(tile + kAhead * kAttendWarps, stage == 0 ? kStages - 1 : stage - 1);
    const std::uint32_t landmark_row =
        memory + static_cast<std::uint32_t>(stage * Shape::kHalfBytes + lane % 16 * Shape::kStride + lane / 16 * 16);
    stage = stage == kStages - 1 ? 0 : stage + 1;
    const int chunk = first + tile * kTileChunks + lane / 4;  // the lane's first; the other is 8 behind it
    const std::uint32_t marked = marks[chunk / 32] >> (chunk % 32);
    float products[2][kGroups][4] = {};
    multiply_keys<Shape, kDim, kGroups, Shape::kQueriesInRegisters>(landmark_row, held, 0, products);
    if (!held.whole) multiply_keys<Shape, kDim, kGroups, false>(landmark_row, held, 1, products);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = chunk + i / 2 * 8;
        const int column = n * 8 + lane % 4 * 2 + i % 2;
        const bool counts = (marked >> (i / 2 * 8) & 1U) == 0 && at < first + count;
        const float score = counts ? (products[0][n][i] + products[1][n][i]) * scale : lowest();
        if (column < group && at < first + count)
          scores[static_cast<std::size_t>(column) * static_cast<std::size_t>(store.max_chunks) + at] = score;
        softmax[n][i % 2].add(score, counts ? 1.0F : 0.0F);
      }
    }
  }
  let_next_kernel_begin();
  wait_for_copies<0>();
  auto* const largest = reinterpret_cast<float*>(block_memory() + Shape::kTableBytes);
  float* const sum = largest + kAttendWarps * Shape::kColumns;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        const float other = __shfl_xor_sync(kAllLanes, softmax[n][i].largest, step);
        softmax[n][i].add(other, __shfl_xor_sync(kAllLanes, softmax[n][i].sum, step));
      }
      const int column = n * 8 + lane % 4 * 2 + i;
      if (lane < 4) largest[warp * Shape::kColumns + column] = softmax[n][i].largest;
      if (lane < 4) sum[warp * Shape::kColumns + column] = softmax[n][i].sum;
    }
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column >= group) return;
  LaneSoftmax total;
#pragma unroll
  for (int w = 0; w < kAttendWarps; ++w) total.add(largest[w * Shape::kColumns + column], sum[w * Shape::kColumns + column]);
  const std::size_t at =
      (row_list * static_cast<std::size_t>(layout.score_splits()) + static_cast<std::size_t>(split)) * static_cast<std::size_t>(group) +
      static_cast<std::size_t>(column);
  layout.score_max[at] = total.largest;
  layout.score_sum[at] = total.sum;
}

constexpr int kMaxGroup = 16;
static_assert(kMaxGroup <= kTopThreads / 32, "a warp sums up a query head");

/// One block chooses for one row and KV head. Grid: (KV heads, rows).
__global__ void __launch_bounds__(kTopThreads)
    choose_kernel(const __grid_constant__ ShadowLayout layout, Layer layer, StepView view, Selection by_row) {
  __shared__ TopMemory memory;
  __shared__ float log_sums[kMaxGroup];
  wait_for_earlier_kernels();
  const StoreLayout& store = layout.store;
  const int kv_head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const int place = row / view.rows_per_sequence;
  const int thread = static_cast<int>(threadIdx.x);
  const bool live = row_is_live(view.mode[place], row % view.rows_per_sequence);
  const int end = live ? store.range_end(view.position[place]) : 0;
  const int outliers = live ? layout.outlier_count[store.list(view.slot_of[place], layer, kv_head)] : 0;
  const int wanted = min(min(by_row.capacity, store.selected), end - outliers);
  if (thread == 0) by_row.count_of(row, kv_head) = max(wanted, 0);
  if (wanted <= 0) return;
  const std::size_t row_list = store.row_list(row, kv_head);
  const int group = store.group;
  if (thread / 32 < group) {
    const std::size_t at = row_list * static_cast<std::size_t>(layout.score_splits()) * static_cast<std::size_t>(group) +
                           static_cast<std::size_t>(thread / 32);
    LaneSoftmax mine;
    for (int split = thread % 32; split * kScoreChunks < end; split += 32) {
      const std::size_t of_split = at + static_cast<std::size_t>(split) * static_cast<std::size_t>(group);
      mine.add(layout.score_max[of_split], layout.score_sum[of_split]);
    }
    for (int step = 16; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, mine.largest, step);
      mine.add(other, __shfl_xor_sync(kAllLanes, mine.sum, step));
    }
    if (thread % 32 == 0) log_sums[thread / 32] = mine.largest + logf(mine.sum);
  }
  __syncthreads();
  const float* const scores = layout.scores + row_list * static_cast<std::size_t>(group) * static_cast<std::size_t>(store.max_chunks);
  float* const ranks = layout.ranks_of(row_list);
  for (int c = thread; c < end; c += kTopThreads) {
    float best = lowest();
    for (int g = 0; g < group; ++g) {
      best = fmaxf(best, scores[static_cast<std::size_t>(g) * static_cast<std::size_t>(store.max_chunks) + static_cast<std::size_t>(c)] -
                             log_sums[g]);
    }
    ranks[c] = best;
  }
  __syncthreads();
  int* const chunks = by_row.chunks_of(row, kv_head);
  float* const shares = by_row.scores_of(row, kv_head);
  choose_top(memory, ranks, end, wanted, reinterpret_cast<std::uint32_t*>(block_memory()), [=](int to, int chunk, float rank) {
    chunks[to] = chunk;
    shares[to] = expf(rank);
  });
}

template <int kDim, int kGroups>
void launch_scores(const ShadowLayout& layout, Layer layer, const StepView& view, RowsIn queries, cudaStream_t stream) {
  constexpr int kBytes = AttendShape<kDim, kGroups, kStages>::kBytes;
  const auto kernel = score_kernel<kDim, kGroups>;
  allow_shared_memory(kernel, kBytes, "select_landmarks: shared memory of a block for this head_dim");
  const dim3 grid(static_cast<unsigned>(layout.score_splits()), static_cast<unsigned>(layout.store.kv_heads),
                  static_cast<unsigned>(view.rows()));
  check(launch_overlapped(kernel, grid, kAttendThreads, kBytes, stream, layout, layer, view, queries,
                          1.0F / std::sqrt(static_cast<float>(kDim))),
        "select_landmarks: scores");
}

template <int kDim>
void launch_scores(const ShadowLayout& layout, Layer layer, const StepView& view, RowsIn queries, cudaStream_t stream) {
  if (layout.store.group > 8) return launch_scores<kDim, 2>(layout, layer, view, queries, stream);
  launch_scores<kDim, 1>(layout, layer, view, queries, stream);
}

}  // namespace

void select_landmarks(const ShadowLayout& layout, Layer layer, const StepView& view, RowsIn queries, const Selection& by_row,
                      cudaStream_t stream) {
  const StoreLayout& store = layout.store;
  dualdecoder::detail::require(store.group >= 1 && store.group <= kMaxGroup, "heads / kv_heads", store.group, "in 1 .. 16");
  if (view.rows() == 0) return;
  switch (store.dim) {
    case 64: launch_scores<64>(layout, layer, view, queries, stream); break;
    case 80: launch_scores<80>(layout, layer, view, queries, stream); break;
    case 96: launch_scores<96>(layout, layer, view, queries, stream); break;
    case 128: launch_scores<128>(layout, layer, view, queries, stream); break;
    case 256: launch_scores<256>(layout, layer, view, queries, stream); break;
    default: throw InvalidArgument("head_dim = " + std::to_string(store.dim) + ": must be 64, 80, 96, 128 or 256");
  }
  const std::size_t bits = static_cast<std::size_t>(layout.bit_words()) * sizeof(std::uint32_t);
  allow_shared_memory(choose_kernel, bits, "select_landmarks: shared memory");
  const dim3 grid(static_cast<unsigned>(store.kv_heads), static_cast<unsigned>(view.rows()));
  check(launch_overlapped(choose_kernel, grid, kTopThreads, bits, stream, layout, layer, view, by_row), "select_landmarks: choice");
}

}  // namespace dualdecoder::cuda
