#include "test/sim/scenario.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace sim {
namespace {

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
  machine->reports_death = random.Chance(0.5);
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
    const int64_t n_groups = static_cast<int64_t>(scenario.groups.size());
    plan.group =
        static_cast<int>(scenario.are_others_apart ? n_groups - 1 : random.Below(n_groups));
  }
  const int n = static_cast<int>(scenario.groups[static_cast<size_t>(plan.group)].size());
  const size_t most =
      scenario.is_small ? 8 : static_cast<size_t>(random.Of(std::vector<int>{8, 100, 600}));
  // Often one slot: another rank has begun all of such a plan or nothing.
  const bool is_single = random.Chance(number > 0 || scenario.is_small ? 0.4 : 0.0);
  int64_t n_slots = is_single ? 1 : random.Between(1, scenario.is_small ? 2 : 3);
  if (scenario.has_gaps && number == 0) n_slots = 3;
  for (int64_t i = 0; i < n_slots; ++i) {
    plan.slots.push_back(DrawSlot(random, n, most));
    if (number == 0 && i == 0) {  // a step that not all ranks join ends on none
      plan.slots[0].kind = Kind::kSum;
      plan.slots[0].counts[0] += 1;
    }
    // The last one may follow the first slot: it overtakes those that come between them.
    const bool is_last = scenario.has_gaps && number == 0 && i == 2;
    if (!random.Chance(scenario.has_gaps && number == 0 ? 0.0 : 0.35) && !is_last) continue;
    SlotSpec gather = DrawSlot(random, n, most);
    if (scenario.has_long_gathers) {
      gather.counts.assign(1, static_cast<size_t>(random.Between(1000, 3000)));
      gather.cuts = DrawCuts(random, n, gather.total());
    }
    gather.kind = random.Chance(0.7) ? Kind::kGather : Kind::kChange;
    gather.dtype = tfscale::DType::kFloat32;
    gather.op = tfscale::ReduceOp::kSum;
    gather.postscale = 1.0;
    gather.unit = 1;
    gather.is_compared = false;
    gather.after = static_cast<int>(random.Below(static_cast<int64_t>(plan.slots.size())));
    if (is_last) gather.after = 0;
    while (plan.slots[static_cast<size_t>(gather.after)].is_posted()) --gather.after;
    plan.slots.push_back(gather);
  }
  return plan;
}

// Each rank on a host of its own.
void PutApart(Scenario* scenario) {
  std::vector<int>& hosts = scenario->machine.host_of;
  hosts.resize(static_cast<size_t>(scenario->machine.n_ranks));
  std::iota(hosts.begin(), hosts.end(), 0);
  scenario->options.ranks_per_host = 0;
}

// Nothing but a sum.
void DrawSum(Random& random, size_t n_elements, Scenario* scenario) {
  SlotSpec sum;
  sum.dtype = tfscale::DType::kFloat64;
  sum.counts = {n_elements};
  sum.cuts = DrawCuts(random, scenario->machine.n_ranks, n_elements);
  sum.way = tfscale::Way{false, 0};
  scenario->groups.resize(1);
  scenario->plans.resize(1);
  scenario->plans[0].slots.assign(1, sum);
  scenario->has_meeting = scenario->has_last = false;
  FitDraw fit;
  fit.n_steps = {1};
  fit.plans.assign(1, {0});
  fit.has_eager.assign(1, false);
  scenario->fits.assign(1, fit);
}

// In many chunks that take three times as long as any wait may.
void DrawSlow(Random& random, Scenario* scenario) {
  constexpr size_t kElements = 1500, kChunk = 128;
  DrawSum(random, kElements, scenario);
  PutApart(scenario);
  tfscale::EngineOptions& options = scenario->options;
  options.chunk_bytes = kChunk;
  scenario->machine.eager_bytes = kChunk;
  // Else questions would be asked, and wait on the link for all that was sent before.
  options.stall_warning_s = options.stall_shutdown_s;
  options.max_message_bytes = 1000;
  const double bytes = kElements * sizeof(double) * (kChunk + 40.0) / kChunk;
  scenario->machine.bytes_per_ns = bytes / (3e9 * options.stall_shutdown_s);
}

// A rank dies, for which another waits before it joins a collective without that rank: so others
// wait for both. Or all that do anything have other numbers in their group than in the world.
void DrawDeath(Random& random, Scenario* scenario) {
  DrawSum(random, 600, scenario);
  PutApart(scenario);
  scenario->machine.late = 0;
  const int dead = scenario->turn_rank, n_ranks = scenario->machine.n_ranks;
  const bool is_absent_dead = dead == 0 || random.Chance(0.6);
  std::vector<int> others = scenario->groups[0];
  others.erase(others.begin() + (is_absent_dead ? dead : 0));
  scenario->groups.push_back(others);
  scenario->sequential_rank = random.Of(others);
  PlanDraw plan = scenario->plans[0];
  plan.name = "others";
  plan.group = 1;
  plan.slots[0].cuts = DrawCuts(random, n_ranks - 1, plan.slots[0].total());
  scenario->plans.push_back(plan);
  FitDraw& fit = scenario->fits[0];
  fit.n_steps = {6};
  fit.plans.assign(6, {0, 1});
  if (!is_absent_dead) {
    scenario->machine.reports_death = true;
    fit.plans.assign(6, {1});
  }
  fit.has_eager.assign(6, false);
  // Also while the plans are compared.
  const int64_t n_ticks = (random.Chance(0.4) ? 100 : 500) * n_ranks;
  scenario->faults = {{FaultKind::kDeath, random.Below(n_ticks), dead}};
}

