// What must hold in a simulated training, on each rank and over all.
#ifndef TFSCALE_TEST_SIM_INVARIANTS_H_
#define TFSCALE_TEST_SIM_INVARIANTS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/task.h"
#include "test/sim/scenario.h"
#include "test/sim/world.h"

namespace sim {

class Program;
using Programs = std::vector<std::unique_ptr<Program>>;

enum class Outcome { kOk, kStopped, kFailed };

// Takes notes while the programs run, and violates the world where they contradict each other.
class Invariants {
 public:
  Invariants(const Scenario& scenario, World& world) : scenario_(scenario), world_(world) {}

  // Results that must be equal, by plan, slot, incarnation and execution.
  using Key = std::vector<int64_t>;
  void Compare(const Key& key, uint64_t digest, const std::string& name) {
    const auto known = digests_.emplace(key, digest);
    if (known.first->second != digest) world_.Violate("ranks have different results of " + name);
  }
  // How a step of a fit and epoch ended on a rank.
  void NoteStep(const Key& step, Outcome outcome) {
    std::set<Outcome>& outcomes = steps_[step];
    outcomes.insert(outcome);
    if (outcomes.count(Outcome::kOk) > 0 && outcomes.count(Outcome::kStopped) > 0) {
      world_.Violate("some ranks have applied step " + std::to_string(step[2]) + " of epoch " +
                     std::to_string(step[1]) + ", others have not");
    }
  }
  // An execution of a slot of a plan, noted by its first member.
  void NoteExecution(int plan, int slot, uint64_t seed) { seeds_[{plan, slot}].push_back(seed); }
  void NoteFault(const Fault& fault) {
    happened_.push_back(fault);
    if (fault.kind == FaultKind::kDeath) died_[fault.process] = world_.now();
  }
  // A rank compares a plan from its first collective on.
  void NotePosted(int plan, int rank) {
    ++n_posted_;
    comparing_[plan].insert(rank);
  }
  void NoteSuccess(int plan, size_t n_members, const std::string& name) {
    ++n_ok_;
    if (plan >= 0 && comparing_[plan].size() < n_members) {
      world_.Violate(name + " has ended before its plan was compared");
    }
  }
  // Of a rank whose plans have these ids; plans of a later incarnation repeat the executions.
  void CheckEvents(int rank, const std::vector<tfscale::Event>& events,
                   const std::vector<int>& plans, bool are_repeated);
  // Of what a rank prints, or why it fails, when it does.
  void CheckText(const Programs& programs, const std::string& text);
  // After the run.
  void CheckEnd(const Programs& programs);

  const std::vector<Fault>& happened() const { return happened_; }
  int64_t n_posted() const { return n_posted_; }
  int64_t n_ok() const { return n_ok_; }

 private:
  void CheckHeld(int rank, const std::vector<tfscale::Event>& events, const tfscale::Event& early,
                 const std::vector<int>& plans, int plan, Time turn);
  void CheckGentle(int rank, const tfscale::Event& early, int plan, Time end);
  void CheckNamed(const Programs& programs, const std::string& text);
  void CheckFailures(const Programs& programs);
  void CheckBytes();

  const Scenario& scenario_;
  World& world_;
  std::map<Key, uint64_t> digests_;
  std::map<Key, std::set<Outcome>> steps_;
  std::map<int, std::set<int>> comparing_;  // ranks by plan
  std::map<std::pair<int, int>, std::vector<uint64_t>> seeds_;
  std::vector<Fault> happened_;
  std::map<int, Time> died_;  // by rank
  int64_t n_posted_ = 0;
  int64_t n_ok_ = 0;
};

}  // namespace sim

#endif  // TFSCALE_TEST_SIM_INVARIANTS_H_
