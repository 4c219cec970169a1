// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/tensor_map.hpp"

#include <cudaTypedefs.h>

#include <algorithm>

namespace dualdecoder::cuda {
namespace {

constexpr int kTileColumns = 64;

PFN_cuTensorMapEncodeTiled_v12000 find_encode_tiled() noexcept {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

/// The driver's call, without linking the driver; null where it has none.
PFN_cuTensorMapEncodeTiled_v12000 encode_tiled() noexcept {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encode_tiled();
  return encode;
}

/// A tensor of kRank dimensions, the contiguous one first.
template <int kRank>
struct Layout {
  cuuint64_t extents[kRank];
  cuuint64_t strides[kRank - 1];  // bytes
  cuuint32_t box[kRank];
};

template <int kRank>
cudaError_t describe_layout(const void* data, const Layout<kRank>& layout, CUtensorMap& map) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode = encode_tiled();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1U);
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<void*>(data), layout.extents, layout.strides,
                                 layout.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

bool can_describe() noexcept { return encode_tiled() != nullptr; }

cudaError_t describe(const HeadRowsTensor& tensor, int box_rows, CUtensorMap& map) {
  const auto head_bytes = static_cast<cuuint64_t>(tensor.head_dim) * 2;
  const Layout<3> layout{
      .extents = {static_cast<cuuint64_t>(tensor.head_dim), static_cast<cuuint64_t>(tensor.heads), static_cast<cuuint64_t>(tensor.rows)},
      .strides = {head_bytes, head_bytes * static_cast<cuuint64_t>(tensor.heads)},
      .box = {kTileColumns, 1, static_cast<cuuint32_t>(box_rows)}};
  return describe_layout(tensor.data, layout, map);
}

cudaError_t describe(const MatrixTensor& tensor, int box_rows, CUtensorMap& map) {
  const Layout<2> layout{.extents = {static_cast<cuuint64_t>(tensor.columns), static_cast<cuuint64_t>(tensor.rows)},
                         .strides = {static_cast<cuuint64_t>(tensor.columns) * 2},
                         .box = {kTileColumns, static_cast<cuuint32_t>(box_rows)}};
  return describe_layout(tensor.data, layout, map);
}

}  // namespace dualdecoder::cuda
