#include "comm/scheduler.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <numeric>
#include <sstream>
#include <utility>

#include "comm/pending.h"

namespace tfscale {
namespace {

int64_t Nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

std::string Join(const std::vector<int>& ranks) {
  std::ostringstream text;
  for (size_t i = 0; i < ranks.size(); ++i) text << (i ? ", " : "") << ranks[i];
  return text.str();
}

Status StepFailedHere() { return Status::Failed("The step failed on this rank."); }

std::map<int, Group> WorldOnly(Communicator world) {
  std::map<int, Group> groups;
  Group& group = groups[0];
  group.ranks.resize(static_cast<size_t>(world.size()));
  std::iota(group.ranks.begin(), group.ranks.end(), 0);
  group.comm = std::make_unique<Communicator>(std::move(world));
  return groups;
}

}  // namespace

Scheduler::Scheduler(const EngineOptions& options, Communicator world, PlanTable& plans,
                     EventLog& events, Traffic& traffic, BufferPool& buffers, WorkerPool& workers)
    : options_(options),
      plans_(plans),
      events_(events),
      traffic_(traffic),
      buffers_(buffers),
      workers_(workers),
      groups_(WorldOnly(std::move(world))),
      roster_(*groups_.at(0).comm, options.identity == nullptr ? "" : options.identity),
      marks_(groups_.at(0)),
      stalls_(options, groups_.at(0).comm->rank(), roster_, marks_),
      leaving_(marks_, stalls_),
      status_file_(options.status_path) {
  traffic_.SetRanks(groups_.at(0).comm->rank(), groups_.at(0).comm->size());
  marks_.Listen([this](int sender, MarkKind kind, const std::string& text) {
    if (kind == MarkKind::kTraffic) traffic_.Hear(sender, text);
  });
}

Group& Scheduler::GroupOf(int id) {
  const auto it = groups_.find(id);
  if (it == groups_.end()) throw CommError("No process set has the id " + std::to_string(id));
  if (!it->second.comm) {
    throw CommError(
        "process_set may be used by its members only. Received: a call from a rank outside of [" +
        Join(it->second.ranks) + "]. Guard it with process_set.included().");
  }
  return it->second;
}

PlanQueue& Scheduler::QueueOf(int plan) {
  const auto it = queues_.find(plan);
  if (it != queues_.end()) return *it->second;
  PlanSpec spec = plans_.Freeze(plan);
  const Group& group = GroupOf(spec.group);
  // Throws if the tags do not suffice, rather than later in the middle of a step.
  if (!spec.tag_slots.empty()) group.SlotTag(spec.tag_slots.back(), group.n_incarnations() - 1);
  auto queue = std::make_unique<PlanQueue>(std::move(spec), group);
  return *queues_.emplace(plan, std::move(queue)).first->second;
}

void Scheduler::AddGroup(int id, const std::vector<int>& ranks) {
  const Communicator& world = *groups_.at(0).comm;
  Group group;
  group.id = id;
  group.ranks = ranks;
  if (std::find(ranks.begin(), ranks.end(), world.rank()) != ranks.end()) {
    const int tag = groups_.at(0).HandshakeTag(id);
    group.comm = std::make_unique<Communicator>(Communicator::ForRanks(world, ranks, tag));
  }
  groups_[id] = std::move(group);
}

bool Scheduler::RemoveGroup(int id) {
  if (id == 0 || groups_.count(id) == 0) {
    throw CommError("No process set to remove has the id " + std::to_string(id));
  }
  const auto uses = [&](const Task& task) { return task.group == id; };
  if (plans_.HasPlans(id) || !abandoned_.is_empty() ||
      std::any_of(active_.begin(), active_.end(), uses)) {
    return false;
  }
  groups_.erase(id);
  n_eager_.erase(id);
  return true;
}

Channel Scheduler::BaseChannel() const {
  Channel channel{};
  channel.buffers = &buffers_;
  channel.workers = &workers_;
  channel.max_message_bytes = static_cast<size_t>(options_.max_message_bytes);
  channel.chunk_bytes = static_cast<size_t>(options_.chunk_bytes);
  return channel;
}

void Scheduler::Accept(Task task) {
  if (has_failed()) {
    task.done(failure_);
    return;
  }
  task.generation = marks_.generation();
  try {
    if (task.plan == kEager) {
      const Group& group = GroupOf(task.group);
      task.execution = n_eager_[task.group]++;
      const int tag = group.EagerTag(task.execution);
      Start(std::move(task), tag);
    } else {
      PlanQueue& queue = *(task.queue = &QueueOf(task.plan));
      if (!queue.interruption().ok()) {
        GiveUp(task, queue.interruption());
      } else if (task.is_cancelled && *task.is_cancelled) {
        GiveUp(task, ending_.value_or(StepFailedHere()));
      } else if (task.is_cancelled && queue.is_running(task.slot)) {
        // Its op waits, so that call has not ended: their collectives would be mixed up.
        Fail(
            "tf.function with collectives must be called by one thread at a time. Received: a call "
            "of '" +
            queue.spec().name + "' while '" + task.name +
            "' of an earlier call is in progress. Call it from one thread.");
        task.done(failure_);
      } else {
        queue.Add(std::move(task));
      }
    }
  } catch (const std::exception& error) {
    // A task that was not handed on is at fault itself; else communication is.
    if (task.done) {
      task.done(Status::Invalid(error.what()));
    } else {
      Fail(error.what());
    }
  }
}

void Scheduler::Start(Task task, int tag) {
  Channel channel = BaseChannel();
  channel.comm = GroupOf(task.group).comm.get();
  channel.tag = tag;
  task.started = task.moved = Clock::now();
  active_.push_back(std::move(task));
  active_.back().operation->Start(channel);
}

void Scheduler::StartSlot(const PlanQueue& queue, Task task) {
  const int tag_slot = queue.spec().tag_slots[static_cast<size_t>(task.slot)];
  // A patient plan may have begun before this incarnation, and its peers come later.
  Start(std::move(task), queue.group().SlotTag(tag_slot, queue.is_patient() ? 0 : incarnation_));
}

bool Scheduler::Step() {
  if (has_failed()) {
    StepFailed();
    return false;
  }
  try {
    bool has_moved = StepActive();
    if (StepQueues()) has_moved = true;
    const bool has_heard = marks_.Poll();
    if (marks_.has_received() && is_busy()) GiveUpHopeless();
    if (has_heard && ending_ && !announced_.empty()) AnnounceGivenUp();
    abandoned_.Step();
    if (traffic_.is_on()) CountWaiting();
    if (is_urgent()) {
      CheckStalls();
    } else if (!leaving_.has_begun()) {  // StepLeave looks itself.
      stalls_.Rest();
    }
    return has_moved || has_heard;
  } catch (const std::exception& error) {
    Fail(error.what());
    return true;
  }
}

bool Scheduler::StepActive() {
  bool has_moved = false;
  for (auto it = active_.begin(); it != active_.end();) {
    if (it->operation->Step()) {
      has_moved = true;
      it->moved = Clock::now();
    }
    if (!it->operation->is_done()) {
      ++it;
      continue;
    }
    Task task = std::move(*it);
    it = active_.erase(it);
    Finish(task);
  }
  return has_moved;
}

void Scheduler::Finish(Task& task) {
  if (task.queue) task.queue->OnFinished(task);
  events_.Add({Nanoseconds(task.posted), Nanoseconds(task.started), Nanoseconds(Clock::now()),
               static_cast<int64_t>(task.operation->bytes()), task.execution, task.plan,
               task.slot});
  if (traffic_.is_on()) traffic_.AddBytes(task.operation->bytes());
  if (status_file_.is_open()) {
    status_file_.WritePlace(PlaceOf(task) + ", run " + std::to_string(task.execution + 1));
  }
  task.operation.reset();
  task.done(Status::Ok());
}

bool Scheduler::StepQueues() {
  bool has_moved = false;
  const Channel base = BaseChannel();
  for (auto& [id, queue] : queues_) {
    if (!queue->is_waiting()) continue;
    if (queue->StepHandshake(base)) has_moved = true;
    while (auto task = queue->TakeNext(options_.window_bytes)) {
      StartSlot(*queue, std::move(*task));
      has_moved = true;
    }
  }
  if (active_.empty()) has_moved = StartEarly() || has_moved;
  PaceEarly();
  return has_moved;
}

bool Scheduler::is_early(const Task& task) const {
  return task.may_overtake && task.queue && task.queue->is_early(task.slot);
}

// What was started early sends only while nothing else is active, and then little at a time.
void Scheduler::PaceEarly() {
  const auto can_overtake = [](const Task& task) { return task.may_overtake; };
  if (std::none_of(active_.begin(), active_.end(), can_overtake)) return;
  const auto n_early = std::count_if(active_.begin(), active_.end(),
                                     [this](const Task& task) { return is_early(task); });
  const Pace early = static_cast<size_t>(n_early) < active_.size() ? Pace::kHeld : Pace::kGentle;
  for (Task& task : active_) {
    if (task.may_overtake) task.operation->SetPace(is_early(task) ? early : Pace::kFree);
  }
}

bool Scheduler::StartEarly() {
  for (auto& [id, queue] : queues_) {
    if (!queue->is_waiting() || queue->is_patient()) continue;
    std::optional<Task> task = queue->TakeEarly();
    if (!task) continue;
    task->operation->SetPace(Pace::kGentle);
    StartSlot(*queue, std::move(*task));
    return true;
  }
  return false;
}

bool Scheduler::is_busy() const {
  const auto is_waiting = [](const auto& entry) { return entry.second->is_waiting(); };
  return !active_.empty() || std::any_of(queues_.begin(), queues_.end(), is_waiting);
}

// The ranks and collectives that this rank waits for, and the limits of the wait.

bool Scheduler::is_urgent() const {
  const auto is_waiting = [](const auto& entry) {
    return entry.second->is_waiting() && !entry.second->is_patient();
  };
  return std::any_of(active_.begin(), active_.end(),
                     [](const Task& task) { return !IsPatient(task); }) ||
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
  if (!task.queue) return task.name;
  return task.name + " (slot " + std::to_string(task.slot) + " of " + task.queue->spec().name + ")";
}

Wait Scheduler::Describe(const Task& task, bool is_active) {
  Wait wait;
  wait.what = PlaceOf(task);
  if (is_active) {
    wait.ranks = GroupOf(task.group).RanksOf(task.operation->WaitingFor());
  } else if (task.queue->is_comparing()) {
    wait.reason = "waiting to compare plans with";
    wait.ranks = task.queue->ComparingWith();
  } else {
    wait.reason = "waiting for '" + task.queue->next_slot_name() + "' to be reached on this rank";
  }
  return wait;
}

void Scheduler::CountWaiting() {
  const Clock::time_point now = Clock::now();
  traffic_.Note(now, std::any_of(active_.begin(), active_.end(), [](const Task& task) {
                  return !IsPatient(task) && task.operation->is_waiting();
                }));
  if (leaving_.has_begun()) return;  // Marks that come later may find no reader.
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
    if (IsPatient(task)) return;
    oldest = &task;
    is_active = is_task_active;
  };
  for (const Task& task : active_) look(task, true);
  for (const auto& [id, queue] : queues_) {
    // They wait for active tasks, or for slots whose inputs may be the results of such.
    if (oldest != nullptr && is_active) break;
    queue->ForEachWaiting([&](const Task& task) { look(task, false); });
  }
  if (oldest == nullptr) return;
  stalls_.Look(now, since(*oldest), [&] {
    Wait wait = Describe(*oldest, is_active);
    if (wait.ranks.empty()) return wait;
    // Those for which others wait nearly as long: one of them may be gone, and keep the rest.
    const auto add = [&](const Task& task, bool is_task_active) {
      if (IsPatient(task) || now - since(task) < (now - since(*oldest)) / 2) return;
      for (int rank : Describe(task, is_task_active).ranks) {
        const bool is_known = std::count(wait.ranks.begin(), wait.ranks.end(), rank) > 0;
        if (!is_known) wait.ranks.push_back(rank);
      }
    };
    for (const Task& task : active_) add(task, true);
    for (const auto& [id, queue] : queues_) {
      queue->ForEachWaiting([&](const Task& task) { add(task, false); });
    }
    return wait;
  });
}

