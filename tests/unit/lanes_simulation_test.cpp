// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
// Thousands of seeded interleavings of loads, evictions, adds, removes, truncates and faults under a simulated clock (the method of
// FoundationDB, Zhou et al., SIGMOD 2021, section 4): a small store whose chunks say what they are meets a link that does whatever a link
// may do. Failures name their seed, and a seed replays.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/testing/workplace.hpp"
#include "tests/catch.hpp"
#include "tests/unit/simulated_scheduler.hpp"

namespace dualdecoder::test {
namespace {

const StreamRef kStream(reinterpret_cast<CUstream_st*>(std::uintptr_t{64}));

/// Rules of a store that it breaks, to show that the simulation notices.
enum class Mistake {
  none,
  reads_without_waiting,    ///< attends without waiting for last step's prefetch
  evicts_pending_loads,     ///< gives a slot away while a load into it is under way
  loads_before_write_back,  ///< offers a new chunk before its write-back arrived
  closes_under_loads,       ///< reuses host memory while loads from it are under way
  trusts_failed_loads,      ///< keeps a chunk in its table whose load failed
  forgets_to_truncate,      ///< keeps chunks in slots that were rewound and then written anew
};

/// What a chunk is; its bytes follow from it.
struct Tag {
  std::uint64_t sequence = 0;
  int layer = 0;
  int head = 0;
  int chunk = 0;
  int version = 0;  // of the sequence, grows with every truncate

  std::uint64_t hash() const {
    testing::Random mixer(sequence * 1'000'003U + static_cast<std::uint64_t>(version));
    return mixer.next() ^ testing::Random((static_cast<std::uint64_t>(layer) << 40) ^ (static_cast<std::uint64_t>(head) << 32) ^
                                          static_cast<std::uint64_t>(chunk))
                              .next();
  }
};

void write_chunk(std::byte* memory, std::size_t bytes, const Tag& tag) {
  testing::Random stream(tag.hash());
  for (std::size_t i = 0; i < bytes; i += 8) {
    const std::uint64_t word = stream.next();
    std::memcpy(memory + i, &word, std::min<std::size_t>(8, bytes - i));
  }
}

bool is_chunk(const std::byte* memory, std::size_t bytes, const Tag& tag) {
  std::vector<std::byte> expected(bytes);
  write_chunk(expected.data(), bytes, tag);
  return std::equal(expected.begin(), expected.end(), memory);
}

struct Shape {
  int layers = 2;
  int heads = 1;
  int places = 2;
  int slots = 5;   // of one place, layer and head
  int needed = 2;  // chunks of one list
  int max_chunks = 24;
  std::size_t chunk_bytes = 72;
};

/// A store in miniature: slots with LRU, needed and predicted sets, write-back of completed chunks; no numbers, only identities.
class MiniStore {
 public:
  MiniStore(const Shape& shape, TransferScheduler& scheduler, std::uint64_t seed, Mistake mistake)
      : shape_(shape),
        scheduler_(scheduler),
        random_(seed ^ 0xabcdefU),
        mistake_(mistake),
        host_(cells(shape.max_chunks), std::byte{0xdd}),
        device_(cells(shape.slots), std::byte{0xdd}),
        staging_(cells(1), std::byte{0xdd}),
        slots_(static_cast<std::size_t>(shape.layers * shape.places * shape.heads * shape.slots)),
        predicted_(slots_.size() / static_cast<std::size_t>(shape.slots)),
        places_(static_cast<std::size_t>(shape.places)) {}

  bool is_open(int place) const { return places_[index(place)].open; }

  void open(int place, std::uint64_t sequence, int chunks) {
    Place& p = places_[index(place)];
    p = {true, sequence, chunks, 0, {}};
    for (int chunk = 0; chunk < chunks; ++chunk) p.versions.push_back(0);
    for_each_list([&](Layer layer, int at, int head) {
      if (at != place) return;
      for (int chunk = 0; chunk < chunks; ++chunk)
        write_chunk(host(layer, place, head, chunk), shape_.chunk_bytes, tag(layer, place, head, chunk));
      predicted_[list(layer, place, head)].clear();
    });
  }

