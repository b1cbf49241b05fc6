// Functions that Python calls through ctypes. None throws; a negative result or
// a non-empty tfscale_last_error() reports an error.
#ifndef TFSCALE_COMM_C_API_H_
#define TFSCALE_COMM_C_API_H_

#include <cstdint>

#include "comm/host_place.h"
#include "comm/options.h"
#include "comm/task.h"

extern "C" {

// Text of the last error on the calling thread; "" if there was none.
const char* tfscale_last_error();

// Starts the engine on a communicator given as a Fortran handle, or on all
// processes for -1. Collective; blocking. Returns 0 or -1.
int tfscale_start(int fortran_comm, const tfscale::EngineOptions* options);
// Collective; blocking until all ranks call it, unless the engine has failed.
// Gathers of parameters end first. Returns 0, 1 where the engine has failed and
// this rank left alone, or -1 where others never come.
int tfscale_stop();
// Ends all processes of the job with `code`. Does not return.
void tfscale_abort(int code);

int tfscale_rank();
int tfscale_size();
int tfscale_thread_level();
// Collective, before tfscale_start only; returns 0 or -1.
int tfscale_host_place(int fortran_comm, tfscale::HostPlace* place);

// Returns the id of a process set, equal on all ranks, or -1.
int tfscale_add_group(const int* ranks, int n_ranks);
// Frees a process set's communicator once nothing uses it. Returns 0 or -1.
int tfscale_remove_group(int group);

// Returns the id of a new plan over a group, or -1. `is_patient`: see PlanSpec.
int tfscale_plan_create(int group, const char* name, int is_patient);
// Returns the number of the new slot, or -1.
int tfscale_plan_add_slot(int plan, const char* name, const char* signature);

// kind: see MarkKind. Returns 0 or -1.
int tfscale_mark(int kind);
int tfscale_start_incarnation(int incarnation);
int64_t tfscale_num_given_up();
int tfscale_fail(const char* why);

// Number of variables with a pending gather; also without an engine.
int64_t tfscale_num_pending();
// Number of variables whose last gather failed and that have no newer value.
int64_t tfscale_num_failed();
// Blocking until there is none. No step may be running.
void tfscale_drain();

// Moves up to `capacity` finished collectives to `out`; returns how many.
int64_t tfscale_take_events(tfscale::Event* out, int64_t capacity);
// The Traffic: copies the seconds that each of up to `capacity` ranks has waited, of others as last
// reported; returns the bytes that this rank has exchanged, or -1.
int64_t tfscale_traffic(double* waited_s, int64_t capacity);
// Nanoseconds of the clock that events are measured with.
int64_t tfscale_clock_ns();

}  // extern "C"

#endif  // TFSCALE_COMM_C_API_H_
