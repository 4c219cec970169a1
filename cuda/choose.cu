// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda/block_tools.cuh"
#include "cuda/check.hpp"
#include "cuda/launch.hpp"
#include "cuda/select.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/store_kernels.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr float kLowest = -INFINITY;

constexpr int kChooseThreads = 512;
constexpr int kBuckets = 4 * kChooseThreads;
constexpr float kBucketsPerNat = 64.0F;  // of log share, from 0 down
constexpr int kStagedTiles = 2048;       // whose ranks are kept
constexpr int kListedTiles = 1024;       // that may hold a chunk to be chosen
constexpr int kFewCandidates = 4096;     // room for chunks that may be chosen, at least
constexpr int kPiecesTogether = 2;       // whose sums are read before any is used
constexpr int kFewMembers = 128;         // of the bucket where the choice ends, compared one with another
constexpr int kMaxGroup = 16;
static_assert(kMaxGroup <= kChooseThreads / 32, "a warp sums up a query head");

/// Ranks in linear buckets, the best in bucket 0: a floating-point digit would put nearly all of them into a few.
__device__ int bucket_of(float rank) {
  return min(kBuckets - 1, static_cast<int>(fmaxf(-rank, 0.0F) * kBucketsPerNat));  // the conversion saturates
}

/// A chunk and its rank, the logarithm of its largest share over the group.
struct Candidate {
  int chunk;
  float rank;
};

struct ChooseMemory {
  alignas(16) int histogram[kBuckets];
  float tile_ranks[kStagedTiles];
  int tiles[kListedTiles];
  std::uint64_t members[kFewMembers];
  float log_sums[kMaxGroup];
  int warp_sums[32];
  int tile_count;
  int candidate_count;
  int member_count;
  int found_bucket;
  int found_before;
};

/// In dynamic shared memory: bits of chunks, those chosen and those at the threshold of which the first are chosen too, and candidates.
struct ChooseLists {
  std::uint32_t* chosen;
  std::uint32_t* ties;  ///< in the end how many chunks are chosen before each word
  Candidate* candidates;
  int capacity;

  __device__ static void set(std::uint32_t* bits, int chunk) { atomicOr(bits + chunk / 32, 1U << (chunk % 32)); }
  __device__ bool is_chosen(int chunk) const { return (chosen[chunk / 32] >> (chunk % 32) & 1U) != 0; }
  /// Place of a chosen chunk in ascending order.
  __device__ int place(int chunk) const {
    return static_cast<int>(ties[chunk / 32]) + __popc(chosen[chunk / 32] & ((1U << (chunk % 32)) - 1U));
  }
};

/// Sum of `value` over the threads before this one. The block passes a barrier between two calls.
__device__ int sum_before(ChooseMemory& memory, int value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) memory.warp_sums[warp] = sum;
  __syncthreads();
  return static_cast<int>(__reduce_add_sync(kAllLanes, lane < warp ? static_cast<unsigned>(memory.warp_sums[lane]) : 0U)) + sum - value;
}

/// The first bucket by whose end at least `wanted` are counted, and the count before it. Clears the histogram.
__device__ void find_bucket(ChooseMemory& memory, int wanted) {
  int4& own = reinterpret_cast<int4*>(memory.histogram)[threadIdx.x];
  const int counts[4] = {own.x, own.y, own.z, own.w};
  own = {0, 0, 0, 0};
  int before = sum_before(memory, counts[0] + counts[1] + counts[2] + counts[3]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (before < wanted && wanted <= before + counts[i]) {
      memory.found_bucket = static_cast<int>(threadIdx.x) * 4 + i;
      memory.found_before = before;
    }
    before += counts[i];
  }
  __syncthreads();
}

/// Largest score of a piece and its sum of exp(score - largest).
struct PieceSum {
  float largest = kLowest;
  float sum = 0.0F;

  __device__ static PieceSum load(const float* largest, const float* sums, int at) { return {__ldcg(largest + at), __ldcg(sums + at)}; }
  __device__ void add(const PieceSum& other) {
    if (other.largest == kLowest) return;  // none of its chunks can be chosen
    const float top = fmaxf(largest, other.largest);
    sum = sum * expf(largest - top) + other.sum * expf(other.largest - top);
    largest = top;
  }
};

