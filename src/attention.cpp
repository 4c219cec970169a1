// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "src/chunk_geometry.hpp"

namespace dualdecoder::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

/// Rows of scores are padded to whole vectors of any instruction set.
constexpr std::size_t padded(int count) { return (index(count) + 15) / 16 * 16; }

/// Replaces weights by their sums over groups of `together`, of the first of which `cut_off` come before weights[0]. Returns how many
/// groups there are.
int sum_groups(float* weights, int count, int cut_off, int together) {
  int groups = 0;
  for (int first = 0; first < count;) {
    const int end = std::min(count, first + together - (groups == 0 ? cut_off : 0));
    weights[groups++] = std::accumulate(weights + first, weights + end, 0.0F);
    first = end;
  }
  return groups;
}

}  // namespace

void join_parts(const float* parts, int count, int group, std::size_t dim, float* out) {
  const std::size_t width = index(group) * (dim + 2);
  for (int g = 0; g < group; ++g, out += dim) {
    const float* tops = parts + index(group) * dim + index(g);  // of the first part
    float largest = kLowest;
    for (int part = 0; part < count; ++part) largest = std::max(largest, tops[index(part) * width]);
    std::fill_n(out, dim, 0.0F);
    float sum = 0.0F;
    for (int part = 0; part < count; ++part) {
      const float* values = parts + index(part) * width + index(g) * dim;
      const float top = tops[index(part) * width];
      if (top == kLowest) continue;
      const float factor = std::exp(top - largest);
      sum += factor * tops[index(part) * width + index(group)];
      for (std::size_t d = 0; d < dim; ++d) out[d] += factor * values[d];
    }
    for (std::size_t d = 0; d < dim; ++d) out[d] /= sum;
  }
}

AttentionRunner::AttentionRunner(const Limits& limits, const SegmentLayout& layout, ThreadPool& threads, Isa isa)
    : limits_(limits),
      layout_(layout),
      threads_(threads),
      kernels_(attention_kernels(isa)),
      dense_(dense_kernels(isa)),
      score_stride_(padded(std::max(kPartTokens + static_cast<int>(layout.chunk), kPartChunks))) {
  // a part of segments is closed when the next segment would not fit, so it is more than half full unless segments are large
  const int exact_parts = 2 * (limits.tokens / kPartTokens + 1);
  const int tail_parts = limits.chunks / kPartChunks + 1;
  parts_.reserve(index(limits.jobs) * index(exact_parts + tail_parts));
  first_part_.reserve(index(limits.jobs) + 1);
  unfinished_ = std::make_unique<std::atomic<int>[]>(index(limits.jobs));
}

void AttentionRunner::carve(Carver& carver) {
  scores_ = carver.take<float>(index(limits_.threads) * index(limits_.group) * score_stride_);
  results_ = carver.take<float>(parts_.capacity() * index(limits_.group) * (layout_.dim + 2));
}

float* AttentionRunner::sums_of(int part) const noexcept { return results_ + index(part) * index(limits_.group) * (layout_.dim + 2); }

void AttentionRunner::split(const AttentionJob* jobs, int count) {
  parts_.clear();
  first_part_.clear();
  for (int job = 0; job < count; ++job) {
    first_part_.push_back(static_cast<int>(parts_.size()));
    int first = 0;
    int tokens = 0;
    for (int s = 0; s < jobs[job].segment_count; ++s) {
      if (tokens > 0 && tokens + jobs[job].segments[s].tokens > kPartTokens) {
        parts_.push_back({job, false, first, s - first});
        first = s;
        tokens = 0;
      }
      tokens += jobs[job].segments[s].tokens;
    }
    if (tokens > 0) parts_.push_back({job, false, first, jobs[job].segment_count - first});
    for (int chunk = 0; chunk < jobs[job].tail.chunks; chunk += kPartChunks) {
      parts_.push_back({job, true, chunk, std::min(kPartChunks, jobs[job].tail.chunks - chunk)});
    }
  }
  first_part_.push_back(static_cast<int>(parts_.size()));
}

void AttentionRunner::run_part(const AttentionJob& job, int part_index, int worker) {
  const Part& part = parts_[index(part_index)];
  const int group = limits_.group;
  const std::size_t dim = layout_.dim;
  float* scores = scores_ + index(worker) * index(group) * score_stride_;
  float* values = sums_of(part_index);
  float* largest = values + index(group) * dim;
  float* sum = largest + group;
  std::fill_n(values, index(group) * dim, 0.0F);
  std::fill_n(largest, index(group), kLowest);
  std::fill_n(sum, index(group), 0.0F);
  int width = part.count;
  if (part.tail) {
    const Tail& tail = job.tail;
    for (int g = 0; g < group; ++g) {
      const float* from = tail.scores + index(g) * tail.stride + index(part.first);
      float* to = scores + index(g) * score_stride_;
      for (int c = 0; c < part.count; ++c) to[c] = from[c] + tail.shifts[g];
      const int* exact = std::lower_bound(job.exact, job.exact + job.exact_count, part.first);
      for (; exact != job.exact + job.exact_count && *exact < part.first + part.count; ++exact) to[*exact - part.first] = kLowest;
      if (std::all_of(to, to + part.count, [](float score) { return score == kLowest; })) return;  // for one head, so for all
    }
  } else {
    width = 0;
    for (int s = part.first; s < part.first + part.count; ++s) width += job.segments[s].tokens;
    kernels_.key_scores(job.queries, group, job.segments + part.first, part.count, layout_, scores, score_stride_);
  }
  for (int g = 0; g < group; ++g) {
    dense_.softmax_block(scores + index(g) * score_stride_, index(width), padded(width), &largest[g], &sum[g], values + index(g) * dim,
                         dim);
  }
  if (part.tail) {
    const Tail& tail = job.tail;
    const int first_group = (tail.cut_off + part.first) / tail.value_group;
    const int cut_off = (tail.cut_off + part.first) % tail.value_group;
    int groups = part.count;
    for (int g = 0; g < group && tail.value_group > 1; ++g) {
      groups = sum_groups(scores + index(g) * score_stride_, part.count, cut_off, tail.value_group);
    }
    kernels_.add_summaries(scores, score_stride_, group, tail.value_means + index(first_group) * (dim / 2), tail.value_scales + first_group,
                           index(groups), dim, kNegligible, values);
  } else {
    kernels_.add_values(scores, score_stride_, group, job.segments + part.first, part.count, layout_, values);
  }
}

void AttentionRunner::run(const AttentionJob* jobs, int count) {
  split(jobs, count);
  for (int job = 0; job < count; ++job) {
    const int parts = first_part_[index(job) + 1] - first_part_[index(job)];
    unfinished_[index(job)].store(parts, std::memory_order_relaxed);
  }
  threads_.parallel_for(static_cast<int>(parts_.size()), [&](int part, int worker) {
    const int job = parts_[index(part)].job;
    run_part(jobs[job], part, worker);
    // whoever finishes a job's last part joins them, which saves a second loop over the threads
    if (unfinished_[index(job)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      const int first = first_part_[index(job)];
      join_parts(sums_of(first), first_part_[index(job) + 1] - first, limits_.group, layout_.dim, jobs[job].out);
    }
  });
}

}  // namespace dualdecoder::cpu