// Two ranks die one after another, for whose end another waits.
void DrawDeathsAtEnd(Random& random, Scenario* scenario) {
  DrawSum(random, 8, scenario);
  PutApart(scenario);
  scenario->machine.late = 0;
  scenario->options.stall_warning_s = 0.2;
  scenario->options.stall_shutdown_s = static_cast<double>(random.Between(4, 12)) / 10;
  scenario->pause_at_end = 4 * kSecond;
  std::vector<int> others = scenario->groups[0];
  others.erase(others.begin() + scenario->turn_rank);
  random.Shuffle(others);
  // Nearly all after the step.
  const auto draw_tick = [&] { return random.Between(80, 350) * scenario->machine.n_ranks; };
  for (size_t i = 0; i < 2; ++i) {
    scenario->faults.push_back({FaultKind::kDeath, draw_tick(), others[i]});
  }
}

// A step fails where the gathers of the step before, one after another, have not all begun.
void DrawFailure(Random& random, Scenario* scenario) {
  DrawSum(random, 8, scenario);
  scenario->options.window_bytes = 1;
  scenario->sequential_rank = -1;
  scenario->has_gaps = true;  // it has begun the other plan by then
  scenario->plans.push_back(scenario->plans[0]);
  PlanDraw& plan = scenario->plans[1];
  plan.name = "gathers";
  SlotSpec gather = plan.slots[0];
  gather.kind = Kind::kGather;
  gather.dtype = tfscale::DType::kFloat32;
  gather.after = 0;
  plan.slots.insert(plan.slots.end(), 2, gather);
  FitDraw& fit = scenario->fits[0];
  fit.n_steps = {4};
  fit.plans.assign(4, {0, 1});
  fit.has_eager.assign(4, false);
  scenario->slow_rank = random.Of(scenario->groups[0]);
  scenario->turn = Turn::kStepFails;
  scenario->turn_step = static_cast<int>(random.Between(1, 3));
}

// Longer than what a rank reads of another's memory at a time.
void DrawLong(Random& random, Scenario* scenario) {
  DrawSum(random, static_cast<size_t>(random.Between(33000, 50000)), scenario);
  std::fill(scenario->machine.host_of.begin(), scenario->machine.host_of.end(), 0);
  scenario->options.ranks_per_host = 0;
  scenario->options.host_memory_bytes = 1;
  scenario->options.chunk_bytes = 1 << 20;
}

}  // namespace

