// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/block_tools.cuh"
#include "cuda/check.hpp"
#include "cuda/fragments.cuh"
#include "cuda/specache_layout.hpp"
#include "cuda/tensor_core.cuh"

namespace dualdecoder::cuda {
namespace {

constexpr int kRankThreads = 256;
constexpr int kRankTokens = 2048;  // of a block
constexpr int kMaxGroup = 16;
constexpr int kTopThreads = 512;
constexpr int kListed = 4096;  ///< what is sorted; no less than can be chosen
constexpr int kDigitBits = 11;
constexpr int kRankBuckets = 1 << kDigitBits;  ///< of a rank's leading digits
constexpr int kPlaceBits = 26;
constexpr std::size_t kTopBytes = kListed * sizeof(std::uint64_t);  ///< of shared memory that choose_top() sorts in
static_assert(kRankBuckets == 4 * kTopThreads);

/// The bucket of a rank, which is not negative.
__device__ int bucket_of_rank(float rank) { return static_cast<int>(__float_as_uint(rank) >> (31 - kDigitBits)); }
static_assert(kHistogram == kRankBuckets);

/// Which row and KV head a block works for. Grid: (.., KV heads, rows).
struct RankRow {
  int row;
  int kv_head;
  int place;
  int number;
  std::size_t row_list;

  __device__ RankRow(const SpeCacheLayout& layout, const StepView& view, unsigned row_index, unsigned head)
      : row(static_cast<int>(row_index)),
        kv_head(static_cast<int>(head)),
        place(row / view.rows_per_sequence),
        number(row % view.rows_per_sequence),
        row_list(layout.row_list(row, kv_head)) {}
};

/// Ranks of some tokens of a row list, and how often their leading digits occur.
__global__ void __launch_bounds__(kRankThreads) rank_kernel(SpeCacheLayout layout, Layer layer, StepView view, bool laid) {
  __shared__ int histogram[kRankBuckets];
  __shared__ float log_sums[kMaxGroup];
  const RankRow at(layout, view, blockIdx.z, blockIdx.y);
  if (!row_is_live(view.mode[at.place], at.number)) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int length = view.position[at.place];
  const int copied = layout.copied(length);
  const int first = static_cast<int>(blockIdx.x) * kRankTokens;
  if (first >= copied) return;
  const std::size_t score_list = layout.score_list(layer, at.row, at.kv_head);
  const bool waits = layout.wait_policy || (view.waits != nullptr && view.waits[at.place] != 0);
  const int fetched = laid && !waits ? layout.fetched_count[layout.list(view.slot_of[at.place], layer, at.kv_head)] : 0;
  const int splits = (copied + layout.split_tokens - 1) / layout.split_tokens;
  const int fetched_end = layout.splits + (fetched + kPartTokens - 1) / kPartTokens;
  const int first_window = layout.splits + layout.fetched_parts();
  const int window_end = first_window + (length - copied + kPartTokens - 1) / kPartTokens;
  for (int i = thread; i < kRankBuckets; i += kRankThreads) histogram[i] = 0;
  for (int head = thread / 32; head < layout.group; head += kRankThreads / 32) {
    float top = -INFINITY;
    float sum = 0.0F;
    for (int part = thread % 32; part < window_end; part += 32) {
      const bool dead = (part >= splits && part < layout.splits) || (part >= fetched_end && part < first_window);
      if (dead) continue;
      const std::size_t from = layout.part_sums(score_list, part) + static_cast<std::size_t>(head);
      const float largest = layout.score_max[from];
      if (largest == -INFINITY) continue;  // all its tokens were replaced
      const float both = fmaxf(top, largest);
      sum = sum * power_of_two(top - both) + layout.score_sum[from] * power_of_two(largest - both);
      top = both;
    }
    float most = top;
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, step));
    float total = sum * power_of_two(top - most);
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xFFFFFFFFU, total, step);
    if (thread % 32 == 0) log_sums[head] = most + log2f(total * static_cast<float>(layout.group));
  }
  __syncthreads();
  float* const ranks = layout.ranks + at.row_list * static_cast<std::size_t>(layout.stride);
  for (int token = first + 4 * thread; token < min(first + kRankTokens, copied); token += 4 * kRankThreads) {  // whole groups
    float4 rank = {0.0F, 0.0F, 0.0F, 0.0F};
    for (int head = 0; head < layout.group; ++head) {
      const float4 score = *reinterpret_cast<const float4*>(layout.scores_of(score_list, head) + token);
      const float log_sum = log_sums[head];
      rank.x += power_of_two(score.x - log_sum);
      rank.y += power_of_two(score.y - log_sum);
      rank.z += power_of_two(score.z - log_sum);
      rank.w += power_of_two(score.w - log_sum);
    }
    *reinterpret_cast<float4*>(ranks + token) = rank;
    for (const float one : {rank.x, rank.y, rank.z, rank.w}) atomicAdd(histogram + bucket_of_rank(one), 1);
  }
  __syncthreads();
  int* const counts = layout.histogram + at.row_list * kRankBuckets;
  for (int i = thread; i < kRankBuckets; i += kRankThreads) {
    if (histogram[i] != 0) atomicAdd(counts + i, histogram[i]);
  }
}

