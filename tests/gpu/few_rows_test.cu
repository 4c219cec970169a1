// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Products of few rows against sums in double precision on the host; with --bench their speed beside cuBLAS's.
#include "cuda/few_rows.hpp"

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/dense_kernels.hpp"
#include "cuda/gemm.hpp"
#include "dualdecoder/stream.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "tests/gpu/bf16.hpp"
#include "tests/gpu/check.hpp"
#include "tests/gpu/replay.hpp"

namespace dualdecoder::test {
namespace {

using Bf16 = __nv_bfloat16;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

/// Normal numbers, rounded to bf16.
std::vector<Bf16> normal(std::size_t count, std::uint64_t seed, float scale) {
  testing::Random random(seed);
  std::vector<Bf16> values(count);
  for (Bf16& value : values) value = __float2bfloat16(random.normal() * scale);
  return values;
}

enum class Kind { store, add, gate };
const char* name_of(Kind kind) { return kind == Kind::store ? "store" : kind == Kind::add ? "add" : "gate"; }

struct Shape {
  std::vector<int> outputs;  // of the matrices
  int inner;
};

/// Matrices in allocations of their own, on the host and on the device.
struct Weights {
  Weights(const Shape& shape, bool gated) : inner(shape.inner) {
    const float scale = 1.0F / std::sqrt(static_cast<float>(inner));
    std::vector<cuda::WeightMatrix> matrices;
    for (const int outputs : shape.outputs) {
      host.push_back(normal(at(outputs) * at(inner), 10 + host.size(), scale));
      device.emplace_back(host.back());
      matrices.push_back({device.back().data(), outputs});
      all += outputs;
    }
    cuda::check(cuda::cut_weights(matrices, inner, gated, tiles), "cut_weights");
  }

  int inner;
  int all = 0;  // outputs
  std::vector<std::vector<Bf16>> host;
  std::vector<DeviceArray<Bf16>> device;
  cuda::WeightTiles tiles;
};

/// Products of rows with all outputs in double precision: [rows, outputs], and the sums of their terms' magnitudes.
struct Reference {
  Reference(const Weights& weights, const std::vector<Bf16>& x, int rows) : outputs(weights.all) {
    const std::vector<float> row_values = to_floats(x);
    int first = 0;
    sums.resize(at(rows) * at(outputs));
    magnitudes.resize(sums.size());
    for (const std::vector<Bf16>& matrix : weights.host) {
      const std::vector<float> values = to_floats(matrix);
      const int own = static_cast<int>(values.size() / at(weights.inner));
      for (int n = 0; n < own; ++n) {
        for (int row = 0; row < rows; ++row) {
          double sum = 0;
          double magnitude = 0;
          for (int k = 0; k < weights.inner; ++k) {
            const double term = static_cast<double>(values[at(n) * at(weights.inner) + at(k)]) *
                                static_cast<double>(row_values[at(row) * at(weights.inner) + at(k)]);
            sum += term;
            magnitude += std::abs(term);
          }
          sums[at(row) * at(outputs) + at(first + n)] = sum;
          magnitudes[at(row) * at(outputs) + at(first + n)] = magnitude;
        }
      }
      first += own;
    }
  }

