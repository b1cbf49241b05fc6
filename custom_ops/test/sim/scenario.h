// What is drawn before a simulated training: machine, plans, steps, departures and faults.
#ifndef TFSCALE_TEST_SIM_SCENARIO_H_
#define TFSCALE_TEST_SIM_SCENARIO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "comm/options.h"
#include "test/sim/work.h"
#include "test/sim/world.h"

namespace sim {

// Which kinds of runs may be drawn.
struct Choice {
  int n_ranks = 0;  // 0: drawn
  int n_plans = 0;
  int n_steps = 0;
  bool has_marks = true;   // ranks that stop, end early, fail or leave
  bool has_faults = true;  // deaths and other faults
};

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
  Time least_compute = 0, most_compute = 0;
  bool has_long_gathers = false;  // on slow links, beside other collectives
  bool has_gaps = false;          // which gathers fill
  bool are_others_apart = false;  // plans but the first are of all but the rank that departs
  bool is_small = false;          // few ranks, plans and steps
  int slow_rank = -1;             // it computes for much longer than the others
  Time pause_at_end = 0;          // before all ranks but the one that departs leave
  int sequential_rank = -1;       // it posts nothing before all that it has posted has ended

  const std::vector<int>& RanksOf(int group) const { return groups[static_cast<size_t>(group)]; }
  // The first tag of a slot in the first incarnation, as Group::SlotTag says.
  int TagOf(int plan, int slot) const;
  size_t NumHosts(int group) const;
  // No message passes a second rank, and no other group has the same members.
  bool IsSimple(int group) const;
  // In words.
  std::string Describe() const;
};

Scenario Draw(uint64_t seed, const Choice& choice);

}  // namespace sim

#endif  // TFSCALE_TEST_SIM_SCENARIO_H_
