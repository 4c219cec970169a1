// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// launch_prefill_attention, and launch_warpgroup_attention where the device has it, against attention from its definition in double
// precision; with --bench their speed.
#include "cuda/prefill_attention.hpp"

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/warpgroup_attention.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "tests/gpu/bf16.hpp"
#include "tests/gpu/check.hpp"

namespace dualdecoder::test {
namespace {

using cuda::PrefillAttention;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

struct Case {
  int heads = 1;
  int kv_heads = 1;
  int head_dim = 64;
  int rows = 1;
  int offset = 0;
  float query_scale = 1.0F;  // large ones make softmax pick single keys
  bool equal_keys = false;
};

/// Queries, keys and values of a case, values that bf16 holds.
struct Inputs {
  explicit Inputs(const Case& c) {
    testing::Random random(static_cast<std::uint64_t>(c.rows * 131 + c.offset * 7 + c.heads + c.head_dim));
    const auto fill = [&](std::vector<float>& values, std::int64_t count, float scale) {
      values.resize(at(count));
      for (float& value : values) value = rounded_to_bf16(scale * random.normal());
    };
    const std::int64_t width = std::int64_t{c.kv_heads} * c.head_dim;
    const std::int64_t tokens = c.offset + c.rows;
    fill(queries, std::int64_t{c.rows} * c.heads * c.head_dim, c.query_scale);
    fill(keys, tokens * width, 1.0F);
    fill(values, tokens * width, 1.0F);
    for (std::int64_t i = width; c.equal_keys && i < tokens * width; ++i) keys[at(i)] = keys[at(i - width)];
  }
  std::vector<float> queries, keys, values;
};

/// What attention gives for one row and head by its definition (arXiv 1706.03762, equation 1), and how far an answer may be from it.
struct Expected {
  std::vector<double> out;
  std::vector<double> magnitude;  // sum of weight * |value|
};

Expected expected(const Case& c, const Inputs& in, int row, int head) {
  const int kv_head = head / (c.heads / c.kv_heads);
  const std::size_t dim = at(c.head_dim);
  const float* q = in.queries.data() + (at(row) * at(c.heads) + at(head)) * dim;
  const auto vector_of = [&](const std::vector<float>& all, int key) {
    return all.data() + (at(key) * at(c.kv_heads) + at(kv_head)) * dim;
  };
  std::vector<double> weights(at(c.offset + row + 1));
  double top = -1e300;
  for (std::size_t key = 0; key < weights.size(); ++key) {
    const float* k = vector_of(in.keys, static_cast<int>(key));
    double dot = 0;
    for (std::size_t d = 0; d < dim; ++d) dot += static_cast<double>(q[d]) * static_cast<double>(k[d]);
    weights[key] = dot / std::sqrt(static_cast<double>(c.head_dim));
    top = std::max(top, weights[key]);
  }
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - top);
  Expected made{std::vector<double>(dim, 0.0), std::vector<double>(dim, 0.0)};
  for (std::size_t key = 0; key < weights.size(); ++key) {
    const float* v = vector_of(in.values, static_cast<int>(key));
    for (std::size_t d = 0; d < dim; ++d) {
      made.out[d] += weights[key] / sum * static_cast<double>(v[d]);
      made.magnitude[d] += weights[key] / sum * std::abs(static_cast<double>(v[d]));
    }
  }
  return made;
}

enum class Kernel { portable, warpgroup };

const char* name_of(Kernel kernel) { return kernel == Kernel::portable ? "portable" : "warpgroup"; }

/// The kernels of bf16 that this device has for a head_dim.
std::vector<Kernel> kernels(int head_dim) {
  if (!cuda::has_warpgroup_attention(head_dim)) return {Kernel::portable};
  return {Kernel::portable, Kernel::warpgroup};
}

void launch(Kernel kernel, const PrefillAttention& job) {
  if (kernel == Kernel::portable) {
    cuda::check(cuda::prepare_prefill_attention(job.head_dim), "prepare_prefill_attention");
    cuda::check(cuda::launch_prefill_attention(job, nullptr), "launch_prefill_attention");
  } else {
    cuda::check(cuda::prepare_warpgroup_attention(job.head_dim), "prepare_warpgroup_attention");
    cuda::check(cuda::launch_warpgroup_attention(job, nullptr), "launch_warpgroup_attention");
  }
}

/// The kernel's answer; every tensor on the device is of type Element.
template <class Element>
std::vector<float> answer(Kernel kernel, const Case& c, const Inputs& in) {
  const DeviceArray<Element> queries(converted<Element>(in.queries));
  const DeviceArray<Element> keys(converted<Element>(in.keys));
  const DeviceArray<Element> values(converted<Element>(in.values));
  const DeviceArray<Element> out(converted<Element>(std::vector<float>(in.queries.size() + 64, -77.0F)));  // and what must stay
  constexpr DataType kType = sizeof(Element) == 2 ? DataType::bf16 : DataType::f32;
  launch(kernel, {.heads = c.heads,
                  .kv_heads = c.kv_heads,
                  .head_dim = c.head_dim,
                  .rows = c.rows,
                  .offset = c.offset,
                  .queries = queries.data(),
                  .keys = keys.data(),
                  .values = values.data(),
                  .out = out.data(),
                  .query_type = kType,
                  .key_type = kType,
                  .out_type = kType});
  std::vector<float> got = to_floats(out.download());
  for (std::size_t i = in.queries.size(); i < got.size(); ++i) {
    DUALDECODER_EXPECT(got[i] == -77.0F, "wrote %g behind the last row", static_cast<double>(got[i]));
  }
  got.resize(in.queries.size());
  return got;
}

/// Weights are rounded to bf16 before they meet the values, which changes each by at most half its last place, 2^-8 of it, so an element is
/// off by at most that of the sum of weight * |value|; bf16 results are rounded once more. Scores differ in their last bits of f32: 2^-23
/// of |q| |k|, which e^x turns into a relative error of the weights.
template <class Element>
void compare(Kernel kernel, const Case& c) {
  const Inputs in(c);
  const std::vector<float> got = answer<Element>(kernel, c, in);
  const double score_error = 1e-6 * static_cast<double>(c.query_scale) * c.head_dim;
  for (int row = 0; row<c.rows; row += c.rows> 40 ? 1 + row % 7 : 1) {
    for (int head = 0; head < c.heads; ++head) {
      const Expected want = expected(c, in, row, head);
      for (int d = 0; d < c.head_dim; ++d) {
        const double value = static_cast<double>(got[(at(row) * at(c.heads) + at(head)) * at(c.head_dim) + at(d)]);
        const double rounding = sizeof(Element) == 2 ? std::abs(want.out[at(d)]) : 0.0;
        const double bound = 1.01 * 0x1p-8 * (want.magnitude[at(d)] + rounding) + score_error * want.magnitude[at(d)] + 1e-6;
        const double error = std::abs(value - want.out[at(d)]);
        DUALDECODER_EXPECT(error <= bound, "%s, %d/%d heads of %d, %d rows at %d, %s: row %d head %d element %d is %g, not %g (bound %g)",
                           name_of(kernel), c.heads, c.kv_heads, c.head_dim, c.rows, c.offset, sizeof(Element) == 2 ? "bf16" : "f32", row,
                           head, d, value, want.out[at(d)], bound);
      }
    }
  }
}

/// Both element types on the portable kernel, bf16 on the other.
void compare_all(const Case& c) {
  for (const Kernel kernel : kernels(c.head_dim)) compare<__nv_bfloat16>(kernel, c);
  if (c.rows % 2 == 1) compare<float>(Kernel::portable, c);
}

void test_values() {
  const std::vector<int> all_rows{1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300};
  const std::vector<int> all_offsets{0, 1, 63, 64, 65, 127, 200};
  const std::vector<int> rows_list = small_run() ? std::vector{1, 65, 193, 300} : all_rows;
  const std::vector<int> offsets = small_run() ? std::vector{0, 65} : all_offsets;
  for (const int dim : {64, 80, 96, 128, 256}) {
    for (const int rows : rows_list) {
      for (const int offset : offsets) {
        compare_all({.heads = 2, .kv_heads = 1, .head_dim = dim, .rows = rows, .offset = offset});
      }
    }
    for (int group = 1; group <= 16; group += small_run() ? 5 : 1)
      compare_all({.heads = 2 * group, .kv_heads = 2, .head_dim = dim, .rows = 33, .offset = 70});
    compare_all({.heads = 3, .kv_heads = 3, .head_dim = dim, .rows = 151, .offset = 1000, .query_scale = 30.0F});
    compare_all({.heads = 2, .kv_heads = 1, .head_dim = dim, .rows = 141, .offset = 77, .equal_keys = true});
  }
}

/// A row gives the same bits in a block of its own as among others, wherever the blocks begin.
void test_rows_are_independent(Kernel kernel, int dim) {
  const Case whole{.heads = 4, .kv_heads = 2, .head_dim = dim, .rows = 333, .offset = 0};
  const Inputs in(whole);
  const std::vector<float> all = answer<__nv_bfloat16>(kernel, whole, in);
  const std::size_t width = at(whole.heads) * at(dim);
  const auto place = [&](const std::vector<float>& values, int row) {
    return values.begin() + static_cast<std::ptrdiff_t>(at(row) * width);
  };
  for (const auto& [first, rows] : {std::pair{0, 1}, std::pair{100, 130}, std::pair{200, 133}, std::pair{332, 1}}) {
    Case part = whole;
    part.rows = rows;
    part.offset = first;
    Inputs some = in;
    const std::int64_t tokens = first + rows;
    some.queries.assign(place(in.queries, first), place(in.queries, first + rows));
    some.keys.resize(at(tokens * part.kv_heads * dim));
    some.values.resize(some.keys.size());
    const std::vector<float> alone = answer<__nv_bfloat16>(kernel, part, some);
    DUALDECODER_EXPECT(std::equal(alone.begin(), alone.end(), place(all, first)),
                       "%s, head_dim %d: %d rows from %d differ from the same among 333", name_of(kernel), dim, rows, first);
  }
}

/// All tokens in one launch, the last block of a prefill alone, and all of its blocks, as a session attends in a layer.
void print_speed() {
  constexpr int kHeads = 32;
  constexpr int kKvHeads = 8;
  constexpr int kBlock = 4096;  // Backend::prefill_block
  for (const int dim : {128, 64}) {
    for (const int tokens : {16384, 65536, 131072}) {
      testing::Random random(1);
      const auto noise = [&](std::size_t count) {
        std::vector<__nv_bfloat16> piece(std::size_t{1} << 20U);
        for (auto& value : piece) value = __float2bfloat16(random.normal());
        DeviceArray<__nv_bfloat16> filled(count);
        for (std::size_t i = 0; i < count; i += piece.size()) {
          const std::size_t bytes = std::min(piece.size(), count - i) * sizeof(__nv_bfloat16);
          cuda::check(cudaMemcpy(filled.data() + i, piece.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
        }
        return filled;
      };
      const DeviceArray<__nv_bfloat16> queries = noise(at(tokens) * kHeads * at(dim));
      const DeviceArray<__nv_bfloat16> keys = noise(at(tokens) * kKvHeads * at(dim));
      const DeviceArray<__nv_bfloat16> values = noise(at(tokens) * kKvHeads * at(dim));
      const DeviceArray<__nv_bfloat16> out(queries.size());
      const auto rows_at = [&](Kernel kernel, int rows, int offset) {
        launch(kernel, {.heads = kHeads,
                        .kv_heads = kKvHeads,
                        .head_dim = dim,
                        .rows = rows,
                        .offset = offset,
                        .queries = queries.data(),
                        .keys = keys.data(),
                        .values = values.data(),
                        .out = out.data()});
      };
      const int rounds = tokens > 65536 ? 2 : 5;
      for (const Kernel kernel : kernels(dim)) {
        const auto report = [&](const char* what, double pairs, double ms) {
          std::printf("prefill attention (%s) D=%d, 32/8 heads, %d tokens, %s: %.2f ms, %.0f TFLOP/s\n", name_of(kernel), dim, tokens, what,
                      ms, 4.0 * dim * kHeads * pairs / ms * 1e-9);
        };
        const auto pairs = [](double rows, double offset) { return rows * (offset + (rows + 1) / 2); };  // of a query and a key it sees
        report("in one", pairs(tokens, 0), milliseconds(nullptr, rounds, [&] { rows_at(kernel, tokens, 0); }));
        report("the last 4096", pairs(kBlock, tokens - kBlock),
               milliseconds(nullptr, 5, [&] { rows_at(kernel, kBlock, tokens - kBlock); }));
        report("in blocks of 4096", pairs(tokens, 0), milliseconds(nullptr, rounds, [&] {
                 for (int offset = 0; offset < tokens; offset += kBlock) rows_at(kernel, kBlock, offset);
               }));
      }
    }
  }
}

}  // namespace
}  // namespace dualdecoder::test

int main(int argc, char**) {
  return dualdecoder::test::run_on_device([&] {
    if (argc > 1) return dualdecoder::test::print_speed();
    dualdecoder::test::test_values();
    for (const int dim : {64, 80, 96, 128, 256}) {
      for (const auto kernel : dualdecoder::test::kernels(dim)) dualdecoder::test::test_rows_are_independent(kernel, dim);
    }
  });
}
