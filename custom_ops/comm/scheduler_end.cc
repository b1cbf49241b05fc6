// The end of collectives that do not succeed, and the leaving of a rank.
#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "comm/scheduler.h"

namespace tfscale {
namespace {

// For the last mark of other ranks, on bad links: several turns of TCP.
constexpr std::chrono::seconds kLastWait{10};

}  // namespace

void Scheduler::Fail(const std::string& why) {
  if (has_failed()) return;
  failure_ = Status::Failed(why);
  try {
    // First of all, so that the others receive the cause before they see its effects.
    marks_.Send(MarkKind::kFailed, {}, why);
  } catch (const std::exception& error) {
    failure_.message += std::string(" The other ranks could not be told: ") + error.what();
  }
  if (is_leaving_) leave_failure_ = failure_.message;
  EndAll(failure_);
}

void Scheduler::StepFailed() {
  if (!can_answer_) return;
  try {
    // The others still have to receive the reason, to see that this rank lives, and
    // to complete their sends: they wait for that before they leave.
    marks_.Poll();
    abandoned_.Step();
    DiscardAll();
  } catch (const std::exception&) {
    can_answer_ = false;  // The first failure is the one that is reported.
  }
}

void Scheduler::DiscardAll() {
  for (const auto& [id, group] : groups_) {
    if (group.comm) abandoned_.Discard(*group.comm, id == 0 ? group.MarkTag() : -1);
  }
}

void Scheduler::EndAll(const Status& why) {
  std::vector<Task> tasks;
  for (Task& task : active_) {
    if (task.plan != kEager) queues_.at(task.plan)->OnFinished(task);
    tasks.push_back(std::move(task));
  }
  active_.clear();
  for (auto& [id, queue] : queues_) {
    for (Task& task : queue->TakeIf([](const Task&) { return true; })) {
      tasks.push_back(std::move(task));
    }
    if (auto handshake = queue->TakeHandshake()) abandoned_.Add(std::move(handshake));
  }
  for (Task& task : tasks) {
    abandoned_.Add(std::move(task.operation));
    task.done(why);
  }
}

void Scheduler::Mark(MarkKind kind) {
  // A rank that leaves in the middle of a run takes no further part in this run. Nor does one that
  // has given up a step: what it had not posted by then never comes.
  const bool is_over = kind == MarkKind::kLeft || n_given_up_ > 0;
  RunCounts counts;
  for (const auto& [id, queue] : queues_) {
    const bool is_whole = is_over && (kind == MarkKind::kLeft || !queue->is_patient());
    counts[queue->key()] = is_whole ? queue->n_complete_executions() : queue->n_executions();
  }
  for (const auto& [group, n_calls] : n_eager_) counts[{group, kEager}] = n_calls;
  marks_.Send(kind, counts);
  ending_.reset();
}

void Scheduler::StartIncarnation(int incarnation) {
  // Never one that was: what is left of it may still be on the wire. All ranks
  // count alike, as all start each one.
  incarnation = std::max(incarnation, incarnation_ + 1);
  if (incarnation >= groups_.at(0).n_incarnations()) {
    throw CommError("fit can be stopped early " +
                    std::to_string(groups_.at(0).n_incarnations() - 1) +
                    " times per job. Received: one stop more. Start a new job.");
  }
  for (const auto& [id, queue] : queues_) {
    if (!queue->is_idle() && !queue->is_patient()) {
      throw CommError("fit must start when no tf.function runs. Received: '" + queue->spec().name +
                      "' has collectives under way.");
    }
  }
  incarnation_ = incarnation;
  n_given_up_ = 0;
  ending_.reset();
  cancelled_.clear();
  announced_.clear();
  RunCounts counts;
  for (auto& [id, queue] : queues_) {
    if (queue->is_patient()) continue;
    counts[queue->key()] = queue->n_complete_executions();
    queue->Reset();
  }
  marks_.StartIncarnation(incarnation, counts);
}

void Scheduler::Leave() {
  if (has_failed()) return;
  is_leaving_ = true;
  n_failed_before_ = marks_.n_failed();
  try {
    Mark(MarkKind::kLeft);
  } catch (const std::exception& error) {
    Fail(error.what());
  }
}

std::vector<int> Scheduler::Others() const {
  std::vector<int> others;
  const Group& world = groups_.at(0);
  for (int rank : world.ranks) {
    if (rank != world.comm->rank()) others.push_back(rank);
  }
  return others;
}

bool Scheduler::StepLeave() {
  bool has_moved = Step();
  if (has_failed()) return true;
  try {
    is_cut_off_ = marks_.n_failed() > n_failed_before_;
    if (is_cut_off_) {
      // A rank that began to leave after the failure still waits for this mark.
      if (!is_quiet_) marks_.Send(MarkKind::kQuiet, {});
      is_quiet_ = true;
      return true;
    }
    const std::vector<int> others = marks_.Without(MarkKind::kLeft);
    if (!others.empty()) {
      stalls_.LookAtEnd(Clock::now(), others);
      return has_moved;
    }
    EndAll(Status::Failed("tfscale has been shut down."));
    DiscardAll();
    if (!abandoned_.is_empty()) {
      // Messages of a step with a rank whose communication failed never end.
      stalls_.LookAtEnd(Clock::now(), Others());
      return has_moved;
    }
    if (!is_quiet_) marks_.Send(MarkKind::kQuiet, {});
    is_quiet_ = true;
    const std::vector<int> unquiet = marks_.Without(MarkKind::kQuiet);
    if (unquiet.empty() && !seen_at_) {
      marks_.Send(MarkKind::kSeen, {});
      seen_at_ = Clock::now();
    }
    // A message that MPI has taken over is lost where its packet is lost and the process that would
    // send it again has ended. So a rank stays until the others have seen that it is quiet. The
    // last mark may be lost, too, and nothing is needed of a rank that does not wait for it.
    const bool is_seen = seen_at_ && (marks_.Without(MarkKind::kSeen).empty() ||
                                      Clock::now() - *seen_at_ > kLastWait);
    has_left_ = is_seen && marks_.is_quiet();
    // A rank that has not received a mark has not left: others must not be asked any more.
    if (!has_left_) {
      stalls_.LookAtEnd(Clock::now(), unquiet.empty() ? marks_.Unquiet() : unquiet);
    }
  } catch (const std::exception& error) {
    Fail(error.what());
  }
  return has_moved || has_left_;
}

std::optional<Status> Scheduler::WhyGivenUp(const Task& task) {
  const Group& group = GroupOf(task.group);
  const PlanKey key =
      task.plan == kEager ? PlanKey{task.group, kEager} : queues_.at(task.plan)->key();
  return marks_.WhyGivenUp(key, task.execution, task.generation, group.ranks, is_patient(task));
}

void Scheduler::GiveUp(Task& task, const Status& why) {
  // A meeting that was given up requires no new incarnation.
  if (!is_patient(task)) ++n_given_up_;
  if (task.plan != kEager) queues_.at(task.plan)->Interrupt(why);
  abandoned_.Add(std::move(task.operation));
  task.done(why);
}

void Scheduler::ReportFailed(const Status& why) {
  // Nothing waits for collectives that are pending when this rank leaves.
  if (why.code == StatusCode::kFailed && !is_leaving_) status_file_.WriteFailed(why.message);
}

Status Scheduler::StepFailedHere() { return Status::Failed("The step failed on this rank."); }

void Scheduler::GiveUpWaiting(int plan) {
  const auto found = queues_.find(plan);
  if (found == queues_.end()) return;
  PlanQueue& queue = *found->second;
  if (ending_) {
    cancelled_.insert(queue.key());
    AnnounceGivenUp();
    // In a smaller group, which has no rank of the mark, a run ends well where all its slots have
    // come on all members. Else those to whom they have come are told.
    if (queue.is_whole()) return;
  }
  for (Task& task : queue.TakeIf([](const Task&) { return true; })) {
    queue.Uncount(task);
    GiveUp(task, ending_.value_or(StepFailedHere()));
  }
}

// Runs that have begun here and not on another rank, whose step ends too, are known to it by the
// plans that this rank announces: then it does.
void Scheduler::AnnounceGivenUp() {
  RunCounts counts;
  const std::set<PlanKey> of_others = marks_.Announced();
  for (const PlanKey& key : of_others) counts[key] = 0;  // those that have never run here
  for (const auto& [id, queue] : queues_) {
    const PlanKey key = queue->key();
    const bool is_over = cancelled_.count(key) > 0 || of_others.count(key) > 0 ||
                         !queue->is_whole() || !queue->interruption().ok();
    if (is_over && !queue->is_patient()) counts[key] = queue->n_complete_executions();
  }
  if (!counts.empty() && counts != announced_) marks_.Announce(counts, *ending_);
  announced_ = std::move(counts);
}

void Scheduler::GiveUpStranded() {
  // Those of a function that another thread runs can be cancelled with it.
  const auto is_posted = [](const Task& task) { return task.is_cancelled == nullptr; };
  for (auto& [id, queue] : queues_) {
    if (queue->is_patient() || queue->is_next_due()) continue;
    for (Task& task : queue->TakeIf(is_posted)) GiveUp(task, StepFailedHere());
  }
}

void Scheduler::GiveUpHopeless() {
  std::vector<Status> reasons;
  const auto is_hopeless = [&](const Task& task) {
    const std::optional<Status> why = WhyGivenUp(task);
    if (why) reasons.push_back(*why);
    return why.has_value();
  };
  std::vector<Task> tasks;
  for (auto it = active_.begin(); it != active_.end();) {
    if (!is_hopeless(*it)) {
      ++it;
      continue;
    }
    if (it->plan != kEager) queues_.at(it->plan)->OnFinished(*it);
    tasks.push_back(std::move(*it));
    it = active_.erase(it);
  }
  for (auto& [id, queue] : queues_) {
    for (Task& task : queue->TakeIf(is_hopeless)) tasks.push_back(std::move(task));
  }
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (tasks[i].plan != kEager) queues_.at(tasks[i].plan)->Uncount(tasks[i]);
    const bool is_of_step = tasks[i].plan != kEager && !is_patient(tasks[i]);
    if (is_of_step && !ending_) ending_ = reasons[i];
    ReportFailed(reasons[i]);
    GiveUp(tasks[i], reasons[i]);
  }
}

}  // namespace tfscale
