// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "dualdecoder/memory.hpp"
#include "src/simd/attention_simd.hpp"
#include "src/simd/dense_simd.hpp"
#include "src/simd/dispatch.hpp"
#include "src/thread_pool.hpp"

namespace dualdecoder::cpu {

/// Chunks that are estimated from their summaries: chunk c adds mass exp(score_c + shift) with the mean value of its group g, scale_g *
/// mean_g (docs/concepts.md, "Tail estimate").
struct Tail {
  const float* scores = nullptr;  ///< [group, stride]
  std::size_t stride = 0;
  const std::uint8_t* value_means = nullptr;  ///< [groups, dim / 2], see ValueSummary
  const float* value_scales = nullptr;        ///< [groups]
  int value_group = 1;                        ///< chunks of a group
  int cut_off = 0;                            ///< chunks of the first group that lie before the tail's first
  int chunks = 0;                             ///< 0: no tail
  const float* shifts = nullptr;              ///< [group] log(chunk tokens) + bias
};

/// One row's attention in one KV head.
struct AttentionJob {
  const float* queries = nullptr;  ///< [group, dim], scaled by 1/sqrt(dim)
  Segment* segments = nullptr;     ///< exact tokens, in the order of the context
  int segment_count = 0;
  const int* exact = nullptr;  ///< chunks of the tail that are among the segments, ascending, counted from the tail's first
  int exact_count = 0;
  Tail tail;
  float* out = nullptr;  ///< [group, dim]
};

/// Joins partial attention in the order of the parts: out[g] = sum of the parts' values over the sum of their weights. A part is values
/// [group, dim] that are summed with weights exp(score - largest), then the largest scores [group], -inf where the part is empty, then the
/// sums of the weights [group].
void join_parts(const float* parts, int count, int group, std::size_t dim, float* out);

/// Runs attention jobs in parts of fixed size on a thread pool and joins the parts in a fixed order, so a job's result depends neither on
/// the other jobs nor on the number of threads.
class AttentionRunner {
 public:
  struct Limits {
    int jobs = 0;
    int group = 0;
    int tokens = 0;  ///< exact tokens of one job
    int chunks = 0;  ///< of one job's tail
    int threads = 1;
  };

  AttentionRunner(const Limits& limits, const SegmentLayout& layout, ThreadPool& threads, Isa isa);

  /// Takes the work space from `carver`; called once with a counting carver for the size and once with memory.
  void carve(Carver& carver);
  void run(const AttentionJob* jobs, int count);

 private:
  struct Part {
    int job;
    bool tail;
    int first;  ///< segment or chunk
    int count;
  };

  void split(const AttentionJob* jobs, int count);
  void run_part(const AttentionJob& job, int part, int worker);
  float* sums_of(int part) const noexcept;

  static constexpr int kPartTokens = 256;
  static constexpr int kPartChunks = 512;
  static constexpr float kNegligible = 1e-9F;  // of the largest weight; 512 of them stay below float's rounding

  Limits limits_;
  SegmentLayout layout_;
  ThreadPool& threads_;
  const AttentionKernels& kernels_;
  const DenseKernels& dense_;
  std::size_t score_stride_;
  std::vector<Part> parts_;
  std::vector<int> first_part_;                     // [jobs + 1]
  std::unique_ptr<std::atomic<int>[]> unfinished_;  // [jobs] parts
  float* scores_ = nullptr;                         // [threads, group, score_stride]
  float* results_ = nullptr;                        // [parts, group, dim + 2]: values, then largest and sum per head behind them
};

}  // namespace dualdecoder::cpu
