// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The step kernels against HostStepKernels, which host_step_kernels_test.cpp holds to tables written by hand: every mode with every rule,
// and random batches larger than a thread block.
#include "cuda/step_kernels.hpp"

#include <cstdint>
#include <memory>
#include <vector>

#include "dualdecoder/cuda/backend.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/host_step_kernels.hpp"
#include "dualdecoder/testing/store_driver.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "tests/gpu/check.hpp"

namespace dualdecoder::test {
namespace {

using testing::Mirror;
using testing::Random;
using testing::SelectionMirror;

constexpr RowMode kModes[] = {RowMode::idle, RowMode::single, RowMode::dual, RowMode::resync};

/// A batch in device memory, and the same in vectors.
struct Batch {
  Batch(const testing::Workplace& workplace, int places, int rows_per_sequence, Random& random)
      : rows(rows_per_sequence),
        mode(workplace, static_cast<std::size_t>(places)),
        position(workplace, static_cast<std::size_t>(places)),
        token(workplace, static_cast<std::size_t>(places)),
        guess(workplace, static_cast<std::size_t>(places)),
        waits(workplace, static_cast<std::size_t>(places)),
        sampled(workplace, static_cast<std::size_t>(places * rows_per_sequence)) {
    for (std::size_t place = 0; place < mode.host.size(); ++place) {
      mode.host[place] = rows == 2 ? kModes[random.below(4)] : kModes[random.below(2)];
      position.host[place] = random.below(100000);
      token.host[place] = random.below(100000);
      guess.host[place] = random.below(4);
      waits.host[place] = random.chance(0.5) ? 1 : 0;
    }
    for (Token& value : sampled.host) value = random.below(4);  // so that guesses are often right
    upload();
  }

  void upload() {
    mode.upload();
    position.upload();
    token.upload();
    guess.upload();
    waits.upload();
    sampled.upload();
  }
  int places() const { return static_cast<int>(mode.host.size()); }
  StepState on_device(bool with_waits = true) {
    return {places(), rows, mode.data(), position.data(), token.data(), guess.data(), with_waits ? waits.data() : nullptr};
  }
  StepState on_host(bool with_waits = true) {
    return {places(),
            rows,
            mode.host.data(),
            position.host.data(),
            token.host.data(),
            guess.host.data(),
            with_waits ? waits.host.data() : nullptr};
  }
  /// Whether the device holds what the vectors hold.
  bool same() {
    const auto equal = [](auto& mirror) {
      const auto expected = mirror.host;
      mirror.download();
      const bool same = mirror.host == expected;
      mirror.host = expected;
      return same;
    };
    const bool all[] = {equal(mode), equal(position), equal(token), equal(guess), equal(waits), equal(sampled)};
    for (const bool one : all) {
      if (!one) return false;
    }
    return true;
  }

