// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/tensor_map.hpp"

#include <cudaTypedefs.h>

namespace dualdecoder::cuda {
namespace {

constexpr int kTileColumns = 64;

/// The driver's call, without linking the driver; null where it has none.
PFN_cuTensorMapEncodeTiled_v12000 encode_tiled() {
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

}  // namespace

cudaError_t describe(const HeadRowsTensor& tensor, int box_rows, CUtensorMap& map) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = encode_tiled();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto head_bytes = static_cast<cuuint64_t>(tensor.head_dim) * 2;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(tensor.head_dim), static_cast<cuuint64_t>(tensor.heads),
                                static_cast<cuuint64_t>(tensor.rows)};
  const cuuint64_t strides[] = {head_bytes, head_bytes * static_cast<cuuint64_t>(tensor.heads)};
  const cuuint32_t box[] = {kTileColumns, 1, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(tensor.data), extents, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace dualdecoder::cuda
