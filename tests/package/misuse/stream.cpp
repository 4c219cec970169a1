// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <dualdecoder/memory.hpp>
#include <dualdecoder/stream.hpp>

void* use(dualdecoder::MemoryResource& memory, CUstream_st* stream) {
#if defined(FROM_ZERO)
  return memory.allocate(1, 1, 0);
#elif defined(FROM_NULLPTR)
  return memory.allocate(1, 1, nullptr);
#elif defined(FORGOTTEN)
  return memory.allocate(1, 1);
#else
  return memory.allocate(1, 1, stream);
#endif
}