/// log of the sum of exp(score) over the lanes' pieces; called by a warp.
__device__ float log_sum_of(const PieceSum& mine) {
  const std::uint32_t order = __reduce_max_sync(kAllLanes, order_key(mine.largest));
  const float top = __uint_as_float(order ^ ((order >> 31) != 0 ? 0x80000000U : 0xFFFFFFFFU));
  float sum = mine.sum * expf(mine.largest - top);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return top + logf(sum);
}

/// Scores of a row list as ranks; those of kHeads query heads are read before any is used.
template <int kHeads>
struct Ranks {
  const float* tile_max;        ///< of the first query head, columns from tile to tile
  const std::uint16_t* levels;  ///< of the first query head, 16 of each column
  int columns;
  int group;
  const float* log_sums;

  __device__ float top(int tile, int head) const { return __ldcg(tile_max + (tile * columns + head)); }
  /// All that compare ranks use these, so that a chunk has one rank.
  __device__ static float rank(float top, float log_sum, std::uint32_t level) {
    return __fmaf_rn(static_cast<float>(level), -1.0F / kScoreLevels, __fsub_rn(top, log_sum));
  }
  __device__ void load_tops(int tile, int first_head, float (&tops)[kHeads]) const {
    const float* const from = tile_max + (tile * columns + first_head);
    if (group % 4 == 0) {  // then they are aligned
#pragma unroll
      for (int h = 0; h < kHeads; h += 4) {
        if (first_head + h >= group) break;
        const float4 four = __ldcg(reinterpret_cast<const float4*>(from + h));
        tops[h] = four.x;
        tops[h + 1] = four.y;
        tops[h + 2] = four.z;
        tops[h + 3] = four.w;
      }
      return;
    }
    if (group % 2 == 0) {
#pragma unroll
      for (int h = 0; h < kHeads; h += 2) {
        if (first_head + h >= group) break;
        const float2 two = __ldcg(reinterpret_cast<const float2*>(from + h));
        tops[h] = two.x;
        tops[h + 1] = two.y;
      }
      return;
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (first_head + h < group) tops[h] = __ldcg(from + h);
    }
  }
  __device__ float best(float so_far, const float (&tops)[kHeads], int first_head) const {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (first_head + h < group) so_far = fmaxf(so_far, rank(tops[h], log_sums[first_head + h], 0));
    }
    return so_far;
  }
  /// Of the best chunk of a tile.
  __device__ float of_tile(int tile) const {
    float best_rank = kLowest;
    for (int first = 0; first < group; first += kHeads) {
      float tops[kHeads];
      load_tops(tile, first, tops);
      best_rank = best(best_rank, tops, first);
    }
    return best_rank;
  }
  __device__ float of_chunk(int chunk) const {
    float best_rank = kLowest;
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
      const std::size_t at = static_cast<std::size_t>(chunk / kTileChunks * columns + head) * kTileChunks;
      const std::uint32_t level = __ldcg(levels + at + score_place(chunk % kTileChunks));
      best_rank = fmaxf(best_rank, rank(top(chunk / kTileChunks, head), log_sums[head], level));
    }
    return best_rank;
  }
  /// Of the eight chunks of half a tile, by place.
  __device__ void of_half(int tile, int half, float (&best_ranks)[8]) const {
#pragma unroll
    for (float& best_rank : best_ranks) best_rank = kLowest;
    for (int first = 0; first < group; first += kHeads) {
      float tops[kHeads];
      uint4 eight[kHeads];
      load_tops(tile, first, tops);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (first + h >= group) continue;
        eight[h] = __ldcg(reinterpret_cast<const uint4*>(levels) + static_cast<std::size_t>(tile * columns + first + h) * 2 + half);
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (first + h >= group) continue;
        const std::uint32_t pairs[4] = {eight[h].x, eight[h].y, eight[h].z, eight[h].w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const std::uint32_t level = i % 2 == 0 ? pairs[i / 2] & 0xFFFFU : pairs[i / 2] >> 16;
          best_ranks[i] = fmaxf(best_ranks[i], rank(tops[h], log_sums[first + h], level));
        }
      }
    }
  }
};

