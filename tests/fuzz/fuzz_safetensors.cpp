// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "dualdecoder/error.hpp"
#include "src/load_source_model.hpp"
#include "src/model_files.hpp"
#include "src/safetensors.hpp"
#include "tests/unit/test_backend.hpp"

/// Two bytes with the length of a config.json, the config.json, a safetensors file. Only errors of the library may come out, and every
/// tensor lies inside the file.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace dualdecoder;
  if (size < 2) return 0;
  const std::span input(reinterpret_cast<const std::byte*>(data) + 2, size - 2);
  const std::size_t config_bytes = std::min<std::size_t>(data[0] + 256U * data[1], input.size());
  const std::span file = input.subspan(config_bytes);
  try {
    detail::parse_safetensors_index(input);
  } catch (const Error&) {
  }
  test::MemoryBackend backend;
  try {
    for (const detail::SafetensorsInfo& tensor : detail::parse_safetensors(file)) {
      if (tensor.offset > file.size() || tensor.bytes > file.size() - tensor.offset) std::abort();
    }
    LoadOptions options;
    options.threads = 1;
    const auto model = detail::SourceModel::from_safetensors(input.first(config_bytes), {{"fuzz", file}});
    detail::load_source_model(model, backend, options);
  } catch (const Error&) {
  }
  if (backend.counting().live_bytes() != 0) std::abort();
  return 0;
}
