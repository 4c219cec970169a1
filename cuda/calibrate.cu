// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// docs/concepts.md, "Tail estimate": per query head the mean over the last prompt queries of log(true unselected mass / estimated), each
// kept in -3 .. 6. Queries choose their chunks as rows of passes do, with the same kernels; the true keys then cross the link once per KV
// head, 64 tokens at a time, for all queries of all heads of the group.
#include <cuda_bf16.h>

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cuda/check.hpp"
#include "cuda/store_kernels.hpp"
#include "cuda/tensor_core.cuh"
#include "dualdecoder/memory.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr int kQueries = KvStore::kCalibrationQueries;
constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
constexpr int kTileTokens = 64;    // keys that a block holds at a time
constexpr int kExactBlocks = 256;  // over all KV heads, enough to fill the link
constexpr int kPadding = 8;        // bf16 behind each key in shared memory, so that fragments are read without conflicts
constexpr float kLog2e = 1.4426950408889634F;
constexpr float kLeastBias = -3.0F;
constexpr float kMostBias = 6.0F;

constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// Scratch. A "line" is a query and a head of the group: query * group + head.
struct Work {
  int* slot_of = nullptr;             // [max_sequences] the pass in which queries are rows
  int* position = nullptr;            // likewise
  RowMode* mode = nullptr;            // likewise
  Selection chosen;                   // [rows] lists
  float* queries = nullptr;           // [kQueries + 1, heads, dim]; the last row is read by no one who lives
  std::uint32_t* excluded = nullptr;  // [kv_heads, kQueries, words] a bit for each chunk that is chosen or cannot be
  float* shift = nullptr;             // [kv_heads, kQueries * group] largest estimated score of the others
  float* estimated = nullptr;         // [kv_heads, kQueries * group] their estimated mass, relative to exp(shift)
  uint4* fragments = nullptr;         // [kv_heads, tiles of 16 lines, dim / 16, 2, lanes] scaled queries, upper and lower half
  float* exact = nullptr;             // [splits, kv_heads, kQueries * group] their true mass, likewise
  int words = 0;
  int splits = 0;

  Work(const StoreLayout& layout, Carver& carver)
      : words((layout.max_chunks + 31) / 32), splits(std::max(1, kExactBlocks / layout.kv_heads)) {
    const std::size_t lists = at(layout.rows()) * at(layout.kv_heads);
    const std::size_t lines = at(layout.kv_heads) * at(kQueries * layout.group);
    slot_of = carver.take<int>(at(layout.max_sequences));
    position = carver.take<int>(at(layout.max_sequences));
    mode = carver.take<RowMode>(at(layout.max_sequences));
    chosen.chunks = carver.take<int>(lists * at(layout.selected));
    chosen.scores = carver.take<float>(lists * at(layout.selected));
    chosen.count = carver.take<int>(lists);
    chosen.capacity = layout.selected;
    chosen.kv_heads = layout.kv_heads;
    queries = carver.take<float>(at(kQueries + 1) * at(layout.heads) * at(layout.dim));
    excluded = carver.take<std::uint32_t>(at(layout.kv_heads) * kQueries * at(words));
    shift = carver.take<float>(lines);
    estimated = carver.take<float>(lines);
    fragments = carver.take<uint4>(lines / 16 * at(layout.dim / 16) * 2 * kLanes);
    exact = carver.take<float>(at(splits) * lines);
  }
};

/// A sequence's choosable chunks, its queries, and how many of them count.
struct Job {
  Layer layer;
  int slot;
  int begin;  // chunks
  int end;
  int queries;  // the newest `queries` of the kept ones
};

__global__ void fill_view(StoreLayout layout, Work work, int slot, int length, int rows) {
  for (int place = static_cast<int>(threadIdx.x); place < layout.max_sequences; place += static_cast<int>(blockDim.x)) {
    const int of_place = rows - place * layout.rows_per_sequence;
    work.slot_of[place] = slot;
    work.position[place] = length;
    work.mode[place] = of_place >= 2 && layout.rows_per_sequence == 2 ? RowMode::dual : of_place >= 1 ? RowMode::single : RowMode::idle;
  }
}