// The end of collectives that do not succeed.

void Scheduler::Fail(const std::string& why) {
  if (has_failed()) return;
  failure_ = Status::Failed(why);
  try {
    // First of all, so that the others receive the cause before they see its effects.
    marks_.Send(MarkKind::kFailed, {}, why);
  } catch (const std::exception& error) {
    failure_.message += std::string(" The other ranks could not be told: ") + error.what();
  }
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
  std::list<Task> tasks = std::exchange(active_, {});
  for (const Task& task : tasks) {
    if (task.queue) task.queue->OnFinished(task);
  }
  for (auto& [id, queue] : queues_) {
    std::vector<Task> waiting = queue->TakeIf([](const Task&) { return true; });
    std::move(waiting.begin(), waiting.end(), std::back_inserter(tasks));
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
  leaving_.Begin();
  try {
    Mark(MarkKind::kLeft);
  } catch (const std::exception& error) {
    Fail(error.what());
  }
}

bool Scheduler::StepLeave() {
  const bool has_moved = Step();
  if (has_failed()) return true;
  try {
    if (leaving_.AreAllLeaving()) {
      EndAll(Status::Failed("tfscale has been shut down."));
      DiscardAll();
      leaving_.Step(abandoned_.is_empty());
    }
  } catch (const std::exception& error) {
    Fail(error.what());
  }
  return has_moved || is_over();
}

std::optional<Status> Scheduler::WhyGivenUp(const Task& task) {
  const PlanKey key = task.queue ? task.queue->key() : PlanKey{task.group, kEager};
  return marks_.WhyGivenUp(key, task.execution, task.generation, GroupOf(task.group).ranks,
                           IsPatient(task));
}

void Scheduler::GiveUp(Task& task, const Status& why) {
  // A meeting that was given up requires no new incarnation.
  if (!IsPatient(task)) ++n_given_up_;
  if (task.queue) task.queue->Interrupt(why);
  abandoned_.Add(std::move(task.operation));
  task.done(why);
}

void Scheduler::ReportFailed(const Status& why) {
  // Nothing waits for collectives that are pending when this rank leaves.
  if (why.code == StatusCode::kFailed && !leaving_.has_begun())
    status_file_.WriteFailed(why.message);
}

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
  const auto give_up = [&](auto is_chosen) {
    for (Task& task : queue.TakeIf(is_chosen)) {
      queue.Uncount(task);
      GiveUp(task, ending_.value_or(StepFailedHere()));
    }
  };
  give_up([](const Task& task) { return task.is_cancelled != nullptr; });
  // What an earlier step has posted stays, where its run is whole: other ranks wait for that before
  // they come to the slots that this step waits for.
  give_up([&](const Task& task) { return task.execution >= queue.n_complete_executions(); });
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

std::vector<Task> Scheduler::TakeActive(const std::function<bool(const Task&)>& is_chosen) {
  std::vector<Task> tasks;
  for (auto it = active_.begin(); it != active_.end();) {
    if (!is_chosen(*it)) {
      ++it;
      continue;
    }
    if (it->queue) it->queue->OnFinished(*it);
    tasks.push_back(std::move(*it));
    it = active_.erase(it);
  }
  return tasks;
}

void Scheduler::GiveUpStranded() {
  // Those of a function that another thread runs can be cancelled with it.
  const auto is_posted = [](const Task& task) { return task.is_cancelled == nullptr; };
  const auto is_stranded = [&](const Task& task) {
    return task.queue && !task.queue->is_patient() && !task.queue->is_next_due() && is_posted(task);
  };
  // One that started early, before a slot that never comes, may wait for ranks that wait for that.
  std::vector<Task> tasks =
      TakeActive([&](const Task& task) { return is_stranded(task) && is_early(task); });
  for (auto& [id, queue] : queues_) {
    for (Task& task : queue->TakeIf(is_stranded)) tasks.push_back(std::move(task));
  }
  for (Task& task : tasks) GiveUp(task, StepFailedHere());
}

void Scheduler::GiveUpHopeless() {
  std::vector<Status> reasons;
  const auto is_hopeless = [&](const Task& task) {
    const std::optional<Status> why = WhyGivenUp(task);
    if (why) reasons.push_back(*why);
    return why.has_value();
  };
  std::vector<Task> tasks = TakeActive(is_hopeless);
  for (auto& [id, queue] : queues_) {
    for (Task& task : queue->TakeIf(is_hopeless)) tasks.push_back(std::move(task));
  }
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (tasks[i].queue) tasks[i].queue->Uncount(tasks[i]);
    if (tasks[i].queue && !IsPatient(tasks[i]) && !ending_) ending_ = reasons[i];
    ReportFailed(reasons[i]);
    GiveUp(tasks[i], reasons[i]);
  }
  // Of a whole run that is given up after this rank's mark, others know only by this.
  if (!tasks.empty() && ending_) AnnounceGivenUp();
}

}  // namespace tfscale
