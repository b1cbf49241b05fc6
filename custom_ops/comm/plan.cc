#include "comm/plan.h"

#include <algorithm>
#include <atomic>
#include <sstream>

#include "comm/types.h"

namespace tfscale {
namespace {

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty()) lines.push_back(line);
  }
  return lines;
}

std::string LineOr(const std::vector<std::string>& lines, size_t i, const char* otherwise) {
  return i < lines.size() ? lines[i].substr(lines[i].find_first_not_of(' ')) : otherwise;
}

// Of plans of one job. Ids are equal on ranks that trace alike, in later jobs too.
constexpr int kMostPlans = 1 << 20;
constexpr int kMostJobs = 1 << 11;
std::atomic<int> n_jobs{0};

}  // namespace

std::string PlanSpec::Describe() const {
  std::ostringstream text;
  text << "function " << name << "\n";
  for (size_t i = 0; i < slots.size(); ++i) {
    text << "#" << tag_slots[i] << " " << signatures[i] << "\n";
  }
  return text.str();
}

std::string FirstDifference(const std::vector<std::string>& descriptions,
                            const std::vector<int>& ranks) {
  const std::vector<std::string> first = Lines(descriptions[0]);
  for (size_t r = 1; r < descriptions.size(); ++r) {
    if (descriptions[r] == descriptions[0]) continue;
    const std::vector<std::string> other = Lines(descriptions[r]);
    size_t line = 0;
    while (line < std::min(first.size(), other.size()) && first[line] == other[line]) ++line;
    // Lines of tensors follow that of their slot.
    const auto begins_slot = [](const std::string& text) { return text.front() == '#'; };
    const auto end = first.begin() + static_cast<std::ptrdiff_t>(line);
    auto n_slots = std::count_if(first.begin(), end, begins_slot);
    if (LineOr(first, line, "#").front() == '#' && LineOr(other, line, "#").front() == '#')
      ++n_slots;
    std::ostringstream text;
    text << "ranks run different collectives. Received: ";
    if (line > 0) text << "at slot " << n_slots - 1 << ", ";
    text << "rank " << ranks[0] << " has '" << LineOr(first, line, "nothing more") << "' and rank "
         << ranks[r] << " has '" << LineOr(other, line, "nothing more")
         << "'. Build the same model, optimizer and functions on every rank, in the same order.";
    return text.str();
  }
  return "";
}

PlanTable::PlanTable() : first_id_(n_jobs++ % kMostJobs * kMostPlans) {}

int PlanTable::Create(int group, const std::string& name, bool is_patient) {
  if (group < 0) throw CommError("No process set has the id " + std::to_string(group));
  Lock lock(mutex_);
  const size_t g = static_cast<size_t>(group);
  if (n_plans_.size() <= g) {
    n_plans_.resize(g + 1, 0);
    next_tag_slot_.resize(g + 1, 0);
  }
  Entry entry;
  entry.spec.id = first_id_ + static_cast<int>(plans_.size());
  entry.spec.group = group;
  entry.spec.index = n_plans_[g]++;
  entry.spec.name = name;
  entry.spec.is_patient = is_patient;
  plans_.push_back(std::move(entry));
  return plans_.back().spec.id;
}

bool PlanTable::HasPlans(int group) {
  Lock lock(mutex_);
  const size_t g = static_cast<size_t>(group);
  return g < n_plans_.size() && n_plans_[g] > 0;
}

int PlanTable::AddSlot(int plan, const std::string& name, const std::string& signature) {
  Lock lock(mutex_);
  Entry& entry = Find(plan);
  if (entry.is_frozen) {
    throw CommError("plan cannot change after its first use. Received: '" + name + "' for plan '" +
                    entry.spec.name + "'.");
  }
  entry.spec.slots.push_back(name);
  entry.spec.signatures.push_back(signature.empty() ? name : signature);
  entry.spec.tag_slots.push_back(next_tag_slot_[static_cast<size_t>(entry.spec.group)]++);
  return static_cast<int>(entry.spec.slots.size()) - 1;
}

PlanSpec PlanTable::Freeze(int plan) {
  Lock lock(mutex_);
  Entry& entry = Find(plan);
  entry.is_frozen = true;
  return entry.spec;
}

PlanTable::Entry& PlanTable::Find(int plan) {
  const int place = plan - first_id_;
  if (place >= 0 && static_cast<size_t>(place) < plans_.size()) {
    return plans_[static_cast<size_t>(place)];
  }
  throw CommError(
      "tf.function must run in the job in which it was traced. Received: a collective of plan " +
      std::to_string(plan) + ", of " + std::to_string(plans_.size()) +
      " plans here. Trace the function again.");
}

}  // namespace tfscale
