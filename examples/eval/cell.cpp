// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/cell.hpp"

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

namespace dualdecoder::examples {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double hit_rate(const StoreStatistics& to, const StoreStatistics& from) {
  const std::uint64_t predictable = to.predictable - from.predictable;
  return predictable == 0 ? 0.0 : static_cast<double>(to.predicted_hit - from.predicted_hit) / static_cast<double>(predictable);
}

/// Work on one sequence's logits beside the next step: in order, a piece at a time. The logits of a large vocabulary take the host about as
/// long as a step takes a GPU.
class BesideSteps {
 public:
  /// `work` on a copy of `logits`, once the piece before it has ended.
  void run(std::span<const float> logits, std::function<void(std::span<const float>)> work) {
    finish();
    copy_.assign(logits.begin(), logits.end());
    last_ = std::async(std::launch::async, [this, work = std::move(work)] { work(copy_); });
  }
  void finish() {
    if (last_.valid()) last_.get();
  }

 private:
  std::vector<float> copy_;
  std::future<void> last_;  // goes first, since it reads the copy
};

/// Steps until nothing is active; `on_token` has every event, `after_step` every step.
void run_all(DecodeSession& session, const std::function<void(const TokenEvent&)>& on_token, const std::function<void()>& after_step) {
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) on_token(event);
    after_step();
  }
}

}  // namespace

/// One question of a run that is forced on full attention's text, then left alone where it parts from it.
struct QuestionBatch::Forced {
  std::size_t question = 0;
  FidelityMeter meter{};
  BesideSteps comparison{};
  std::string answer{};
};

QuestionBatch::QuestionBatch(const Laboratory& laboratory, std::vector<Prompt> prompts, Match match, int context)
    : laboratory_(laboratory), prompts_(std::move(prompts)), match_(match), context_(context) {
  tapes_.reserve(prompts_.size());
  for (const Prompt& prompt : prompts_) {
    tapes_.emplace_back(*laboratory_.backend, laboratory_.weights->config(), static_cast<int>(prompt.tokens.size()));
  }
}

std::size_t QuestionBatch::device_bytes() const {
  return laboratory_.device_memory != nullptr ? laboratory_.device_memory->live_bytes() : 0;
}

double QuestionBatch::score_of(std::size_t question, const std::string& answer) const {
  return score(match_, answer, prompts_[question].answers);
}

/// Generates until the model ends its answer or the answer's room is used up.
AddOptions QuestionBatch::free_options(std::size_t question) const {
  const auto& ends = laboratory_.tokenizer->end_tokens();
  AddOptions options{.max_new_tokens = prompts_[question].answer_tokens, .stop_tokens = {ends.begin(), ends.end()}};
  options.on_prefill = [this](std::size_t, std::size_t) { laboratory_.on_progress(0.0); };
  return options;
}

SequenceId QuestionBatch::add(DecodeSession& session, std::size_t question, AddOptions options) {
  SequenceId id{};
  laboratory_.backend->with(tapes_[question], [&] { id = session.add(prompts_[question].tokens, std::move(options)); });
  return id;
}

void QuestionBatch::make_full() {
  if (!full_.empty()) return;
  const auto begin = Clock::now();
  const auto count = prompts_.size();
  SessionOptions options = full_attention({});
  options.max_context = context_;
  options.max_sequences = static_cast<int>(count);
  const int vocabulary = laboratory_.weights->config().vocabulary;
  std::vector<Full> full;
  for (const Prompt& prompt : prompts_)
    full.push_back({.tokens = {}, .log_probabilities = {prompt.answer_tokens, vocabulary}, .result = {}});

  const std::size_t before = device_bytes();
  std::vector<BesideSteps> beside(count);
  CellResult together;
  {
    DecodeSession session = make_session(laboratory_.backend, laboratory_.weights, options);
    std::vector<SequenceId> ids;
    for (std::size_t i = 0; i < count; ++i) {
      AddOptions one = free_options(i);
      one.on_logits = [&full, &beside, i](std::span<const float> logits) {
        beside[i].run(logits, [&one = full[i]](std::span<const float> copy) { one.log_probabilities.add(copy); });
      };
      ids.push_back(add(session, i, std::move(one)));
      laboratory_.on_progress(static_cast<double>(i + 1) / static_cast<double>(count + 1));
    }
    together.measured_device_bytes = device_bytes() - before;
    run_all(
        session,
        [&](const TokenEvent& event) {
          const auto at = std::find(ids.begin(), ids.end(), event.sequence) - ids.begin();
          full[static_cast<std::size_t>(at)].tokens.push_back(event.token);
        },
        [&] { laboratory_.on_progress(static_cast<double>(count) / static_cast<double>(count + 1)); });
    for (BesideSteps& one : beside) one.finish();
    together.session = session.statistics();
  }
  together.batch = static_cast<int>(count);
  together.seconds = seconds_since(begin);
  for (std::size_t i = 0; i < count; ++i) {
    CellResult& result = full[i].result = together;
    result.answer = text_of(full[i].tokens);
    result.score = score_of(i, result.answer);
    const std::size_t compared = full[i].tokens.size() - 1;
    result.fidelity = {.tokens = compared, .agreement = 1.0};
    result.thirds.fill({.agreement = 1.0});
    result.first_divergence = compared;
  }
  full_ = std::move(full);
}

