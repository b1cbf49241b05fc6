#include "comm/c_api.h"

#include <mpi.h>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/engine.h"
#include "comm/pending.h"

namespace {

using tfscale::CommError;
using tfscale::Engine;

thread_local std::string last_error;

// Runs `body`; an exception becomes `on_error` and a text.
template <typename Result, typename Body>
Result Guarded(Result on_error, Body body) {
  last_error.clear();
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
    return on_error;
  }
}

// The same of a body without a result: 0 or -1.
template <typename Body>
int Done(Body body) {
  return Guarded(-1, [&] { return body(), 0; });
}

std::shared_ptr<Engine> Running() {
  std::shared_ptr<Engine> engine = Engine::Get();
  if (!engine) throw CommError("tfscale is not initialised. Call tfscale.init() first.");
  return engine;
}

// Between tfscale_host_place and tfscale_start MPI is kept alive here.
std::unique_ptr<tfscale::MpiEnv>& PendingEnv() {
  static std::unique_ptr<tfscale::MpiEnv> env;
  return env;
}

// The communicator of an integer handle, as mpi4py's py2f gives it. Where handles are integers
// (MPICH), nothing is asked of a later library.
template <typename Comm>
Comm FromInteger(int handle) {
  if constexpr (std::is_integral_v<Comm>) {
    return handle;
  } else {
#if MPI_VERSION >= 5
    return MPI_Comm_fromint(handle);
#else
    return MPI_Comm_f2c(static_cast<MPI_Fint>(handle));
#endif
  }
}

MPI_Comm Parent(int fortran_comm) {
  if (!PendingEnv()) PendingEnv() = std::make_unique<tfscale::MpiEnv>();
  return fortran_comm == -1 ? MPI_COMM_WORLD : FromInteger<MPI_Comm>(fortran_comm);
}

}  // namespace

extern "C" {

const char* tfscale_last_error() { return last_error.c_str(); }

int tfscale_start(int fortran_comm, const tfscale::EngineOptions* options) {
  return Guarded(-1, [&] {
    if (Engine::Get()) throw CommError("tfscale is already initialised.");
    MPI_Comm comm = Parent(fortran_comm);
    Engine::Start(comm, *options, std::move(PendingEnv()));
    return 0;
  });
}

int tfscale_stop() {
  return Guarded(-1, [] {
    // Posted gathers must arrive, even if no reader waits for them before the end.
    tfscale_drain();
    const Engine::End end = Engine::Stop();
    if (!end.failure.empty()) throw CommError(end.failure);
    return end.is_together ? 0 : 1;
  });
}

void tfscale_abort(int code) { MPI_Abort(MPI_COMM_WORLD, code); }

int tfscale_rank() {
  return Guarded(-1, [] { return Running()->rank(); });
}

int tfscale_size() {
  return Guarded(-1, [] { return Running()->size(); });
}

int tfscale_thread_level() {
  return Guarded(-1, [] { return Running()->thread_level(); });
}

int tfscale_host_place(int fortran_comm, tfscale::HostPlace* place) {
  return Done([&] { *place = tfscale::FindHostPlace(Parent(fortran_comm)); });
}

int tfscale_add_group(const int* ranks, int n_ranks) {
  return Guarded(-1, [&] { return Running()->AddGroup(std::vector<int>(ranks, ranks + n_ranks)); });
}

int tfscale_remove_group(int group) {
  return Done([&] { Running()->RemoveGroup(group); });
}

int tfscale_plan_create(int group, const char* name, int is_patient) {
  return Guarded(-1, [&] { return Running()->plans().Create(group, name, is_patient != 0); });
}

int tfscale_plan_add_slot(int plan, const char* name, const char* signature) {
  return Guarded(-1, [&] { return Running()->plans().AddSlot(plan, name, signature); });
}

int tfscale_mark(int kind) {
  return Done([&] { Running()->Mark(static_cast<tfscale::MarkKind>(kind)); });
}

int tfscale_start_incarnation(int incarnation) {
  return Done([&] { Running()->StartIncarnation(incarnation); });
}

int64_t tfscale_num_given_up() {
  return Guarded(int64_t{-1}, [] { return Running()->NumGivenUp(); });
}

int tfscale_fail(const char* why) {
  return Done([&] { Running()->Fail(why); });
}

int64_t tfscale_num_pending() { return tfscale::PendingVariables::Get().n_pending(); }

int64_t tfscale_num_failed() { return tfscale::PendingVariables::Get().n_failed(); }

void tfscale_drain() {
  Guarded(-1, [] {
    // Of a failed step: gathers after one that was never posted would not start.
    const std::shared_ptr<Engine> engine = Engine::Get();
    if (engine && tfscale_num_pending() > 0) engine->GiveUpStranded();
    return 0;
  });
  tfscale::PendingVariables::Get().WaitForAll();
}

int64_t tfscale_take_events(tfscale::Event* out, int64_t capacity) {
  return Guarded(int64_t{-1}, [&] {
    return static_cast<int64_t>(Running()->events().Take(out, static_cast<size_t>(capacity)));
  });
}

int64_t tfscale_traffic(double* waited_s, int64_t capacity) {
  return Guarded(int64_t{-1}, [&] {
    return Running()->traffic().Read(waited_s, static_cast<size_t>(capacity));
  });
}

int64_t tfscale_clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             tfscale::Clock::now().time_since_epoch())
      .count();
}

}  // extern "C"
