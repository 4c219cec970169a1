// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dualdecoder/retrieval_predictor.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/testing/store_driver.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder::testing {

/// A RetrievalPredictor to check, and where it runs.
struct PredictorSubject {
  std::function<std::unique_ptr<RetrievalPredictor>()> make;
  StepKernels* kernels;
  Workplace workplace;
};

namespace detail {

/// Modes that a pass of so many rows may run.
inline bool mode_is_legal(RowMode mode, int rows_per_sequence) {
  switch (mode) {
    case RowMode::idle:
    case RowMode::single: return true;
    case RowMode::dual:
    case RowMode::resync: return rows_per_sequence == 2;
  }
  return false;
}

inline void check_traits(const PredictorSubject& subject, Findings& findings) {
  const auto predictor = subject.make();
  const PredictorTraits traits = predictor->traits();
  findings.expect(traits.name != nullptr && !std::string_view(traits.name).empty(), "traits().name is empty.");
  findings.expect(traits.rows_per_sequence == 1 || traits.rows_per_sequence == 2, "traits().rows_per_sequence is neither 1 nor 2.");
  const RowMode first = predictor->first_mode();
  findings.expect(first == RowMode::single || (first == RowMode::resync && traits.rows_per_sequence == 2),
                  "first_mode() is not single, nor resync with two rows: a new sequence has no guess yet.");
  const PredictorTraits again = subject.make()->traits();
  findings.expect(std::string_view(again.name) == traits.name && again.rows_per_sequence == traits.rows_per_sequence &&
                      again.row1_set == traits.row1_set && again.layer_ahead == traits.layer_ahead,
                  "Two predictors made alike have different traits.");
}

/// A pass over places in every mode, and selections as a store would make them.
struct PredictorPass {
  static constexpr int kLayers = 3;
  static constexpr int kHeads = 2;
  static constexpr int kCapacity = 8;

  PredictorPass(const Workplace& workplace, int rows_per_sequence, Random& random)
      : rows(rows_per_sequence),
        slot_of(workplace, 5),
        position(workplace, 5),
        mode(workplace, 5),
        by_row(workplace, 5 * rows, kHeads, kCapacity),
        ahead(workplace, 5 * rows, kHeads, kCapacity),
        predicted(workplace, 5 + 1, kHeads, kCapacity) {
    const RowMode all[] = {RowMode::single, RowMode::dual, RowMode::idle, RowMode::resync};
    for (int place = 0; place < 5; ++place) {
      const auto p = static_cast<std::size_t>(place);
      slot_of.host[p] = 4 - place;
      position.host[p] = 400 + random.below(100);
      const RowMode wanted = all[(p + static_cast<std::size_t>(random.below(4))) % 4];
      mode.host[p] = mode_is_legal(wanted, rows) ? wanted : RowMode::single;
      for (int row = 0; row < rows; ++row) {
        for (int head = 0; head < kHeads; ++head) {
          const bool live = row_is_live(mode.host[p], row);
          by_row.set(place * rows + row, head, live ? ascending(random) : std::vector<int>());
          ahead.set(place * rows + row, head, live ? ascending(random) : std::vector<int>());
        }
      }
    }
    slot_of.upload();
    position.upload();
    mode.upload();
    by_row.upload();
    ahead.upload();
    std::fill(predicted.chunks.host.begin(), predicted.chunks.host.end(), -77);
    std::fill(predicted.count.host.begin(), predicted.count.host.end(), -77);
    predicted.upload();
    view = {5, rows, slot_of.data(), position.data(), mode.data(), nullptr};
  }

  static std::vector<int> ascending(Random& random) {
    std::vector<int> chunks;
    for (int chunk = 0; chunk < 50 && static_cast<int>(chunks.size()) < kCapacity; ++chunk) {
      if (random.chance(0.15)) chunks.push_back(chunk);
    }
    return chunks;
  }