  int rows;
  Mirror<RowMode> mode;
  Mirror<int> position;
  Mirror<Token> token;
  Mirror<Token> guess;
  Mirror<std::uint8_t> waits;
  Mirror<Token> sampled;
};

void test_advance(const testing::Workplace& workplace, StepKernels& kernels) {
  HostStepKernels host;
  Random random(1);
  for (const int rows : {1, 2}) {
    for (const bool dual : {false, true}) {
      if (dual && rows == 1) continue;
      for (const Resync resync : {Resync::never, Resync::always, Resync::automatic}) {
        for (const bool lone : {false, true}) {
          for (const int below : {0, 1, 1000}) {
            for (const bool with_waits : {false, true}) {
              Batch batch(workplace, 300, rows, random);
              const AdvanceRule rule{dual, resync, lone, below, 7};
              for (int step = 0; step < 3; ++step) {
                kernels.advance(batch.on_device(with_waits), {batch.sampled.data()}, rule, workplace.stream);
                host.advance(batch.on_host(with_waits), {batch.sampled.host.data()}, rule, workplace.stream);
              }
              DUALDECODER_EXPECT(batch.same(), "advance differs: rows %d, dual %d, resync %d, lone %d, below %d, waits %d", rows, dual,
                                 static_cast<int>(resync), lone, below, with_waits);
            }
          }
        }
      }
    }
  }
}

void test_lay_out_force_mark(const testing::Workplace& workplace, StepKernels& kernels) {
  HostStepKernels host;
  Random random(2);
  for (const int rows : {1, 2}) {
    for (const int places : {1, 2, 127, 128, 129, 1000}) {
      Batch batch(workplace, places, rows, random);
      const auto rows_in_all = static_cast<std::size_t>(places * rows);
      Mirror<Token> tokens(workplace, rows_in_all + 1, -7);
      Mirror<int> positions(workplace, rows_in_all + 1, -7);
      kernels.lay_out(batch.on_device(), tokens.data(), positions.data(), workplace.stream);
      host.lay_out(batch.on_host(), tokens.host.data(), positions.host.data(), workplace.stream);
      const auto expected_tokens = tokens.host;
      const auto expected_positions = positions.host;
      tokens.download();
      positions.download();
      DUALDECODER_EXPECT(tokens.host == expected_tokens && positions.host == expected_positions, "lay_out differs for %d places", places);

      Mirror<Token> forced(workplace, static_cast<std::size_t>(places));
      for (Token& token : forced.host) token = random.below(10) - 5;
      forced.upload();
      kernels.force(batch.on_device(), forced.data(), batch.sampled.data(), workplace.stream);
      host.force(batch.on_host(), forced.host.data(), batch.sampled.host.data(), workplace.stream);
      DUALDECODER_EXPECT(batch.same(), "force differs for %d places", places);

      // two places in three share one set, every seventh has none
      constexpr std::size_t kWords = 2000;
      const auto sets = static_cast<std::size_t>(places);
      Mirror<std::uint64_t> bits(workplace, sets * kWords);
      Mirror<std::uint64_t*> seen(workplace, sets);
      std::vector<std::uint64_t> expected(bits.host);
      std::vector<std::uint64_t*> expected_seen(sets);
      for (std::size_t place = 0; place < sets; ++place) {
        const std::size_t set = place % 3 == 0 ? place : 0;
        seen.host[place] = place % 7 == 0 ? nullptr : bits.data() + set * kWords;
        expected_seen[place] = place % 7 == 0 ? nullptr : expected.data() + set * kWords;
      }
      seen.upload();
      kernels.mark_seen(batch.on_device(), seen.data(), workplace.stream);
      host.mark_seen(batch.on_host(), expected_seen.data(), workplace.stream);
      bits.download();
      DUALDECODER_EXPECT(bits.host == expected, "mark_seen differs for %d places", places);
    }
  }
}

void test_copy_row(const testing::Workplace& workplace, StepKernels& kernels) {
  HostStepKernels host;
  Random random(3);
  for (const int rows : {1, 2}) {
    for (const int heads : {1, 3, 8}) {
      for (const int capacity : {1, 31, 128, 500}) {
        for (int row = 0; row < 2; ++row) {
          constexpr int kPlaces = 9;
          Batch batch(workplace, kPlaces, rows, random);
          SelectionMirror from(workplace, kPlaces * rows, heads, capacity);
          SelectionMirror to(workplace, kPlaces, heads, capacity + 2);
          for (int& chunk : from.chunks.host) chunk = random.below(1000000);
          for (float& score : from.scores.host) score = random.normal();
          for (int& count : from.count.host) count = random.below(capacity + 1);
          for (int& count : to.count.host) count = -77;
          from.upload();
          to.upload();
          const StepView view{kPlaces, rows, nullptr, batch.position.data(), batch.mode.data(), nullptr};
          const StepView host_view{kPlaces, rows, nullptr, batch.position.host.data(), batch.mode.host.data(), nullptr};
          kernels.copy_row(view, from.view, row, to.view, workplace.stream);
          const auto on_host = [](SelectionMirror& mirror) {
            return Selection{mirror.chunks.host.data(), mirror.scores.host.data(), mirror.count.host.data(), mirror.view.capacity,
                             mirror.view.kv_heads};
          };
          host.copy_row(host_view, on_host(from), row, on_host(to), workplace.stream);
          const auto chunks = to.chunks.host;
          const auto scores = to.scores.host;
          const auto counts = to.count.host;
          to.download();
          DUALDECODER_EXPECT(to.chunks.host == chunks && to.scores.host == scores && to.count.host == counts,
                             "copy_row differs: rows %d, heads %d, capacity %d, row %d", rows, heads, capacity, row);
        }
      }
    }
  }
}

void test_copies_and_refusals(const testing::Workplace& workplace, StepKernels& kernels) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{300} << 10U, std::size_t{5} << 20U}) {
    Mirror<std::uint8_t> target(workplace, bytes + 1);
    std::vector<std::uint8_t> source(bytes + 1);
    for (std::size_t i = 0; i < bytes; ++i) source[i] = static_cast<std::uint8_t>(i * 37 + 1);
    const auto expected = source;
    kernels.upload(target.data(), source.data(), bytes, workplace.stream);
    std::fill(source.begin(), source.end(), std::uint8_t{0});  // the source may be reused on return
    kernels.download(source.data(), target.data(), bytes, workplace.stream);
    DUALDECODER_EXPECT(source == expected, "%zu bytes came back differently", bytes);
  }
  // a pinned source as well
  constexpr std::size_t kBytes = std::size_t{2} << 20U;
  const Buffer pinned(*workplace.host_tier, kBytes, workplace.stream);
  Mirror<std::uint8_t> target(workplace, kBytes);
  std::fill_n(reinterpret_cast<std::uint8_t*>(pinned.data()), kBytes, std::uint8_t{3});
  kernels.upload(target.data(), pinned.data(), kBytes, workplace.stream);
  std::fill_n(reinterpret_cast<std::uint8_t*>(pinned.data()), kBytes, std::uint8_t{4});
  target.download();
  DUALDECODER_EXPECT(target.host == std::vector<std::uint8_t>(kBytes, 3), "a pinned source was read after upload() returned");

  const auto refused = [](auto&& call) {
    try {
      call();
    } catch (const InvalidArgument&) {
      return true;
    }
    return false;
  };
  SelectionMirror narrow(workplace, 1, 1, 4);
  SelectionMirror wide(workplace, 1, 2, 8);
  const StepView view{1, 1, nullptr, nullptr, nullptr, nullptr};
  DUALDECODER_EXPECT(refused([&] { kernels.copy_row(view, narrow.view, 0, wide.view, workplace.stream); }), "other KV heads");
  DUALDECODER_EXPECT(refused([&] { kernels.copy_row(view, wide.view, 0, narrow.view, workplace.stream); }), "less capacity");
  StepState one_row;
  one_row.sequences = 1;
  DUALDECODER_EXPECT(refused([&] { kernels.advance(one_row, {}, {.dual = true}, workplace.stream); }), "a dual rule for one row");
}

}  // namespace
}  // namespace dualdecoder::test

int main() {
  return dualdecoder::test::run_on_device([] {
    const auto backend = dualdecoder::cuda::make_cuda_backend();
    const auto workplace = dualdecoder::testing::workplace_of(*backend);
    dualdecoder::test::test_advance(workplace, backend->kernels());
    dualdecoder::test::test_lay_out_force_mark(workplace, backend->kernels());
    dualdecoder::test::test_copy_row(workplace, backend->kernels());
    dualdecoder::test::test_copies_and_refusals(workplace, backend->kernels());
  });
}
