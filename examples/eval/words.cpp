// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/words.hpp"

#include <fmt/core.h>

#include <array>
#include <functional>
#include <set>
#include <string_view>

namespace dualdecoder::examples {
namespace {

const std::vector<std::string> kAdjectives = {
    "able",    "amber",  "ancient", "bitter", "blue",   "bold",   "brave",   "brief",  "bright", "broad",  "calm",    "careful",
    "cheap",   "clean",  "clever",  "cold",   "common", "crisp",  "curious", "damp",   "dark",   "deep",   "distant", "dry",
    "dusty",   "eager",  "early",   "empty",  "famous", "fierce", "flat",    "fresh",  "gentle", "golden", "grand",   "green",
    "grey",    "heavy",  "hidden",  "hollow", "honest", "humble", "idle",    "ivory",  "joyful", "keen",   "late",    "lively",
    "local",   "lonely", "loud",    "lucky",  "mellow", "mild",   "modern",  "narrow", "neat",   "noble",  "odd",     "patient",
    "plain",   "polite", "proud",   "quiet",  "rapid",  "rare",   "ripe",    "robust", "rough",  "round",  "royal",   "rural",
    "scarlet", "sharp",  "shy",     "silent", "silver", "slow",   "small",   "solid",  "steady", "steep",  "strange", "sudden",
    "tall",    "tender", "tidy",    "tiny",   "vast",   "violet", "warm",    "weary",  "wide",   "wild",   "wise",    "young"};

const std::vector<std::string> kNouns = {
    "acorn",    "anchor",  "apple",  "arrow",   "basket",   "bell",   "bench",   "bottle",   "branch",  "bridge",  "bucket",  "button",
    "cabin",    "candle",  "canyon", "carpet",  "castle",   "cellar", "chapel",  "chart",    "cherry",  "circle",  "clock",   "cloud",
    "coast",    "copper",  "corner", "cottage", "cotton",   "cradle", "desert",  "diary",    "drawer",  "eagle",   "engine",  "falcon",
    "feather",  "fence",   "ferry",  "field",   "flame",    "flute",  "forest",  "fountain", "garden",  "garlic",  "gate",    "glacier",
    "glove",    "guitar",  "hammer", "harbour", "harvest",  "hill",   "honey",   "horse",    "island",  "jacket",  "journal", "kettle",
    "kitchen",  "ladder",  "lake",   "lantern", "leather",  "lemon",  "letter",  "library",  "lion",    "market",  "meadow",  "mirror",
    "mountain", "museum",  "needle", "nephew",  "notebook", "oak",    "ocean",   "olive",    "orchard", "oven",    "paddle",  "palace",
    "parcel",   "pebble",  "pencil", "pepper",  "piano",    "pillow", "planet",  "pocket",   "pond",    "quarry",  "rabbit",  "railway",
    "ribbon",   "river",   "saddle", "salmon",  "school",   "shadow", "shelf",   "shore",    "signal",  "sparrow", "spoon",   "station",
    "stone",    "street",  "summer", "table",   "temple",   "thread", "ticket",  "tower",    "trumpet", "tunnel",  "turtle",  "valley",
    "velvet",   "village", "violin", "wagon",   "wallet",   "walnut", "whistle", "window",   "winter",  "wolf"};

const std::vector<std::string> kVerbs = {"faces",    "guards",  "follows", "hides", "carries", "crosses",   "frames",
                                         "shelters", "reaches", "borders", "warms", "colours", "surrounds", "recalls"};

constexpr std::array kOnsets = {"b", "br", "c", "d", "dr", "f",  "g", "gr", "h", "k", "l",
                                "m", "n",  "p", "r", "s",  "st", "t", "tr", "v", "w"};
constexpr std::array kNuclei = {"a", "e", "i", "o", "u", "ai", "ea", "oo"};
constexpr std::array kCodas = {"", "l", "m", "n", "r", "s", "t", "nd", "rk", "st"};
constexpr std::array kTownEndings = {"vik", "mora", "ton", "field", "holm", "bury", "dal", "stead", "ford", "wick"};
constexpr std::array kGiven = {"Ada",   "Anton", "Bruno", "Clara", "Dora", "Edgar", "Elin", "Felix", "Greta", "Hugo",  "Ida",    "Ivan",
                               "Jonas", "Karla", "Leon",  "Marta", "Nils", "Olga",  "Paul", "Rosa",  "Simon", "Tilda", "Viktor", "Wanda"};

std::string syllable(Random& random) { return std::string(random.pick(kOnsets)) + random.pick(kNuclei) + random.pick(kCodas); }

std::string capitalized(std::string word) {
  word.front() = static_cast<char>(word.front() - 'a' + 'A');
  return word;
}

std::vector<std::string> distinct(std::size_t count, const std::function<std::string()>& next) {
  std::vector<std::string> out;
  std::set<std::string> seen;
  while (out.size() < count) {
    std::string word = next();
    if (seen.insert(word).second) out.push_back(std::move(word));
  }
  return out;
}

}  // namespace

std::vector<std::string> distinct_words(Random& random, std::size_t count) {
  std::vector<std::string> words = kNouns;
  words.insert(words.end(), kAdjectives.begin(), kAdjectives.end());
  if (words.size() < count) {
    const auto made_up = distinct(count - words.size(), [&] { return syllable(random) + syllable(random) + syllable(random); });
    words.insert(words.end(), made_up.begin(), made_up.end());
  }
  random.shuffle(words);
  words.resize(count);
  return words;
}

std::vector<std::string> distinct_keys(Random& random, std::size_t count) {
  const bool long_names = count > kAdjectives.size() * kNouns.size() / 2;
  return distinct(count, [&] {
    std::string key = random.pick(kAdjectives) + "-" + random.pick(kNouns);
    return long_names ? key + "-" + random.pick(kNouns) : key;
  });
}

std::vector<std::string> distinct_towns(Random& random, std::size_t count) {
  return distinct(
      count, [&] { return capitalized(syllable(random) + (random.below(2) == 0 ? syllable(random) : "") + random.pick(kTownEndings)); });
}

std::vector<std::string> distinct_people(Random& random, std::size_t count) {
  return distinct(count, [&] { return std::string(random.pick(kGiven)) + " " + capitalized(syllable(random) + syllable(random)); });
}

std::vector<std::string> made_up_prose(std::size_t sentences) {
  Random random(0, "prose");
  return distinct(sentences, [&] {
    const auto thing = [&] { return random.pick(kAdjectives) + " " + random.pick(kNouns); };
    switch (random.below(4)) {
      case 0: return fmt::format("The {} {} the {}. ", thing(), random.pick(kVerbs), thing());
      case 1:
        return fmt::format("Behind the {}, the {} {} the {}. ", random.pick(kNouns), thing(), random.pick(kVerbs), random.pick(kNouns));
      case 2: return fmt::format("When the {} is {}, nobody thinks of the {}. ", random.pick(kNouns), random.pick(kAdjectives), thing());
      default:
        return fmt::format("People say that the {} of the {} is as {} as the {}. ", random.pick(kNouns), random.pick(kNouns),
                           random.pick(kAdjectives), random.pick(kNouns));
    }
  });
}

const std::string& any_adjective(Random& random) { return random.pick(kAdjectives); }
const std::string& any_noun(Random& random) { return random.pick(kNouns); }

}  // namespace dualdecoder::examples
