#include "test/sim/program.h"

#include <algorithm>
#include <set>

#include "test/sim/network.h"

namespace sim {
namespace {

using tfscale::Engine;
using tfscale::MarkKind;
using tfscale::Status;
using tfscale::StatusCode;

constexpr int kMeeting = 99;  // the plan of a meeting
constexpr int kLast = 98;     // the plan of broadcasts after all fits

}  // namespace

bool Program::IsMember(int group) const { return PlaceIn(group) >= 0; }

int Program::PlaceIn(int group) const {
  const std::vector<int>& ranks = scenario_.RanksOf(group);
  const auto it = std::find(ranks.begin(), ranks.end(), rank_);
  return it == ranks.end() ? -1 : static_cast<int>(it - ranks.begin());
}

bool Program::IsTurn(Turn turn, int fit, int epoch) const {
  return scenario_.turn == turn && scenario_.turn_rank == rank_ && scenario_.turn_fit == fit &&
         scenario_.turn_epoch == epoch;
}

void Program::Compute() {
  if (rank_ == scenario_.slow_rank) {
    // All that it computes in a step takes less than others wait.
    const double longest = scenario_.options.stall_warning_s / 20 * static_cast<double>(kSecond);
    return world_.Sleep(random().Scale(kMilli, static_cast<Time>(longest)), "computes for long");
  }
  if (!scenario_.has_gaps && random().Chance(0.5)) return;
  world_.Sleep(random().Scale(scenario_.least_compute, scenario_.most_compute), "computes");
}

// Until any collective of this rank has ended.
void Program::AwaitChange() {
  const int64_t before = n_ended_;
  while (n_ended_ == before) world_.Wait(this, kNever, phase.c_str());
}

void Program::SetUp() {
  phase = "starts";
  engine = std::make_unique<Engine>(MPI_COMM_WORLD, scenario_.options,
                                    std::make_unique<tfscale::MpiEnv>());
  groups_.push_back(0);
  for (size_t i = 1; i < scenario_.groups.size(); ++i) {
    groups_.push_back(engine->AddGroup(scenario_.groups[i]));
  }
  if (scenario_.groups.size() > 1 && scenario_.has_meeting) {
    // One that is removed, and its number used again.
    const int extra = engine->AddGroup(scenario_.groups[1]);
    engine->RemoveGroup(extra);
    if (engine->AddGroup(scenario_.groups[1]) != extra) world_.Violate("a group's id is not free");
  }
  try {
    engine->RemoveGroup(0);
    world_.Violate("the group of all ranks is removed");
  } catch (const tfscale::CommError&) {
    // As it must be.
  }
  for (const PlanDraw& plan : scenario_.plans) {
    variables_.emplace_back(plan.slots.size());
    plans_.push_back(-1);
    if (!IsMember(plan.group)) continue;
    plans_.back() = engine->plans().Create(groups_[static_cast<size_t>(plan.group)], plan.name);
    for (const SlotSpec& slot : plan.slots)
      engine->plans().AddSlot(plans_.back(), NameOf(slot.kind));
  }
  // Those with plans stay, on their members.
  for (size_t i = 1; i < groups_.size() && scenario_.has_meeting; ++i) {
    engine->RemoveGroup(groups_[i]);
  }
  meeting_ = engine->plans().Create(0, "save", true);
  engine->plans().AddSlot(meeting_, "save");
  last_plan_ = engine->plans().Create(0, "last");
  engine->plans().AddSlot(last_plan_, "broadcast");
  on_set_up_();
}

std::shared_ptr<Flight> Program::Post(const SlotSpec& spec, int group, int plan, int slot,
                                      std::shared_ptr<std::atomic<bool>> is_cancelled,
                                      std::function<void(const Status&)> then) {
  const int n = static_cast<int>(scenario_.RanksOf(group).size());
  int64_t& n_before = plan == tfscale::kEager ? n_eager_ : n_posted_[{plan, slot}];
  const int64_t execution = n_before++;
  const int64_t incarnation = plan == tfscale::kEager || plan == kMeeting ? 0 : incarnation_;
  const Invariants::Key key = {plan, slot, incarnation, execution};
  uint64_t seed = 0x9E3779B97F4A7C15ULL;
  for (int64_t part : key) seed = Random(seed + static_cast<uint64_t>(part)).Next();
  auto flight = std::make_shared<Flight>();
  flight->spec = &spec;
  flight->posted = world_.now();
  flight->slot = slot;
  flight->work = std::make_unique<Work>(spec, n, PlaceIn(group), seed);
  flight->name = std::string(NameOf(spec.kind)) + ", slot " + std::to_string(slot) + " of plan " +
                 std::to_string(plan) + ", run " + std::to_string(execution) + " of incarnation " +
                 std::to_string(incarnation);
  std::shared_ptr<Flight>& last = last_[{plan, slot}];
  // Eager calls share a place, but not all of them are of the same vectors.
  const bool is_same = last && last->spec == flight->spec;
  if (is_same && last->status.ok() && last->n_done == 1) flight->work->Follow(*last->work);
  last = flight;
  tfscale::Call call;
  call.name = NameOf(spec.kind);
  call.group = groups_[static_cast<size_t>(group)];
  call.plan = plan == tfscale::kEager ? plan
              : plan == kMeeting      ? meeting_
              : plan == kLast         ? last_plan_
                                      : plans_[static_cast<size_t>(plan)];
  call.slot = slot < 0 ? 0 : slot;
  call.shapes = flight->work->Shapes();
  call.is_awaited_later = spec.is_awaited_later;
  call.may_overtake = spec.is_posted();
  call.is_cancelled = flight->is_cancelled = std::move(is_cancelled);
  const int rank = rank_;
  call.memory = std::shared_ptr<void>(nullptr, [this, flight, rank](void*) {
    flight->work->ForEachBuffer([&](const char* data, size_t bytes) {
      world_.network().RequireUnused(rank, data, bytes, flight->name.c_str());
    });
  });
  world_.Note("posts", plan, slot, execution);
  if (PlaceIn(group) == 0 && plan >= 0) invariants_.NoteExecution(plan, slot, seed);
  invariants_.NotePosted(plan, rank_);
  tfscale::OperationHandle operation = flight->work->Operation();
  call.done = [this, flight, key, n, then = std::move(then)](const Status& status) {
    world_.Note(status.ok() ? "ended" : "failed", key[0], key[1], key[3]);
    if (++flight->n_done > 1) world_.Violate(flight->name + " has ended twice");
    flight->status = status;
    if (status.ok()) {
      invariants_.NoteSuccess(static_cast<int>(key[0]), static_cast<size_t>(n), flight->name);
      const std::string why = flight->work->Check();
      if (!why.empty()) {
        world_.Violate(flight->name + " is wrong on rank " + std::to_string(rank_) + ": " + why);
      }
      const uint64_t digest = flight->work->Digest();
      if (digest != 0) invariants_.Compare(key, digest, flight->name);
    }
    if (then) then(status);
    ++n_ended_;
    world_.Signal(this);
  };
  tfscale::Submit(std::move(operation), std::move(call));
  return flight;
}

Time Program::LongestWait() const {
  Time longest = 0;
  for (const auto& [place, flight] : last_) {
    if (flight->n_done == 0) longest = std::max(longest, world_.now() - flight->posted);
  }
  return longest;
}

bool Program::AwaitsOnly(int dead, const Programs& programs, Time age) const {
  for (const auto& [place, flight] : last_) {
    const auto [plan, slot] = place;
    if (plan < 0 || plan >= static_cast<int>(scenario_.plans.size()) || slot > 0) continue;
    const PlanDraw& of = scenario_.plans[static_cast<size_t>(plan)];
    const std::vector<int>& ranks = scenario_.RanksOf(of.group);
    if (flight->n_done > 0 || !scenario_.IsSimple(of.group) || ranks.size() > 8) continue;
    // The plans have been compared, and nothing of an earlier run is under way. Or the dead one
    // has not begun to compare them.
    const int64_t n_runs = n_posted_.at(place);
    const bool is_direct =
        flight->spec->kind == Kind::kSum && flight->spec->total() >= 64 * ranks.size();
    const bool is_alone = std::none_of(of.slots.begin(), of.slots.end(),
                                       [](const SlotSpec& spec) { return spec.is_posted(); });
    const auto& runs_of_dead = programs[static_cast<size_t>(dead)]->n_posted_;
    const auto first = runs_of_dead.lower_bound({plan, 0});
    const bool has_compared =
        incarnation_ > 0 || (first != runs_of_dead.end() && first->first.first == plan);
    if (has_compared && (!is_direct || !is_alone || n_runs < 2)) continue;
    const auto is_as_said = [&, &place = place](int rank) {
      const Program& other = *programs[static_cast<size_t>(rank)];
      const auto n = other.n_posted_.find(place);
      const bool has_begun =
          other.incarnation_ == incarnation_ && n != other.n_posted_.end() && n->second >= n_runs;
      if (rank == dead || !has_begun) return has_begun == (rank != dead);
      return world_.now() - other.last_.at(place)->posted >= age;
    };
    const bool is_member = std::count(ranks.begin(), ranks.end(), dead) > 0;
    if (is_member && std::all_of(ranks.begin(), ranks.end(), is_as_said)) return true;
  }
  return false;
}

void Program::AwaitVariable(int plan, int slot) {
  const void* key = &variables_[static_cast<size_t>(plan)][static_cast<size_t>(slot)];
  auto is_there = std::make_shared<bool>(false);
  pending.Await({key}, [this, is_there](const Status&) {
    *is_there = true;
    ++n_ended_;
    world_.Signal(this);
  });
  while (!*is_there) AwaitChange();
}

void Program::PostGather(Step& step, int plan, int slot) {
  AwaitVariable(plan, slot);
  if (rank_ == scenario_.slow_rank || random().Chance(0.3)) Compute();
  const void* key = &variables_[static_cast<size_t>(plan)][static_cast<size_t>(slot)];
  const PlanDraw& of = scenario_.plans[static_cast<size_t>(plan)];
  pending.Begin({key});
  const auto end = [this, key](const Status& status) { pending.End({key}, status); };
  const SlotSpec& spec = of.slots[static_cast<size_t>(slot)];
  step.flights[{plan, slot}] = Post(spec, of.group, plan, slot, nullptr, end);
}

void Program::PostNext(Step& step, std::shared_ptr<std::atomic<bool>> is_cancelled) {
  const auto [plan, slot] = step.to_post.back();
  step.to_post.pop_back();
  const PlanDraw& of = scenario_.plans[static_cast<size_t>(plan)];
  const SlotSpec& spec = of.slots[static_cast<size_t>(slot)];
  step.flights[{plan, slot}] = Post(spec, of.group, plan, slot, std::move(is_cancelled));
}

void Program::Cancel(Step& step, const Status& why) {
  if (step.outcome != Outcome::kOk) return;
  step.outcome = why.code == StatusCode::kStopped ? Outcome::kStopped : Outcome::kFailed;
  step.why = why;
  const auto give_up = [this](int plan) {
    tfscale::GiveUpWaiting(plans_[static_cast<size_t>(plan)]);
    if (random().Chance(0.2)) world_.Sleep(random().Scale(0, kMilli), "cancels");
  };
  // As TensorFlow does where an op of a step has failed: it cancels those that wait, on one thread,
  // while another may begin one more.
  const bool begins_one = !step.to_post.empty() && random().Chance(0.2);
  const bool is_late = random().Chance(0.5);
  const int plan = begins_one ? step.to_post.back().first : -1;
  auto is_cancelled = std::make_shared<std::atomic<bool>>(begins_one && is_late);
  if (begins_one && is_late) give_up(plan);
  std::set<int> plans;
  for (const auto& [place, flight] : step.flights) {
    if (flight->n_done > 0 || !flight->is_cancelled) continue;
    *flight->is_cancelled = true;
    plans.insert(place.first);
  }
  for (int other : plans) give_up(other);
  if (!begins_one) return;
  PostNext(step, is_cancelled);
  *is_cancelled = true;
  if (!is_late) give_up(plan);
}

// What has ended lets others begin, or ends the step.
void Program::LookAt(Step& step) {
  for (auto& [place, flight] : step.flights) {
    if (flight->is_seen || flight->n_done == 0) continue;
    flight->is_seen = true;
    if (!flight->status.ok() && !flight->spec->is_posted()) Cancel(step, flight->status);
  }
  for (size_t i = 0; i < step.gathers.size() && step.outcome == Outcome::kOk;) {
    const auto [plan, slot] = step.gathers[i];
    const SlotSpec& spec =
        scenario_.plans[static_cast<size_t>(plan)].slots[static_cast<size_t>(slot)];
    const auto before = step.flights.find({plan, spec.after});
    if (before == step.flights.end() || before->second->n_done == 0) {
      ++i;
      continue;
    }
    step.gathers.erase(step.gathers.begin() + static_cast<std::ptrdiff_t>(i));
    PostGather(step, plan, slot);
  }
}

// Until all ops that the step has begun have ended, and its gathers have been posted.
void Program::AwaitOps(Step& step, bool with_gathers) {
  while (true) {
    const int64_t before = n_ended_;
    LookAt(step);
    const bool is_over = std::all_of(step.flights.begin(), step.flights.end(), [](const auto& of) {
      return of.second->n_done > 0 || of.second->spec->is_posted();
    });
    const bool are_posted = !with_gathers || step.gathers.empty() || step.outcome != Outcome::kOk;
    if (is_over && are_posted && n_ended_ == before) break;
    while (n_ended_ == before) world_.Wait(this, kNever, phase.c_str());
  }
}

Outcome Program::RunStep(const std::vector<int>& plans, bool fails_here) {
  Step step;
  ++n_steps_;
  phase = "step " + std::to_string(n_steps_);
  world_.Note("begins step", n_steps_, incarnation_);
  for (int plan : plans) {
    const PlanDraw& of = scenario_.plans[static_cast<size_t>(plan)];
    if (!IsMember(of.group)) continue;
    for (size_t slot = 0; slot < of.slots.size(); ++slot) {
      const bool is_posted = of.slots[slot].is_posted();
      (is_posted ? step.gathers : step.to_post).emplace_back(plan, static_cast<int>(slot));
    }
  }
  const double share = random().Chance(0.5) ? 0.5 : random().Below(2);
  for (const auto& [plan, slot] : step.gathers) {
    if (random().Chance(share)) AwaitVariable(plan, slot);
  }
  if (scenario_.has_gaps) {
    std::reverse(step.to_post.begin(), step.to_post.end());  // the last one is next
  } else {
    random().Shuffle(step.to_post);
  }
  const bool is_sequential = rank_ == scenario_.sequential_rank;
  // In the order of each plan, the first one last.
  if (is_sequential) std::sort(step.to_post.rbegin(), step.to_post.rend());
  const int64_t n_ops = static_cast<int64_t>(step.to_post.size());
  for (int64_t left = n_ops, fails_at = fails_here ? random().Below(n_ops + 1) : -1;; --left) {
    if (left == fails_at) {
      Cancel(step, Status::Failed("An op of rank " + std::to_string(rank_) + "."));
    }
    Compute();
    LookAt(step);
    if (step.outcome != Outcome::kOk || left == 0) break;
    PostNext(step, std::make_shared<std::atomic<bool>>(false));
    if (is_sequential) AwaitOps(step, false);
  }
  AwaitOps(step, true);
  if (step.outcome == Outcome::kFailed) failure = step.why.message;
  return step.outcome;
}

void Program::Wait(const std::shared_ptr<Flight>& flight) {
  while (flight->n_done == 0) AwaitChange();
  if (!flight->status.ok()) failure = flight->status.message;
}

// As tfscale.fit.agreement does it, and the first step of a fit without callbacks that follows one
// with: false where the program ends.
bool Program::BeginFit(int number) {
  const auto has_callbacks = [this](int fit) {
    return scenario_.fits[static_cast<size_t>(fit)].has_callbacks;
  };
  if (!has_callbacks(number) && !has_callbacks(number - 1)) return true;
  phase = "begins a fit";
  Drain();
  struct Numbers {
    int64_t own, sum;
  };
  auto numbers = std::make_shared<Numbers>();
  numbers->own = engine->NumGivenUp();
  tfscale::ReductionArgs args;
  args.dtype = tfscale::DType::kInt64;
  args.inputs = {&numbers->own};
  args.outputs = {&numbers->sum};
  args.counts = {1};
  tfscale::Call call;
  call.name = "begin of fit";
  call.memory = numbers;
  auto flight = std::make_shared<Flight>();
  call.done = [this, flight](const Status& status) {
    flight->status = status;
    ++flight->n_done;
    ++n_ended_;
    world_.Signal(this);
  };
  ++n_eager_;
  tfscale::Submit(tfscale::MakeReduction(std::move(args)), std::move(call));
  Wait(flight);
  if (!failure.empty()) return false;
  if (numbers->sum == 0) return true;
  StartIncarnation();
  return true;
}

void Program::StartIncarnation() {
  ++incarnation_;
  n_posted_.clear();
  last_.clear();
  n_steps_ = 0;
  engine->StartIncarnation(static_cast<int>(incarnation_));
}

// As tfscale.fit.uneven_batches does it.
bool Program::Fit(int number) {
  const FitDraw& fit = scenario_.fits[static_cast<size_t>(number)];
  if (!BeginFit(number)) return false;
  bool is_stopping = false;
  const bool has_meeting = scenario_.has_meeting && fit.has_callbacks;
  bool has_met = !has_meeting;
  for (int epoch = 0; epoch < static_cast<int>(fit.n_steps.size()) && !is_stopping; ++epoch) {
    const int64_t n_given_up = engine->NumGivenUp();
    const int n_steps = fit.n_steps[static_cast<size_t>(epoch)];
    int n_begun = 0;
    for (int s = 0; s <= n_steps; ++s) {
      const bool is_turn = s == scenario_.turn_step;
      if (is_turn && IsTurn(Turn::kLeave, number, epoch)) return false;
      if (is_turn && IsTurn(Turn::kStop, number, epoch)) is_stopping = true;
      if (is_stopping || s == n_steps) break;
      if (is_turn && IsTurn(Turn::kUneven, number, epoch)) break;
      ++n_begun;
      if (!has_met && random().Chance(0.3)) {
        has_met = true;
        open_meeting_ = Post(scenario_.meeting, 0, kMeeting, 0);
      }
      const bool fails = is_turn && IsTurn(Turn::kStepFails, number, epoch);
      // After an uneven epoch ranks may be a step apart, and only calls of steps know it: all have
      // the same plans.
      const bool may_differ =
          scenario_.turn == Turn::kUneven && scenario_.turn_fit == number &&
          std::pair(epoch, s) >= std::pair(scenario_.turn_epoch, scenario_.turn_step);
      const Outcome outcome = RunStep(fit.plans[static_cast<size_t>(may_differ ? 0 : s)], fails);
      invariants_.NoteStep({number, epoch, s}, outcome);
      if (outcome == Outcome::kFailed) return false;
      if (outcome == Outcome::kStopped) {
        is_stopping = true;
        break;
      }
      if (!fit.has_eager[static_cast<size_t>(s)] || may_differ) continue;
      phase = "an eager call";
      const SlotSpec& spec = scenario_.eager[static_cast<size_t>(s) % scenario_.eager.size()];
      Wait(Post(spec, 0, tfscale::kEager, -1));
      if (!failure.empty()) return false;
    }
    // A rank that stops between two epochs never begins the second.
    const bool is_void =
        (is_stopping && n_begun == 0) || (n_begun <= 1 && engine->NumGivenUp() > n_given_up);
    world_.Note("ends epoch", epoch, is_void, is_stopping);
    if (!is_void && fit.has_callbacks)
      engine->Mark(is_stopping ? MarkKind::kStop : MarkKind::kEpochEnd);
  }
  if (fit.has_callbacks) engine->Mark(is_stopping ? MarkKind::kStop : MarkKind::kEpochEnd);
  if (!has_meeting) return true;
  phase = "a meeting";
  if (!has_met) open_meeting_ = Post(scenario_.meeting, 0, kMeeting, 0);
  // Its caller has a time limit of its own.
  const Time limit = world_.now() + 40 * kSecond;
  while (open_meeting_->n_done == 0 && world_.now() < limit) {
    world_.Wait(this, limit, phase.c_str());
  }
  if (open_meeting_->n_done == 0) failure = "The meeting has taken too long.";
  if (!open_meeting_->status.ok()) failure = open_meeting_->status.message;
  return failure.empty();
}

// The root of a broadcast needs no other rank for its part: it may have left, from a later
// incarnation, before the others begin theirs.
void Program::Last() {
  phase = "a last broadcast";
  Drain();
  for (int i = 0; i < 2 && failure.empty(); ++i) {
    Wait(Post(scenario_.last, 0, kLast, 0));
    if (failure.empty()) StartIncarnation();
  }
}

void Program::Drain() {
  if (pending.n_pending() > 0) engine->GiveUpStranded();
  pending.WaitForAll();
}

void Program::Main() {
  try {
    SetUp();
    bool is_whole = true;
    for (size_t f = 0; f < scenario_.fits.size() && is_whole; ++f) {
      is_whole = Fit(static_cast<int>(f));
    }
    std::vector<tfscale::Event> events(1 << 12);
    events.resize(engine->events().Take(events.data(), events.size()));
    invariants_.CheckEvents(rank_, events, plans_, incarnation_ > 0);
    if (is_whole && scenario_.has_last) Last();
    if (rank_ != scenario_.turn_rank) world_.Sleep(scenario_.pause_at_end, "pauses");
    phase = "leaves";
    Drain();
  } catch (const tfscale::CommError& error) {
    if (failure.empty()) failure = error.what();
  }
  if (!failure.empty()) world_.Note(failure);
  phase = "leaves";
  is_leaving = true;
  if (engine) {
    end = engine->Leave();
    if (!end.failure.empty()) world_.Note("leaving: " + end.failure);
    if (end.is_together && world_.network().n_requests(rank_) > 0) {
      world_.Violate("rank " + std::to_string(rank_) + " has left with messages under way");
    }
    engine.reset();
  }
  world_.Note("ends");
}

}  // namespace sim
