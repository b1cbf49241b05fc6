#include "test/sim/training.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "comm/engine.h"
#include "comm/pending.h"
#include "test/sim/network.h"
#include "test/sim/work.h"

namespace sim {
namespace {

using tfscale::Engine;
using tfscale::MarkKind;
using tfscale::PendingVariables;
using tfscale::Status;
using tfscale::StatusCode;

constexpr int kMeeting = 99;  // the plan of a meeting
constexpr int kLast = 98;     // the plan of broadcasts after all fits

// A rank that departs from what all do.
enum class Turn { kNone, kStop, kUneven, kStepFails, kLeave };

struct PlanDraw {
  std::string name;
  int group = 0;
  std::vector<SlotSpec> slots;
};

struct FitDraw {
  std::vector<int> n_steps;             // by epoch
  std::vector<std::vector<int>> plans;  // of each step of an epoch
  std::vector<bool> has_eager;          // after each of these steps
  bool has_callbacks = true;            // without, it sets no marks
};

// All that is drawn before a run.
struct Scenario {
  Machine machine;
  tfscale::EngineOptions options{};
  std::vector<std::vector<int>> groups;  // members; the first has all ranks
  std::vector<PlanDraw> plans;
  std::vector<SlotSpec> eager;
  SlotSpec meeting;
  bool has_meeting = false;
  SlotSpec last;
  bool has_last = false;
  std::vector<FitDraw> fits;
  Turn turn = Turn::kNone;
  int turn_rank = -1, turn_fit = 0, turn_epoch = 0, turn_step = 0;
  std::vector<Fault> faults;
  Time most_compute = 0;
  bool has_long_gathers = false;  // on slow links, beside other collectives

