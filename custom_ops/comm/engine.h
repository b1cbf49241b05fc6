// The engine: everything between a TensorFlow op and MPI.
#ifndef TFSCALE_COMM_ENGINE_H_
#define TFSCALE_COMM_ENGINE_H_

#include <mpi.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/comm_thread.h"
#include "comm/event_log.h"
#include "comm/mpi_env.h"
#include "comm/options.h"
#include "comm/plan.h"
#include "comm/scheduler.h"
#include "comm/traffic.h"
#include "comm/work_queue.h"
#include "comm/worker_pool.h"

namespace tfscale {

// Owns MPI, the plans and the communication thread. One per process. Public
// methods may be called from any thread and do not block unless they say so.
//
// The threads of a process, and what they use of the engine:
//   thread         runs                                    uses
//   main           init, shutdown, eager calls, marks      MPI, while there is no other; Engine
//   TensorFlow's   ops of steps, and their cancellation    Submit, GiveUpWaiting, BufferPool,
//                                                          PendingVariables
//   communication  CommThread::Run: the Scheduler with     MPI, and alone all that has no mutex;
//                  all that it owns; `done`, and waiters   takes from the WorkQueue
//                  of PendingVariables
//   workers        parts of WorkerPool::For, while the     the memory of operations, and that of
//                  communication thread is in it           other ranks
//   Python's       meetings, metrics, timelines            Submit, PlanTable, EventLog, Traffic
class Engine {
 public:
  // Collective over `comm`; blocking; on the main thread.
  Engine(MPI_Comm comm, const EngineOptions& options, std::unique_ptr<MpiEnv> env);
  // Blocking until all ranks have destroyed theirs, or the engine has failed.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The engine of the process; null before Start and after Stop.
  static std::shared_ptr<Engine> Get();
  static void Start(MPI_Comm comm, const EngineOptions& options, std::unique_ptr<MpiEnv> env);
  struct End {
    bool is_together = true;  // all ranks have left, and communication had not failed here
    std::string failure;      // why leaving failed, "" if it did not
  };
  // Blocking as the destructor.
  static End Stop();
  // The same of an engine that no other thread uses. Nothing may be called afterwards.
  End Leave();

  int rank() const { return rank_; }
  int size() const { return size_; }
  int thread_level() const { return env_->thread_level(); }
  PlanTable& plans() { return plans_; }
  EventLog& events() { return events_; }
  const Traffic& traffic() const { return traffic_; }

  // Hands a collective to the communication thread. `task.done` runs there,
  // exactly once, also when the engine has failed or is stopping. In a forked
  // process, which has no such thread, it fails at once.
  void Submit(Task task);

  // See Scheduler::GiveUpWaiting.
  void GiveUpWaiting(int plan);

  // Collective over the members of `ranks`, called by all ranks; blocking.
  // Returns the id of the group, equal on all ranks. Throws CommError, also
  // when the ranks name different members.
  int AddGroup(const std::vector<int>& ranks);
  // See Scheduler::RemoveGroup.
  void RemoveGroup(int id);
  // Blocking until the mark has been posted.
  void Mark(MarkKind kind) {
    RunOnCommThread([&] { scheduler_->Mark(kind); });
  }
  // These are as those of the Scheduler; blocking until they are done.
  void StartIncarnation(int incarnation) {
    RunOnCommThread([&] { scheduler_->StartIncarnation(incarnation); });
  }
  int64_t NumGivenUp() {
    int64_t n = 0;
    RunOnCommThread([&] { n = scheduler_->n_given_up(); });
    return n;
  }
  void GiveUpStranded() {
    RunOnCommThread([&] { scheduler_->GiveUpStranded(); });
  }
  void Fail(const std::string& why) {
    RunOnCommThread([&] { scheduler_->Fail(why); });
  }

 private:
  // Returns the texts of all ranks, by rank. Collective; blocking.
  std::vector<std::string> GatherTexts(const std::string& name, const std::string& text);
  std::string WhyForked() const;
  // Runs `command` on the communication thread; waits; rethrows its CommError.
  void RunOnCommThread(const std::function<void()>& command);

  // Destroyed from the last to the first.
  const EngineOptions options_;
  std::unique_ptr<MpiEnv> env_;
  BufferPool buffers_;
  WorkerPool workers_;
  PlanTable plans_;
  EventLog events_;
  Traffic traffic_;
  WorkQueue queue_;
  int rank_ = 0;
  int size_ = 1;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<CommThread> thread_;
  std::set<int> group_ids_ = {0};  // of groups that exist on this rank
  const pid_t process_ = getpid();
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_ENGINE_H_