struct TopMemory {
  alignas(16) int histogram[kRankBuckets];
  int warp_sums[kTopThreads / 32];
  int bucket;
  int before;
  int inside;
  int listed;
};

/// A place in the order of choice, the largest first: its rank, which has no sign, then the lower place.
__device__ std::uint64_t choice_key(float rank, int place) {
  return (std::uint64_t{__float_as_uint(rank)} << kPlaceBits) | static_cast<std::uint64_t>((1 << kPlaceBits) - 1 - place);
}
__device__ int place_of(std::uint64_t key) { return (1 << kPlaceBits) - 1 - static_cast<int>(key & ((1U << kPlaceBits) - 1U)); }

/// The bucket in which the `wanted`-th largest key lies, how many lie above it and in it.
__device__ void find_top_bucket(TopMemory& memory, int wanted) {
  const int last = kRankBuckets - 1 - 4 * static_cast<int>(threadIdx.x);
  const int4 own = *reinterpret_cast<const int4*>(memory.histogram + last - 3);
  const int counts[4] = {own.w, own.z, own.y, own.x};
  int total;
  int before = block_exclusive_sum<kTopThreads>(own.x + own.y + own.z + own.w, memory.warp_sums, total);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (before < wanted && wanted <= before + counts[i]) {
      memory.bucket = last - i;
      memory.before = before;
      memory.inside = counts[i];
    }
    before += counts[i];
  }
  __syncthreads();
}

/// Calls f(key) for every rank; room for them is a multiple of four.
template <class F>
__device__ void for_each_rank(const float* ranks, int count, F&& f) {
  constexpr int kBatch = 8;  // vectors that a thread asks for before it uses the first
  for (int first = 4 * static_cast<int>(threadIdx.x); first < count; first += kBatch * 4 * kTopThreads) {
    float4 read[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = first + b * 4 * kTopThreads;
      if (at < count) read[b] = *reinterpret_cast<const float4*>(ranks + at);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = first + b * 4 * kTopThreads;
      if (at >= count) break;
      f(choice_key(read[b].x, at));
      if (at + 1 < count) f(choice_key(read[b].y, at + 1));
      if (at + 2 < count) f(choice_key(read[b].z, at + 2));
      if (at + 3 < count) f(choice_key(read[b].w, at + 3));
    }
  }
}

