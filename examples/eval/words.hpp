// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "examples/eval/random.hpp"

namespace dualdecoder::examples {

/// English words: the ordinary ones first, made-up pronounceable ones when those run out. All distinct, in an order of the seed.
std::vector<std::string> distinct_words(Random& random, std::size_t count);

/// "adjective-noun" names, with a second noun when pairs run out; all distinct.
std::vector<std::string> distinct_keys(Random& random, std::size_t count);

/// Made-up names of towns or of people ("Given Family"); all distinct.
std::vector<std::string> distinct_towns(Random& random, std::size_t count);
std::vector<std::string> distinct_people(Random& random, std::size_t count);

/// Sentences of plain made-up prose without figures, each with a blank behind it.
std::vector<std::string> made_up_prose(std::size_t sentences);

const std::string& any_adjective(Random& random);
const std::string& any_noun(Random& random);

}  // namespace dualdecoder::examples