/// Ranks the tiles, staged for later. `tops` holds what comes first. Where as many tiles exist as chunks are `wanted`, a chunk of
/// a bucket behind the returned one is not chosen: each of these tiles has a chunk of its rank.
constexpr int kTilesTogether = 2;
template <int kHeads>
__device__ int bound_buckets(ChooseMemory& memory, const Ranks<kHeads>& ranks, int first_tile, int last_tile, int wanted,
                             float (&tops)[kTilesTogether][kHeads]) {
  const bool bounded = wanted <= last_tile - first_tile;
  for (int base = 0; base < last_tile; base += kTilesTogether * kChooseThreads) {
    float rank[kTilesTogether];
#pragma unroll
    for (float& of : rank) of = kLowest;
    for (int first = 0; first < ranks.group; first += kHeads) {
#pragma unroll
      for (int u = 0; u < kTilesTogether; ++u) {
        const int tile = base + u * kChooseThreads + static_cast<int>(threadIdx.x);
        if ((base != 0 || first != 0) && tile < last_tile) ranks.load_tops(tile, first, tops[u]);
      }
#pragma unroll
      for (int u = 0; u < kTilesTogether; ++u) rank[u] = ranks.best(rank[u], tops[u], first);
    }
#pragma unroll
    for (int u = 0; u < kTilesTogether; ++u) {
      const int tile = base + u * kChooseThreads + static_cast<int>(threadIdx.x);
      if (tile < first_tile || tile >= last_tile) continue;
      if (tile < kStagedTiles) memory.tile_ranks[tile] = rank[u];
      if (bounded) atomicAdd(&memory.histogram[bucket_of(rank[u])], 1);
    }
  }
  __syncthreads();
  if (!bounded) return kBuckets - 1;
  find_bucket(memory, wanted);
  return memory.found_bucket;
}

/// Lists the tiles that have a chunk within the bound, as far as there is room.
template <int kHeads>
__device__ void list_tiles(ChooseMemory& memory, const Ranks<kHeads>& ranks, int first_tile, int last_tile, int bound) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  for (int base = 0; base + thread - lane < last_tile; base += kTilesTogether * kChooseThreads) {  // the same in a warp
    unsigned lanes[kTilesTogether];
    int count = 0;
#pragma unroll
    for (int u = 0; u < kTilesTogether; ++u) {
      const int tile = base + u * kChooseThreads + thread;
      bool within = tile >= first_tile && tile < last_tile;
      if (within) within = bucket_of(tile < kStagedTiles ? memory.tile_ranks[tile] : ranks.of_tile(tile)) <= bound;
      lanes[u] = __ballot_sync(kAllLanes, static_cast<int>(within));
      count += __popc(lanes[u]);
    }
    if (count == 0) continue;
    int place = lane == 0 ? atomicAdd(&memory.tile_count, count) : 0;
    place = __shfl_sync(kAllLanes, place, 0);
#pragma unroll
    for (int u = 0; u < kTilesTogether; ++u) {
      const int mine = place + __popc(lanes[u] & ((1U << lane) - 1U));
      if ((lanes[u] >> lane & 1U) != 0 && mine < kListedTiles) memory.tiles[mine] = base + u * kChooseThreads + thread;
      place += __popc(lanes[u]);
    }
  }
  __syncthreads();
}

/// Counts and lists the chunks within the bound, as far as there is room. Half a tile for a thread.
template <int kHeads>
__device__ void list_candidates(ChooseMemory& memory, const ChooseLists& lists, const Ranks<kHeads>& ranks, int begin, int end, int bound) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int halves = 2 * memory.tile_count;
  for (int base = thread - lane; base < halves; base += kChooseThreads) {  // the same in a warp
    const bool works = base + lane < halves;
    const int tile = memory.tiles[works ? (base + lane) / 2 : 0];
    const int half = lane % 2;
    float rank[8];
    ranks.of_half(tile, half, rank);
    unsigned within = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int chunk = tile * kTileChunks + half * 4 + i / 4 * 2 + i / 2 % 2 * 8 + i % 2;  // see score_place()
      if (works && chunk >= begin && chunk < end && bucket_of(rank[i]) <= bound) within |= 1U << i;
    }
    int place = __popc(within);
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kAllLanes, place, step);
      if (lane >= step) place += before;
    }
    int first = lane == 31 ? atomicAdd(&memory.candidate_count, place) : 0;
    first = __shfl_sync(kAllLanes, first, 31);
    place += first - __popc(within);
    for (; within != 0; within &= within - 1) {
      const int i = __ffs(static_cast<int>(within)) - 1;
      float of = rank[0];
#pragma unroll
      for (int other = 1; other < 8; ++other) of = other == i ? rank[other] : of;
      atomicAdd(&memory.histogram[bucket_of(of)], 1);
      const int chunk = tile * kTileChunks + half * 4 + i / 4 * 2 + i / 2 % 2 * 8 + i % 2;
      if (place < lists.capacity) lists.candidates[place] = {chunk, of};
      ++place;
    }
  }
}