  void close(int place) {
    if (mistake_ != Mistake::closes_under_loads) settle();
    forget(place, 0);
    places_[index(place)].open = false;
  }

  void truncate(int place, int chunks) {
    settle();
    Place& p = places_[index(place)];
    p.chunks = std::min(p.chunks, chunks);
    p.versions.resize(static_cast<std::size_t>(p.chunks));
    ++p.rewinds;
    if (mistake_ != Mistake::forgets_to_truncate) forget(place, p.chunks);
  }

  void step() {
    for (Layer layer = 0; layer < shape_.layers; ++layer) {
      choose_needed();
      std::vector<TransferItem> urgent;
      resolve_needed(layer, urgent);
      submit(Lane::urgent, layer, urgent);
      while (!waited(Lane::urgent, layer)) {
        if (mistake_ == Mistake::trusts_failed_loads) break;
        submit(Lane::urgent, layer, urgent);
      }
      if (mistake_ != Mistake::reads_without_waiting && !settle_prefetch(layer)) {
        resolve_needed(layer, urgent);  // what was lost is loaded again
        while (!urgent.empty() && (submit(Lane::urgent, layer, urgent), !waited(Lane::urgent, layer))) {
        }
      }
      read(layer);
      prefetch(layer);
    }
    commit();
  }

  /// A chunk that is on its way to the host when its place changes is dropped with the change.
  void drop_completed(int place) {
    settle_write_back();
    std::erase_if(completed_, [&](const auto& of) { return of.first == place; });
  }

  const std::vector<std::string>& violations() const { return violations_; }
  std::uint64_t reads() const { return reads_; }

 private:
  struct Slot {
    int chunk = -1;
    std::uint64_t used = 0;
    bool pending = false;  // a prefetch into it may be under way
  };
  struct Place {
    bool open = false;
    std::uint64_t sequence = 0;
    int chunks = 0;
    int rewinds = 0;
    std::vector<int> versions;  // [chunks] of each chunk
  };

  static std::size_t index(int i) { return static_cast<std::size_t>(i); }
  std::size_t cells(int per_list) const { return index(shape_.layers * shape_.places * shape_.heads * per_list) * shape_.chunk_bytes; }
  std::size_t list(Layer layer, int place, int head) const { return index((layer * shape_.places + place) * shape_.heads + head); }
  std::byte* host(Layer layer, int place, int head, int chunk) {
    return host_.data() + (list(layer, place, head) * index(shape_.max_chunks) + index(chunk)) * shape_.chunk_bytes;
  }
  std::byte* device(Layer layer, int place, int head, int slot) {
    return device_.data() + (list(layer, place, head) * index(shape_.slots) + index(slot)) * shape_.chunk_bytes;
  }
  std::byte* staging(Layer layer, int place, int head) { return staging_.data() + list(layer, place, head) * shape_.chunk_bytes; }
  Slot* slots(Layer layer, int place, int head) { return slots_.data() + list(layer, place, head) * index(shape_.slots); }
  Tag tag(Layer layer, int place, int head, int chunk) const {
    const Place& p = places_[index(place)];
    return {p.sequence, layer, head, chunk, p.versions[index(chunk)]};
  }

  template <class Action>
  void for_each_list(Action&& action) {
    for (Layer layer = 0; layer < shape_.layers; ++layer) {
      for (int place = 0; place < shape_.places; ++place) {
        if (!places_[index(place)].open) continue;
        for (int head = 0; head < shape_.heads; ++head) action(layer, place, head);
      }
    }
  }

  void submit(Lane lane, Layer layer, std::vector<TransferItem>& items) {
    int count = static_cast<int>(items.size());
    scheduler_.submit(lane, layer, {items.data(), &count, count}, kStream);
  }
  bool waited(Lane lane, Layer layer) {
    try {
      scheduler_.wait(lane, layer, kStream);
      return true;
    } catch (const SimulatedFault&) {
      return false;
    }
  }

  // Last step's prefetch of the layer; false if something of it was lost, and then all of it is forgotten.
  bool settle_prefetch(Layer layer) {
    const bool arrived = waited(Lane::prefetch, layer) || mistake_ == Mistake::trusts_failed_loads;
    for_each_list([&](Layer at, int place, int head) {
      if (at != layer) return;
      for (int slot = 0; slot < shape_.slots; ++slot) {
        Slot& s = slots(layer, place, head)[slot];
        if (s.pending && !arrived) s.chunk = -1;
        s.pending = false;
      }
    });
    return arrived;
  }

