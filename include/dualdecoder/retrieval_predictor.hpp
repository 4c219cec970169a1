// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/stream.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder {

/// What the next pass runs, in memory of the backend; written by a predictor's observe, read by the next pass. [sequences] each.
struct StepState {
  int sequences = 0;
  int rows_per_sequence = 1;
  RowMode* mode = nullptr;
  int* position = nullptr;        ///< committed tokens
  Token* token = nullptr;         ///< the true token at `position`, not yet committed
  Token* guess = nullptr;         ///< the guess at `position` + 1, or -1
  std::uint8_t* waits = nullptr;  ///< see StepView::waits
};

/// What a pass sampled. Dead rows hold -1.
struct Outcome {
  const Token* sampled = nullptr;  ///< [rows] the token after each row
};

/// What a sequence does after its guess turned out wrong.
enum class Resync : std::uint8_t {
  never,   ///< goes on with a guess made from the wrong token
  always,  ///< one pass of the true token alone as a row-1 row, before it is run as row 0
  /// always while several sequences run; a lone sequence lets its next step wait for what it needs instead, and takes a resync only if
  /// the guess of that step is wrong too
  automatic,
};

/// How a step's outcome becomes the next step's rows.
struct AdvanceRule {
  bool dual = false;  ///< run a guess beside the true token
  Resync resync = Resync::never;
  bool lone_sequence = false;  ///< one sequence is active, for Resync::automatic
  int random_guess_below = 0;  ///< > 0: a missing guess becomes a seeded random token below this number instead of a resync
  std::uint64_t seed = 0;      ///< of that random token
};

/// The few operations that predictors need on memory of the backend, so that one predictor serves every backend.
class StepKernels {
 public:
  StepKernels() = default;
  StepKernels(const StepKernels&) = delete;
  StepKernels& operator=(const StepKernels&) = delete;
  virtual ~StepKernels() = default;

  /// `to`'s list of place s becomes `from`'s list of row `row` of place s; empty where that row is dead.
  virtual void copy_row(const StepView& view, const Selection& from, int row, const Selection& to, StreamRef stream) = 0;
  /// Applies a pass to `state`: the token sampled by row 0 (single, dual) becomes the true token and `position` grows by one, guesses and
  /// modes follow `rule`. A finished sequence is made idle by the session, not here.
  virtual void advance(const StepState& state, const Outcome& outcome, const AdvanceRule& rule, StreamRef stream) = 0;
  /// Lays the next pass out: per row its token and position, -1 and 0 for dead rows. tokens, positions: [rows].
  virtual void lay_out(const StepState& state, Token* tokens, int* positions, StreamRef stream) = 0;
  /// Row 0 of a place where it is live sampled `forced[place]` instead, where that is not negative. forced: [sequences], sampled: [rows].
  virtual void force(const StepState& state, const Token* forced, Token* sampled, StreamRef stream) = 0;
  /// Sets the bit of the true token in `seen[place]` where row 0 is live; see SamplingView::seen. seen: [sequences], may hold null.
  virtual void mark_seen(const StepState& state, std::uint64_t* const* seen, StreamRef stream) = 0;
  /// Copies host memory into memory of the backend, in the order of the stream; the source may be reused on return.
  virtual void upload(void* target, const void* source, std::size_t bytes, StreamRef stream) = 0;
  /// Copies within memory of the backend, in the order of the stream. The two must not overlap.
  virtual void copy(void* target, const void* source, std::size_t bytes, StreamRef stream) = 0;
  /// Copies memory of the backend into host memory and waits for it; for tools that record, never inside an ordinary step.
  virtual void download(void* target, const void* source, std::size_t bytes, StreamRef stream) = 0;
};

/// Fixed properties of a predictor, read once.
struct PredictorTraits {
  const char* name = "";
  int rows_per_sequence = 1;
  Row1Set row1_set = Row1Set::own_resident;
  bool layer_ahead = false;  ///< wants queries of the next layer made from this layer's input
  bool reads_back = false;   ///< a tool that downloads inside a pass, so that passes cannot be recorded
};

/// Which rows to run, and which chunks to bring. Threading: one thread at a time.
class RetrievalPredictor {
 public:
  RetrievalPredictor() = default;
  RetrievalPredictor(const RetrievalPredictor&) = delete;
  RetrievalPredictor& operator=(const RetrievalPredictor&) = delete;
  virtual ~RetrievalPredictor() = default;

  virtual PredictorTraits traits() const noexcept = 0;
  /// After select of `layer`: fills `prediction.chunks` (memory is given) and says which layer they are for. `ahead` holds row 0's chunks
  /// of the next layer where traits ask for it and there is a next layer, else null lists.
  virtual void predict(Layer layer, const StepView& view, const Selection& by_row, const Selection& ahead, Prediction& prediction,
                       StepKernels& kernels, StreamRef stream) = 0;
  /// After sampling: writes what the next pass runs. `active` is the host's count of sequences that are not idle.
  virtual void observe(const StepState& state, const Outcome& outcome, int active, StepKernels& kernels, StreamRef stream) = 0;
  /// How a sequence's first pass runs, for the host that adds it.
  virtual RowMode first_mode() const noexcept = 0;
};

}  // namespace dualdecoder