  int rows;
  Mirror<int> slot_of;
  Mirror<int> position;
  Mirror<RowMode> mode;
  SelectionMirror by_row;
  SelectionMirror ahead;
  SelectionMirror predicted;  // one place more than the pass has, to notice writes behind the end
  StepView view;
};

inline void check_lists(const PredictorPass& pass, Findings& findings) {
  for (int place = 0; place < 5; ++place) {
    for (int head = 0; head < PredictorPass::kHeads; ++head) {
      const int count = pass.predicted.count.host[pass.predicted.view.list(place, head)];
      findings.expect(count >= 0 && count <= PredictorPass::kCapacity, "A predicted list's count was not written or exceeds the capacity.");
      const std::vector<int> chunks = pass.predicted.list(place, head);
      findings.expect(std::adjacent_find(chunks.begin(), chunks.end(), std::greater_equal<>()) == chunks.end() &&
                          (chunks.empty() || chunks.front() >= 0),
                      "A predicted list is not ascending.");
      findings.expect(pass.mode.host[static_cast<std::size_t>(place)] != RowMode::idle || chunks.empty(),
                      "Chunks were predicted for an idle place.");
    }
  }
  for (int head = 0; head < PredictorPass::kHeads; ++head) {
    findings.expect(pass.predicted.count.host[pass.predicted.view.list(5, head)] == -77, "predict() wrote behind the places of the pass.");
  }
}

inline void check_predict(const PredictorSubject& subject, Findings& findings, std::uint64_t seed) {
  const auto predictor = subject.make();
  const PredictorTraits traits = predictor->traits();
  Random random(seed);
  for (Layer layer = 0; layer < PredictorPass::kLayers; ++layer) {
    PredictorPass pass(subject.workplace, traits.rows_per_sequence, random);
    const bool has_ahead = traits.layer_ahead && layer + 1 < PredictorPass::kLayers;
    const std::vector<int> chosen = pass.by_row.chunks.host;
    const std::vector<int> counts = pass.by_row.count.host;
    Prediction prediction{layer, false, pass.predicted.view};
    predictor->predict(layer, pass.view, pass.by_row.view, has_ahead ? pass.ahead.view : Selection{}, prediction, *subject.kernels,
                       subject.workplace.stream);
    subject.workplace.synchronize();
    pass.by_row.download();
    pass.predicted.download();
    findings.expect(pass.by_row.chunks.host == chosen && pass.by_row.count.host == counts, "predict() changed what the rows chose.");
    findings.expect(prediction.layer >= 0 && prediction.layer < PredictorPass::kLayers, "A prediction is for a layer that there is not.");
    findings.expect(!prediction.this_step || prediction.layer > layer, "A prediction for this step is for a layer that has run.");
    findings.expect(prediction.chunks.chunks == nullptr || prediction.chunks.chunks == pass.predicted.view.chunks,
                    "predict() put its lists elsewhere than in the memory given.");
    if (prediction.chunks.chunks == nullptr) continue;
    check_lists(pass, findings);
  }
}

/// Twenty passes of four sequences, one of them idle, with sampled tokens that sometimes prove the guess right.
inline void check_observe(const PredictorSubject& subject, Findings& findings, std::uint64_t seed) {
  constexpr std::size_t kPlaces = 4;
  const auto predictor = subject.make();
  const int rows = predictor->traits().rows_per_sequence;
  Random random(seed);
  Mirror<RowMode> mode(subject.workplace, kPlaces, predictor->first_mode());
  Mirror<int> position(subject.workplace, kPlaces, 10);
  Mirror<Token> token(subject.workplace, kPlaces, 1);
  Mirror<Token> guess(subject.workplace, kPlaces, -1);
  Mirror<std::uint8_t> waits(subject.workplace, kPlaces, 0);
  Mirror<Token> sampled(subject.workplace, kPlaces * static_cast<std::size_t>(rows));
  mode.host[2] = RowMode::idle;
  mode.upload();
  const StepState state{static_cast<int>(kPlaces), rows, mode.data(), position.data(), token.data(), guess.data(), waits.data()};
  for (int step = 0; step < 20; ++step) {
    const auto before_mode = mode.host;
    const auto before_position = position.host;
    const auto before_token = token.host;
    for (std::size_t place = 0; place < kPlaces; ++place) {
      for (int row = 0; row < rows; ++row) {
        const bool live = row_is_live(mode.host[place], row);
        const bool right = row == 0 && guess.host[place] >= 0 && random.chance(0.6);
        sampled.host[place * static_cast<std::size_t>(rows) + static_cast<std::size_t>(row)] = !live   ? -1
                                                                                               : right ? guess.host[place]
                                                                                                       : random.below(100);
      }
    }
    sampled.upload();
    predictor->observe(state, {sampled.data()}, 3, *subject.kernels, subject.workplace.stream);
    subject.workplace.synchronize();
    mode.download();
    position.download();
    token.download();
    guess.download();
    waits.download();
    for (std::size_t place = 0; place < kPlaces; ++place) {
      const bool committed = row_is_live(before_mode[place], 0);
      const Token accepted = committed ? sampled.host[place * static_cast<std::size_t>(rows)] : before_token[place];
      findings.expect(mode_is_legal(mode.host[place], rows), "observe() wrote a mode that a pass of so many rows cannot run.");
      findings.expect((before_mode[place] == RowMode::idle) == (mode.host[place] == RowMode::idle),
                      "observe() made a place idle or woke one.");
      findings.expect(position.host[place] == before_position[place] + (committed ? 1 : 0),
                      "observe() did not advance the position of exactly the places whose row 0 ran, by one.");
      findings.expect(token.host[place] == accepted, "observe() did not make row 0's sampled token the true token.");
      findings.expect(mode.host[place] != RowMode::dual || guess.host[place] >= 0, "observe() runs a guess without naming one.");
      findings.expect(before_mode[place] != RowMode::resync || mode.host[place] != RowMode::resync,
                      "observe() lets one resync follow another, so the sequence may never advance.");
      findings.expect(waits.host[place] <= 1, "observe() wrote something else than 0 or 1 into waits.");
    }
  }
}

}  // namespace detail

/// What every RetrievalPredictor honours, as retrieval_predictor.hpp says.
inline std::vector<std::string> check_retrieval_predictor(const PredictorSubject& subject) {
  Findings findings;
  findings.run("traits()", [&] { detail::check_traits(subject, findings); });
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    findings.run("predict()", [&] { detail::check_predict(subject, findings, seed); });
    findings.run("observe()", [&] { detail::check_observe(subject, findings, seed); });
  }
  return findings.take();
}

}  // namespace dualdecoder::testing