  void settle() {
    for (Layer layer = 0; layer < shape_.layers; ++layer) settle_prefetch(layer);
    settle_write_back();
  }

  void settle_write_back() {
    while (!waited(Lane::write_back, 0)) submit(Lane::write_back, 0, written_back_);
    written_back_.clear();
  }

  void forget(int place, int from_chunk) {
    for_each_list([&](Layer layer, int at, int head) {
      if (at != place) return;
      for (int slot = 0; slot < shape_.slots; ++slot) {
        Slot& s = slots(layer, place, head)[slot];
        if (s.chunk >= from_chunk) s = {};
      }
    });
  }

  // The lists of a step wander: most of the predicted, something new.
  void choose_needed() {
    needed_.assign(predicted_.size(), {});
    for_each_list([&](Layer layer, int place, int head) {
      const std::size_t l = list(layer, place, head);
      const int chunks = places_[index(place)].chunks;
      for (int chunk : predicted_[l]) {
        if (chunk < chunks && random_.chance(0.8)) needed_[l].push_back(chunk);
      }
      while (static_cast<int>(needed_[l].size()) < std::min(shape_.needed, chunks)) add(needed_[l], random_.below(chunks));
    });
  }
  static void add(std::vector<int>& chunks, int chunk) {
    if (std::find(chunks.begin(), chunks.end(), chunk) == chunks.end()) chunks.push_back(chunk);
  }
  static bool holds(const std::vector<int>& chunks, int chunk) { return std::find(chunks.begin(), chunks.end(), chunk) != chunks.end(); }

  int slot_of(Layer layer, int place, int head, int chunk) {
    for (int slot = 0; slot < shape_.slots; ++slot) {
      if (slots(layer, place, head)[slot].chunk == chunk) return slot;
    }
    return -1;
  }

  // The least recently used slot outside the kept sets into which no load is under way.
  int victim(Layer layer, int place, int head, const std::vector<int>& keep, const std::vector<int>& keep_too) {
    int best = -1;
    for (int slot = 0; slot < shape_.slots; ++slot) {
      const Slot& s = slots(layer, place, head)[slot];
      if (s.chunk >= 0 && (holds(keep, s.chunk) || holds(keep_too, s.chunk))) continue;
      if (s.pending && mistake_ != Mistake::evicts_pending_loads) continue;
      if (s.pending) return slot;  // the mistake at its worst
      if (best < 0 || s.used < slots(layer, place, head)[best].used) best = slot;
    }
    return best;
  }

  void resolve_needed(Layer layer, std::vector<TransferItem>& urgent) {
    urgent.clear();
    for_each_list([&](Layer at, int place, int head) {
      if (at != layer) return;
      for (int chunk : needed_[list(layer, place, head)]) {
        int slot = slot_of(layer, place, head, chunk);
        if (slot < 0) {
          slot = victim(layer, place, head, needed_[list(layer, place, head)], {});
          if (slot < 0) {
            settle_prefetch(layer);
            slot = slot_of(layer, place, head, chunk);
            if (slot < 0) slot = victim(layer, place, head, needed_[list(layer, place, head)], {});
          }
          Slot& s = slots(layer, place, head)[slot];
          s.chunk = chunk;
          urgent.push_back(load(layer, place, head, chunk, slot));
        }
        slots(layer, place, head)[slot].used = ++clock_;
      }
    });
  }

  TransferItem load(Layer layer, int place, int head, int chunk, int slot) {
    return {host(layer, place, head, chunk), device(layer, place, head, slot), static_cast<std::uint32_t>(shape_.chunk_bytes), 0.0F};
  }

