// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The listing of docs/integrating.md that adapts a logger of spdlog.
#include <spdlog/spdlog.h>

#include <dualdecoder/cpu/backend.hpp>
#include <dualdecoder/log.hpp>
#include <memory>
#include <string_view>
#include <utility>

//! [sink]
class SpdlogSink final : public dualdecoder::LogSink {
 public:
  explicit SpdlogSink(std::shared_ptr<spdlog::logger> logger) : logger_(std::move(logger)) {}
  void log(dualdecoder::LogLevel level, std::string_view message) override {
    static constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info, spdlog::level::warn,
                                                            spdlog::level::err};
    logger_->log(kLevels[static_cast<int>(level)], "{}", message);
  }

 private:
  std::shared_ptr<spdlog::logger> logger_;
};
//! [sink]

namespace listings {

std::shared_ptr<dualdecoder::Backend> backend_with(dualdecoder::LogSink& log) { return dualdecoder::cpu::make_cpu_backend({.log = &log}); }

}  // namespace listings
