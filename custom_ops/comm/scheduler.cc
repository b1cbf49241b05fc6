#include "comm/scheduler.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

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

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::map<int, Group> WorldOnly(Communicator world) {
  std::map<int, Group> groups;
  Group& group = groups[0];
  group.ranks = AllRanks(world.size());
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
      PlanQueue& queue = QueueOf(task.plan);
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
    } else if (!is_leaving_) {  // StepLeave looks itself.
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
  if (task.plan != kEager) queues_.at(task.plan)->OnFinished(task);
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
      const int tag_slot = queue->spec().tag_slots[static_cast<size_t>(task->slot)];
      // A patient plan may have begun before this incarnation, and its peers come later.
      const int incarnation = queue->is_patient() ? 0 : incarnation_;
      Start(std::move(*task), queue->group().SlotTag(tag_slot, incarnation));
      has_moved = true;
    }
  }
  if (active_.empty()) has_moved = StartEarly() || has_moved;
  PaceEarly();
  return has_moved;
}

bool Scheduler::is_early(const Task& task) const {
  return task.may_overtake && task.plan != kEager && queues_.at(task.plan)->is_early(task.slot);
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
    const int tag_slot = queue->spec().tag_slots[static_cast<size_t>(task->slot)];
    task->operation->SetPace(Pace::kGentle);
    Start(std::move(*task), queue->group().SlotTag(tag_slot, incarnation_));
    return true;
  }
  return false;
}

bool Scheduler::is_busy() const {
  if (!active_.empty()) return true;
  return std::any_of(queues_.begin(), queues_.end(),
                     [](const auto& entry) { return entry.second->is_waiting(); });
}

}  // namespace tfscale
