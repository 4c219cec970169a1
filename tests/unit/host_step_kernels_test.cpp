// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "dualdecoder/host_step_kernels.hpp"

#include <array>
#include <cstddef>
#include <vector>

#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"

namespace dualdecoder {
namespace {

const StreamRef kStream = static_cast<CUstream_st*>(nullptr);

/// State of a batch in vectors.
struct Batch {
  explicit Batch(std::vector<RowMode> modes, int rows_per_sequence = 2)
      : mode(std::move(modes)),
        rows(rows_per_sequence),
        position(mode.size(), 10),
        token(mode.size(), 100),
        guess(mode.size(), -1),
        waits(mode.size(), 1) {}

  StepState state() {
    return {static_cast<int>(mode.size()), rows, mode.data(), position.data(), token.data(), guess.data(), waits.data()};
  }
  void advance(const std::vector<Token>& sampled, const AdvanceRule& rule) {
    HostStepKernels().advance(state(), {sampled.data()}, rule, kStream);
  }

  std::vector<RowMode> mode;
  int rows;
  std::vector<int> position;
  std::vector<Token> token;
  std::vector<Token> guess;
  std::vector<std::uint8_t> waits;
};

/// What one place looks like after a pass.
void expect_place(const Batch& batch, std::size_t place, RowMode mode, Token token, int position, Token guess, int waits) {
  INFO("place " << place);
  CHECK(batch.mode[place] == mode);
  CHECK(batch.token[place] == token);
  CHECK(batch.position[place] == position);
  CHECK(batch.guess[place] == guess);
  CHECK(batch.waits[place] == waits);
}

}  // namespace

TEST_CASE("advance without a dual rule takes row 0's token", "[step_kernels]") {
  Batch batch({RowMode::single, RowMode::idle, RowMode::dual, RowMode::resync});
  batch.guess[2] = 5;
  batch.advance({7, -1, -1, -1, 8, 9, -1, 6}, {});
  expect_place(batch, 0, RowMode::single, 7, 11, -1, 0);
  expect_place(batch, 1, RowMode::idle, 100, 10, -1, 1);
  expect_place(batch, 2, RowMode::single, 8, 11, -1, 0);
  expect_place(batch, 3, RowMode::single, 100, 10, -1, 0);  // the true token was not run as row 0, so it is still to be committed

  Batch narrow({RowMode::single}, 1);
  narrow.advance({7}, {});
  expect_place(narrow, 0, RowMode::single, 7, 11, -1, 0);
}

TEST_CASE("advance resynchronises a sequence that has no guess", "[step_kernels]") {
  Batch batch({RowMode::single});
  batch.advance({7, -1}, {.dual = true});
  expect_place(batch, 0, RowMode::resync, 7, 11, -1, 0);
  batch.advance({-1, 8}, {.dual = true});
  expect_place(batch, 0, RowMode::dual, 7, 11, 8, 0);
}

TEST_CASE("advance draws a seeded guess where the rule asks for it", "[step_kernels]") {
  const AdvanceRule rule{.dual = true, .random_guess_below = 50, .seed = 3};
  Batch one({RowMode::single, RowMode::single});
  Batch other({RowMode::single, RowMode::single});
  one.advance({7, -1, 7, -1}, rule);
  other.advance({7, -1, 7, -1}, rule);
  CHECK(one.guess == other.guess);
  CHECK(one.guess[0] != one.guess[1]);
  for (std::size_t place = 0; place < 2; ++place) {
    CHECK(one.mode[place] == RowMode::dual);
    CHECK(one.guess[place] >= 0);
    CHECK(one.guess[place] < 50);
  }
}

TEST_CASE("advance after a right guess goes on with the next one", "[step_kernels]") {
  for (const Resync resync : {Resync::never, Resync::always, Resync::automatic}) {
    for (const bool lone : {false, true}) {
      Batch batch({RowMode::dual});
      batch.guess[0] = 7;
      batch.advance({7, 8}, {.dual = true, .resync = resync, .lone_sequence = lone});
      expect_place(batch, 0, RowMode::dual, 7, 11, 8, 0);
    }
  }
}

TEST_CASE("advance after a wrong guess does what resync says", "[step_kernels]") {
  const auto after = [](Resync resync, bool lone, std::uint8_t waited = 0) {
    Batch batch({RowMode::dual});
    batch.guess[0] = 6;
    batch.waits[0] = waited;
    batch.advance({7, 8}, {.dual = true, .resync = resync, .lone_sequence = lone});
    return batch;
  };
  expect_place(after(Resync::never, true), 0, RowMode::dual, 7, 11, 8, 0);
  expect_place(after(Resync::always, true), 0, RowMode::resync, 7, 11, -1, 0);
  expect_place(after(Resync::automatic, false), 0, RowMode::resync, 7, 11, -1, 0);
  expect_place(after(Resync::automatic, true), 0, RowMode::dual, 7, 11, 8, 1);
  // a lone sequence waits once, and takes a resync when the guess of that step is wrong too
  expect_place(after(Resync::automatic, true, 1), 0, RowMode::resync, 7, 11, -1, 0);
}

TEST_CASE("advance refuses a dual rule on one row", "[step_kernels]") {
  Batch narrow({RowMode::single}, 1);
  test::expect_error<InvalidArgument>([&] { narrow.advance({7}, {.dual = true}); }, {"rows_per_sequence = 1"});
}

TEST_CASE("lay_out gives every live row its token and position", "[step_kernels]") {
  Batch batch({RowMode::single, RowMode::idle, RowMode::dual, RowMode::resync});
  batch.guess[2] = 5;
  std::array<Token, 8> tokens{};
  std::array<int, 8> positions{};
  HostStepKernels().lay_out(batch.state(), tokens.data(), positions.data(), kStream);
  CHECK(tokens == std::array<Token, 8>{100, -1, -1, -1, 100, 5, -1, 100});
  CHECK(positions == std::array<int, 8>{10, 0, 0, 0, 10, 11, 0, 10});
}

TEST_CASE("copy_row copies live rows' lists and empties the others", "[step_kernels]") {
  constexpr int kHeads = 2;
  constexpr int kCapacity = 3;
  const std::array modes{RowMode::dual, RowMode::single, RowMode::resync, RowMode::idle};
  std::vector<int> chunks(8 * kHeads * kCapacity);
  std::vector<float> scores(chunks.size());
  std::vector<int> counts(8 * kHeads);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    chunks[i] = static_cast<int>(i);
    scores[i] = static_cast<float>(i) / 2.0F;
  }
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = static_cast<int>(i) % 3 + 1;
  const Selection from{chunks.data(), scores.data(), counts.data(), kCapacity, kHeads};
  const StepView view{.sequences = 4, .rows_per_sequence = 2, .mode = modes.data()};