Scenario Draw(uint64_t seed, const Choice& choice) {
  Random random(seed);
  Scenario scenario;
  DrawMachine(random, choice, &scenario.machine);
  DrawOptions(random, &scenario.options);
  const bool is_any = choice.n_ranks == 0 && choice.n_plans == 0 && choice.n_steps == 0;
  // Half of all: what goes wrong where ranks stop, fail or die needs few of anything.
  scenario.is_small = is_any && random.Chance(0.5);
  if (scenario.is_small) {
    const int n_ranks = static_cast<int>(random.Between(2, 4));
    scenario.machine.n_ranks = std::min(scenario.machine.n_ranks, n_ranks);
    scenario.machine.host_of.resize(static_cast<size_t>(scenario.machine.n_ranks));
  }
  scenario.has_long_gathers = !scenario.is_small && random.Chance(0.2);
  if (scenario.has_long_gathers) {
    scenario.machine.bytes_per_ns = 0.02;
    scenario.machine.eager_bytes = 64;
    scenario.options.chunk_bytes = 128;
    // Of few ranks on hosts of their own, before another collective comes: they overtake.
    scenario.has_gaps = random.Chance(0.5);
    if (scenario.has_gaps) {
      if (choice.n_ranks == 0) scenario.machine.n_ranks = static_cast<int>(random.Between(2, 3));
      scenario.least_compute = random.Scale(10 * kMicro, 300 * kMicro);
      scenario.machine.latency = random.Scale(kMicro, 10 * kMicro);
      scenario.machine.jitter = random.Scale(100, 10 * kMicro);
      PutApart(&scenario);
    }
  }
  const int n_ranks = scenario.machine.n_ranks;
  scenario.groups.emplace_back();
  for (int rank = 0; rank < n_ranks; ++rank) scenario.groups[0].push_back(rank);
  scenario.turn_rank = static_cast<int>(random.Below(n_ranks));
  scenario.are_others_apart = n_ranks > 2 && random.Chance(scenario.is_small ? 0.4 : 0.15);
  if (scenario.is_small && random.Chance(0.3)) {
    scenario.slow_rank = static_cast<int>(random.Below(n_ranks));
  }
  // It keeps others waiting for as long as all of its collectives take together.
  if (scenario.is_small && scenario.machine.late == 0 && random.Chance(0.3)) {
    scenario.sequential_rank = static_cast<int>(random.Below(n_ranks));
  }
  while (scenario.groups.size() < 3 && n_ranks > 1 &&
         (random.Chance(0.4) || (scenario.are_others_apart && scenario.groups.size() == 1))) {
    std::vector<int> members;
    const bool is_of_others = scenario.are_others_apart || random.Chance(0.3);
    for (int rank = 0; rank < n_ranks; ++rank) {
      const bool is_member = is_of_others ? rank != scenario.turn_rank : random.Chance(0.6);
      if (is_member) members.push_back(rank);
    }
    if (!members.empty()) scenario.groups.push_back(members);
  }
  const int64_t most_plans = scenario.has_gaps ? 2 : scenario.is_small ? 3 : 5;
  const int n_plans =
      choice.n_plans > 0 ? choice.n_plans : static_cast<int>(random.Between(1, most_plans));
  for (int i = 0; i < n_plans; ++i) scenario.plans.push_back(DrawPlan(random, scenario, i));
  for (int i = 0; i < 3; ++i) scenario.eager.push_back(DrawSlot(random, n_ranks, 100));
  scenario.meeting = DrawSlot(random, n_ranks, 50);
  scenario.has_meeting = random.Chance(0.2);
  scenario.last = DrawSlot(random, n_ranks, 50);
  scenario.last.kind = Kind::kBroadcast;
  scenario.has_last = random.Chance(0.15);
  scenario.most_compute = std::max(scenario.least_compute, random.Scale(kMicro, 2 * kMilli));

  if (choice.n_plans == 0 && n_ranks == 2 && random.Chance(0.05)) {
    random.Chance(0.6) ? DrawSlow(random, &scenario) : DrawLong(random, &scenario);
    return scenario;
  }
  if (scenario.is_small && n_ranks > 2 && choice.has_faults && random.Chance(0.1)) {
    random.Chance(0.6) ? DrawDeath(random, &scenario) : DrawDeathsAtEnd(random, &scenario);
    return scenario;
  }

  if (scenario.is_small && n_ranks > 1 && choice.has_marks && random.Chance(0.08)) {
    DrawFailure(random, &scenario);
    return scenario;
  }

  const double kind = static_cast<double>(random.Below(100)) / 100;
  const bool has_marks = choice.has_marks && n_ranks > 1 && kind < (scenario.is_small ? 0.6 : 0.4);
  const bool has_faults = choice.has_faults && n_ranks > 1 &&
                          (scenario.is_small ? kind > 0.55 : kind > 0.3 && kind < 0.65);
  const int64_t n_fits = random.Between(1, has_marks ? 3 : 2);
  for (int64_t f = 0; f < n_fits; ++f) {
    FitDraw fit;
    const int64_t most_steps = scenario.is_small ? 3 : 6;
    int n_left =
        choice.n_steps > 0 ? choice.n_steps : static_cast<int>(random.Between(1, most_steps));
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
    // Where its step fails, others could wait for an op that it has begun, and it for theirs.
    scenario.sequential_rank = -1;
    scenario.turn = static_cast<Turn>(random.Of(std::vector<int>{1, 1, 1, 2, 3, 4}));
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
      const int64_t n_ticks = (scenario.is_small ? 500 : 2000) * n_ranks;  // of most runs
      fault.tick = random.Chance(0.4) ? random.Scale(0, n_ticks) : random.Below(n_ticks);
      scenario.faults.push_back(fault);
    }
  }
  return scenario;
}

int Scenario::TagOf(int plan, int slot) const {
  const int group = plans[static_cast<size_t>(plan)].group;
  int n_before = slot;
  for (int p = 0; p < plan; ++p) {
    const PlanDraw& other = plans[static_cast<size_t>(p)];
    if (other.group == group) n_before += static_cast<int>(other.slots.size());
  }
  return n_before * std::clamp(machine.max_tag >> 18, 16, 1024) * 3;
}

size_t Scenario::NumHosts(int group) const {
  std::set<int> hosts;
  for (int rank : RanksOf(group)) {
    const int per_host = options.ranks_per_host;
    hosts.insert(per_host > 0 ? rank / per_host : machine.host_of[static_cast<size_t>(rank)]);
  }
  return hosts.size();
}

bool Scenario::IsSimple(int group) const {
  const std::vector<int>& ranks = RanksOf(group);
  const size_t n_hosts = NumHosts(group);
  return (n_hosts == 1 || n_hosts == ranks.size()) &&
         std::count(groups.begin(), groups.end(), ranks) == 1;
}

std::string Scenario::Describe() const {
  const char* turns[] = {"", "a rank stops", "uneven epochs", "a step fails", "a rank leaves"};
  std::string text =
      std::to_string(machine.n_ranks) + " ranks, " + std::to_string(plans.size()) + " plans";
  if (turn == Turn::kNone) return text;
  return text + ", " + turns[static_cast<size_t>(turn)] + " (rank " + std::to_string(turn_rank) +
         ")";
}

}  // namespace sim