  bool has_fault(FaultKind kind) const {
    return std::any_of(faults.begin(), faults.end(),
                       [kind](const Fault& fault) { return fault.kind == kind; });
  }
};

void DrawMachine(Random& random, const Choice& choice, Machine* machine) {
  machine->n_ranks = choice.n_ranks > 0 ? choice.n_ranks
                                        : static_cast<int>(random.Of(std::vector<int64_t>{
                                              1, 2, 2, 3, 3, 4, 4, 4, 5, 6, 8, 9, 12, 16}));
  const int layout = static_cast<int>(random.Below(4));
  int host = 0;
  for (int rank = 0; rank < machine->n_ranks; ++rank) {
    if (layout == 0) host = rank;                               // hosts of one rank
    if (layout == 2) host = rank / 2;                           // of two
    if (layout == 3 && rank > 0 && random.Chance(0.4)) ++host;  // of any number
    machine->host_of.push_back(host);
  }
  machine->latency = random.Scale(kMicro, 200 * kMicro);
  machine->bytes_per_ns = static_cast<double>(random.Scale(10, 5000)) / 1000;
  machine->jitter = random.Scale(100, 300 * kMicro);
  machine->overtakes = random.Chance(0.5);
  machine->eager_bytes = random.Of(std::vector<int>{0, 64, 1000, 4096, 65536});
  machine->max_tag = random.Of(std::vector<int>{32767, 1 << 20, 1 << 28});
  if (random.Chance(0.3)) {
    machine->late = 0.05;
    machine->lateness = random.Scale(10 * kMicro, 20 * kMilli);
  }
  if (random.Chance(0.3)) machine->spurious = 0.1;
  machine->shuffles = random.Chance(0.5);
  machine->reports_death = random.Chance(0.3);
}

void DrawOptions(Random& random, tfscale::EngineOptions* options) {
  options->stall_warning_s = static_cast<double>(random.Of(std::vector<int>{1, 2, 5})) / 10;
  options->stall_shutdown_s = options->stall_warning_s * static_cast<double>(random.Between(1, 3));
  options->report_s = random.Chance(0.3) ? 0.01 : 0.0;
  options->max_message_bytes = random.Of(std::vector<int64_t>{100, 1000, 1 << 20});
  options->chunk_bytes = random.Of(std::vector<int64_t>{128, 640, 1 << 20});
  options->window_bytes = random.Of(std::vector<int64_t>{500, 4000, 1 << 20});
  options->host_memory_bytes = random.Of(std::vector<int64_t>{0, 1, 200, 1000});
  options->reduce_threads = 1;
  options->pin_core = -1;
  options->ranks_per_host = static_cast<int32_t>(random.Chance(0.2) ? random.Between(1, 3) : 0);
  options->stack_signal = 10;
}

PlanDraw DrawPlan(Random& random, const Scenario& scenario, int number) {
  PlanDraw plan;
  plan.name = "plan" + std::to_string(number);
  if (number > 0) {
    plan.group = static_cast<int>(random.Below(static_cast<int64_t>(scenario.groups.size())));
  }
  const int n = static_cast<int>(scenario.groups[static_cast<size_t>(plan.group)].size());
  const size_t most = static_cast<size_t>(random.Of(std::vector<int>{8, 100, 600}));
  const int64_t n_slots = random.Between(1, 3);
  for (int64_t i = 0; i < n_slots; ++i) {
    plan.slots.push_back(DrawSlot(random, n, most));
    if (number == 0 && i == 0) {  // a step that not all ranks join ends on none
      plan.slots[0].kind = Kind::kSum;
      plan.slots[0].counts[0] += 1;
    }
    if (!random.Chance(0.35)) continue;
    SlotSpec gather = DrawSlot(random, n, most);
    if (scenario.has_long_gathers) {
      gather.counts.assign(1, static_cast<size_t>(random.Between(1000, 3000)));
      gather.cuts = DrawCuts(random, n, gather.total());
    }
    gather.kind = random.Chance(0.7) ? Kind::kGather : Kind::kChange;
    gather.dtype = tfscale::DType::kFloat32;
    gather.op = tfscale::ReduceOp::kSum;
    gather.postscale = 1.0;
    gather.is_compared = false;
    gather.after = static_cast<int>(random.Below(static_cast<int64_t>(plan.slots.size())));
    while (plan.slots[static_cast<size_t>(gather.after)].is_posted()) --gather.after;
    plan.slots.push_back(gather);
  }
  return plan;
}

Scenario Draw(uint64_t seed, const Choice& choice) {
  Random random(seed);
  Scenario scenario;
  DrawMachine(random, choice, &scenario.machine);
  DrawOptions(random, &scenario.options);
  scenario.has_long_gathers = random.Chance(0.1);
  if (scenario.has_long_gathers) {
    scenario.machine.bytes_per_ns = 0.02;
    scenario.machine.eager_bytes = 64;
    scenario.options.chunk_bytes = 128;
  }
  const int n_ranks = scenario.machine.n_ranks;
  scenario.groups.emplace_back();
  for (int rank = 0; rank < n_ranks; ++rank) scenario.groups[0].push_back(rank);
  while (scenario.groups.size() < 3 && n_ranks > 1 && random.Chance(0.4)) {
    std::vector<int> members;
    for (int rank = 0; rank < n_ranks; ++rank) {
      if (random.Chance(0.6)) members.push_back(rank);
    }
    if (!members.empty()) scenario.groups.push_back(members);
  }
  const int n_plans = choice.n_plans > 0 ? choice.n_plans : static_cast<int>(random.Between(1, 5));
  for (int i = 0; i < n_plans; ++i) scenario.plans.push_back(DrawPlan(random, scenario, i));
  for (int i = 0; i < 3; ++i) scenario.eager.push_back(DrawSlot(random, n_ranks, 100));
  scenario.meeting = DrawSlot(random, n_ranks, 50);
  scenario.has_meeting = random.Chance(0.2);
  scenario.last = DrawSlot(random, n_ranks, 50);
  scenario.last.kind = Kind::kBroadcast;
  scenario.has_last = random.Chance(0.15);
  scenario.most_compute = random.Scale(kMicro, 2 * kMilli);

  const double kind = static_cast<double>(random.Below(100)) / 100;
  const bool has_marks = choice.has_marks && n_ranks > 1 && kind < 0.4;
  const bool has_faults = choice.has_faults && n_ranks > 1 && kind > 0.3 && kind < 0.65;
  const int64_t n_fits = random.Between(1, has_marks ? 3 : 2);
  for (int64_t f = 0; f < n_fits; ++f) {
    FitDraw fit;
    int n_left = choice.n_steps > 0 ? choice.n_steps : static_cast<int>(random.Between(1, 6));
    while (n_left > 0) {
      const int n_steps = static_cast<int>(random.Between(1, n_left));
      fit.n_steps.push_back(n_steps);
      n_left -= n_steps;
    }
    for (int i = 0; i < 7; ++i) {
      std::vector<int> plans = {0};
      for (int p = 1; p < n_plans; ++p) {
        if (choice.n_plans > 0 || random.Chance(0.7)) plans.push_back(p);
      }
      fit.plans.push_back(plans);
      fit.has_eager.push_back(random.Chance(0.2));
    }
    fit.has_callbacks = f == 0 || random.Chance(0.6);
    scenario.fits.push_back(fit);
    if (choice.n_steps > 0) break;
  }
  if (has_marks) {
    scenario.turn = static_cast<Turn>(random.Of(std::vector<int>{1, 1, 1, 2, 3, 4}));
    scenario.turn_rank = static_cast<int>(random.Below(n_ranks));
    scenario.turn_fit = static_cast<int>(random.Below(static_cast<int64_t>(scenario.fits.size())));
    FitDraw& fit = scenario.fits[static_cast<size_t>(scenario.turn_fit)];
    fit.has_callbacks = true;
    scenario.turn_epoch = static_cast<int>(random.Below(static_cast<int64_t>(fit.n_steps.size())));
    scenario.turn_step =
        static_cast<int>(random.Below(fit.n_steps[static_cast<size_t>(scenario.turn_epoch)] + 1));
  }
  if (has_faults) {
    if (random.Chance(0.3)) scenario.machine.lost = 0.02;
    const int64_t n_faults = random.Chance(0.8) ? 1 : 2;
    for (int64_t i = 0; i < n_faults; ++i) {
      Fault fault{};
      fault.kind =
          static_cast<FaultKind>(random.Of(std::vector<int>{0, 0, 0, 0, 1, 1, 2, 3, 4, 5}));
      const bool is_short = random.Chance(0.5);
      const Time limit =
          static_cast<Time>(scenario.options.stall_shutdown_s * static_cast<double>(kSecond));
      fault.duration =
          is_short ? random.Scale(kMicro, limit / 4) : limit + random.Below(8 * kSecond);
      const int64_t n_ticks = 2000 * n_ranks;  // of most runs
      fault.tick = random.Chance(0.4) ? random.Scale(0, n_ticks) : random.Below(n_ticks);
      scenario.faults.push_back(fault);
    }
  }
  return scenario;
}

class Training;

// A collective that a rank has posted.
struct Flight {
  std::unique_ptr<Work> work;
  const SlotSpec* spec = nullptr;
  std::string name;
  int n_done = 0;
  Status status;
  bool is_seen = false;
  int slot = -1;
  std::shared_ptr<std::atomic<bool>> is_cancelled;  // null where its op does not wait
};

enum class Outcome { kOk, kStopped, kFailed };

// What one rank's program does, on its main thread.
class Program {
 public:
  Program(Training& training, int rank) : training_(training), rank_(rank) {}