/// The key of the wanted-th best of the members of a bucket, digit by digit; `visit(f)` calls f(chunk, key) for each member. Returns the
/// key, and in `ties` how many of those with this very key are wanted.
template <class Visit>
__device__ std::uint32_t find_key(ChooseMemory& memory, int wanted, Visit visit, int& ties) {
  std::uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    visit([&](int, std::uint32_t key) {
      if (shift < 24 && (key >> (shift + 8)) != (prefix >> (shift + 8))) return;
      const int digit = 255 - static_cast<int>((key >> shift) & 255U);  // the best first
      const unsigned peers = __match_any_sync(__activemask(), digit);
      if (static_cast<int>(threadIdx.x) % 32 == __ffs(static_cast<int>(peers)) - 1) atomicAdd(&memory.histogram[digit], __popc(peers));
    });
    __syncthreads();
    find_bucket(memory, wanted);
    prefix |= static_cast<std::uint32_t>(255 - memory.found_bucket) << shift;
    wanted -= memory.found_before;
    __syncthreads();  // before the next digit's result
  }
  ties = wanted;
  return prefix;
}

/// Marks the `wanted` best of the chunks that `visit(f)` calls f(chunk, rank) for, which the histogram counts. Returns how many of
/// lists.ties belong to the best.
template <class Visit>
__device__ int mark_best(ChooseMemory& memory, const ChooseLists& lists, int wanted, const Visit& visit) {
  const int thread = static_cast<int>(threadIdx.x);
  find_bucket(memory, wanted);
  const int last = memory.found_bucket;
  const int rest = wanted - memory.found_before;  // wanted of the last bucket
  visit([&](int chunk, float rank) {
    const int bucket = bucket_of(rank);
    if (bucket < last) ChooseLists::set(lists.chosen, chunk);
    if (bucket != last) return;
    const int place = atomicAdd(&memory.member_count, 1);
    // among equals the lower chunk is the better one
    if (place < kFewMembers) {
      memory.members[place] = (std::uint64_t{order_key(rank)} << 32) | (0xFFFFFFFFU - static_cast<std::uint32_t>(chunk));
    }
  });
  __syncthreads();
  const int members = memory.member_count;
  if (members <= kFewMembers) {
    if (thread < members) {
      const std::uint64_t mine = memory.members[thread];
      int better = 0;
      for (int i = 0; i < members; ++i) better += memory.members[i] > mine ? 1 : 0;
      if (better < rest) ChooseLists::set(lists.chosen, static_cast<int>(0xFFFFFFFFU - static_cast<std::uint32_t>(mine)));
    }
    __syncthreads();
    return 0;
  }
  const auto visit_members = [&](auto f) {
    visit([&](int chunk, float rank) {
      if (bucket_of(rank) == last) f(chunk, order_key(rank));
    });
  };
  int ties = 0;
  const std::uint32_t threshold = find_key(memory, rest, visit_members, ties);
  visit_members([&](int chunk, std::uint32_t key) {
    if (key > threshold) ChooseLists::set(lists.chosen, chunk);
    if (key == threshold) ChooseLists::set(lists.ties, chunk);
  });
  __syncthreads();
  return ties;
}

/// Adds the first `ties` chunks of lists.ties to those chosen, and counts how many are chosen before each word.
__device__ void count_before(ChooseMemory& memory, const ChooseLists& lists, int begin, int end, int ties) {
  const int first_word = begin / 32;
  const int words = (end + 31) / 32 - first_word;
  const int each = (words + kChooseThreads - 1) / kChooseThreads;
  const int my_first = first_word + min(words, static_cast<int>(threadIdx.x) * each);
  const int my_last = first_word + min(words, static_cast<int>(threadIdx.x) * each + each);
  if (ties > 0) {
    int count = 0;
    for (int w = my_first; w < my_last; ++w) count += __popc(lists.ties[w]);
    int left = ties - sum_before(memory, count);
    for (int w = my_first; w < my_last; ++w) {
      for (std::uint32_t rest = lists.ties[w]; rest != 0 && left > 0; rest &= rest - 1, --left) lists.chosen[w] |= rest & (0U - rest);
    }
    __syncthreads();
  }
  int count = 0;
  for (int w = my_first; w < my_last; ++w) count += __popc(lists.chosen[w]);
  int before = sum_before(memory, count);
  for (int w = my_first; w < my_last; ++w) {
    lists.ties[w] = static_cast<std::uint32_t>(before);
    before += __popc(lists.chosen[w]);
  }
  __syncthreads();
}