/// grid: KV heads, rows; row r is query first_query + r.
__global__ void __launch_bounds__(kThreads) exclude_chosen(StoreLayout layout, Work work, Job job, int first_query) {
  const int kv_head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  std::uint32_t* const bits = work.excluded + (at(kv_head) * kQueries + at(first_query + row)) * at(work.words);
  for (int w = thread; w < work.words; w += kThreads) {
    std::uint32_t word = 0;
    for (int b = 0; b < 32; ++b) {
      const int chunk = w * 32 + b;
      if (chunk < job.begin || chunk >= job.end) word |= 1U << b;
    }
    bits[w] = word;
  }
  __syncthreads();
  const std::size_t list = layout.row_list(row, kv_head);
  const int* const chunks = work.chosen.chunks + list * at(work.chosen.capacity);
  const int count = work.chosen.count[list];
  for (int i = thread; i < count; i += kThreads) atomicOr(&bits[chunks[i] / 32], 1U << (chunks[i] % 32));
}

/// The same in all threads; `shared` is one float for each warp.
template <class Combine>
__device__ float reduce_block(float value, float* shared, Combine combine) {
  for (int step = kLanes / 2; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(0xFFFFFFFFU, value, step));
  __syncthreads();
  if (threadIdx.x % kLanes == 0) shared[threadIdx.x / kLanes] = value;
  __syncthreads();
  float all = shared[0];
  for (int warp = 1; warp < kWarps; ++warp) all = combine(all, shared[warp]);
  return all;
}

/// grid: heads, rows. Reads the scores that choosing left behind.
__global__ void __launch_bounds__(kThreads) estimate_mass(StoreLayout layout, Work work, Job job, int first_query) {
  __shared__ float shared[kWarps];
  const int kv_head = static_cast<int>(blockIdx.x) / layout.group;
  const int g = static_cast<int>(blockIdx.x) % layout.group;
  const int row = static_cast<int>(blockIdx.y);
  const int query = first_query + row;
  const std::uint32_t* const bits = work.excluded + (at(kv_head) * kQueries + at(query)) * at(work.words);
  const std::size_t list = layout.score_list(job.layer, row / layout.rows_per_sequence, kv_head);
  const float* const tile_max = layout.tile_max_of(list);
  const std::uint16_t* const levels = layout.score_levels_of(list);
  const int column = row % layout.rows_per_sequence * layout.group + g;
  const auto score_of = [=](int c) {
    const std::size_t at_tile = at(c / kTileChunks * layout.columns() + column);
    return tile_max[at_tile] - static_cast<float>(levels[at_tile * kTileChunks + at(score_place(c % kTileChunks))]) / kScoreLevels;
  };
  float largest = -FLT_MAX;
  for (int c = job.begin + static_cast<int>(threadIdx.x); c < job.end; c += kThreads) {
    if ((bits[c / 32] >> (c % 32) & 1U) == 0) largest = fmaxf(largest, score_of(c));
  }
  largest = reduce_block(largest, shared, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0.0F;
  for (int c = job.begin + static_cast<int>(threadIdx.x); c < job.end; c += kThreads) {
    if ((bits[c / 32] >> (c % 32) & 1U) == 0) sum += expf(score_of(c) - largest);
  }
  sum = reduce_block(sum, shared, [](float a, float b) { return a + b; });
  if (threadIdx.x == 0) {
    const std::size_t line = at(kv_head) * at(kQueries * layout.group) + at(query * layout.group + g);
    work.shift[line] = largest;
    work.estimated[line] = sum * static_cast<float>(layout.chunk);
  }
}

/// grid: tiles of 16 lines, KV heads, steps of 16 dims. A query is the sum of two bf16, which together hold 16 bits of it.
__global__ void split_queries(StoreLayout layout, Work work, Job job, const float* queries) {
  const int tile = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const int step = static_cast<int>(blockIdx.z);
  const int lane = static_cast<int>(threadIdx.x);
  const float scale = 1.0F / sqrtf(static_cast<float>(layout.dim));
  std::uint32_t upper[4];
  std::uint32_t lower[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int line = tile * 16 + lane / 4 + (i % 2) * 8;
    const int d = step * 16 + (lane % 4) * 2 + (i / 2) * 8;
    float2 x{0.0F, 0.0F};
    if (line < job.queries * layout.group) {
      const int head = kv_head * layout.group + line % layout.group;
      const float* const from = queries + (at(line / layout.group) * at(layout.heads) + at(head)) * at(layout.dim) + at(d);
      x = {from[0] * scale, from[1] * scale};
    }
    upper[i] = pack_bf16(x.x, x.y);
    const float2 rounded = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(upper[i]));
    lower[i] = pack_bf16(x.x - rounded.x, x.y - rounded.y);
  }
  const std::size_t tiles = at(kQueries * layout.group / 16);
  uint4* const to = work.fragments + (((at(kv_head) * tiles + at(tile)) * at(layout.dim / 16) + at(step)) * 2) * kLanes + at(lane);
  to[0] = {upper[0], upper[1], upper[2], upper[3]};
  to[kLanes] = {lower[0], lower[1], lower[2], lower[3]};
}