double QuestionBatch::full_score(std::size_t question) {
  make_full();
  return full_[question].result.score;
}

std::vector<CellResult> QuestionBatch::run_full(const SessionOptions& options) {
  make_full();
  std::vector<CellResult> results;
  for (const Full& full : full_) {
    results.push_back(full.result);
    results.back().plan = memory_plan(*laboratory_.backend, laboratory_.weights->config(), options);
  }
  return results;
}

void QuestionBatch::run_forced(DecodeSession& session, std::vector<Forced>& forced, CellResult& together) {
  std::size_t longest = 0;
  for (Forced& one : forced) {
    const Full& full = full_[one.question];
    AddOptions options = free_options(one.question);
    options.stop_tokens.clear();
    options.max_new_tokens = static_cast<int>(full.tokens.size());
    options.forced = full.tokens;
    options.on_logits = [&one, &full, row = std::size_t{0}](std::span<const float> logits) mutable {
      one.comparison.run(logits, [&one, known = full.log_probabilities.row(row)](std::span<const float> copy) {
        one.meter.add(known, log_probabilities(copy));
      });
      ++row;
    };
    add(session, one.question, std::move(options));
    longest = std::max(longest, full.tokens.size());
  }
  together.measured_device_bytes = device_bytes();
  std::size_t steps = 0;  // of the longest text, resyncs left out
  std::size_t third = 1;
  StoreStatistics last;
  std::size_t tokens = 0;
  run_all(
      session, [&](const TokenEvent&) { ++tokens; },
      [&] {
        if (tokens > 0) ++steps;
        tokens = 0;
        for (; third <= CellResult::kThirds && steps >= 1 + third * (longest - 1) / CellResult::kThirds; ++third) {
          const StoreStatistics now = session.store_statistics();
          together.hits[third - 1] = hit_rate(now, last);
          last = now;
        }
        laboratory_.on_progress(0.5 * static_cast<double>(std::min(steps, longest)) / static_cast<double>(longest));
      });
  for (Forced& one : forced) one.comparison.finish();
  together.session = session.statistics();
  together.store = session.store_statistics();
}

/// Answers of the method alone. One that chooses every token as full attention does would say the same; and where all that is asked for
/// stands in front of the first token that differs, what comes behind changes no score.
void QuestionBatch::run_free(DecodeSession& session, std::vector<Forced>& forced) {
  const bool settles = match_ == Match::all || match_ == Match::any;
  std::vector<std::pair<SequenceId, Forced*>> left_alone;
  std::vector<std::vector<Token>> tokens;
  for (Forced& one : forced) {
    const std::vector<Token>& full = full_[one.question].tokens;
    const std::size_t same = one.meter.first_divergence(0);
    one.answer = text_of(std::span(full).first(same));
    if (same == full.size() || match_ == Match::none) continue;
    if (settles && score_of(one.question, one.answer) == 1.0) continue;
    left_alone.emplace_back(add(session, one.question, free_options(one.question)), &one);
  }
  tokens.resize(left_alone.size());
  int room = 1;
  for (const auto& [id, one] : left_alone) room = std::max(room, prompts_[one->question].answer_tokens);
  int steps = 0;
  run_all(
      session,
      [&](const TokenEvent& event) {
        const auto at = std::find_if(left_alone.begin(), left_alone.end(), [&](const auto& one) { return one.first == event.sequence; });
        tokens[static_cast<std::size_t>(at - left_alone.begin())].push_back(event.token);
      },
      [&] { laboratory_.on_progress(std::min(1.0, 0.5 + 0.5 * ++steps / room)); });
  for (std::size_t i = 0; i < left_alone.size(); ++i) left_alone[i].second->answer = text_of(tokens[i]);
}

std::vector<CellResult> QuestionBatch::run(const SessionOptions& options, const std::shared_ptr<Backend>& backend,
                                           std::span<const std::size_t> questions) {
  make_full();
  const auto begin = Clock::now();
  CellResult together;
  together.plan = memory_plan(*backend, laboratory_.weights->config(), options);
  together.batch = static_cast<int>(questions.size());
  std::vector<Forced> forced(questions.size());
  for (std::size_t i = 0; i < questions.size(); ++i) forced[i].question = questions[i];
  {
    const std::size_t before = device_bytes();
    SessionOptions beside = options;
    beside.max_sequences = together.batch;
    DecodeSession session = make_session(backend, laboratory_.weights, beside);
    run_forced(session, forced, together);
    together.measured_device_bytes -= before;
    run_free(session, forced);
  }
  together.seconds = seconds_since(begin);
  std::vector<CellResult> results;
  for (const Forced& one : forced) {
    CellResult result = together;
    const std::size_t compared = one.meter.size() - 1;  // the first token comes from the prefill, which is dense for every method
    const auto third = [&](std::size_t i) { return 1 + i * compared / CellResult::kThirds; };
    result.fidelity = one.meter.over(1, one.meter.size());
    for (std::size_t i = 0; i < CellResult::kThirds; ++i) result.thirds[i] = one.meter.over(third(i), third(i + 1));
    result.first_divergence = one.meter.first_divergence(1);
    result.answer = one.answer;
    result.score = score_of(one.question, one.answer);
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace dualdecoder::examples