/// Leaves in keys[0 .. wanted) the places of the `wanted` largest of `count` ranks, ties to the lower place, ascending. memory.histogram
/// holds how often their buckets occur, and is used up. wanted: 1 .. min(count, kListed). keys: kTopBytes of shared memory. Called by a
/// whole block of kTopThreads.
__device__ void choose_top(TopMemory& memory, std::uint64_t* keys, const float* ranks, int count, int wanted) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) memory.listed = 0;
  __syncthreads();
  find_top_bucket(memory, wanted);
  int shift = kPlaceBits + 31 - kDigitBits;
  std::uint64_t prefix = static_cast<std::uint64_t>(memory.bucket);
  int above = memory.before;
  while (above + memory.inside > kListed) {  // look at more digits; with all of them every key is alone
    const int next = max(shift - kDigitBits, 0);
    __syncthreads();  // all have read what the bucket holds
    for (int i = thread; i < kRankBuckets; i += kTopThreads) memory.histogram[i] = 0;
    __syncthreads();
    for_each_rank(ranks, count, [&](std::uint64_t key) {
      if (key >> shift == prefix) atomicAdd(memory.histogram + static_cast<int>(key >> next & ((1U << (shift - next)) - 1U)), 1);
    });
    __syncthreads();
    find_top_bucket(memory, wanted - above);
    prefix = (prefix << (shift - next)) | static_cast<std::uint64_t>(memory.bucket);
    above += memory.before;
    shift = next;
  }
  for_each_rank(ranks, count, [&](std::uint64_t key) {
    if (key >> shift >= prefix) keys[atomicAdd(&memory.listed, 1)] = ~key;
  });
  __syncthreads();
  const int listed = memory.listed;
  if (listed > wanted) block_sort(keys, listed);  // the best first
  for (int i = thread; i < wanted; i += kTopThreads) keys[i] = static_cast<std::uint64_t>(place_of(~keys[i]));
  block_sort(keys, wanted);
}

/// A block chooses the tokens of a row list. Grid: (KV heads, rows).
__global__ void __launch_bounds__(kTopThreads) top_kernel(SpeCacheLayout layout, StepView view, Selection by_row) {
  __shared__ TopMemory memory;
  auto* const keys = reinterpret_cast<std::uint64_t*>(block_memory());
  const RankRow at(layout, view, blockIdx.y, blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const bool live = row_is_live(view.mode[at.place], at.number);
  const int copied = live ? layout.copied(view.position[at.place]) : 0;
  const int wanted = min(min(by_row.capacity, layout.selected), copied);
  int& count = by_row.count_of(at.row, at.kv_head);
  if (wanted == 0) {
    if (thread == 0) count = 0;
    return;
  }
  const float* const ranks = layout.ranks + at.row_list * static_cast<std::size_t>(layout.stride);
  int* const counts = layout.histogram + at.row_list * kRankBuckets;
  for (int i = thread; i < kRankBuckets; i += kTopThreads) {
    memory.histogram[i] = counts[i];
    counts[i] = 0;
  }
  choose_top(memory, keys, ranks, copied, wanted);
  for (int i = thread; i < wanted; i += kTopThreads) {
    const int token = static_cast<int>(keys[i]);
    by_row.chunks_of(at.row, at.kv_head)[i] = token;
    by_row.scores_of(at.row, at.kv_head)[i] = ranks[token];
  }
  if (thread == 0) count = wanted;
}

}  // namespace

void choose_tokens(const SpeCacheLayout& layout, Layer layer, const StepView& view, const Selection& by_row, bool laid,
                   cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(view.rows());
  const auto kv_heads = static_cast<unsigned>(layout.kv_heads);
  if (rows == 0) return;
  if (by_row.capacity == 0 || layout.selected == 0) {
    check(cudaMemsetAsync(by_row.count, 0, by_row.list(view.rows(), 0) * sizeof(int), stream), "choose_tokens: cudaMemsetAsync");
    return;
  }
  const auto blocks = static_cast<unsigned>((layout.stride + kRankTokens - 1) / kRankTokens);
  rank_kernel<<<dim3(blocks, kv_heads, rows), kRankThreads, 0, stream>>>(layout, layer, view, laid);
  check_launch("choose_tokens: rank");
  top_kernel<<<dim3(kv_heads, rows), kTopThreads, kTopBytes, stream>>>(layout, view, by_row);
  check_launch("choose_tokens: top");
}

}  // namespace dualdecoder::cuda
