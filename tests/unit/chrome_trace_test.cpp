// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
// The text is judged by nlohmann::json, a parser that we did not write.
#include "dualdecoder/chrome_trace.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <locale>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.hpp"

namespace dualdecoder {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

std::vector<json> events_of(const json& trace, const std::string& phase) {
  std::vector<json> events;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("ph") == phase) events.push_back(event);
  }
  return events;
}

struct CommaForPoint final : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

}  // namespace

TEST_CASE("spans and counters become trace events with microseconds", "[chrome_trace]") {
  std::ostringstream out;
  const auto before = Clock::now();
  {
    ChromeTrace trace(out, "a program");
    const auto begin = Clock::now();
    trace.span("compute", "layer 0", begin, begin + std::chrono::nanoseconds(1'234'567));
    trace.span("prefetch", "layer 1", begin + std::chrono::microseconds(10), begin + std::chrono::microseconds(30));
    trace.span("compute", "layer 1", begin, begin);
    trace.counter("hit rate", begin, 0.96875);
  }
  const auto after = Clock::now();
  const json trace = json::parse(out.str());
  const auto spans = events_of(trace, "X");
  REQUIRE(spans.size() == 3);
  CHECK(spans[0].at("name") == "layer 0");
  CHECK(spans[0].at("dur") == 1234.567);
  CHECK(spans[0].at("tid") == 1);
  CHECK(spans[1].at("tid") == 2);
  CHECK(spans[2].at("tid") == 1);
  CHECK(spans[1].at("dur") == 20.0);
  CHECK(spans[1].at("ts").get<double>() - spans[0].at("ts").get<double>() == Approx(10.0));
  CHECK(spans[0].at("ts") >= 0.0);
  CHECK(spans[0].at("ts") <= std::chrono::duration<double, std::micro>(after - before).count());
  const auto counters = events_of(trace, "C");
  REQUIRE(counters.size() == 1);
  CHECK(counters[0].at("name") == "hit rate");
  CHECK(counters[0].at("args").at("value") == 0.96875);
  const auto names = events_of(trace, "M");
  CHECK(names[0].at("args").at("name") == "a program");
  CHECK(std::count_if(names.begin(), names.end(), [](const json& event) { return event.at("name") == "thread_name"; }) == 2);
}

TEST_CASE("any name is valid JSON and comes back as it was", "[chrome_trace]") {
  std::ostringstream out;
  const std::vector<std::string> names = {"plain",
                                          "quote \" backslash \\ slash /",
                                          "tab\tline\nreturn\rbell\a\x01\x1f\x7f",
                                          std::string("nul\0inside", 10),
                                          "gr\xc3\xbc\xc3\x9f \xe6\xbc\xa2 \xf0\x9f\x99\x82",
                                          "",
                                          "</script>"};
  {
    ChromeTrace trace(out);
    for (const std::string& name : names) trace.span(name, name, Clock::now(), Clock::now());
    trace.counter(names[1], Clock::now(), 1e300);
  }
  const json trace = json::parse(out.str());
  const auto spans = events_of(trace, "X");
  REQUIRE(spans.size() == names.size());
  for (std::size_t i = 0; i < names.size(); ++i) CHECK(spans[i].at("name") == names[i]);
  CHECK(events_of(trace, "C")[0].at("args").at("value") == 1e300);
}

TEST_CASE("bytes that are not UTF-8 are replaced", "[chrome_trace]") {
  const std::string replacement = "\xef\xbf\xbd";
  const auto written = [](const std::string& name) {
    std::ostringstream out;
    {
      ChromeTrace trace(out);
      trace.span("t", name, Clock::now(), Clock::now());
    }
    return events_of(json::parse(out.str()), "X")[0].at("name").get<std::string>();
  };
  CHECK(written("a\xff z") == "a" + replacement + " z");
  CHECK(written("cut \xe6\xbc") == "cut " + replacement + replacement);
  CHECK(written("\xc0\xaf") == replacement + replacement);                                      // overlong
  CHECK(written("\xed\xa0\x80") == replacement + replacement + replacement);                    // a surrogate
  CHECK(written("\xf4\x90\x80\x80") == replacement + replacement + replacement + replacement);  // past U+10FFFF
}

TEST_CASE("a trace that is closed early is whole, and later events are dropped", "[chrome_trace]") {
  std::ostringstream out;
  ChromeTrace trace(out);
  trace.span("compute", "first", Clock::now(), Clock::now());
  trace.close();
  const std::string text = out.str();
  trace.span("compute", "second", Clock::now(), Clock::now());
  trace.close();
  CHECK(out.str() == text);
  CHECK(events_of(json::parse(text), "X").size() == 1);
  std::ostringstream nothing;
  { ChromeTrace empty(nothing); }
  CHECK(json::parse(nothing.str()).at("traceEvents").size() == 1);
}

TEST_CASE("values without JSON are left out, and times before the trace are negative", "[chrome_trace]") {
  std::ostringstream out;
  {
    ChromeTrace trace(out);
    trace.counter("x", Clock::now(), std::numeric_limits<double>::quiet_NaN());
    trace.counter("x", Clock::now(), std::numeric_limits<double>::infinity());
    const auto now = Clock::now();
    trace.span("t", "early", now - std::chrono::seconds(10), now - std::chrono::seconds(9));
    trace.span("t", "ends before it begins", now, now - std::chrono::seconds(1));
  }
  const json trace = json::parse(out.str());
  CHECK(events_of(trace, "C").empty());
  CHECK(events_of(trace, "X")[0].at("ts") < -9e6);
  CHECK(events_of(trace, "X")[0].at("dur") == 1e6);
  CHECK(events_of(trace, "X")[1].at("dur") == 0.0);
}

TEST_CASE("the stream's locale does not matter", "[chrome_trace]") {
  std::ostringstream out;
  out.imbue(std::locale(std::locale::classic(), new CommaForPoint));
  {
    ChromeTrace trace(out);
    trace.span("t", "x", Clock::now(), Clock::now() + std::chrono::seconds(12345));
    trace.counter("c", Clock::now(), 1234567.5);
  }
  CHECK(events_of(json::parse(out.str()), "C")[0].at("args").at("value") == 1234567.5);
}

TEST_CASE("a stream that fails or throws harms nobody", "[chrome_trace]") {
  std::ostringstream out;
  out.exceptions(std::ios::badbit | std::ios::failbit);
  ChromeTrace trace(out);
  try {
    out.setstate(std::ios::badbit);
  } catch (const std::ios::failure&) {
  }
  trace.span("t", "x", Clock::now(), Clock::now());
  trace.close();
  SUCCEED();
}

TEST_CASE("several threads trace at once", "[chrome_trace][lanes]") {
  std::ostringstream out;
  {
    ChromeTrace trace(out);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&trace, t] {
        for (int i = 0; i < 250; ++i) {
          trace.span("track " + std::to_string(t), "span", Clock::now(), Clock::now());
          trace.counter("count", Clock::now(), i);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  const json trace = json::parse(out.str());
  CHECK(events_of(trace, "X").size() == 1000);
  CHECK(events_of(trace, "C").size() == 1000);
}

}  // namespace dualdecoder