/// Starts to bring the keys of one tile of tokens into shared memory, zeros where no choosable chunk is.
__device__ void fetch_keys(const StoreLayout& layout, const Job& job, int kv_head, int tile, __nv_bfloat16* keys) {
  const int vectors = layout.dim / 8;
  const int stride = layout.dim + kPadding;
  for (int i = static_cast<int>(threadIdx.x); i < kTileTokens * vectors; i += kThreads) {
    const int token = i / vectors;
    const int vector = i - token * vectors;
    const int position = tile * kTileTokens + token;
    const int chunk = position / layout.chunk;
    const bool present = chunk >= job.begin && chunk < job.end;
    const std::byte* const from = layout.host_chunk(job.slot, job.layer, kv_head, present ? chunk : job.begin) +
                                  at((position % layout.chunk) * layout.dim + vector * 8) * sizeof(__nv_bfloat16);
    copy_async(shared_address(keys + token * stride + vector * 8), from, present);
  }
  commit_copies();
}

/// Adds to each line's sum the mass of the tile's tokens whose chunk the line's query does not exclude. A warp takes every kWarps-th tile
/// of 16 lines.
__device__ void add_mass(const StoreLayout& layout, const Work& work, const Job& job, int kv_head, int tile, const __nv_bfloat16* keys,
                         float* sums) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int stride = layout.dim + kPadding;
  const int steps = layout.dim / 16;
  const int lines = job.queries * layout.group;
  const int first_chunk = tile * (kTileTokens / layout.chunk);
  const std::size_t line_tiles = at(kQueries * layout.group / 16);
  for (int line_tile = static_cast<int>(threadIdx.x) / kLanes; line_tile * 16 < lines; line_tile += kWarps) {
    float score[kTileTokens / 8][4] = {};
    const uint4* fragment = work.fragments + ((at(kv_head) * line_tiles + at(line_tile)) * at(steps) * 2) * kLanes + at(lane);
    for (int step = 0; step < steps; ++step, fragment += 2 * kLanes) {
      const uint4 u = fragment[0];
      const uint4 l = fragment[kLanes];
      const std::uint32_t upper[4] = {u.x, u.y, u.z, u.w};
      const std::uint32_t lower[4] = {l.x, l.y, l.z, l.w};
      const __nv_bfloat16* const key = keys + (lane / 4) * stride + step * 16 + (lane % 4) * 2;
#pragma unroll
      for (int n = 0; n < kTileTokens / 8; ++n) {
        const std::uint32_t b0 = *reinterpret_cast<const std::uint32_t*>(key + n * 8 * stride);
        const std::uint32_t b1 = *reinterpret_cast<const std::uint32_t*>(key + n * 8 * stride + 8);
        multiply_add(score[n], upper, b0, b1);
        multiply_add(score[n], lower, b0, b1);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = line_tile * 16 + lane / 4 + half * 8;
      const bool lives = line < lines;
      const int safe = lives ? line : 0;
      const float shift = work.shift[at(kv_head) * at(kQueries * layout.group) + at(safe)] * kLog2e;
      const std::uint32_t* const bits = work.excluded + (at(kv_head) * kQueries + at(safe / layout.group)) * at(work.words);
      const std::uint32_t excluded = bits[first_chunk / 32] >> (first_chunk % 32);
      float sum = 0.0F;
#pragma unroll
      for (int n = 0; n < kTileTokens / 8; ++n) {
        const int chunk = (n * 8 + (lane % 4) * 2) / layout.chunk;
        if ((excluded >> chunk & 1U) != 0) continue;
        sum += power_of_two(fmaf(score[n][half * 2], kLog2e, -shift)) + power_of_two(fmaf(score[n][half * 2 + 1], kLog2e, -shift));
      }
      sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFFU, sum, 2);
      if (lives && lane % 4 == 0) sums[line] += sum;
    }
  }
}

