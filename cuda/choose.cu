// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>

#include "cuda/block_tools.cuh"
#include "cuda/check.hpp"
#include "cuda/launch.hpp"
#include "cuda/shared_memory.hpp"
#include "cuda/store_kernels.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr float kLowest = -INFINITY;

constexpr int kChooseThreads = 1024;
constexpr int kBuckets = 2 * kChooseThreads;
constexpr float kBucketsPerNat = 64.0F;  // of log share, from 0 down
constexpr int kCandidates = 4096;        // that may be chosen and are listed
constexpr int kFewMembers = 128;         // of the bucket where the choice ends, compared one with another
constexpr int kMaxGroup = 16;

/// Ranks in linear buckets, the best in bucket 0: a floating-point digit would put nearly all of them into a few.
__device__ int bucket_of(float rank) {
  return min(kBuckets - 1, static_cast<int>(fmaxf(-rank, 0.0F) * kBucketsPerNat));  // the conversion saturates
}

struct ChooseMemory {
  int histogram[kBuckets];
  int candidates[kCandidates];
  std::uint64_t members[kFewMembers];
  float log_sums[kMaxGroup];
  int warp_sums[32];
  int candidate_count;
  int member_count;
  int found_bucket;
  int found_before;
};

/// Bits of chunks: those chosen, and those at the threshold of which the first are chosen too.
struct ChooseBits {
  std::uint32_t* chosen;
  std::uint32_t* ties;
  __device__ static void set(std::uint32_t* bits, int chunk) { atomicOr(bits + chunk / 32, 1U << (chunk % 32)); }
};

/// The first bucket by whose end at least `wanted` are counted, and the count before it. Clears the histogram.
__device__ void find_bucket(ChooseMemory& memory, int wanted) {
  const int first = static_cast<int>(threadIdx.x) * 2;
  const int low = memory.histogram[first];
  const int high = memory.histogram[first + 1];
  int total;
  const int before = block_exclusive_sum<kChooseThreads>(low + high, memory.warp_sums, total);
  memory.histogram[first] = 0;
  memory.histogram[first + 1] = 0;
  if (before < wanted && wanted <= before + low + high) {
    const bool in_low = wanted <= before + low;
    memory.found_bucket = in_low ? first : first + 1;
    memory.found_before = in_low ? before : before + low;
  }
  __syncthreads();
}

/// log of the sum of exp(score) over the chunks of one query head; by one warp, which reads all of it at once where it can.
__device__ float log_sum_of(const float* largest, const float* sums, int splits, int group) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float mine = kLowest;
  float sum = 0.0F;
  for (int s = lane; s < splits; s += 32) {
    const float split_largest = __ldcg(largest + s * group);
    const float split_sum = __ldcg(sums + s * group);
    if (split_largest == kLowest) continue;  // none of its chunks can be chosen
    const float top = fmaxf(mine, split_largest);
    sum = sum * expf(mine - top) + split_sum * expf(split_largest - top);
    mine = top;
  }
  float top = mine;
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
  sum *= expf(mine - top);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return top + logf(sum);
}

__device__ float4 larger(const float4& a, const float4& score, float log_sum) {
  return {fmaxf(a.x, score.x - log_sum), fmaxf(a.y, score.y - log_sum), fmaxf(a.z, score.z - log_sum), fmaxf(a.w, score.w - log_sum)};
}

/// Which chunks a thread ranks: four at a time, kTogether times, whose scores are all read before any is used.
struct Share {
  static constexpr int kTogether = 2;
  const float4* scores;  // of the first query head
  int stride;            // to the next one
  int group;
  int begin;
  int end;

  __device__ int first_quad() const { return begin / 4 + static_cast<int>(threadIdx.x); }
  __device__ int quads() const { return (end + 3) / 4; }
  /// Scores of up to four query heads from `head` on.
  __device__ void load(int quad, int head, float4 (&score)[kTogether][4]) const {
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        if (head + g < group && quad + u * kChooseThreads < quads()) {
          score[u][g] = __ldcg(scores + static_cast<std::size_t>(head + g) * static_cast<std::size_t>(stride) + quad + u * kChooseThreads);
        }
      }
    }
  }
};

