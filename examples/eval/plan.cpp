// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/plan.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "dualdecoder/error.hpp"
#include "examples/common/setting.hpp"

namespace dualdecoder::examples {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kRulerTasks = 13;      // the first of task_kinds()
constexpr std::size_t kRobustnessTasks = 5;  // the last
constexpr std::string_view kFull = "full";

/// Throws FormatError for a key that is none of `known`.
void only(const Json& object, std::initializer_list<std::string_view> known) {
  if (!object.is_object()) throw FormatError("must be an object, is " + object.dump());
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    std::string names;
    for (const std::string_view name : known) names += (names.empty() ? "" : ", ") + std::string(name);
    throw FormatError(fmt::format("\"{}\": must be one of {}", key, names));
  }
}

template <class Value>
std::vector<Value> list_of(const Json& json, const char* key) {
  if (!json.contains(key)) return {};
  try {
    return json.at(key).get<std::vector<Value>>();
  } catch (const Json::exception&) {
    throw FormatError(
        fmt::format("\"{}\": must be a list of {}, is {}", key, std::is_arithmetic_v<Value> ? "numbers" : "texts", json.at(key).dump()));
  }
}

ModelChoice read_model(const Json& json) {
  if (json.is_string()) return {.path = json.get<std::string>(), .name = {}};
  only(json, {"path", "name", "yarn"});
  return {.path = json.at("path").get<std::string>(), .name = json.value("name", ""), .yarn = json.value("yarn", 0.0F)};
}

std::string read_setting(const Json& json) {
  if (json.is_string()) return json.get<std::string>();
  if (!json.is_object()) throw FormatError("\"settings\": must be a list of texts or objects");
  std::string text;
  for (const auto& [key, value] : json.items()) {
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", key, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

Bound read_bound(const std::string& method, const Json& json) {
  only(json, {"kl", "agreement", "score_loss"});
  return {.method = method, .most_kl = json.at("kl"), .least_agreement = json.at("agreement"), .most_score_loss = json.at("score_loss")};
}

PlanLists read_lists(const Json& json) {
  only(json, {"models", "contexts", "tasks", "seeds", "policies", "settings", "bounds"});
  PlanLists lists{.models = {},
                  .contexts = list_of<int>(json, "contexts"),
                  .tasks = list_of<std::string>(json, "tasks"),
                  .seeds = list_of<std::uint64_t>(json, "seeds"),
                  .policies = list_of<std::string>(json, "policies"),
                  .settings = {},
                  .bounds = {}};
  for (const Json& model : json.value("models", Json::array())) lists.models.push_back(read_model(model));
  for (const Json& setting : json.value("settings", Json::array())) lists.settings.push_back(read_setting(setting));
  const Json bounds = json.value("bounds", Json::object());
  for (const auto& [method, bound] : bounds.items()) lists.bounds.push_back(read_bound(method, bound));
  return lists;
}

std::vector<const TaskKind*> tasks_named(const std::string& name) {
  const std::span<const TaskKind> kinds = task_kinds();
  const auto pointers = [](std::span<const TaskKind> some) {
    std::vector<const TaskKind*> tasks;
    for (const TaskKind& kind : some) tasks.push_back(&kind);
    return tasks;
  };
  if (name == "all") return pointers(kinds);
  if (name == "ruler") return pointers(kinds.first(kRulerTasks));
  if (name == "robustness") return pointers(kinds.last(kRobustnessTasks));
  const TaskKind* kind = find_task(name);
  if (kind == nullptr) throw InvalidArgument("task = " + name + ": must be all, ruler, robustness or one of " + task_names());
  return {kind};
}

template <class Values>
void must_hold_some(const Values& values, const char* what) {
  if (values.empty()) throw InvalidArgument(std::string(what) + ": must name at least one");
}

/// The methods that a policy's entry stands for: "NAME SETTING" is one, a name alone is one with every setting of the list.
std::vector<Method> methods_of(const std::string& entry, const std::vector<std::string>& settings) {
  const std::size_t space = entry.find(' ');
  const Policy& policy = find_policy(entry.substr(0, space));
  if (space != std::string::npos) return {{.policy = &policy, .setting = canonical_setting(entry.substr(space + 1))}};
  if (settings.empty() || policy.name == kFull) return {{.policy = &policy, .setting = {}}};
  std::vector<Method> methods;
  for (const std::string& setting : settings) methods.push_back({.policy = &policy, .setting = canonical_setting(setting)});
  return methods;
}

std::vector<Method> make_methods(const PlanLists& lists) {
  std::vector<Method> methods;
  for (const std::string& entry : lists.policies) {
    for (Method& method : methods_of(entry, lists.settings)) {
      const auto same = [&](const Method& other) { return other.name() == method.name(); };
      if (std::none_of(methods.begin(), methods.end(), same)) methods.push_back(std::move(method));
    }
  }
  std::stable_partition(methods.begin(), methods.end(), [](const Method& method) { return method.policy->name == kFull; });
  return methods;
}

}  // namespace

PlanLists read_plan(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in || std::filesystem::is_directory(file)) throw IoError("plan " + file.string() + ": cannot be read");
  try {
    return read_lists(Json::parse(in));
  } catch (const Json::exception& error) {
    throw FormatError("plan " + file.string() + ": " + error.what());
  } catch (const FormatError& error) {
    throw FormatError("plan " + file.string() + ": " + error.what());
  }
}

Plan make_plan(const PlanLists& lists) {
  must_hold_some(lists.models, "models");
  must_hold_some(lists.contexts, "contexts");
  must_hold_some(lists.tasks, "tasks");
  must_hold_some(lists.seeds, "seeds");
  must_hold_some(lists.policies, "policies");
  for (const int context : lists.contexts) {
    if (context < 1) throw InvalidArgument(fmt::format("context = {}: must be at least 1", context));
  }
  Plan plan{.models = lists.models, .groups = {}, .methods = make_methods(lists), .bounds = lists.bounds};
  for (ModelChoice& model : plan.models) {
    if (model.name.empty())
      model.name = model.path.filename().replace_extension(model.path.extension() == ".gguf" ? "" : model.path.extension());
  }
  for (const Bound& bound : plan.bounds) {
    const auto is_it = [&](const Method& method) { return method.name() == bound.method; };
    if (std::none_of(plan.methods.begin(), plan.methods.end(), is_it)) {
      throw InvalidArgument("bounds: \"" + bound.method + "\" must be a policy of the plan, with its setting where it has one");
    }
  }
  for (std::size_t model = 0; model < plan.models.size(); ++model) {
    for (const int context : lists.contexts) {
      for (const std::string& name : lists.tasks) {
        for (const TaskKind* task : tasks_named(name)) {
          for (const std::uint64_t seed : lists.seeds) {
            plan.groups.push_back({.model = model, .context = context, .task = task, .seed = seed});
          }
        }
      }
    }
  }
  return plan;
}

}  // namespace dualdecoder::examples
