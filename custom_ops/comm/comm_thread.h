// The one thread that talks to MPI.
#ifndef TFSCALE_COMM_COMM_THREAD_H_
#define TFSCALE_COMM_COMM_THREAD_H_

#include <chrono>
#include <memory>
#include <thread>

#include "comm/options.h"
#include "comm/scheduler.h"
#include "comm/work_queue.h"

namespace tfscale {

// Runs the scheduler. While transfers move it polls without pause; once nothing
// has moved for a while it sleeps between polls (up to 500 us), so that waiting
// for a slower rank costs the computation next to it no core.
class CommThread {
 public:
  // Both references must outlive the thread.
  CommThread(const EngineOptions& options, WorkQueue& queue, Scheduler& scheduler);
  // Ends the thread after all ranks have left (see Marks) or after a failure.
  ~CommThread();
  CommThread(const CommThread&) = delete;
  CommThread& operator=(const CommThread&) = delete;

 private:
  void Run();
  void TakeItems(std::chrono::microseconds wait);
  std::chrono::microseconds NextWait(bool has_moved);
  void PinToCore() const;

  const EngineOptions& options_;
  WorkQueue& queue_;
  Scheduler& scheduler_;
  Clock::time_point last_moved_ = Clock::now();
  Clock::time_point shared_until_;  // a thread that computes is on the same core
  bool is_leaving_ = false;         // set by a command on the thread itself
  std::thread thread_;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_COMM_THREAD_H_