/// Ranks this thread's share, staged for later; returns the largest of them. `score` holds what comes first.
template <bool kStaged>
__device__ float rank_all(const Share& share, float4 (&score)[Share::kTogether][4], const float* log_sums, float* ranks) {
  constexpr int kTogether = Share::kTogether;
  float top = kLowest;
  for (int q = share.first_quad(); q < share.quads(); q += kTogether * kChooseThreads) {
    float4 rank[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) rank[u] = {kLowest, kLowest, kLowest, kLowest};
    for (int first = 0; first < share.group; first += 4) {
      if (q != share.first_quad() || first != 0) share.load(q, first, score);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          if (first + g < share.group) rank[u] = larger(rank[u], score[u][g], log_sums[first + g]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int chunk = (q + u * kChooseThreads) * 4;
      if (chunk >= share.end) continue;
      if constexpr (kStaged) reinterpret_cast<float4*>(ranks)[chunk / 4] = rank[u];
      const float four[4] = {rank[u].x, rank[u].y, rank[u].z, rank[u].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (chunk + i >= share.begin && chunk + i < share.end) top = fmaxf(top, four[i]);
      }
    }
  }
  return top;
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

/// Marks the `wanted` best of the chunks begin .. end; `top` is the largest rank of those that this thread ranked, and four_ranks(q)
/// returns ranks of four of these. Returns how many of bits.ties belong to the best.
template <class RankOf, class FourRanks>
__device__ int mark_best(ChooseMemory& memory, const ChooseBits& bits, int begin, int end, int wanted, float top, RankOf rank_of,
                         FourRanks four_ranks) {
  const int thread = static_cast<int>(threadIdx.x);
  // As many threads as are wanted ranked a chunk of this bucket or a better one, so no worse one is chosen.
  int bound = kBuckets - 1;
  const int quads = (end + 3) / 4 - begin / 4;
  const bool bounded = wanted <= min(quads, kChooseThreads);
  if (bounded) {
    if (thread < quads) atomicAdd(&memory.histogram[bucket_of(top)], 1);
    __syncthreads();
    find_bucket(memory, wanted);
    bound = memory.found_bucket;
  }
  // each looks at what it ranked itself, and few have anything within the bound
  if (thread < quads && bucket_of(top) <= bound) {
    for (int q = begin / 4 + thread; q < (end + 3) / 4; q += kChooseThreads) {
      const float4 rank = four_ranks(q);
      if (bucket_of(fmaxf(fmaxf(rank.x, rank.y), fmaxf(rank.z, rank.w))) > bound) continue;
      const float four[4] = {rank.x, rank.y, rank.z, rank.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int chunk = 4 * q + i;
        const int bucket = bucket_of(four[i]);
        if (chunk < begin || chunk >= end || bucket > bound) continue;
        atomicAdd(&memory.histogram[bucket], 1);
        if (!bounded) continue;
        const int place = atomicAdd(&memory.candidate_count, 1);
        if (place < kCandidates) memory.candidates[place] = chunk;
      }
    }
  }
  __syncthreads();
  const int candidates = memory.candidate_count;
  const bool listed = bounded && candidates <= kCandidates;
  const auto visit = [&](auto f) {
    const int count = listed ? candidates : end - begin;
    for (int i = thread; i < count; i += kChooseThreads) {
      const int chunk = listed ? memory.candidates[i] : begin + i;
      f(chunk, rank_of(chunk));
    }
  };

  find_bucket(memory, wanted);
  const int last = memory.found_bucket;
  const int rest = wanted - memory.found_before;  // wanted of the last bucket
  visit([&](int chunk, float rank) {
    const int bucket = bucket_of(rank);
    if (bucket < last) bits.set(bits.chosen, chunk);
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
      if (better < rest) bits.set(bits.chosen, static_cast<int>(0xFFFFFFFFU - static_cast<std::uint32_t>(mine)));
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
    if (key > threshold) bits.set(bits.chosen, chunk);
    if (key == threshold) bits.set(bits.ties, chunk);
  });
  __syncthreads();
  return ties;
}

/// Adds the first `ties` chunks of bits.ties and writes what is chosen in ascending order.
template <class RankOf>
__device__ void write_chosen(ChooseMemory& memory, const ChooseBits& bits, int begin, int end, int ties, int* chunks, float* shares,
                             RankOf rank_of) {
  const int first_word = begin / 32;
  const int words = (end + 31) / 32 - first_word;
  const int each = (words + kChooseThreads - 1) / kChooseThreads;
  const int my_first = first_word + min(words, static_cast<int>(threadIdx.x) * each);
  const int my_last = first_word + min(words, static_cast<int>(threadIdx.x) * each + each);
  int total;
  if (ties > 0) {
    int count = 0;
    for (int w = my_first; w < my_last; ++w) count += __popc(bits.ties[w]);
    int left = ties - block_exclusive_sum<kChooseThreads>(count, memory.warp_sums, total);
    for (int w = my_first; w < my_last; ++w) {
      for (std::uint32_t rest = bits.ties[w]; rest != 0 && left > 0; rest &= rest - 1, --left) bits.chosen[w] |= rest & (0U - rest);
    }
  }
  int count = 0;
  for (int w = my_first; w < my_last; ++w) count += __popc(bits.chosen[w]);
  int to = block_exclusive_sum<kChooseThreads>(count, memory.warp_sums, total);
  for (int w = my_first; w < my_last; ++w) {
    for (std::uint32_t rest = bits.chosen[w]; rest != 0; rest &= rest - 1, ++to) {
      const int chunk = w * 32 + __ffs(static_cast<int>(rest)) - 1;
      chunks[to] = chunk;
      shares[to] = expf(rank_of(chunk));
    }
  }
}

/// One block chooses for one row and KV head.
template <bool kStaged>
__global__ void __launch_bounds__(kChooseThreads, 1) choose_kernel(StoreLayout layout, Layer layer, StepView view, Selection by_row) {
  extern __shared__ uint4 dynamic[];
  __shared__ ChooseMemory memory;
  const int kv_head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const int place = row / view.rows_per_sequence;
  const int thread = static_cast<int>(threadIdx.x);
  const int all_words = (layout.max_chunks + 31) / 32;
  ChooseBits bits;
  bits.chosen = reinterpret_cast<std::uint32_t*>(dynamic);
  bits.ties = bits.chosen + all_words;
  float* const ranks = reinterpret_cast<float*>(dynamic + (2 * all_words + 3) / 4);
  for (int w = thread; w < 2 * all_words; w += kChooseThreads) bits.chosen[w] = 0;
  memory.histogram[thread] = 0;
  memory.histogram[kChooseThreads + thread] = 0;
  if (thread == 0) {
    memory.candidate_count = 0;
    memory.member_count = 0;
  }
  wait_for_earlier_kernels();

  const RowMode mode = view.mode[place];
  const int position = view.position[place];
  const int begin = layout.range_begin();
  const int end = row_is_live(mode, row % view.rows_per_sequence) ? layout.range_end(position) : begin;
  const int wanted = min(min(by_row.capacity, layout.selected), end - begin);
  const std::size_t list = static_cast<std::size_t>(row) * static_cast<std::size_t>(by_row.kv_heads) + static_cast<std::size_t>(kv_head);
  if (thread == 0) by_row.count[list] = max(wanted, 0);
  if (wanted <= 0) return;

  const std::size_t work = layout.work_list(layer, row, kv_head);
  const std::size_t statistics = work * static_cast<std::size_t>(layout.splits) * static_cast<std::size_t>(layout.group);
  const float* const scores = layout.scores + work * static_cast<std::size_t>(layout.group) * static_cast<std::size_t>(layout.max_chunks);
  const Share share{reinterpret_cast<const float4*>(scores), layout.max_chunks / 4, layout.group, begin, end};
  float4 first_scores[Share::kTogether][4];
  share.load(share.first_quad(), 0, first_scores);  // on their way while the sums are joined
  if (thread / 32 < layout.group) {
    const int g = thread / 32;
    const int splits = (end + kSplitChunks - 1) / kSplitChunks;
    const float log_sum = log_sum_of(layout.score_max + statistics + g, layout.score_sum + statistics + g, splits, layout.group);
    if (thread % 32 == 0) memory.log_sums[g] = log_sum;
  }
  __syncthreads();

  const float top = rank_all<kStaged>(share, first_scores, memory.log_sums, ranks);
  const auto rank_of = [&](int chunk) {
    if constexpr (kStaged) return ranks[chunk];
    float rank = kLowest;
    for (int g = 0; g < layout.group; ++g) {
      rank = fmaxf(rank, scores[static_cast<std::size_t>(g) * static_cast<std::size_t>(layout.max_chunks) + chunk] - memory.log_sums[g]);
    }
    return rank;
  };
  const auto four_ranks = [&](int quad) {
    if constexpr (kStaged) return reinterpret_cast<const float4*>(ranks)[quad];
    float4 rank{kLowest, kLowest, kLowest, kLowest};
    for (int g = 0; g < layout.group; ++g) {
      rank = larger(rank, __ldcg(share.scores + static_cast<std::size_t>(g) * static_cast<std::size_t>(share.stride) + quad),
                    memory.log_sums[g]);
    }
    return rank;
  };

  const std::size_t to = list * static_cast<std::size_t>(by_row.capacity);
  if (wanted == end - begin) {
    __syncthreads();  // ranks that others staged
    for (int i = thread; i < wanted; i += kChooseThreads) {
      by_row.chunks[to + i] = begin + i;
      by_row.scores[to + i] = expf(rank_of(begin + i));
    }
    return;
  }
  const int ties = mark_best(memory, bits, begin, end, wanted, top, rank_of, four_ranks);
  let_next_kernel_begin();
  write_chosen(memory, bits, begin, end, ties, by_row.chunks + to, by_row.scores + to, rank_of);
}

/// Dynamic shared memory of the choice: two bits a chunk, and where they are staged its rank.
std::size_t choice_bytes(const StoreLayout& layout, bool staged) {
  const std::size_t words = (static_cast<std::size_t>(layout.max_chunks) + 31) / 32;
  return (2 * words + 3) / 4 * 16 + (staged ? static_cast<std::size_t>(layout.max_chunks) * sizeof(float) : 0);
}

template <bool kStaged>
void launch_choice(const StoreLayout& layout, Layer layer, const StepView& view, const Selection& by_row, cudaStream_t stream) {
  const std::size_t bytes = choice_bytes(layout, kStaged);
  allow_shared_memory(choose_kernel<kStaged>, bytes, "choose_chunks: shared memory");
  const dim3 grid(static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(view.rows()));
  check(launch_overlapped(choose_kernel<kStaged>, grid, kChooseThreads, bytes, stream, layout, layer, view, by_row), "choose_chunks");
}

}  // namespace

void choose_chunks(const StoreLayout& layout, Layer layer, const StepView& view, const Selection& by_row, cudaStream_t stream) {
  if (view.sequences == 0) return;
  const bool staged = choice_bytes(layout, true) + sizeof(ChooseMemory) <= offered_shared_memory();
  if (staged) return launch_choice<true>(layout, layer, view, by_row, stream);
  launch_choice<false>(layout, layer, view, by_row, stream);
}

}  // namespace dualdecoder::cuda