/// grid: splits, KV heads. The next tile crosses the link while this one is worked on.
__global__ void __launch_bounds__(kThreads) exact_mass(StoreLayout layout, Work work, Job job) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int kv_head = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.x);
  const int tile_elements = kTileTokens * (layout.dim + kPadding);
  auto* const keys = reinterpret_cast<__nv_bfloat16*>(memory);
  auto* const sums = reinterpret_cast<float*>(keys + 2 * tile_elements);
  const int lines = kQueries * layout.group;
  for (int i = static_cast<int>(threadIdx.x); i < lines; i += kThreads) sums[i] = 0.0F;

  const int first_tile = job.begin * layout.chunk / kTileTokens;
  const int tiles = (job.end * layout.chunk + kTileTokens - 1) / kTileTokens - first_tile;
  const auto tile_of = [&](int s) { return first_tile + static_cast<int>(static_cast<long long>(tiles) * s / work.splits); };
  const int begin = tile_of(split);
  const int end = tile_of(split + 1);
  if (begin < end) fetch_keys(layout, job, kv_head, begin, keys);
  for (int tile = begin; tile < end; ++tile) {
    const int buffer = (tile - begin) % 2;
    if (tile + 1 < end) {
      fetch_keys(layout, job, kv_head, tile + 1, keys + (1 - buffer) * tile_elements);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    add_mass(layout, work, job, kv_head, tile, keys + buffer * tile_elements, sums);
    __syncthreads();
  }
  __syncthreads();
  float* const to = work.exact + (at(split) * at(layout.kv_heads) + at(kv_head)) * at(lines);
  for (int i = static_cast<int>(threadIdx.x); i < lines; i += kThreads) to[i] = sums[i];
}

/// grid: KV heads; a warp for each head of the group.
__global__ void set_bias(StoreLayout layout, Work work, Job job) {
  const int kv_head = static_cast<int>(blockIdx.x);
  const int g = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::size_t lines = at(kQueries * layout.group);
  float sum = 0.0F;
  for (int query = lane; query < job.queries; query += kLanes) {
    const std::size_t line = at(query * layout.group + g);
    float exact = 0.0F;
    for (int split = 0; split < work.splits; ++split) exact += work.exact[(at(split) * at(layout.kv_heads) + at(kv_head)) * lines + line];
    const float ratio = logf(exact / work.estimated[at(kv_head) * lines + line]);
    sum += fminf(fmaxf(ratio, kLeastBias), kMostBias);
  }
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, step);
  if (lane == 0) {
    const std::size_t head = (at(job.slot) * at(layout.layers) + at(job.layer)) * at(layout.heads) + at(kv_head * layout.group + g);
    layout.bias[head] = sum / static_cast<float>(job.queries);
  }
}

/// grid: chunks of a list, KV heads. What the newest query chose is copied into empty slots.
__global__ void warm_slots(StoreLayout layout, Work work, Job job, int row) {
  const int i = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y);
  const std::size_t row_list = layout.row_list(row, kv_head);
  if (i >= work.chosen.count[row_list]) return;
  const int chunk = work.chosen.chunks[row_list * at(work.chosen.capacity) + at(i)];
  const std::uint32_t pass = *layout.pass;
  const std::size_t list = layout.slot_list(job.slot, job.layer, kv_head, pass);
  if (threadIdx.x == 0) {
    layout.slot_of[list * at(layout.max_chunks) + at(chunk)] = i;
    layout.chunk_of[list * at(layout.slots) + at(i)] = chunk;
    layout.used[list * at(layout.slots) + at(i)] = 2 * pass + 1;
  }
  const auto* const from = reinterpret_cast<const uint4*>(layout.host_chunk(job.slot, job.layer, kv_head, chunk));
  auto* const to = reinterpret_cast<uint4*>(layout.slot_data(list, i));
  for (unsigned v = threadIdx.x; v < layout.chunk_bytes / sizeof(uint4); v += blockDim.x) to[v] = from[v];
}

