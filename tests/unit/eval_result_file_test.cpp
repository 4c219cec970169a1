// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/result_file.hpp"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "dualdecoder/error.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"

namespace dualdecoder::examples {
namespace {

class Folder {
 public:
  Folder() { std::filesystem::create_directories(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path_); }

  std::filesystem::path results() const { return path_ / "quality.jsonl"; }
  void write(const std::string& text) const { std::ofstream(results(), std::ios::binary) << text; }
  static std::string read(const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

 private:
  std::filesystem::path path_ = std::filesystem::temp_directory_path() / ("dualdecoder-eval-results-test-" + std::to_string(::getpid()));
};

ResultFile::Json line_of(int seed) {
  return {{"model", "m"},     {"context", 4096}, {"task", "vt"},    {"seed", seed},
          {"policy", "full"}, {"setting", ""},   {"text", "noise"}, {"score", 0.5}};
}
std::string text_of(int seed) { return line_of(seed).dump() + "\n"; }

}  // namespace

TEST_CASE("results are there again when the file is opened again") {
  const Folder folder;
  {
    ResultFile file(folder.results());
    CHECK(file.lines().empty());
    file.append(line_of(1));
    file.append(line_of(2));
  }
  CHECK(Folder::read(folder.results()) == text_of(1) + text_of(2));
  const ResultFile again(folder.results());
  CHECK(again.lines().size() == 2);
  CHECK(again.holds(ResultFile::key_of(line_of(2))));
  CHECK_FALSE(again.holds(ResultFile::key_of(line_of(3))));
  CHECK(again.set_aside() == 0);
}

TEST_CASE("torn and foreign lines are set aside, all others stay") {
  const Folder folder;
  const std::string torn = text_of(3).substr(0, 30);
  folder.write(text_of(1) + "not JSON\n{\"score\": 1}\n" + text_of(2) + torn);
  {
    ResultFile file(folder.results());
    CHECK(file.set_aside() == 3);
    CHECK(file.lines().size() == 2);
    CHECK_FALSE(file.holds(ResultFile::key_of(line_of(3))));
    CHECK(Folder::read(file.corrupt_path()) == "not JSON\n{\"score\": 1}\n" + torn + "\n");
    file.append(line_of(3));
  }
  CHECK(Folder::read(folder.results()) == text_of(1) + text_of(2) + text_of(3));

  folder.write(text_of(1) + "again");
  const ResultFile second(folder.results());
  CHECK(Folder::read(second.corrupt_path()) == "not JSON\n{\"score\": 1}\n" + torn + "\nagain\n");
}

TEST_CASE("a last line without its line break is whole") {
  const Folder folder;
  const std::string text = text_of(1);
  folder.write(text.substr(0, text.size() - 1));
  ResultFile file(folder.results());
  CHECK(file.set_aside() == 0);
  file.append(line_of(2));
  CHECK(Folder::read(folder.results()) == text_of(1) + text_of(2));
}

TEST_CASE("a result file that cannot be written, or that another program writes, is refused") {
  const Folder folder;
  test::expect_error<IoError>([] { const ResultFile file("/no-such-folder/quality.jsonl"); }, {"/no-such-folder/quality.jsonl"});
  const ResultFile first(folder.results());
  test::expect_error<IoError>([&] { const ResultFile second(folder.results()); }, {"another program"});
}

}  // namespace dualdecoder::examples
