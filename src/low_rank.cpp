// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/low_rank.hpp"

#include <algorithm>
#include <string>

#include "dualdecoder/error.hpp"
#include "src/chunk_geometry.hpp"

#ifdef DUALDECODER_HAS_LAPACK
/// LAPACK's Fortran interface: eigenvalues, ascending, and eigenvectors of a symmetric matrix by divide and conquer. The last two arguments
/// are the lengths of the first two.
extern "C" void dsyevd_(const char* job, const char* triangle, const int* n, double* a, const int* lda, double* w, double* work,
                        const int* lwork, int* iwork, const int* liwork, int* info, std::size_t, std::size_t);
#endif

namespace dualdecoder::cpu {
namespace {

// what dsyevd asks for with eigenvectors
std::size_t work_size(int width) { return 1 + 6 * index(width) + 2 * index(width) * index(width); }
std::size_t int_work_size(int width) { return 3 + 5 * index(width); }

}  // namespace

bool has_lapack() noexcept {
#ifdef DUALDECODER_HAS_LAPACK
  return true;
#else
  return false;
#endif
}

void LowRankFactor::carve(Carver& carver) {
  const std::size_t width = index(shape_.width);
  gram_ = carver.take<double>(width * width);
  eigenvalues_ = carver.take<double>(width);
  work_ = carver.take<double>(work_size(shape_.width));
  int_work_ = carver.take<int>(int_work_size(shape_.width));
  product_ = carver.take<float>(width * width);
  columns_ = carver.take<float>(width * index(shape_.block));
}

void LowRankFactor::clear() noexcept { std::fill_n(gram_, index(shape_.width) * index(shape_.width), 0.0); }

void LowRankFactor::add(const float* rows, int count) noexcept {
  const std::size_t width = index(shape_.width);
  const std::size_t block = index(shape_.block);
  for (std::size_t r = 0; r < index(count); ++r) {
    for (std::size_t c = 0; c < width; ++c) columns_[c * block + r] = rows[r * width + c];
  }
  std::fill_n(product_, width * width, 0.0F);
  const Segment all{rows, count};
  kernels_.add_values(columns_, block, shape_.width, &all, 1, {.chunk = 0, .dim = width, .bf16 = false}, product_);
  for (std::size_t i = 0; i < width * width; ++i) gram_[i] += static_cast<double>(product_[i]);
}

void LowRankFactor::solve(int rank, float* vectors) {
#ifdef DUALDECODER_HAS_LAPACK
  const int n = shape_.width;
  const auto lwork = static_cast<int>(work_size(n));
  const auto liwork = static_cast<int>(int_work_size(n));
  int info = 0;
  dsyevd_("V", "U", &n, gram_, &n, eigenvalues_, work_, &lwork, int_work_, &liwork, &info, 1, 1);
  if (info != 0) throw Error("low-rank keys: dsyevd of LAPACK did not converge (info = " + std::to_string(info) + ")");
  for (int r = 0; r < rank; ++r) {
    const double* vector = gram_ + index(n - 1 - r) * index(n);
    std::transform(vector, vector + n, vectors + index(r) * index(n), [](double x) { return static_cast<float>(x); });
  }
  clear();
#else
  static_cast<void>(rank);
  static_cast<void>(vectors);
  throw Error("low-rank keys: this build has no LAPACK (DUALDECODER_LAPACK)");
#endif
}

}  // namespace dualdecoder::cpu
