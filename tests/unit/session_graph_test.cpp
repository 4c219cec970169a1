// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// A session on a backend that records passes: the same tokens as one that runs them, whatever comes and goes between the launches. The
// recording backend is a CPU backend whose graph calls what it was given again at every launch.
#include <functional>
#include <memory>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "tests/catch.hpp"
#include "tests/unit/session_fixture.hpp"

namespace dualdecoder::test {
namespace {

struct Recorded {
  int graphs = 0;
  int launches = 0;
};

class CallingGraph final : public StepGraph {
 public:
  CallingGraph(std::function<void()> work, Recorded& recorded) : work_(std::move(work)), recorded_(recorded) {}
  void launch(StreamRef) override {
    ++recorded_.launches;
    work_();
  }

 private:
  std::function<void()> work_;
  Recorded& recorded_;
};

class RecordingBackend final : public Backend {
 public:
  explicit RecordingBackend(Recorded& recorded) : recorded_(recorded) {}

  const char* name() const noexcept override { return "recording"; }
  StreamRef stream() noexcept override { return inner_->stream(); }
  MemoryResource& memory(MemoryKind kind) noexcept override { return inner_->memory(kind); }
  StepKernels& kernels() noexcept override { return inner_->kernels(); }
  void copy(void* target, const void* source, std::size_t bytes, StreamRef stream) override { inner_->copy(target, source, bytes, stream); }
  void synchronize(StreamRef stream) override { inner_->synchronize(stream); }
  std::unique_ptr<StepGraph> record(const std::function<void()>& work, StreamRef) override {
    ++recorded_.graphs;
    return std::make_unique<CallingGraph>(work, recorded_);
  }
  std::unique_ptr<DenseModel> make_dense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits) override {
    return inner_->make_dense(std::move(weights), limits);
  }
  std::unique_ptr<KvStore> make_store(const StoreOptions& options) override { return inner_->make_store(options); }
  std::unique_ptr<TransferScheduler> make_scheduler(const SchedulerOptions& options) override { return inner_->make_scheduler(options); }
  MemoryPlan dense_plan(const ModelConfig& config, const DenseLimits& limits) const override { return inner_->dense_plan(config, limits); }
  MemoryPlan store_plan(const StoreOptions& options) const override { return inner_->store_plan(options); }
  LogSink* log() const noexcept override { return inner_->log(); }
  TraceSink* trace() const noexcept override { return inner_->trace(); }

 private:
  Recorded& recorded_;
  std::shared_ptr<Backend> inner_ = cpu::make_cpu_backend({.threads = 2});
};

/// Two sequences, a third after ten steps, one with forced tokens and one with a repetition penalty. All tokens in the order of the events.
std::vector<Token> tokens_of(const std::shared_ptr<Backend>& backend) {
  const auto weights = make_synthetic_weights(tiny_config(), 7, *backend, {.matrix_type = DataType::f32, .threads = 1});
  SessionOptions options = tiny_options();
  options.max_sequences = 3;
  options.miss_policy = MissPolicy::estimate;
  auto session = make_session(backend, weights, options);
  session.add(random_tokens(200, 1), {.max_new_tokens = 30});
  AddOptions penalised;
  penalised.max_new_tokens = 50;
  penalised.sampling.temperature = 0.8F;
  penalised.sampling.repetition_penalty = 1.3F;
  session.add(random_tokens(150, 2), penalised);
  std::vector<Token> tokens;
  for (int step = 0; session.active() > 0; ++step) {
    if (step == 10) {
      AddOptions forced;
      forced.forced = random_tokens(20, 4);
      session.add(random_tokens(99, 3), forced);
    }
    for (const TokenEvent& event : session.step().tokens) {
      tokens.push_back(static_cast<Token>(event.sequence.value));
      tokens.push_back(event.token);
    }
  }
  return tokens;
}

TEST_CASE("Recorded passes give the tokens of passes that run at once", "[session]") {
  Recorded recorded;
  const std::vector<Token> with_graphs = tokens_of(std::make_shared<RecordingBackend>(recorded));
  CHECK(with_graphs == tokens_of(cpu::make_cpu_backend({.threads = 2})));
  CHECK(with_graphs.size() == 2 * 100);
  CHECK(recorded.graphs >= 2);    // two and three places
  CHECK(recorded.graphs <= 4);    // and whether one sequence is alone
  CHECK(recorded.launches > 30);  // most of the passes
}

}  // namespace
}  // namespace dualdecoder::test
