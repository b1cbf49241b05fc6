// The ranks and collectives that this rank waits for, and the limits of the wait.
#include <algorithm>
#include <string>

#include "comm/pending.h"
#include "comm/scheduler.h"

namespace tfscale {

bool Scheduler::is_patient(const Task& task) const {
  return task.plan != kEager && queues_.at(task.plan)->is_patient();
}

bool Scheduler::is_urgent() const {
  const auto is_waiting = [](const auto& entry) {
    return entry.second->is_waiting() && !entry.second->is_patient();
  };
  return std::any_of(active_.begin(), active_.end(),
                     [this](const Task& task) { return !is_patient(task); }) ||
         std::any_of(queues_.begin(), queues_.end(), is_waiting);
}

bool Scheduler::is_relaxed() const {
  const auto is_later = [](const Task& task) { return task.is_awaited_later; };
  if (!std::all_of(active_.begin(), active_.end(), is_later)) return false;
  bool is_relaxed = !PendingVariables::Get().is_awaited();
  for (const auto& [id, queue] : queues_) {
    if (!queue->is_waiting()) continue;
    queue->ForEachWaiting([&](const Task& task) { is_relaxed = is_relaxed && is_later(task); });
  }
  return is_relaxed;
}

std::string Scheduler::PlaceOf(const Task& task) const {
  if (task.plan == kEager) return task.name;
  return task.name + " (slot " + std::to_string(task.slot) + " of " +
         queues_.at(task.plan)->spec().name + ")";
}

Wait Scheduler::Describe(const Task& task, bool is_active) {
  Wait wait;
  wait.what = PlaceOf(task);
  if (is_active) {
    const Group& group = GroupOf(task.group);
    for (int member : task.operation->WaitingFor()) {
      wait.ranks.push_back(group.ranks[static_cast<size_t>(member)]);
    }
    return wait;
  }
  const PlanQueue& queue = *queues_.at(task.plan);
  if (queue.is_comparing()) {
    wait.reason = "waiting to compare plans with";
    wait.ranks = queue.ComparingWith();
  } else {
    wait.reason = "waiting for '" + queue.next_slot_name() + "' to be reached on this rank";
  }
  return wait;
}

void Scheduler::CountWaiting() {
  const Clock::time_point now = Clock::now();
  traffic_.Note(now, std::any_of(active_.begin(), active_.end(), [this](const Task& task) {
                  return !is_patient(task) && task.operation->is_waiting();
                }));
  if (is_leaving_) return;  // Marks that come later may find no reader.
  const std::string report = traffic_.TakeReport(now);
  if (!report.empty()) marks_.Notify(0, MarkKind::kTraffic, report);
}

void Scheduler::CheckStalls() {
  const Clock::time_point now = Clock::now();
  if (!stalls_.IsDue(now)) return;
  const Task* oldest = nullptr;
  bool is_active = false;
  // A transfer that makes progress is not stalled, however long it takes.
  const auto since = [](const Task& task) { return std::max(task.posted, task.moved); };
  const auto look = [&](const Task& task, bool is_task_active) {
    if (oldest != nullptr && since(task) >= since(*oldest)) return;
    if (is_patient(task)) return;
    oldest = &task;
    is_active = is_task_active;
  };
  for (const Task& task : active_) look(task, true);
  for (const auto& [id, queue] : queues_) {
    // They wait for active tasks, or for slots whose inputs may be the results of such.
    if (oldest != nullptr && is_active) break;
    queue->ForEachWaiting([&](const Task& task) { look(task, false); });
  }
  if (oldest != nullptr) {
    stalls_.Look(now, since(*oldest), [&] { return Describe(*oldest, is_active); });
  }
}

}  // namespace tfscale