  void read(Layer layer) {
    for_each_list([&](Layer at, int place, int head) {
      if (at != layer) return;
      for (int chunk : needed_[list(layer, place, head)]) {
        const int slot = slot_of(layer, place, head, chunk);
        ++reads_;
        if (slot < 0) {
          violations_.push_back("a needed chunk is in no slot");
        } else if (!is_chunk(device(layer, place, head, slot), shape_.chunk_bytes, tag(layer, place, head, chunk))) {
          violations_.push_back("layer " + std::to_string(layer) + ", place " + std::to_string(place) + ", head " + std::to_string(head) +
                                ": slot " + std::to_string(slot) + " does not hold chunk " + std::to_string(chunk) + " as it is now");
        }
      }
    });
  }

  void prefetch(Layer layer) {
    std::vector<TransferItem> items;
    for_each_list([&](Layer at, int place, int head) {
      if (at != layer) return;
      const std::size_t l = list(layer, place, head);
      std::vector<int>& predicted = predicted_[l];
      predicted.clear();
      const int chunks = places_[index(place)].chunks;
      for (int chunk : needed_[l]) {
        if (random_.chance(0.5)) predicted.push_back(chunk);
      }
      while (static_cast<int>(predicted.size()) < std::min(shape_.needed, chunks)) add(predicted, random_.below(chunks));
      for (int chunk : predicted) {
        if (slot_of(layer, place, head, chunk) >= 0) continue;
        const int slot = victim(layer, place, head, needed_[l], predicted);
        if (slot < 0) continue;  // the prediction is a hint
        Slot& s = slots(layer, place, head)[slot];
        s.chunk = chunk;
        s.used = ++clock_;
        s.pending = true;
        items.push_back(load(layer, place, head, chunk, slot));
      }
    });
    submit(Lane::prefetch, layer, items);
  }

  // Now and then a place completes a chunk, which goes to the host and may be chosen from the next commit on.
  void commit() {
    if (mistake_ != Mistake::loads_before_write_back) settle_write_back();
    offer_completed();
    for (int place = 0; place < shape_.places; ++place) {
      const Place& p = places_[index(place)];
      if (!p.open || p.chunks >= shape_.max_chunks || !random_.chance(0.5)) continue;
      for (Layer layer = 0; layer < shape_.layers; ++layer) {
        for (int head = 0; head < shape_.heads; ++head) {
          write_chunk(staging(layer, place, head), shape_.chunk_bytes, {p.sequence, layer, head, p.chunks, p.rewinds});
          written_back_.push_back(
              {staging(layer, place, head), host(layer, place, head, p.chunks), static_cast<std::uint32_t>(shape_.chunk_bytes), 0.0F});
        }
      }
      completed_.push_back({place, p.rewinds});
    }
    submit(Lane::write_back, 0, written_back_);
    if (mistake_ == Mistake::loads_before_write_back) offer_completed();
  }

  void offer_completed() {
    for (const auto& [place, version] : completed_) {
      places_[index(place)].versions.push_back(version);
      ++places_[index(place)].chunks;
    }
    completed_.clear();
  }

