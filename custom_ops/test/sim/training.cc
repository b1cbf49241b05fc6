#include "test/sim/training.h"

#include <memory>
#include <vector>

#include "comm/engine.h"
#include "test/sim/invariants.h"
#include "test/sim/network.h"
#include "test/sim/program.h"
#include "test/sim/scenario.h"

namespace sim {
namespace {

class Training {
 public:
  Training(uint64_t seed, const Choice& choice, bool is_logged)
      : scenario(Draw(seed, choice)),
        world(seed ^ 0x5DEECE66DULL, scenario.machine, is_logged),
        invariants(scenario, world) {
    for (int rank = 0; rank < world.size(); ++rank) {
      programs.push_back(
          std::make_unique<Program>(scenario, world, invariants, rank, [this] { OnSetUp(); }));
    }
  }

  Result Run();
  Program& current() { return *programs[static_cast<size_t>(world.current())]; }

  const Scenario scenario;
  World world;
  Invariants invariants;
  Programs programs;

 private:
  // Faults begin when all programs are set up.
  void OnSetUp();
  // Scenario and faults, in words.
  std::string Describe() const;

  int n_set_up_ = 0;
};

Training* the_training = nullptr;

void Training::OnSetUp() {
  if (++n_set_up_ < world.size()) return;
  for (const Fault& fault : scenario.faults) world.AddFault(fault);
  world.BeginFaults();
  world.on_fault = [this](const Fault& fault) {
    invariants.NoteFault(fault);
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

std::string Training::Describe() const {
  const char* faults[] = {"death", "pause", "slow link", "cut link", "bad read", "failure"};
  std::string text = scenario.Describe();
  for (const Fault& fault : invariants.happened()) {
    text += std::string(", ") + faults[static_cast<size_t>(fault.kind)] + " at rank " +
            std::to_string(fault.process);
  }
  return text;
}

Result Training::Run() {
  the_training = this;
  world.on_text = [this](const std::string& text) { invariants.CheckText(programs, text); };
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
  if (world.violation().empty()) invariants.CheckEnd(programs);
  the_training = nullptr;
  return {world.violation(),     Describe(),        world.digest(), world.n_ticks(),
          invariants.n_posted(), invariants.n_ok(), world.now()};
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