  void Main();

  std::unique_ptr<Engine> engine;
  PendingVariables pending;
  int64_t n_buffers = 0;  // of the pool, in use
  std::string failure;    // why it ended early, "" if it did not
  Engine::End end;
  bool is_leaving = false;
  std::string phase = "starts";

 private:
  struct Step {
    std::vector<std::pair<int, int>> to_post;
    std::map<std::pair<int, int>, std::shared_ptr<Flight>> flights;
    std::vector<std::pair<int, int>> gathers;  // that are not posted yet
    Outcome outcome = Outcome::kOk;
    Status why;
  };

  World& world() const;
  Random& random() const;
  const Scenario& scenario() const;
  bool IsMember(int group) const;
  int PlaceIn(int group) const;
  bool IsTurn(Turn turn, int fit, int epoch) const;

  void SetUp();
  void Compute();
  void AwaitChange();
  std::shared_ptr<Flight> Post(const SlotSpec& spec, int group, int plan, int slot,
                               std::shared_ptr<std::atomic<bool>> is_cancelled = nullptr,
                               std::function<void(const Status&)> then = nullptr);
  // The next op of a step.
  void PostNext(Step& step, std::shared_ptr<std::atomic<bool>> is_cancelled);
  void PostGather(Step& step, int plan, int slot);
  void AwaitVariable(int plan, int slot);
  void LookAt(Step& step);
  void Cancel(Step& step, const Status& why);
  Outcome RunStep(const std::vector<int>& plans, bool fails_here);
  void Wait(const std::shared_ptr<Flight>& flight);
  bool BeginFit(int number);
  bool Fit(int number);
  void StartIncarnation();
  void Last();
  void Drain();
  void CheckEvents();
  void CheckHeld(const std::vector<tfscale::Event>& events, const tfscale::Event& early, int plan,
                 Time turn);

  Training& training_;
  const int rank_;
  std::vector<int> groups_;  // ids
  std::vector<int> plans_;   // ids; -1: no member
  int meeting_ = -1;
  int last_plan_ = -1;
  std::shared_ptr<Flight> open_meeting_;
  std::map<std::pair<int, int>, int64_t> n_posted_;  // by plan and slot, in this incarnation
  std::map<std::pair<int, int>, std::shared_ptr<Flight>> last_;
  std::vector<std::vector<char>> variables_;  // by plan: their addresses are keys
  int64_t n_eager_ = 0;
  int64_t n_steps_ = 0;
  int64_t incarnation_ = 0;
  int64_t n_ended_ = 0;
};

class Training {
 public:
  Training(uint64_t seed, const Choice& choice, bool is_logged)
      : scenario(Draw(seed, choice)), world(seed ^ 0x5DEECE66DULL, scenario.machine, is_logged) {
    for (int rank = 0; rank < world.size(); ++rank) {
      programs.push_back(std::make_unique<Program>(*this, rank));
    }
  }

  Result Run();
  Program& current() { return *programs[static_cast<size_t>(world.current())]; }

  // Results that must be equal, by plan, slot, incarnation and execution.
  using Key = std::vector<int64_t>;
  void Compare(const Key& key, uint64_t digest, const std::string& name) {
    const auto known = digests_.emplace(key, digest);
    if (known.first->second != digest) world.Violate("ranks have different results of " + name);
  }
  // How a step of a fit and epoch ended on a rank.
  void NoteStep(const Key& step, Outcome outcome) {
    std::set<Outcome>& outcomes = steps_[step];
    outcomes.insert(outcome);
    if (outcomes.count(Outcome::kOk) > 0 && outcomes.count(Outcome::kStopped) > 0) {
      world.Violate("some ranks have applied step " + std::to_string(step[2]) + " of epoch " +
                    std::to_string(step[1]) + ", others have not");
    }
  }
  void OnSetUp();
  std::string Describe() const;
  // The first tag of a slot in the first incarnation, as Group::SlotTag says.
  int TagOf(int plan, int slot) const;
  // No message passes a second rank, and no other group has the same members.
  bool IsSimple(int group) const;
  // An execution of a slot of a plan, noted by its first member.
  void NoteExecution(int plan, int slot, uint64_t seed) { seeds_[{plan, slot}].push_back(seed); }

