// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <type_traits>
#include <vector>

/// Floats and bf16 of the host, rounded to the nearest.
namespace dualdecoder::test {

inline float rounded_to_bf16(float value) { return __bfloat162float(__float2bfloat16(value)); }

template <class Element>
std::vector<Element> converted(const std::vector<float>& values) {
  if constexpr (std::is_same_v<Element, float>) {
    return values;
  } else {
    std::vector<Element> made;
    made.reserve(values.size());
    for (const float value : values) made.push_back(__float2bfloat16(value));
    return made;
  }
}

inline std::vector<float> to_floats(const std::vector<float>& values) { return values; }
inline std::vector<float> to_floats(const std::vector<__nv_bfloat16>& values) {
  std::vector<float> made;
  made.reserve(values.size());
  for (const __nv_bfloat16 value : values) made.push_back(__bfloat162float(value));
  return made;
}

}  // namespace dualdecoder::test