  int outputs;
  std::vector<double> sums;
  std::vector<double> magnitudes;
};

constexpr float kUntouched = 123.0F;  // exact in bf16
constexpr int kGap = 8;               // columns of `out` behind a row's outputs

/// `out` [rows + 1, outputs + kGap] before a product: ones to add to where the product goes, kUntouched elsewhere.
std::vector<float> blank(int rows, int outputs) {
  std::vector<float> values(at(rows + 1) * at(outputs + kGap), kUntouched);
  for (int row = 0; row < rows; ++row) {
    for (int n = 0; n < outputs; ++n) values[at(row) * at(outputs + kGap) + at(n)] = 1.0F;
  }
  return values;
}

template <class Element>
std::vector<float> product_of(const Weights& weights, Kind kind, const DeviceArray<Bf16>& x, int rows, int outputs) {
  const DeviceArray<Element> out(converted<Element>(blank(rows, outputs)));
  const cuda::FewRows job{
      .x = x.data(), .rows = rows, .out = out.data(), .stride = outputs + kGap, .add = kind == Kind::add, .outputs = outputs};
  cuda::check(cuda::launch_few_rows(weights.tiles, job, nullptr), "launch_few_rows");
  return to_floats(out.download());
}
std::vector<float> product(const Weights& weights, Kind kind, const DeviceArray<Bf16>& x, int rows, int outputs) {
  return kind == Kind::gate ? product_of<Bf16>(weights, kind, x, rows, outputs) : product_of<float>(weights, kind, x, rows, outputs);
}

/// Value and bound of an output. A tensor core may truncate each time it adds sixteen terms to a sum, which is no larger than the terms'
/// magnitudes together: 2^-23 of them each time, and a few times more where warps' sums are joined. bf16 rounds by 2^-9 of the value.
struct Expected {
  double value;
  double bound;
};
Expected expected_of(const Weights& weights, const Reference& reference, Kind kind, int row, int n) {
  const auto sum = [&](int output) { return reference.sums[at(row) * at(reference.outputs) + at(output)]; };
  const auto error = [&](int output) {
    return (weights.inner / 16 + 16) * 0x1p-23 * (1 + reference.magnitudes[at(row) * at(reference.outputs) + at(output)]);
  };
  if (kind != Kind::gate) return {sum(n) + (kind == Kind::add ? 1 : 0), error(n)};
  const int other = n + reference.outputs / 2;
  const double gate = sum(n) / (1 + std::exp(-sum(n)));
  const double value = gate * sum(other);
  // the slope of silu is below 1.1
  return {value, 0x1p-8 * std::abs(value) + 1.1 * error(n) * std::abs(sum(other)) + std::abs(gate) * error(other) + 1e-9};
}

void test_values(const Shape& shape, Kind kind) {
  const bool gated = kind == Kind::gate;
  const Weights weights(shape, gated);
  const std::vector<Bf16> x = normal(at(cuda::kMostFewRows) * at(shape.inner), 3, 1.0F);
  const DeviceArray<Bf16> device_x(x);
  const Reference reference(weights, x, cuda::kMostFewRows);
  const int outputs = gated ? shape.outputs[0] : weights.all;
  std::vector<float> most;  // of the most rows
  for (const int rows : {32, 1, 2, 7, 8, 9, 14, 16, 17, 31}) {
    const std::vector<float> got = product(weights, kind, device_x, rows, outputs);
    int wrong = 0;
    int touched = 0;
    double worst = 0;
    for (int row = 0; row <= rows; ++row) {
      for (int n = 0; n < outputs + kGap; ++n) {
        const float value = got[at(row) * at(outputs + kGap) + at(n)];
        if (row == rows || n >= outputs) {
          touched += value != kUntouched;
          continue;
        }
        const Expected expected = expected_of(weights, reference, kind, row, n);
        const double difference = std::abs(static_cast<double>(value) - expected.value);
        wrong += !(difference <= expected.bound);
        worst = std::max(worst, difference / expected.bound);
      }
    }
    DUALDECODER_EXPECT(wrong == 0, "%s, %d outputs x %d, %d rows: %d outputs are wrong, the worst by %g of its bound", name_of(kind),
                       outputs, shape.inner, rows, wrong, worst);
    DUALDECODER_EXPECT(touched == 0, "%s, %d outputs x %d, %d rows: %d elements that are no outputs were written", name_of(kind), outputs,
                       shape.inner, rows, touched);
    if (most.empty()) most = got;
    const std::size_t bytes = at(rows) * at(outputs + kGap) * sizeof(float);
    DUALDECODER_EXPECT(std::memcmp(got.data(), most.data(), bytes) == 0, "%s, %d outputs x %d: with %d rows other bits than with 32",
                       name_of(kind), outputs, shape.inner, rows);
  }
  // the last row in the place of the first, among other rows
  std::vector<Bf16> turned(x.rbegin(), x.rend());
  std::copy_n(x.end() - shape.inner, shape.inner, turned.begin());
  const std::vector<float> got = product(weights, kind, DeviceArray<Bf16>(turned), 5, outputs);
  const std::size_t last = at(cuda::kMostFewRows - 1) * at(outputs + kGap);
  DUALDECODER_EXPECT(std::memcmp(got.data(), most.data() + last, at(outputs) * sizeof(float)) == 0,
                     "%s, %d outputs x %d: a row has other bits in another place", name_of(kind), outputs, shape.inner);
}

/// Outputs and columns that are no whole tiles, boxes or stages, and matrices of one to eight slices a tile and more tiles than blocks.
void test_shapes() {
  const std::vector<Shape> shapes =
      small_run() ? std::vector<Shape>{{{24, 8, 8}, 200}, {{4100}, 72}}
                  : std::vector<Shape>{{{8, 8, 8}, 8}, {{384, 128, 128}, 328}, {{1003}, 1544},     {{70}, 14344}, {{4096, 1024, 1024}, 136},
                                       {{4100}, 264},  {{9000}, 72},           {{16000, 900}, 72}, {{40007}, 40}, {{16890}, 40}};
  for (const Shape& shape : shapes) {
    test_values(shape, Kind::store);
    test_values(shape, Kind::add);
  }
  const std::vector<Shape> gated = small_run() ? std::vector<Shape>{{{24, 24}, 200}, {{1100, 1100}, 72}}
                                               : std::vector<Shape>{{{8, 8}, 8},         {{520, 520}, 328},  {{24, 24}, 1544},
                                                                    {{1100, 1100}, 136}, {{8960, 8960}, 72}, {{14336, 14336}, 64}};
  for (const Shape& shape : gated) test_values(shape, Kind::gate);
}

/// The first outputs alone, up to the end of a matrix or not.
void test_fewer_outputs() {
  const Shape shape{{384, 128, 120}, 328};
  const Weights weights(shape, false);
  const int rows = 14;
  const DeviceArray<Bf16> x(normal(at(rows) * at(shape.inner), 3, 1.0F));
  const std::vector<float> all = product(weights, Kind::store, x, rows, 632);
  for (const int outputs : {5, 384, 512, 520}) {
    const std::vector<float> got = product(weights, Kind::store, x, rows, outputs);
    int wrong = 0;
    for (int row = 0; row < rows; ++row) {
      for (int n = 0; n < outputs + kGap; ++n) {
        const float value = got[at(row) * at(outputs + kGap) + at(n)];
        wrong += value != (n < outputs ? all[at(row) * at(632 + kGap) + at(n)] : kUntouched);
      }
    }
    DUALDECODER_EXPECT(wrong == 0, "of the first %d outputs %d values are wrong", outputs, wrong);
  }
}

void test_refusals() {
  const Weights weights({{24}, 64}, false);
  const Weights gated({{24, 24}, 64}, true);
  const DeviceArray<Bf16> x(at(33) * 64);
  const DeviceArray<float> out(at(33) * 48);
  const auto status = [&](const Weights& of, int rows, bool add) {
    return cuda::launch_few_rows(of.tiles, {.x = x.data(), .rows = rows, .out = out.data(), .stride = 48, .add = add}, nullptr);
  };
  DUALDECODER_EXPECT(status(weights, 0, false) == cudaErrorInvalidValue, "0 rows were accepted");
  DUALDECODER_EXPECT(status(weights, 33, false) == cudaErrorInvalidValue, "33 rows were accepted");
  DUALDECODER_EXPECT(status(gated, 1, true) == cudaErrorInvalidValue, "adding gated outputs was accepted");
  cuda::WeightTiles tiles;
  const cuda::WeightMatrix one{x.data(), 24};
  const cuda::WeightMatrix other{x.data(), 16};
  const auto cut = [&](std::vector<cuda::WeightMatrix> matrices, int inner, bool gate) {
    return cuda::cut_weights(matrices, inner, gate, tiles);
  };
  DUALDECODER_EXPECT(cut({one}, 60, false) == cudaErrorInvalidValue, "60 columns were accepted");
  DUALDECODER_EXPECT(cut({}, 64, false) == cudaErrorInvalidValue, "no matrix was accepted");
  DUALDECODER_EXPECT(cut({one, other}, 64, true) == cudaErrorInvalidValue, "a gate of other outputs was accepted");
}

// -- speed -------------------------------------------------------------------------------------------------------------------------------

/// Microseconds of one of `count` calls work(0), work(1), .. in a recording, replayed.
template <class F>
double recorded_microseconds(const cuda::Stream& stream, int count, F&& work) {
  const auto all = [&] {
    for (int i = 0; i < count; ++i) work(i);
  };
  all();
  const Replay replay(stream.get(), all);
  double best = 1e30;
  for (int repeat = 0; repeat < 3; ++repeat) {
    best = std::min(best, milliseconds(stream.get(), 4, [&] { replay.launch(stream.get()); }));
  }
  return best * 1e3 / count;
}

struct Product {
  const char* name;
  std::vector<int> outputs;
  int inner;
  Kind kind;
};

/// Normal numbers, the same ones again and again.
void fill(const DeviceArray<Bf16>& weights) {
  const std::vector<Bf16> some = normal(std::min(weights.size(), std::size_t{1} << 20U), 5, 0.02F);
  for (std::size_t first = 0; first < weights.size(); first += some.size()) {
    const std::size_t count = std::min(some.size(), weights.size() - first);
    cuda::check(cudaMemcpy(weights.data() + first, some.data(), count * sizeof(Bf16), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
}

/// Each product by itself, over enough copies of the weights that none is in L2.
void print_product(const Product& product, const cuda::Stream& stream) {
  int all = 0;
  for (const int outputs : product.outputs) all += outputs;
  const std::size_t elements = at(all) * at(product.inner);
  const int copies = std::max(2, static_cast<int>((std::size_t{300} << 20U) / (elements * 2)));
  const DeviceArray<Bf16> weights(elements * at(copies));
  fill(weights);
  const DeviceArray<Bf16> x(normal(at(cuda::kMostFewRows) * at(product.inner), 3, 1.0F));
  const DeviceArray<float> out(at(cuda::kMostFewRows) * at(all));
  const DeviceArray<Bf16> gated(at(cuda::kMostFewRows) * at(all));
  const DeviceArray<std::byte> work(cuda::Gemm::kWorkspaceBytes);
  cuda::check(cudaMemset(out.data(), 0, out.size() * 4), "cudaMemset");
  cuda::Gemm gemm(work.data(), stream.get());
  std::vector<cuda::WeightTiles> tiles(at(copies));
  for (int copy = 0; copy < copies; ++copy) {
    std::vector<cuda::WeightMatrix> matrices;
    const Bf16* data = weights.data() + elements * at(copy);
    for (const int outputs : product.outputs) {
      matrices.push_back({data, outputs});
      data += at(outputs) * at(product.inner);
    }
    cuda::check(cuda::cut_weights(matrices, product.inner, product.kind == Kind::gate, tiles[at(copy)]), "cut_weights");
  }
  const bool gate = product.kind == Kind::gate;
  for (const int rows : {1, 2, 4, 8, 14, 16, 28, 32}) {
    const double own = recorded_microseconds(stream, copies, [&](int copy) {
      cuda::check(cuda::launch_few_rows(tiles[at(copy)],
                                        {.x = x.data(),
                                         .rows = rows,
                                         .out = gate ? static_cast<void*>(gated.data()) : out.data(),
                                         .stride = gate ? product.outputs[0] : all,
                                         .add = product.kind == Kind::add},
                                        stream.get()),
                  "launch_few_rows");
    });
    const double cublas = recorded_microseconds(stream, copies, [&](int copy) {
      gemm.multiply(x.data(), rows, weights.data() + elements * at(copy), product.inner, all,
                    {out.data(), gate ? DataType::bf16 : DataType::f32, all}, product.kind == Kind::add, stream.get());
      if (!gate) return;
      const auto* const both = reinterpret_cast<const Bf16*>(out.data());
      cuda::check(cuda::launch_gate(both, rows, product.outputs[0], gated.data(), stream.get()), "launch_gate");
    });
    std::printf("  %-6s %6d x %5d, %2d rows: %6.1f us, %.2f TB/s of weights, %d slices; cuBLAS %6.1f us\n", product.name, all,
                product.inner, rows, own, 2e-6 * static_cast<double>(elements) / own, tiles[0].slices, cublas);
  }
}

void print_speed() {
  const cuda::Stream stream = cuda::Stream::create();
  std::printf("8B shape\n");
  print_product({"qkv", {4096, 1024, 1024}, 4096, Kind::store}, stream);
  print_product({"output", {4096}, 4096, Kind::add}, stream);
  print_product({"gate", {14336, 14336}, 4096, Kind::gate}, stream);
  print_product({"down", {4096}, 14336, Kind::add}, stream);
  print_product({"head", {128256}, 4096, Kind::store}, stream);
  std::printf("1.5B shape\n");
  print_product({"qkv", {1536, 256, 256}, 1536, Kind::store}, stream);
  print_product({"output", {1536}, 1536, Kind::add}, stream);
  print_product({"gate", {8960, 8960}, 1536, Kind::gate}, stream);
  print_product({"down", {1536}, 8960, Kind::add}, stream);
  print_product({"head", {151936}, 1536, Kind::store}, stream);
}

}  // namespace
}  // namespace dualdecoder::test

int main(int argc, char**) {
  bool skipped = false;
  const int status = dualdecoder::test::run_on_device([&] {
    skipped = !dualdecoder::cuda::has_few_rows();
    if (skipped) return;
    dualdecoder::cuda::check(dualdecoder::cuda::prepare_few_rows(), "prepare_few_rows");
    if (argc > 1) return dualdecoder::test::print_speed();
    dualdecoder::test::test_shapes();
    dualdecoder::test::test_fewer_outputs();
    dualdecoder::test::test_refusals();
  });
  if (!skipped) return status;
  std::printf("SKIPPED: this device or build has no products of few rows of our own\n");
  return 77;
}
