// Short trainings on simulated ranks, one for each seed.
#ifndef TFSCALE_TEST_SIM_TRAINING_H_
#define TFSCALE_TEST_SIM_TRAINING_H_

#include <cstdint>
#include <string>

#include "test/sim/scenario.h"

namespace sim {

struct Result {
  std::string violation;  // "" if all invariants hold
  std::string scenario;   // in words
  uint64_t digest = 0;    // of all that happened
  int64_t n_ticks = 0;
  int64_t n_collectives = 0;
  int64_t n_ok = 0;
  Time end = 0;
};

// Equal seeds and choices give equal runs.
Result RunTraining(uint64_t seed, const Choice& choice, bool is_logged);

}  // namespace sim

#endif  // TFSCALE_TEST_SIM_TRAINING_H_
