// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// SmolLM2 and Qwen2.5-Coder on the device. Logits are compared with those of the transformers library in f32, teacher-forced on its greedy
// tokens (tests/data/golden_*.json, or the files that DUALDECODER_GOLDEN names; scripts/make_golden.py); the invariants of sparse decoding
// are held bit for bit by the recorded passes.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "dualdecoder/cuda/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/load_weights.hpp"
#include "tests/golden.hpp"
#include "tests/gpu/check.hpp"

namespace dualdecoder::test {
namespace {

/// bf16 weights and activations against f32 ones: 2^-9 a rounding, a dozen roundings a layer over 24 to 30 layers, on logits of up to 30.
/// The largest difference seen is 0.36.
constexpr double kLogitBound = 0.6;

std::filesystem::path folder_of(const char* variable, const char* otherwise) {
  const char* folder = std::getenv(variable);
  return folder != nullptr ? folder : otherwise;
}

struct Model {
  std::shared_ptr<Backend> backend;
  std::shared_ptr<const ModelWeights> weights;
};

/// What the logits may differ by. With a run of the transformers library that rounds where this backend does (make_golden.py
/// --round-like-cuda), from that: by what bf16 does to this model on this prompt in that library's own hands, its bf16 run against its f32
/// one. Without one, from f32: by half as much again, since the largest of a few thousand differences is another one in another order of
/// roundings, or by kLogitBound for files without a bf16 run.
double bound_of(const nlohmann::json& test_case) {
  if (!test_case.contains("bf16")) return kLogitBound;
  return (test_case.contains("rounded") ? 1.0 : 1.5) * test_case["bf16"]["largest"].get<double>();
}

void check_golden(const Model& model, const nlohmann::json& golden, const nlohmann::json& test_case) {
  const std::size_t prompt = test_case["prompt"].size();
  const double bound = bound_of(test_case);
  const bool rounded = test_case.contains("rounded");
  const double gap = 2 * (rounded ? 1.5 : 1.0) * bound;  // logits of the two best tokens that are further apart than this are decided
  const GoldenDifference found = compare_golden(model.backend, model.weights, golden, test_case, DataType::bf16, gap);
  const double largest = rounded ? found.rounded_largest : found.largest;
  std::printf("prompt of %zu tokens: logits differ by at most %.3f (bound %.3f)", prompt, largest, bound);
  if (rounded) std::printf(", root mean square %.4f, from those without roundings by %.3f", found.rounded_rms, found.largest);
  std::printf(", root mean square %.4f; %zu of %zu tokens are the same, %zu steps decided\n", found.rms, found.equal, found.steps,
              found.decided);
  DUALDECODER_EXPECT(largest < bound, "prompt of %zu tokens: a logit differs by %f", prompt, largest);
  DUALDECODER_EXPECT(found.wrong == 0, "prompt of %zu tokens: %zu decided steps have another token", prompt, found.wrong);
  DUALDECODER_EXPECT(found.steps == test_case["tokens"].size(), "prompt of %zu tokens: %zu steps", prompt, found.steps);
  if (!test_case.contains("bf16")) {
    DUALDECODER_EXPECT(found.decided > 0, "prompt of %zu tokens: no step is decided", prompt);
    return;
  }
  const auto their_rms = test_case["bf16"]["rms"].get<double>();
  std::printf("  the transformers library in bf16: at most %.3f, root mean square %.4f, %zu tokens the same\n",
              test_case["bf16"]["largest"].get<double>(), their_rms, test_case["bf16"]["equal_tokens"].get<std::size_t>());
  DUALDECODER_EXPECT(found.rms < 1.25 * their_rms, "prompt of %zu tokens: %f root mean square", prompt, found.rms);
}

/// Greedy tokens of prompts in one batch; the later ones join after `join` steps each.
std::vector<std::vector<Token>> tokens_of(const Model& model, SessionOptions options, const std::vector<std::vector<Token>>& prompts,
                                          int count, int join = 0) {
  std::size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  options.max_context = static_cast<int>(longest) + count;
  options.max_sequences = static_cast<int>(prompts.size());
  auto session = make_session(model.backend, model.weights, options);
  std::vector<SequenceId> ids;
  std::vector<std::vector<Token>> tokens(prompts.size());
  std::size_t added = 0;
  for (int step = 0; added < prompts.size() || session.active() > 0; ++step) {
    while (added < prompts.size() && step >= join * static_cast<int>(added)) {
      ids.push_back(session.add(prompts[added++], {.max_new_tokens = count}));
    }
    for (const TokenEvent& event : session.step().tokens) {
      const auto place = static_cast<std::size_t>(std::find(ids.begin(), ids.end(), event.sequence) - ids.begin());
      tokens[place].push_back(event.token);
    }
  }
  return tokens;
}

/// Bits of row 0's logits, by passes that are not recorded, since the host looks at them.
std::vector<float> logits_of(const Model& model, SessionOptions options, const std::vector<Token>& prompt, int count) {
  options.max_context = static_cast<int>(prompt.size()) + count;
  auto session = make_session(model.backend, model.weights, options);
  std::vector<float> all;
  AddOptions add;
  add.max_new_tokens = count;
  add.on_logits = [&](std::span<const float> logits) { all.insert(all.end(), logits.begin(), logits.end()); };
  session.add(prompt, add);
  while (session.active() > 0) session.step();
  return all;
}

void check_invariants(const Model& model, const std::vector<Token>& prompt) {
  constexpr int kCount = 40;
  SessionOptions base;
  base.store = StoreKind::resident;
  base.budget_tokens = 256;
  base.resync = Resync::always;
  base.slots_per_budget = 2.0F;

  SessionOptions wait = base;
  wait.miss_policy = MissPolicy::wait;
  const std::vector<float> reference = logits_of(model, wait, prompt, kCount);
  const auto same_as_wait = [&](const char* what, auto change) {
    SessionOptions changed = wait;
    change(changed);
    DUALDECODER_EXPECT(logits_of(model, changed, prompt, kCount) == reference, "wait: the bits change with %s", what);
  };
  same_as_wait("the predictor", [](SessionOptions& o) { o.predictor = PredictorKind::published_dual_row; });
  same_as_wait("the slots", [](SessionOptions& o) { o.slots_per_budget = 8.0F; });
  same_as_wait("ping-pong buffers", [](SessionOptions& o) { o.store = StoreKind::ping_pong; });
  same_as_wait("a slow link", [](SessionOptions& o) { o.link_bytes_per_second = 2e9; });
  same_as_wait("a single lane", [](SessionOptions& o) { o.single_lane = true; });

  SessionOptions estimate = base;
  estimate.miss_policy = MissPolicy::estimate;
  const std::vector<float> estimated = logits_of(model, estimate, prompt, kCount);
  for (double rate : {25e9, 12e9, 1e9}) {
    SessionOptions slow = estimate;
    slow.link_bytes_per_second = rate;
    DUALDECODER_EXPECT(logits_of(model, slow, prompt, kCount) == estimated, "estimate: the bits change at %g bytes a second", rate);
  }
  DUALDECODER_EXPECT(logits_of(model, estimate, prompt, kCount) == estimated, "estimate: two runs differ");

  // budget >= context: full attention within rounding
  SessionOptions whole = wait;
  whole.budget_tokens = 8192;
  SessionOptions full;
  full.store = StoreKind::full;
  full.predictor = PredictorKind::none;
  const std::vector<float> dense = logits_of(model, full, prompt, 2);
  const std::vector<float> all = logits_of(model, whole, prompt, 2);
  double largest = 0.0;
  for (std::size_t i = 0; i < dense.size(); ++i) largest = std::max(largest, std::fabs(static_cast<double>(dense[i] - all[i])));
  std::printf("a budget of the whole context: logits differ from full attention by at most %.4f\n", largest);
  DUALDECODER_EXPECT(dense.size() == all.size() && largest < kLogitBound / 2, "budget >= context: a logit differs by %f", largest);

  // recorded passes choose the tokens of plain ones, alone and with others that join
  const std::vector<std::vector<Token>> alone = tokens_of(model, estimate, {prompt}, kCount);
  std::vector<Token> plain;
  const std::size_t vocabulary = estimated.size() / kCount;
  for (int step = 0; step < kCount; ++step) {
    const auto begin = estimated.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(step) * vocabulary);
    plain.push_back(static_cast<Token>(std::max_element(begin, begin + static_cast<std::ptrdiff_t>(vocabulary)) - begin));
  }
  DUALDECODER_EXPECT(alone.front() == plain, "recorded passes choose other tokens than plain ones");
  const std::vector<Token> shorter(prompt.begin() + 100, prompt.end());
  const std::vector<Token> shortest(prompt.begin() + 900, prompt.end());
  const auto together = tokens_of(model, estimate, {prompt, shorter, shortest}, kCount, 5);
  const auto second = tokens_of(model, estimate, {shorter}, kCount).front();
  int equal = 0;
  for (int i = 0; i < kCount; ++i) equal += together[1][static_cast<std::size_t>(i)] == second[static_cast<std::size_t>(i)] ? 1 : 0;
  std::printf("in a batch that grows %d of %d tokens are those of running alone\n", equal, kCount);
  DUALDECODER_EXPECT(together[0].size() == kCount && together[2].size() == kCount, "a sequence of the batch ended early");
}

/// Whether the golden file's model is there; then its cases are checked.
bool check_file(const std::filesystem::path& file, bool invariants) {
  const nlohmann::json golden = read_golden(file);
  const auto path = folder_of("DUALDECODER_MODELS", DUALDECODER_MODEL_DIR) / golden["file"].get<std::string>();
  if (!std::filesystem::exists(path)) {
    std::printf("no %s: scripts/get-model.sh fetches it\n", path.filename().c_str());
    return false;
  }
  Model model{cuda::make_cuda_backend(), nullptr};
  model.weights = load_weights(path, *model.backend, {.yarn_factor = golden.value("yarn_factor", 0.0F)});
  std::printf("%s, against %s\n", path.filename().c_str(), file.filename().c_str());
  for (const auto& test_case : golden["cases"]) {
    if (small_run() && test_case["prompt"].size() > 100) continue;
    check_golden(model, golden, test_case);
  }
  if (invariants && !small_run()) check_invariants(model, golden["cases"].back()["prompt"].get<std::vector<Token>>());
  return true;
}

/// The committed files, or those that DUALDECODER_GOLDEN names.
int run_models() {
  std::vector<std::filesystem::path> files = golden_files_asked_for();
  if (files.empty()) {
    for (const auto& entry : std::filesystem::directory_iterator(folder_of("DUALDECODER_TEST_DATA_DIR", DUALDECODER_TEST_DATA_DIR))) {
      const std::string name = entry.path().filename().string();
      if (name.rfind("golden_", 0) == 0 && entry.path().extension() == ".json") files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  int ran = 0;
  for (const auto& file : files) ran += check_file(file, file.filename() == "golden_smollm2.json") ? 1 : 0;
  return ran;
}

}  // namespace
}  // namespace dualdecoder::test

int main() try {
  if (dualdecoder::cuda::device_count() == 0) return std::printf("SKIPPED: no CUDA device\n"), 77;
  if (dualdecoder::test::run_models() == 0) return std::printf("SKIPPED: no model\n"), 77;
  if (dualdecoder::test::failures > 0) return std::printf("%d failures\n", dualdecoder::test::failures), 1;
  return std::printf("all as expected\n"), 0;
} catch (const std::exception& error) {
  return std::printf("%s\n", error.what()), 1;
}