  const Scenario scenario;
  World world;
  std::vector<std::unique_ptr<Program>> programs;
  int64_t n_collectives = 0;
  int64_t n_ok = 0;
  std::vector<Fault> happened;
  int failing = -1;  // the rank whose program fails the engine

 private:
  void CheckEnd();
  void CheckFailures();
  void CheckBytes();

  std::map<Key, uint64_t> digests_;
  std::map<Key, std::set<Outcome>> steps_;
  std::map<std::pair<int, int>, std::vector<uint64_t>> seeds_;
  int n_set_up_ = 0;
};

Training* the_training = nullptr;

World& Program::world() const { return training_.world; }
Random& Program::random() const { return training_.world.random(); }
const Scenario& Program::scenario() const { return training_.scenario; }

bool Program::IsMember(int group) const { return PlaceIn(group) >= 0; }

int Program::PlaceIn(int group) const {
  const std::vector<int>& ranks = scenario().groups[static_cast<size_t>(group)];
  const auto it = std::find(ranks.begin(), ranks.end(), rank_);
  return it == ranks.end() ? -1 : static_cast<int>(it - ranks.begin());
}

bool Program::IsTurn(Turn turn, int fit, int epoch) const {
  return scenario().turn == turn && scenario().turn_rank == rank_ && scenario().turn_fit == fit &&
         scenario().turn_epoch == epoch;
}

void Program::Compute() {
  if (random().Chance(0.5)) world().Sleep(random().Scale(0, scenario().most_compute), "computes");
}

// Until any collective of this rank has ended.
void Program::AwaitChange() {
  const int64_t before = n_ended_;
  while (n_ended_ == before) world().Wait(this, kNever, phase.c_str());
}

void Program::SetUp() {
  phase = "starts";
  engine = std::make_unique<Engine>(MPI_COMM_WORLD, scenario().options,
                                    std::make_unique<tfscale::MpiEnv>());
  groups_.push_back(0);
  for (size_t i = 1; i < scenario().groups.size(); ++i) {
    groups_.push_back(engine->AddGroup(scenario().groups[i]));
  }
  if (scenario().groups.size() > 1 && scenario().has_meeting) {
    // One that is removed, and its number used again.
    const int extra = engine->AddGroup(scenario().groups[1]);
    engine->RemoveGroup(extra);
    if (engine->AddGroup(scenario().groups[1]) != extra)
      world().Violate("a group's id is not free");
  }
  for (const PlanDraw& plan : scenario().plans) {
    variables_.emplace_back(plan.slots.size());
    plans_.push_back(-1);
    if (!IsMember(plan.group)) continue;
    plans_.back() = engine->plans().Create(groups_[static_cast<size_t>(plan.group)], plan.name);
    for (const SlotSpec& slot : plan.slots)
      engine->plans().AddSlot(plans_.back(), NameOf(slot.kind));
  }
  // Those with plans stay, on their members.
  for (size_t i = 1; i < groups_.size() && scenario().has_meeting; ++i) {
    engine->RemoveGroup(groups_[i]);
  }
  meeting_ = engine->plans().Create(0, "save", true);
  engine->plans().AddSlot(meeting_, "save");
  last_plan_ = engine->plans().Create(0, "last");
  engine->plans().AddSlot(last_plan_, "broadcast");
  training_.OnSetUp();
}

std::shared_ptr<Flight> Program::Post(const SlotSpec& spec, int group, int plan, int slot,
                                      std::shared_ptr<std::atomic<bool>> is_cancelled,
                                      std::function<void(const Status&)> then) {
  const int n = static_cast<int>(scenario().groups[static_cast<size_t>(group)].size());
  int64_t& n_before = plan == tfscale::kEager ? n_eager_ : n_posted_[{plan, slot}];
  const int64_t execution = n_before++;
  const int64_t incarnation = plan == tfscale::kEager || plan == kMeeting ? 0 : incarnation_;
  const Training::Key key = {plan, slot, incarnation, execution};
  uint64_t seed = 0x9E3779B97F4A7C15ULL;
  for (int64_t part : key) seed = Random(seed + static_cast<uint64_t>(part)).Next();
  auto flight = std::make_shared<Flight>();
  flight->spec = &spec;
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
      world().network().RequireUnused(rank, data, bytes, flight->name.c_str());
    });
  });
  world().Note("posts", plan, slot, execution);
  if (PlaceIn(group) == 0 && plan >= 0) training_.NoteExecution(plan, slot, seed);
  ++training_.n_collectives;
  tfscale::OperationHandle operation = flight->work->Operation();
  call.done = [this, flight, key, then = std::move(then)](const Status& status) {
    world().Note(status.ok() ? "ended" : "failed", key[0], key[1], key[3]);
    if (++flight->n_done > 1) world().Violate(flight->name + " has ended twice");
    flight->status = status;
    if (status.ok()) {
      ++training_.n_ok;
      const std::string why = flight->work->Check();
      if (!why.empty()) {
        world().Violate(flight->name + " is wrong on rank " + std::to_string(rank_) + ": " + why);
      }
      const uint64_t digest = flight->work->Digest();
      if (digest != 0) training_.Compare(key, digest, flight->name);
    }
    if (then) then(status);
    ++n_ended_;
    world().Signal(this);
  };
  tfscale::Submit(std::move(operation), std::move(call));
  return flight;
}

