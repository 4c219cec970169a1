// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "dualdecoder/error.hpp"
#include "dualdecoder/gguf.hpp"
#include "src/load_source_model.hpp"
#include "src/model_files.hpp"
#include "tests/unit/test_backend.hpp"

/// A GGUF file, parsed and then loaded as far as it goes. Only errors of the library may come out, and every tensor lies inside the file.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace dualdecoder;
  const std::span file(reinterpret_cast<const std::byte*>(data), size);
  test::MemoryBackend backend;
  try {
    const GgufHeader header = parse_gguf_header(file.data(), size, size);
    for (const GgufTensorInfo& tensor : header.tensors) {
      if (tensor.offset > size || tensor.bytes > size - tensor.offset) std::abort();
    }
    LoadOptions options;
    options.threads = 1;
    options.matrix_type = size % 2 == 0 ? DataType::bf16 : DataType::f32;
    detail::load_source_model(detail::SourceModel::from_gguf(file), backend, options);
  } catch (const Error&) {
  }
  if (backend.counting().live_bytes() != 0) std::abort();
  return 0;
}
