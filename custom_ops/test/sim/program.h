// The program of one rank: as tfscale.fit trains, with posted gathers, eager calls and meetings.
#ifndef TFSCALE_TEST_SIM_PROGRAM_H_
#define TFSCALE_TEST_SIM_PROGRAM_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/engine.h"
#include "comm/pending.h"
#include "test/sim/invariants.h"
#include "test/sim/scenario.h"
#include "test/sim/work.h"

namespace sim {

// A collective that a rank has posted.
struct Flight {
  std::unique_ptr<Work> work;
  const SlotSpec* spec = nullptr;
  std::string name;
  int n_done = 0;
  tfscale::Status status;
  Time posted = 0;
  bool is_seen = false;
  int slot = -1;
  std::shared_ptr<std::atomic<bool>> is_cancelled;  // null where its op does not wait
};

// What one rank's program does, on its main thread.
class Program {
 public:
  // `on_set_up` is called when the engine is there, with its groups and plans.
  Program(const Scenario& scenario, World& world, Invariants& invariants, int rank,
          std::function<void()> on_set_up)
      : scenario_(scenario),
        world_(world),
        invariants_(invariants),
        rank_(rank),
        on_set_up_(std::move(on_set_up)) {}

  void Main();
  // How long this rank has waited in the collective that it posted first, of those under way.
  Time LongestWait() const;
  // A collective under way, or a comparison of plans, that all members but `dead` have begun, as
  // long ago as `age`. All of them send each other something, so that this rank has heard from all
  // others.
  bool AwaitsOnly(int dead, const Programs& programs, Time age) const;

  std::unique_ptr<tfscale::Engine> engine;
  tfscale::PendingVariables pending;
  int64_t n_buffers = 0;  // of the pool, in use
  std::string failure;    // why it ended early, "" if it did not
  tfscale::Engine::End end;
  bool is_leaving = false;
  std::string phase = "starts";

 private:
  struct Step {
    std::vector<std::pair<int, int>> to_post;
    std::map<std::pair<int, int>, std::shared_ptr<Flight>> flights;
    std::vector<std::pair<int, int>> gathers;  // that are not posted yet
    Outcome outcome = Outcome::kOk;
    tfscale::Status why;
  };

  Random& random() const { return world_.random(); }
  bool IsMember(int group) const;
  int PlaceIn(int group) const;
  bool IsTurn(Turn turn, int fit, int epoch) const;

  void SetUp();
  void Compute();
  void AwaitChange();
  std::shared_ptr<Flight> Post(const SlotSpec& spec, int group, int plan, int slot,
                               std::shared_ptr<std::atomic<bool>> is_cancelled = nullptr,
                               std::function<void(const tfscale::Status&)> then = nullptr);
  // The next op of a step.
  void PostNext(Step& step, std::shared_ptr<std::atomic<bool>> is_cancelled);
  void PostGather(Step& step, int plan, int slot);
  void AwaitVariable(int plan, int slot);
  void LookAt(Step& step);
  void Cancel(Step& step, const tfscale::Status& why);
  void AwaitOps(Step& step, bool with_gathers);
  Outcome RunStep(const std::vector<int>& plans, bool fails_here);
  void Wait(const std::shared_ptr<Flight>& flight);
  bool BeginFit(int number);
  bool Fit(int number);
  void StartIncarnation();
  void Last();
  void Drain();

  const Scenario& scenario_;
  World& world_;
  Invariants& invariants_;
  const int rank_;
  const std::function<void()> on_set_up_;
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

}  // namespace sim

#endif  // TFSCALE_TEST_SIM_PROGRAM_H_