void Program::AwaitVariable(int plan, int slot) {
  const void* key = &variables_[static_cast<size_t>(plan)][static_cast<size_t>(slot)];
  auto is_there = std::make_shared<bool>(false);
  pending.Await({key}, [this, is_there](const Status&) {
    *is_there = true;
    ++n_ended_;
    world().Signal(this);
  });
  while (!*is_there) AwaitChange();
}

void Program::PostGather(Step& step, int plan, int slot) {
  AwaitVariable(plan, slot);
  if (random().Chance(0.3)) Compute();
  const void* key = &variables_[static_cast<size_t>(plan)][static_cast<size_t>(slot)];
  const PlanDraw& of = scenario().plans[static_cast<size_t>(plan)];
  pending.Begin({key});
  const auto end = [this, key](const Status& status) { pending.End({key}, status); };
  const SlotSpec& spec = of.slots[static_cast<size_t>(slot)];
  step.flights[{plan, slot}] = Post(spec, of.group, plan, slot, nullptr, end);
}

void Program::PostNext(Step& step, std::shared_ptr<std::atomic<bool>> is_cancelled) {
  const auto [plan, slot] = step.to_post.back();
  step.to_post.pop_back();
  const PlanDraw& of = scenario().plans[static_cast<size_t>(plan)];
  const SlotSpec& spec = of.slots[static_cast<size_t>(slot)];
  step.flights[{plan, slot}] = Post(spec, of.group, plan, slot, std::move(is_cancelled));
}

void Program::Cancel(Step& step, const Status& why) {
  if (step.outcome != Outcome::kOk) return;
  step.outcome = why.code == StatusCode::kStopped ? Outcome::kStopped : Outcome::kFailed;
  step.why = why;
  const auto give_up = [this](int plan) {
    tfscale::GiveUpWaiting(plans_[static_cast<size_t>(plan)]);
    if (random().Chance(0.2)) world().Sleep(random().Scale(0, kMilli), "cancels");
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
        scenario().plans[static_cast<size_t>(plan)].slots[static_cast<size_t>(slot)];
    const auto before = step.flights.find({plan, spec.after});
    if (before == step.flights.end() || before->second->n_done == 0) {
      ++i;
      continue;
    }
    step.gathers.erase(step.gathers.begin() + static_cast<std::ptrdiff_t>(i));
    PostGather(step, plan, slot);
  }
}

Outcome Program::RunStep(const std::vector<int>& plans, bool fails_here) {
  Step step;
  ++n_steps_;
  phase = "step " + std::to_string(n_steps_);
  world().Note("begins step", n_steps_, incarnation_);
  for (int plan : plans) {
    const PlanDraw& of = scenario().plans[static_cast<size_t>(plan)];
    if (!IsMember(of.group)) continue;
    for (size_t slot = 0; slot < of.slots.size(); ++slot) {
      const bool is_posted = of.slots[slot].is_posted();
      (is_posted ? step.gathers : step.to_post).emplace_back(plan, static_cast<int>(slot));
    }
  }
  for (const auto& [plan, slot] : step.gathers) {
    if (random().Chance(0.5)) AwaitVariable(plan, slot);
  }
  random().Shuffle(step.to_post);
  const int64_t n_ops = static_cast<int64_t>(step.to_post.size());
  for (int64_t left = n_ops, fails_at = fails_here ? random().Below(n_ops + 1) : -1;; --left) {
    if (left == fails_at) {
      Cancel(step, Status::Failed("An op of rank " + std::to_string(rank_) + "."));
    }
    Compute();
    LookAt(step);
    if (step.outcome != Outcome::kOk || left == 0) break;
    PostNext(step, std::make_shared<std::atomic<bool>>(false));
  }
  while (true) {
    const int64_t before = n_ended_;
    LookAt(step);
    const bool is_over = std::all_of(step.flights.begin(), step.flights.end(), [](const auto& of) {
      return of.second->n_done > 0 || of.second->spec->is_posted();
    });
    if (is_over && n_ended_ == before && (step.gathers.empty() || step.outcome != Outcome::kOk)) {
      break;
    }
    while (n_ended_ == before) world().Wait(this, kNever, phase.c_str());
  }
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
    return scenario().fits[static_cast<size_t>(fit)].has_callbacks;
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
    world().Signal(this);
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
  const FitDraw& fit = scenario().fits[static_cast<size_t>(number)];
  if (!BeginFit(number)) return false;
  bool is_stopping = false;
  const bool has_meeting = scenario().has_meeting && fit.has_callbacks;
  bool has_met = !has_meeting;
  for (int epoch = 0; epoch < static_cast<int>(fit.n_steps.size()) && !is_stopping; ++epoch) {
    const int64_t n_given_up = engine->NumGivenUp();
    const int n_steps = fit.n_steps[static_cast<size_t>(epoch)];
    int n_begun = 0;
    for (int s = 0; s <= n_steps; ++s) {
      const bool is_turn = s == scenario().turn_step;
      if (is_turn && IsTurn(Turn::kLeave, number, epoch)) return false;
      if (is_turn && IsTurn(Turn::kStop, number, epoch)) is_stopping = true;
      if (is_stopping || s == n_steps) break;
      if (is_turn && IsTurn(Turn::kUneven, number, epoch)) break;
      ++n_begun;
      if (!has_met && random().Chance(0.3)) {
        has_met = true;
        open_meeting_ = Post(scenario().meeting, 0, kMeeting, 0);
      }
      const bool fails = is_turn && IsTurn(Turn::kStepFails, number, epoch);
      const Outcome outcome = RunStep(fit.plans[static_cast<size_t>(s)], fails);
      training_.NoteStep({number, epoch, s}, outcome);
      if (outcome == Outcome::kFailed) return false;
      if (outcome == Outcome::kStopped) {
        is_stopping = true;
        break;
      }
      if (!fit.has_eager[static_cast<size_t>(s)]) continue;
      phase = "an eager call";
      const SlotSpec& spec = scenario().eager[static_cast<size_t>(s) % scenario().eager.size()];
      Wait(Post(spec, 0, tfscale::kEager, -1));
      if (!failure.empty()) return false;
    }
    // A rank that stops between two epochs never begins the second.
    const bool is_void =
        (is_stopping && n_begun == 0) || (n_begun <= 1 && engine->NumGivenUp() > n_given_up);
    world().Note("ends epoch", epoch, is_void, is_stopping);
    if (!is_void && fit.has_callbacks)
      engine->Mark(is_stopping ? MarkKind::kStop : MarkKind::kEpochEnd);
  }
  if (fit.has_callbacks) engine->Mark(is_stopping ? MarkKind::kStop : MarkKind::kEpochEnd);
  if (!has_meeting) return true;
  phase = "a meeting";
  if (!has_met) open_meeting_ = Post(scenario().meeting, 0, kMeeting, 0);
  // Its caller has a time limit of its own.
  const Time limit = world().now() + 40 * kSecond;
  while (open_meeting_->n_done == 0 && world().now() < limit) {
    world().Wait(this, limit, phase.c_str());
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
    Wait(Post(scenario().last, 0, kLast, 0));
    if (failure.empty()) StartIncarnation();
  }
}

