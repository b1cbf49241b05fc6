// Options of the engine, set when it starts; see tfscale.config.Settings.
#ifndef TFSCALE_COMM_OPTIONS_H_
#define TFSCALE_COMM_OPTIONS_H_

#include <cstdint>

namespace tfscale {

// Part of the C interface: plain data, fixed layout, all fields required.
struct EngineOptions {
  double stall_warning_s;
  double stall_shutdown_s;
  double report_s;            // between two reports of the Traffic; 0: it is not counted
  int64_t max_message_bytes;  // longest MPI message; below 2^31
  int64_t chunk_bytes;        // size of the pieces in which long vectors are sent and summed
  int64_t window_bytes;       // largest payload of one plan in transfer at a time
  int64_t host_memory_bytes;  // least that ranks of a host read from each other's memory; 0: never
  int32_t reduce_threads;     // 1: the communication thread alone
  int32_t pin_core;           // core of the communication thread; -1: any
  int32_t ranks_per_host;     // consecutive ranks treated as a host; 0: those that share memory
  // Raised on a rank that keeps others waiting: its handler writes where the
  // program is. 0: none.
  int32_t stack_signal;
  const char* identity;     // versions that must be equal on all ranks; may be null
  const char* status_path;  // of the StatusFile; may be null
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_OPTIONS_H_