/// Lets `rows` queries from `queries` on choose as rows of a pass do.
void choose(const StoreLayout& layout, const Work& work, const Job& job, int length, const float* queries, int rows, cudaStream_t stream) {
  fill_view<<<1, kThreads, 0, stream>>>(layout, work, job.slot, length, rows);
  check_launch("fill_view");
  StoreLayout each = layout;
  each.row1_as_row0 = false;
  const StepView view{.sequences = (rows + layout.rows_per_sequence - 1) / layout.rows_per_sequence,
                      .rows_per_sequence = layout.rows_per_sequence,
                      .slot_of = work.slot_of,
                      .position = work.position,
                      .mode = work.mode};
  score_summaries(each, job.layer, view, {queries, false}, stream);
  choose_chunks(each, job.layer, view, work.chosen, stream);
}

void measure_mass(const StoreLayout& layout, const Work& work, const Job& job, const float* queries, cudaStream_t stream) {
  const int lines = job.queries * layout.group;
  const auto kv_heads = static_cast<unsigned>(layout.kv_heads);
  const dim3 split_grid(static_cast<unsigned>((lines + 15) / 16), kv_heads, static_cast<unsigned>(layout.dim / 16));
  split_queries<<<split_grid, kLanes, 0, stream>>>(layout, work, job, queries);
  check_launch("split_queries");
  const std::size_t shared =
      2 * at(kTileTokens) * at(layout.dim + kPadding) * sizeof(__nv_bfloat16) + at(kQueries * layout.group) * sizeof(float);
  check(cudaFuncSetAttribute(exact_mass, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "cudaFuncSetAttribute");
  exact_mass<<<dim3(static_cast<unsigned>(work.splits), kv_heads), kThreads, shared, stream>>>(layout, work, job);
  check_launch("exact_mass");
  set_bias<<<kv_heads, static_cast<unsigned>(layout.group * kLanes), 0, stream>>>(layout, work, job);
  check_launch("set_bias");
}

}  // namespace

std::size_t calibration_work_bytes(const StoreLayout& layout) {
  Carver counting;
  const Work work(layout, counting);
  return counting.bytes();
}

void calibrate_layer(const StoreLayout& layout, Layer layer, int slot, int length, const float* queries, int kept, void* memory,
                     cudaStream_t stream) {
  Carver placing(static_cast<std::byte*>(memory));
  const Work work(layout, placing);
  const std::size_t row = at(layout.heads) * at(layout.dim);
  float* const bias = layout.bias + (at(slot) * at(layout.layers) + at(layer)) * at(layout.heads);
  check(cudaMemsetAsync(bias, 0, at(layout.heads) * sizeof(float), stream), "cudaMemsetAsync");
  Job job{layer, slot, layout.range_begin(), layout.range_end(length), 0};
  if (kept <= 0 || job.end <= job.begin) return;

  // only queries that see every choosable chunk are compared; the newest always does
  const bool compare = layout.tail && layout.selected < job.end - job.begin;
  job.queries = compare ? std::min(kept, length - job.end * layout.chunk + 1) : 1;
  check(cudaMemcpyAsync(work.queries, queries + at(kept - job.queries) * row, at(job.queries) * row * sizeof(float),
                        cudaMemcpyDeviceToDevice, stream),
        "cudaMemcpyAsync");
  for (int first = 0; first < job.queries; first += layout.rows()) {
    const int rows = std::min(layout.rows(), job.queries - first);
    choose(layout, work, job, length, work.queries + at(first) * row, rows, stream);
    if (compare) {
      const auto row_count = static_cast<unsigned>(rows);
      exclude_chosen<<<dim3(static_cast<unsigned>(layout.kv_heads), row_count), kThreads, 0, stream>>>(layout, work, job, first);
      check_launch("exclude_chosen");
      estimate_mass<<<dim3(static_cast<unsigned>(layout.heads), row_count), kThreads, 0, stream>>>(layout, work, job, first);
      check_launch("estimate_mass");
    }
    if (first + rows == job.queries && !layout.swaps) {
      const dim3 grid(static_cast<unsigned>(layout.selected), static_cast<unsigned>(layout.kv_heads));
      warm_slots<<<grid, kThreads / 2, 0, stream>>>(layout, work, job, rows - 1);
      check_launch("warm_slots");
    }
  }
  if (compare) measure_mass(layout, work, job, work.queries, stream);
}

}  // namespace dualdecoder::cuda