void Program::Drain() {
  if (pending.n_pending() > 0) engine->GiveUpStranded();
  pending.WaitForAll();
}

// Slots begin in their order, but for those that overtake where nothing else is active.
void Program::CheckEvents() {
  std::vector<tfscale::Event> events(1 << 12);
  events.resize(engine->events().Take(events.data(), events.size()));
  const auto is_of_plan = [this](const tfscale::Event& event) {
    return std::find(plans_.begin(), plans_.end(), event.plan) != plans_.end();
  };
  for (const tfscale::Event& event : events) {
    if (event.started_ns < event.posted_ns || event.ended_ns < event.started_ns) {
      world().Violate("an event ends before it begins");
    }
    if (!is_of_plan(event) || incarnation_ > 0) continue;
    const auto plan = std::find(plans_.begin(), plans_.end(), event.plan) - plans_.begin();
    const SlotSpec& spec =
        scenario().plans[static_cast<size_t>(plan)].slots[static_cast<size_t>(event.slot)];
    Time turn = 0;  // when the last slot before it began
    for (const tfscale::Event& other : events) {
      const bool is_before =
          other.plan == event.plan && other.execution == event.execution && other.slot < event.slot;
      if (!is_before || other.started_ns < event.started_ns) continue;
      turn = std::max<Time>(turn, other.started_ns);
      if (!spec.is_posted()) world().Violate("slots have not begun in the order of their plan");
      // It has overtaken: nothing else was active.
      for (const tfscale::Event& active : events) {
        if (active.started_ns < event.started_ns && event.started_ns < active.ended_ns) {
          world().Violate("a gather has overtaken while something was active");
        }
      }
    }
    if (turn > 0) world().Note("has overtaken", plan, event.slot, turn - event.started_ns);
    if (turn > 0 && spec.kind == Kind::kGather) {
      CheckHeld(events, event, static_cast<int>(plan), turn);
    }
  }
}

// What has overtaken sends nothing while something else is active.
void Program::CheckHeld(const std::vector<tfscale::Event>& events, const tfscale::Event& early,
                        int plan, Time turn) {
  const int group = scenario().plans[static_cast<size_t>(plan)].group;
  if (!training_.IsSimple(group)) return;
  const int tag = training_.TagOf(plan, early.slot);
  const Time offset = world().process(rank_).clock_offset;
  for (const Network::Sent& sent : world().network().sent()) {
    const bool is_it =
        sent.process == rank_ && sent.tag >= tag && sent.tag < tag + 3 &&
        world().network().comm(sent.comm).ranks == scenario().groups[static_cast<size_t>(group)];
    const Time time = sent.time + offset;
    if (!is_it || time < early.started_ns || time > std::min<Time>(turn, early.ended_ns)) continue;
    for (const tfscale::Event& other : events) {
      const auto of = std::find(plans_.begin(), plans_.end(), other.plan);
      const bool is_posted =
          of != plans_.end() && scenario()
                                    .plans[static_cast<size_t>(of - plans_.begin())]
                                    .slots[static_cast<size_t>(other.slot)]
                                    .is_posted();
      // An eager call begins in the middle of a round.
      const bool is_beside = other.started_ns < time && time < other.ended_ns;
      if (is_posted || other.plan == tfscale::kEager || !is_beside) continue;
      world().Violate("a gather that has overtaken sends while something else is active");
    }
  }
}