/// Where the choice goes.
struct Chosen {
  int* chunks;
  float* shares;
};

/// Chooses the `wanted` best of the chunks that `visit(f)` calls f(chunk, rank) for, which the histogram counts.
template <class Visit>
__device__ void choose_among(ChooseMemory& memory, const ChooseLists& lists, int begin, int end, int wanted, const Chosen& to,
                             const Visit& visit) {
  const int ties = mark_best(memory, lists, wanted, visit);
  let_next_kernel_begin();
  count_before(memory, lists, begin, end, ties);
  visit([&](int chunk, float rank) {
    if (!lists.is_chosen(chunk)) return;
    const int place = lists.place(chunk);
    to.chunks[place] = chunk;
    to.shares[place] = expf(rank);
  });
}

/// The same among all chunks, of which too many are within the bound for a list; `counted` tells whether the histogram has them.
template <int kHeads>
__device__ void choose_among_all(ChooseMemory& memory, const ChooseLists& lists, const Ranks<kHeads>& ranks, int begin, int end, int wanted,
                                 int bound, bool counted, const Chosen& to) {
  const auto visit = [&](auto f) {
    for (int chunk = begin + static_cast<int>(threadIdx.x); chunk < end; chunk += kChooseThreads) f(chunk, ranks.of_chunk(chunk));
  };
  if (!counted) {
    visit([&](int, float rank) {
      if (bucket_of(rank) <= bound) atomicAdd(&memory.histogram[bucket_of(rank)], 1);
    });
    __syncthreads();
  }
  choose_among(memory, lists, begin, end, wanted, to, visit);
}

