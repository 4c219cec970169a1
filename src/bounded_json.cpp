// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/bounded_json.hpp"

#include <set>
#include <vector>

#include "dualdecoder/error.hpp"
#include "src/in_quotes.hpp"

namespace dualdecoder::detail {

nlohmann::json parse_bounded_json(std::span<const std::byte> text, const std::string& what, int deepest) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int depth, Event event, nlohmann::json& parsed) {
    if ((event == Event::object_start || event == Event::array_start) && depth >= deepest) {
      throw FormatError(what + ": JSON nested deeper than " + std::to_string(deepest) + " levels");
    }
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second) {
      throw FormatError(what + ": key " + in_quotes(parsed.get<std::string>()) + " appears twice");
    }
    return true;
  };
  if (text.size() > kLongestJson) {
    throw FormatError(what + ": " + std::to_string(text.size()) + " bytes of JSON: must be at most " + std::to_string(kLongestJson));
  }
  const char* begin = reinterpret_cast<const char*>(text.data());
  nlohmann::json root;
  try {
    root = nlohmann::json::parse(begin, begin + text.size(), check);
  } catch (const nlohmann::json::parse_error& error) {
    throw FormatError(what + ": not valid JSON at byte " + std::to_string(error.byte));
  } catch (const nlohmann::json::exception&) {  // a number out of range
    throw FormatError(what + ": not valid JSON");
  }
  if (!root.is_object()) throw FormatError(what + ": must be a JSON object");
  return root;
}

}  // namespace dualdecoder::detail