void Program::Main() {
  try {
    SetUp();
    bool is_whole = true;
    for (size_t f = 0; f < scenario().fits.size() && is_whole; ++f) {
      is_whole = Fit(static_cast<int>(f));
    }
    CheckEvents();
    if (is_whole && scenario().has_last) Last();
    phase = "leaves";
    Drain();
  } catch (const tfscale::CommError& error) {
    if (failure.empty()) failure = error.what();
  }
  if (!failure.empty()) world().Note(failure);
  phase = "leaves";
  is_leaving = true;
  if (engine) {
    end = engine->Leave();
    if (!end.failure.empty()) world().Note("leaving: " + end.failure);
    if (end.is_together && world().network().n_requests(rank_) > 0) {
      world().Violate("rank " + std::to_string(rank_) + " has left with messages under way");
    }
    engine.reset();
  }
  world().Note("ends");
}

void Training::OnSetUp() {
  if (++n_set_up_ < world.size()) return;
  for (const Fault& fault : scenario.faults) world.AddFault(fault);
  world.BeginFaults();
  world.on_fault = [this](const Fault& fault) {
    happened.push_back(fault);
    Program& program = *programs[static_cast<size_t>(fault.process)];
    if (fault.kind != FaultKind::kFail || !program.engine || program.is_leaving) return;
    world.Spawn(fault.process, [this, &program] {
      if (!program.engine || program.is_leaving) return;
      try {
        program.engine->Fail("the reason of rank " + std::to_string(world.current()));
      } catch (const tfscale::CommError&) {
        // It has ended meanwhile.
      }
    });
  };
}

// Which failures may be, and whom they name.
void Training::CheckFailures() {
  const auto limit =
      static_cast<Time>(scenario.options.stall_shutdown_s * static_cast<double>(kSecond));
  bool may_fail = scenario.machine.lost > 0 || scenario.turn > Turn::kStop;
  std::vector<std::string> names;  // of ranks that may be named
  for (const Fault& fault : happened) {
    const bool is_pause = fault.kind == FaultKind::kPause;
    if (is_pause && fault.duration < limit / 3) continue;
    may_fail = true;
    names.push_back("rank " + std::to_string(fault.process));
  }
  bool is_named = names.empty();
  bool has_failed = false;
  for (const auto& program : programs) {
    if (world.process(static_cast<int>(&program - programs.data())).is_dead) continue;
    const std::string text = program->failure + program->end.failure;
    if (text.empty() && (program->end.is_together || may_fail)) continue;
    has_failed = true;
    if (!may_fail) world.Violate("nothing was wrong, and yet: " + text);
    const bool is_late = text.find("No answer within the time limit") != std::string::npos;
    if (is_late && happened.empty() && scenario.machine.lost == 0) {
      world.Violate("a rank was waited for that had ended its step: " + text);
    }
    for (const std::string& name : names)
      is_named = is_named || text.find(name) != std::string::npos;
  }
  const bool is_one = happened.size() == 1 && scenario.turn == Turn::kNone &&
                      scenario.machine.lost == 0 && happened[0].kind == FaultKind::kDeath;
  if (is_one && has_failed && !is_named) world.Violate("no failure names the rank that has died");
}

// What was sent is what the algorithms say, where each execution has ended well.
void Training::CheckBytes() {
  if (scenario.options.host_memory_bytes > 0) return;
  for (size_t p = 0; p < scenario.plans.size(); ++p) {
    const PlanDraw& plan = scenario.plans[p];
    const std::vector<int>& ranks = scenario.groups[static_cast<size_t>(plan.group)];
    if (std::count(scenario.groups.begin(), scenario.groups.end(), ranks) > 1) continue;
    for (size_t slot = 0; slot < plan.slots.size(); ++slot) {
      const int tag = TagOf(static_cast<int>(p), static_cast<int>(slot));
      int64_t expected = 0;
      bool is_known = true;
      for (uint64_t seed : seeds_[{static_cast<int>(p), static_cast<int>(slot)}]) {
        const auto bytes =
            BytesSent(plan.slots[slot], static_cast<int>(ranks.size()), IsSimple(plan.group), seed);
        is_known = is_known && bytes.has_value();
        expected += bytes.value_or(0);
      }
      const int64_t sent = world.network().BytesSent(ranks, tag, tag + 3);
      if (is_known && sent != expected) {
        world.Violate(std::string(NameOf(plan.slots[slot].kind)) + " sends " +
                      std::to_string(sent) + " bytes, by the formula " + std::to_string(expected));
      }
    }
  }
}