/// One block chooses for one row and KV head: tiles whose best chunk has too low a rank are not looked into.
template <int kHeads>
__global__ void __launch_bounds__(kChooseThreads, 1)
    choose_kernel(StoreLayout layout, int pieces, Layer layer, StepView view, Selection by_row, int capacity) {
  extern __shared__ uint4 dynamic[];
  __shared__ ChooseMemory memory;
  const int kv_head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const int place = view.rows_per_sequence == 2 ? row / 2 : row;
  const int number = row - place * view.rows_per_sequence;
  const int thread = static_cast<int>(threadIdx.x);
  const int all_words = (layout.max_chunks + 31) / 32;
  ChooseLists lists;
  lists.candidates = reinterpret_cast<Candidate*>(dynamic);
  lists.capacity = capacity;
  lists.chosen = reinterpret_cast<std::uint32_t*>(lists.candidates + capacity);
  lists.ties = lists.chosen + all_words;
  for (int w = thread; w < 2 * all_words; w += kChooseThreads) lists.chosen[w] = 0;
  reinterpret_cast<int4*>(memory.histogram)[thread] = {0, 0, 0, 0};
  if (thread == 0) {
    memory.tile_count = 0;
    memory.candidate_count = 0;
    memory.member_count = 0;
  }
  const std::size_t work = layout.work_list(layer, row, kv_head);
  const std::size_t score_list = layout.score_list(layer, place, kv_head);
  const int first_column = number * layout.group;
  const Ranks<kHeads> ranks{.tile_max = layout.tile_max_of(score_list) + first_column,
                            .levels = layout.score_levels_of(score_list) + first_column * kTileChunks,
                            .columns = layout.columns(),
                            .group = layout.group,
                            .log_sums = memory.log_sums};
  const std::size_t statistics = work * static_cast<std::size_t>(layout.score_pieces()) * static_cast<std::size_t>(layout.group) +
                                 static_cast<std::size_t>(thread / 32);
  const float* const piece_max = layout.score_max + statistics;
  const float* const piece_sum = layout.score_sum + statistics;
  wait_for_earlier_kernels();

  // asked for before it is known what of it counts
  float tops[kTilesTogether][kHeads];
  PieceSum first_pieces[kPiecesTogether];
#pragma unroll
  for (int u = 0; u < kTilesTogether; ++u) {
    if (thread + u * kChooseThreads < layout.splits * kSplitTiles) ranks.load_tops(thread + u * kChooseThreads, 0, tops[u]);
  }
#pragma unroll
  for (int u = 0; u < kPiecesTogether; ++u) {
    const int piece = thread % 32 + 32 * u;
    if (thread / 32 < layout.group && piece < pieces) first_pieces[u] = PieceSum::load(piece_max, piece_sum, piece * layout.group);
  }
  const RowMode mode = view.mode[place];
  const int position = view.position[place];
  const int begin = layout.range_begin();
  const int end = row_is_live(mode, number) ? layout.range_end(position) : begin;
  const int wanted = min(min(by_row.capacity, layout.selected), end - begin);
  const std::size_t list = static_cast<std::size_t>(row) * static_cast<std::size_t>(by_row.kv_heads) + static_cast<std::size_t>(kv_head);
  if (thread == 0) by_row.count[list] = max(wanted, 0);
  if (wanted <= 0) return;

  if (thread / 32 < layout.group) {
    PieceSum mine;
#pragma unroll
    for (const PieceSum& piece : first_pieces) mine.add(piece);
    for (int piece = thread % 32 + 32 * kPiecesTogether; piece < pieces; piece += 32) {
      mine.add(PieceSum::load(piece_max, piece_sum, piece * layout.group));
    }
    const float log_sum = log_sum_of(mine);
    if (thread % 32 == 0) memory.log_sums[thread / 32] = log_sum;
  }
  __syncthreads();

  const std::size_t first = list * static_cast<std::size_t>(by_row.capacity);
  const Chosen to{by_row.chunks + first, by_row.scores + first};
  if (wanted == end - begin) {
#pragma unroll 1
    for (int i = thread; i < wanted; i += kChooseThreads) {
      to.chunks[i] = begin + i;
      to.shares[i] = expf(ranks.of_chunk(begin + i));
    }
    return;
  }
  const int first_tile = begin / kTileChunks;
  const int last_tile = (end + kTileChunks - 1) / kTileChunks;
  const int bound = bound_buckets(memory, ranks, first_tile, last_tile, wanted, tops);
  list_tiles(memory, ranks, first_tile, last_tile, bound);
  const bool looked_into = memory.tile_count <= kListedTiles;
  if (looked_into) list_candidates(memory, lists, ranks, begin, end, bound);
  __syncthreads();
  const int count = memory.candidate_count;
  if (!looked_into || count > capacity) {
    choose_among_all(memory, lists, ranks, begin, end, wanted, bound, looked_into, to);
    return;
  }
  choose_among(memory, lists, begin, end, wanted, to, [&](auto f) {
    for (int i = thread; i < count; i += kChooseThreads) f(lists.candidates[i].chunk, lists.candidates[i].rank);
  });
}

}  // namespace

void choose_chunks(const StoreLayout& layout, Layer layer, const StepView& view, const Selection& by_row, cudaStream_t stream) {
  if (view.sequences == 0) return;
  const std::size_t bits = 2 * ((static_cast<std::size_t>(layout.max_chunks) + 31) / 32) * sizeof(std::uint32_t);
  // as many as there can be when as many tiles as chunks are wanted are looked into, as far as shared memory goes
  const std::size_t most = static_cast<std::size_t>(std::min(std::max(kFewCandidates, kTileChunks * layout.selected), layout.max_chunks));
  const std::size_t taken = sizeof(ChooseMemory) + bits;
  const std::size_t offered = offered_shared_memory();
  const std::size_t capacity = std::min(most, offered > taken ? (offered - taken) / sizeof(Candidate) : 0);
  const std::size_t bytes = capacity * sizeof(Candidate) + bits;
  const auto kernel = layout.group <= 4 ? choose_kernel<4> : choose_kernel<8>;
  allow_shared_memory(kernel, bytes, "choose_chunks: shared memory");
  const dim3 grid(static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(view.rows()));
  check(launch_overlapped(kernel, grid, kChooseThreads, bytes, stream, layout, score_cut(layout, view.sequences).pieces, layer, view,
                          by_row, static_cast<int>(capacity)),
        "choose_chunks");
}

}  // namespace dualdecoder::cuda