  Shape shape_;
  TransferScheduler& scheduler_;
  testing::Random random_;
  Mistake mistake_;
  std::vector<std::byte> host_;
  std::vector<std::byte> device_;
  std::vector<std::byte> staging_;
  std::vector<Slot> slots_;
  std::vector<std::vector<int>> predicted_;
  std::vector<std::vector<int>> needed_;  // [lists] of the layer that runs
  std::vector<Place> places_;
  std::vector<std::pair<int, int>> completed_;  // place and version of chunks being written back
  std::vector<TransferItem> written_back_;
  std::vector<std::string> violations_;
  std::uint64_t clock_ = 0;
  std::uint64_t reads_ = 0;
};

struct Run {
  std::vector<std::string> violations;
  std::uint64_t reads = 0;
  std::uint64_t lost_items = 0;
  std::array<LaneStatistics, kLaneCount> lanes;
};

/// One life of a store, all of it decided by the seed.
Run simulate(std::uint64_t seed, Mistake mistake) {
  testing::Random random(seed);
  Shape shape;
  shape.layers = 1 + random.below(4);
  shape.heads = 1 + random.below(2);
  shape.places = 1 + random.below(3);
  shape.needed = 1 + random.below(4);
  shape.slots = shape.needed + 1 + random.below(4);
  shape.chunk_bytes = static_cast<std::size_t>(24 + 8 * random.below(20) + random.below(8));

  SchedulerOptions options;
  options.layers = shape.layers;
  options.max_items_per_submit = shape.places * shape.heads * shape.needed;
  options.bytes_per_second = random.chance(0.3) ? 0.0 : 1e6 * static_cast<double>(1 + random.below(1000));
  options.latency = std::chrono::microseconds(random.below(30));
  options.single_lane = random.chance(0.2);
  SimulationOptions simulation;
  simulation.seed = seed;
  simulation.fault_probability = random.chance(0.5) || mistake == Mistake::trusts_failed_loads ? 0.02 : 0.0;
  simulation.compute = std::chrono::microseconds(random.chance(0.3) ? 0 : 1 << random.below(10));
  simulation.extra_delay = std::chrono::microseconds(random.chance(0.3) ? 0 : 1 << random.below(12));

  SimulatedScheduler scheduler(options, simulation);
  MiniStore store(shape, scheduler, seed, mistake);
  std::uint64_t sequence = 0;
  for (int round = 0; round < 40; ++round) {
    const int place = random.below(shape.places);
    if (!store.is_open(place)) {
      if (random.chance(0.8)) store.open(place, ++sequence, 1 + random.below(shape.max_chunks));
    } else if (random.chance(0.1)) {
      store.drop_completed(place);
      store.close(place);
      if (random.chance(0.5)) store.open(place, ++sequence, 1 + random.below(shape.max_chunks));
    } else if (random.chance(0.1)) {
      store.drop_completed(place);
      store.truncate(place, 1 + random.below(shape.max_chunks));
    }
    store.step();
  }
  Run run{store.violations(), store.reads(), scheduler.lost_items(), {}};
  for (const Lane lane : {Lane::urgent, Lane::prefetch, Lane::write_back})
    run.lanes[static_cast<std::size_t>(lane)] = scheduler.statistics(lane);
  return run;
}

}  // namespace

TEST_CASE("no stale or torn chunk is read under any interleaving of the lanes", "[lanes][simulation]") {
  std::uint64_t reads = 0;
  std::uint64_t lost = 0;
  std::uint64_t moved = 0;
  for (std::uint64_t seed = 1; seed <= 4000; ++seed) {
    const Run run = simulate(seed, Mistake::none);
    if (!run.violations.empty()) {
      INFO("seed " << seed << ": " << run.violations.front());
      REQUIRE(run.violations.empty());
    }
    reads += run.reads;
    lost += run.lost_items;
    moved += run.lanes[static_cast<std::size_t>(Lane::prefetch)].moved_items;
  }
  CHECK(reads > 1'000'000);
  CHECK(moved > 100'000);
  CHECK(lost > 1'000);
}

TEST_CASE("the simulation notices each mistake that a store can make", "[lanes][simulation]") {
  const std::array<std::pair<Mistake, const char*>, 6> mistakes = {{
      {Mistake::reads_without_waiting, "reads without waiting for the prefetch"},
      {Mistake::evicts_pending_loads, "evicts a slot into which a load is under way"},
      {Mistake::loads_before_write_back, "offers a chunk before its write-back arrived"},
      {Mistake::closes_under_loads, "reuses memory under loads"},
      {Mistake::trusts_failed_loads, "trusts a load that failed"},
      {Mistake::forgets_to_truncate, "keeps rewound chunks"},
  }};
  for (const auto& [mistake, what] : mistakes) {
    INFO(what);
    int found = 0;
    for (std::uint64_t seed = 1; seed <= 200; ++seed) found += simulate(seed, mistake).violations.empty() ? 0 : 1;
    CHECK(found > 0);
  }
}

TEST_CASE("a seed replays", "[lanes][simulation]") {
  for (std::uint64_t seed : {3U, 17U, 1234U}) {
    const Run first = simulate(seed, Mistake::reads_without_waiting);
    const Run second = simulate(seed, Mistake::reads_without_waiting);
    CHECK(first.violations == second.violations);
    CHECK(first.reads == second.reads);
    for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
      CHECK(first.lanes[lane].moved_bytes == second.lanes[lane].moved_bytes);
      CHECK(first.lanes[lane].busy == second.lanes[lane].busy);
      CHECK(first.lanes[lane].stalled == second.lanes[lane].stalled);
    }
  }
}

}  // namespace dualdecoder::test
