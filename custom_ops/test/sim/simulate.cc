// Simulates trainings of many seeds, or one with its log. Used by tools/simulate_engine.py.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "test/sim/training.h"

namespace {

double Seconds() {
  timespec time;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// What the engine prints goes to the log.
ssize_t Discard(void*, const char* text, size_t bytes) {
  if (sim::World* world = sim::World::Get()) {
    while (bytes > 0 && text[bytes - 1] == '\n') --bytes;
    const std::string line(text, bytes);
    world->Note(line);
    // Nothing forbids it here.
    if (line.find("exchange data by messages") != std::string::npos) world->Violate(line);
  }
  return static_cast<ssize_t>(bytes + 1);
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, long long> options = {
      {"seed", 0},  {"count", 1},  {"ranks", 0}, {"plans", 0}, {"steps", 0},
      {"marks", 1}, {"faults", 1}, {"log", 0},   {"stops", 0}, {"seconds", 1000000}};
  for (int i = 1; i + 1 < argc; i += 2) options[argv[i] + 2] = std::atoll(argv[i + 1]);
  sim::Choice choice;
  choice.n_ranks = static_cast<int>(options["ranks"]);
  choice.n_plans = static_cast<int>(options["plans"]);
  choice.n_steps = static_cast<int>(options["steps"]);
  choice.has_marks = options["marks"] != 0;
  choice.has_faults = options["faults"] != 0;
  FILE* const own_stderr = stderr;
  stderr = fopencookie(nullptr, "w", {nullptr, Discard, nullptr, nullptr});
  setvbuf(stderr, nullptr, _IOLBF, 4096);
  const double begin = Seconds();
  long long n_runs = 0, n_violations = 0, n_collectives = 0, n_ok = 0, n_ticks = 0;
  for (; n_runs < options["count"] && Seconds() - begin < static_cast<double>(options["seconds"]);
       ++n_runs) {
    const uint64_t seed = static_cast<uint64_t>(options["seed"] + n_runs);
    // Before the run: it may end this process.
    if (options["log"] == 0) {
      std::fprintf(own_stderr, "%llu\r", static_cast<unsigned long long>(seed));
      std::fflush(own_stderr);
    }
    const sim::Result result = sim::RunTraining(seed, choice, options["log"] != 0);
    n_collectives += result.n_collectives;
    n_ok += result.n_ok;
    n_ticks += result.n_ticks;
    if (options["count"] == 1) {
      std::printf("seed %llu: %s; %lld collectives, %lld succeeded; digest %016llx; %.3f ms\n",
                  static_cast<unsigned long long>(seed), result.scenario.c_str(),
                  static_cast<long long>(result.n_collectives), static_cast<long long>(result.n_ok),
                  static_cast<unsigned long long>(result.digest),
                  static_cast<double>(result.end) / 1e6);
    }
    if (result.violation.empty()) continue;
    ++n_violations;
    std::printf("VIOLATION seed %llu: %s (%s)\n", static_cast<unsigned long long>(seed),
                result.violation.c_str(), result.scenario.c_str());
    std::fflush(stdout);
    if (options["stops"] != 0) break;
  }
  const double seconds = Seconds() - begin;
  std::printf("runs %lld, violations %lld, collectives %lld, succeeded %lld, ticks %lld, %.2f s\n",
              n_runs, n_violations, n_collectives, n_ok, n_ticks, seconds);
  return n_violations > 0 ? 1 : 0;
}
