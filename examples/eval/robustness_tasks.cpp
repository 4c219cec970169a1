// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Texts that make it hard to know which parts of the context count. There is no right answer: a text is to be gone on with, so that
// fidelity to full attention is what such a task measures.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <string>

#include "examples/eval/tasks.hpp"
#include "examples/eval/words.hpp"

namespace dualdecoder::examples {
namespace {

constexpr int kContinuationTokens = 128;

/// Sentences about a town and a number.
using Phrases = std::array<const char*, 3>;
constexpr std::array kLanguages = {
    Phrases{"{0} has {1} houses and an old bridge. ", "In {0} the market opens at dawn. ", "Nobody in {0} remembers the winter of {1}. "},
    Phrases{"{0} hat {1} Häuser und eine alte Brücke. ", "In {0} öffnet der Markt im Morgengrauen. ",
            "Niemand in {0} erinnert sich an den Winter {1}. "},
    Phrases{"{0} compte {1} maisons et un vieux pont. ", "À {0}, le marché ouvre à l'aube. ",
            "Personne à {0} ne se souvient de l'hiver {1}. "},
    Phrases{"{0} tiene {1} casas y un puente viejo. ", "En {0} el mercado abre al amanecer. ",
            "Nadie en {0} recuerda el invierno de {1}. "},
    Phrases{"{0} ha {1} case e un vecchio ponte. ", "A {0} il mercato apre all'alba. ", "Nessuno a {0} ricorda l'inverno del {1}. "},
    Phrases{"{0} tem {1} casas e uma ponte velha. ", "Em {0} o mercado abre de madrugada. ",
            "Ninguém em {0} se lembra do inverno de {1}. "},
    Phrases{"{0} telt {1} huizen en een oude brug. ", "In {0} gaat de markt bij zonsopgang open. ",
            "Niemand in {0} herinnert zich de winter van {1}. "},
    Phrases{"W {0} stoi {1} domów i stary most. ", "W {0} targ otwiera się o świcie. ", "Nikt w {0} nie pamięta zimy {1} roku. "},
    Phrases{"В {0} {1} домов и старый мост. ", "В {0} рынок открывается на рассвете. ", "Никто в {0} не помнит зиму {1} года. "},
    Phrases{"Η {0} έχει {1} σπίτια και ένα παλιό γεφύρι. ", "Στη {0} η αγορά ανοίγει την αυγή. ",
            "Κανείς στη {0} δεν θυμάται τον χειμώνα του {1}. "},
    Phrases{"{0} kentinde {1} ev ve eski bir köprü var. ", "{0} kentinde pazar şafakta açılır. ",
            "{0} kentinde kimse {1} kışını hatırlamıyor. "},
    Phrases{"Kaupungissa {0} on {1} taloa ja vanha silta. ", "Kaupungissa {0} tori aukeaa aamunkoitteessa. ",
            "Kukaan kaupungissa {0} ei muista talvea {1}. "},
    Phrases{"{0}有{1}座房屋和一座古桥。", "在{0}，市场在黎明开门。", "{0}没有人记得{1}年的冬天。"},
    Phrases{"{0}には{1}軒の家と古い橋があります。", "{0}では市場が夜明けに開きます。", "{0}では誰も{1}年の冬を覚えていません。"},
    Phrases{"{0}에는 집 {1}채와 오래된 다리가 있습니다. ", "{0}에서는 시장이 새벽에 열립니다. ",
            "{0}에서는 아무도 {1}년 겨울을 기억하지 못합니다. "},
    Phrases{"في {0} يوجد {1} بيت وجسر قديم. ", "في {0} يفتح السوق عند الفجر. ", "لا أحد في {0} يتذكر شتاء {1}. "},
    Phrases{"{0} में {1} घर और एक पुराना पुल है। ", "{0} में बाज़ार भोर में खुलता है। ", "{0} में {1} की सर्दी किसी को याद नहीं। "},
    Phrases{"{0} có {1} ngôi nhà và một cây cầu cũ. ", "Ở {0} chợ mở cửa lúc bình minh. ", "Không ai ở {0} nhớ mùa đông năm {1}. "}};

std::string phrase(Random& random, const Phrases& language) {
  return fmt::format(fmt::runtime(random.pick(language)), distinct_towns(random, 1).front(), random.between(1100, 1990));
}

/// A text to go on with, of at least one part.
template <class Part>
Question continuation(const TaskRequest& request, const Part& part) {
  std::string text;
  for (std::size_t i = 0; i <= request.size; ++i) text += part(i);
  return {.text = fmt::format("Go on with this text in the way it is written.\n\n{}", text), .answer_head = "", .answers = {}};
}

/// A language for a few sentences, then another.
Question make_languages(const TaskRequest& request) {
  constexpr std::size_t kSentences = 4;
  Random random(request.seed, "languages");
  std::size_t language = 0;
  return continuation(request, [&](std::size_t i) {
    if (i % kSentences == 0) language = random.below(kLanguages.size());
    return phrase(random, kLanguages[language]);
  });
}

/// Characters at random, which tokenizers cut into tokens of no frequency.
Question make_random_text(const TaskRequest& request) {
  constexpr std::string_view kAlphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789#$%&()*+-/<=>@[]^{|}~";
  constexpr int kLongest = 9;
  Random random(request.seed, "random text");
  return continuation(request,
                      [&](std::size_t) { return random.letters(kAlphabet, static_cast<std::size_t>(random.between(1, kLongest))) + ' '; });
}

/// One paragraph over and over: what was read before stands at many places.
Question make_repeated(const TaskRequest& request) {
  constexpr std::size_t kSentences = 24;
  Random random(request.seed, "repeated");
  const std::string paragraph = request.essay->text(random, kSentences);
  std::vector<std::string> sentences = Haystack::split(paragraph);
  return continuation(request, [&](std::size_t i) { return sentences[i % sentences.size()]; });
}

std::string any_topic(Random& random, const TaskRequest& request, std::size_t topic) {
  switch (topic) {
    case 0: return request.essay->text(random, 1);
    case 1:
      return fmt::format("def {0}_{1}({0}):\n    return [{0}.{2}({3}) for {0} in {0}s if {0}.{4}]\n", any_noun(random), any_noun(random),
                         any_adjective(random), random.between(2, 99), any_adjective(random));
    case 2:
      return fmt::format("| {} | {} | {}.{:02} |\n", any_noun(random), random.between(1, 999), random.between(1, 99),
                         random.between(0, 99));
    case 3: return fmt::format("\"Where is the {}?\" - \"Behind the {} {}.\"\n", any_noun(random), any_adjective(random), any_noun(random));
    default: {
      const int a = random.between(12, 99);
      const int b = random.between(12, 99);
      return fmt::format("{} + {} = {}, {} x {} = {}. ", a, b, a + b, a, b, a * b);
    }
  }
}

/// Prose, code, tables, talk and sums by turns: what is needed lies elsewhere after every turn.
Question make_topics(const TaskRequest& request) {
  constexpr std::size_t kTopics = 5;
  constexpr std::size_t kPieces = 12;
  Random random(request.seed, "topics");
  std::size_t topic = 0;
  return continuation(request, [&](std::size_t i) {
    std::string turn;
    if (i % kPieces == 0) {
      topic = (topic + 1 + random.below(kTopics - 1)) % kTopics;
      turn = "\n\n";
    }
    return turn + any_topic(random, request, topic);
  });
}

/// Lines that differ in their figures alone and all count: attention has nothing to choose by.
Question make_equal(const TaskRequest& request) {
  Random random(request.seed, "equal");
  std::string text;
  for (std::size_t i = 0; i <= request.size; ++i)
    text += fmt::format("Station {}: {} units.\n", random.between(100, 999), random.between(10, 99));
  return {
      .text = fmt::format("Every station of this list counts as much as any other.\n\n{}\nHow many units do the stations hold on average? "
                          "Go through all of them and explain how you come to the figure.",
                          text),
      .answer_head = "All stations of the list together",
      .answers = {}};
}

}  // namespace

std::vector<TaskKind> robustness_tasks() {
  return {{"languages", Match::none, kContinuationTokens, make_languages},
          {"random_text", Match::none, kContinuationTokens, make_random_text},
          {"repeated", Match::none, kContinuationTokens, make_repeated},
          {"topics", Match::none, kContinuationTokens, make_topics},
          {"equal", Match::none, kContinuationTokens, make_equal}};
}

}  // namespace dualdecoder::examples