  std::vector<int> to_chunks(4 * kHeads * 4);
  std::vector<float> to_scores(to_chunks.size());
  std::vector<int> to_counts(4 * kHeads, 99);
  const Selection to{to_chunks.data(), to_scores.data(), to_counts.data(), 4, kHeads};
  for (const int row : {0, 1}) {
    HostStepKernels().copy_row(view, from, row, to, kStream);
    for (int place = 0; place < 4; ++place) {
      for (int head = 0; head < kHeads; ++head) {
        INFO("row " << row << ", place " << place << ", head " << head);
        const int source = place * 2 + row;
        const bool live = row_is_live(modes[static_cast<std::size_t>(place)], row);
        REQUIRE(to.count_of(place, head) == (live ? from.count_of(source, head) : 0));
        for (int i = 0; i < to.count_of(place, head); ++i) {
          CHECK(to.chunks_of(place, head)[i] == from.chunks_of(source, head)[i]);
          CHECK(to.scores_of(place, head)[i] == from.scores_of(source, head)[i]);
        }
      }
    }
  }
  const Selection small{to_chunks.data(), nullptr, to_counts.data(), 2, kHeads};
  test::expect_error<InvalidArgument>([&] { HostStepKernels().copy_row(view, from, 0, small, kStream); }, {"to.capacity = 2"});
}

TEST_CASE("upload and download copy bytes", "[step_kernels]") {
  HostStepKernels kernels;
  const std::array source{1, 2, 3};
  std::array<int, 3> there{};
  std::array<int, 3> back{};
  kernels.upload(there.data(), source.data(), sizeof source, kStream);
  kernels.download(back.data(), there.data(), sizeof there, kStream);
  kernels.upload(nullptr, nullptr, 0, kStream);
  CHECK(back == source);
}

}  // namespace dualdecoder