int Training::TagOf(int plan, int slot) const {
  const int group = scenario.plans[static_cast<size_t>(plan)].group;
  int n_before = slot;
  for (int p = 0; p < plan; ++p) {
    const PlanDraw& other = scenario.plans[static_cast<size_t>(p)];
    if (other.group == group) n_before += static_cast<int>(other.slots.size());
  }
  return n_before * std::clamp(scenario.machine.max_tag >> 18, 16, 1024) * 3;
}

bool Training::IsSimple(int group) const {
  const std::vector<int>& ranks = scenario.groups[static_cast<size_t>(group)];
  std::set<int> hosts;
  for (int rank : ranks) {
    const int per_host = scenario.options.ranks_per_host;
    hosts.insert(per_host > 0 ? rank / per_host
                              : scenario.machine.host_of[static_cast<size_t>(rank)]);
  }
  return (hosts.size() == 1 || hosts.size() == ranks.size()) &&
         std::count(scenario.groups.begin(), scenario.groups.end(), ranks) == 1;
}

void Training::CheckEnd() {
  CheckFailures();
  bool are_together = true;
  for (const auto& program : programs) are_together = are_together && program->end.is_together;
  for (int rank = 0; rank < world.size(); ++rank) {
    if (world.process(rank).is_dead) return;
    Program& program = *programs[static_cast<size_t>(rank)];
    if (are_together && program.n_buffers != 0) world.Violate("a buffer was not given back");
    if (program.pending.n_pending() > 0) world.Violate("a variable is pending");
  }
  if (are_together && happened.empty() && scenario.machine.lost == 0 &&
      world.network().n_unmatched() > 0) {
    world.Violate("messages are left that no rank has received");
  }
  if (happened.empty() && scenario.turn == Turn::kNone && scenario.machine.lost == 0) CheckBytes();
}

std::string Training::Describe() const {
  const char* turns[] = {"", "a rank stops", "uneven epochs", "a step fails", "a rank leaves"};
  std::string text =
      std::to_string(world.size()) + " ranks, " + std::to_string(scenario.plans.size()) + " plans";
  if (scenario.turn != Turn::kNone) {
    text += std::string(", ") + turns[static_cast<size_t>(scenario.turn)] + " (rank " +
            std::to_string(scenario.turn_rank) + ")";
  }
  const char* faults[] = {"death", "pause", "slow link", "cut link", "bad read", "failure"};
  for (const Fault& fault : happened) {
    text += std::string(", ") + faults[static_cast<size_t>(fault.kind)] + " at rank " +
            std::to_string(fault.process);
  }
  return text;
}

Result Training::Run() {
  the_training = this;
  for (int rank = 0; rank < world.size(); ++rank) {
    world.Spawn(rank, [this, rank] {
      programs[static_cast<size_t>(rank)]->Main();
      world.process(rank).has_ended = true;
    });
  }
  // No wait is longer than the time limit; links and ranks come back after seconds.
  const Time limit = 120 * kSecond;
  const bool is_over = world.Run(limit);
  if (!is_over && world.violation().empty()) {
    std::string text = "ranks still wait: ";
    for (const std::string& line : world.Unfinished()) text += line + "; ";
    world.Violate(text);
  }
  if (!is_over) {
    for (const std::string& line : world.network().Outstanding()) world.Note(line);
  }
  if (world.violation().empty()) CheckEnd();
  the_training = nullptr;
  return {world.violation(), Describe(), world.digest(), world.n_ticks(),
          n_collectives,     n_ok,       world.now()};
}

}  // namespace

Result RunTraining(uint64_t seed, const Choice& choice, bool is_logged) {
  // A run that is over leaves operations, as failed engines do, which refer to it.
  auto* training = new Training(seed, choice, is_logged);
  const Result result = training->Run();
  training->world.Close();
  return result;
}

}  // namespace sim

// Each process has its own of what the engine has one of: see simulate_engine.py for --wrap.
extern "C" {

std::shared_ptr<tfscale::Engine> __wrap__ZN7tfscale6Engine3GetEv() {
  tfscale::Engine* engine = sim::the_training->current().engine.get();
  // Its owner is the program.
  return {std::shared_ptr<void>(), engine};
}

tfscale::PendingVariables& __wrap__ZN7tfscale16PendingVariables3GetEv() {
  return sim::the_training->current().pending;
}

tfscale::BufferPool::Buffer __real__ZN7tfscale10BufferPool3GetEm(tfscale::BufferPool*, size_t);
tfscale::BufferPool::Buffer __wrap__ZN7tfscale10BufferPool3GetEm(tfscale::BufferPool* pool,
                                                                 size_t bytes) {
  ++sim::the_training->current().n_buffers;
  return __real__ZN7tfscale10BufferPool3GetEm(pool, bytes);
}

void __real__ZN7tfscale10BufferPool6ReturnEPcm(tfscale::BufferPool*, char*, size_t);
void __wrap__ZN7tfscale10BufferPool6ReturnEPcm(tfscale::BufferPool* pool, char* data,
                                               size_t bytes) {
  sim::Training& training = *sim::the_training;
  --training.current().n_buffers;
  training.world.network().RequireUnused(training.world.current(), data, bytes, "a buffer");
  __real__ZN7tfscale10BufferPool6ReturnEPcm(pool, data, bytes);
}
}
