// Decides which collectives are active, and ends those that cannot succeed.
#ifndef TFSCALE_COMM_SCHEDULER_H_
#define TFSCALE_COMM_SCHEDULER_H_

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/abandoned.h"
#include "comm/event_log.h"
#include "comm/group.h"
#include "comm/leaving.h"
#include "comm/marks.h"
#include "comm/options.h"
#include "comm/plan.h"
#include "comm/plan_queue.h"
#include "comm/stall_watch.h"
#include "comm/status_file.h"
#include "comm/task.h"
#include "comm/traffic.h"

namespace tfscale {

// Lives on the communication thread; no method blocks, except AddGroup, which
// waits for the other members of the group. Collectives of different plans and
// eager ones progress concurrently: every message has a tag of its own, so no
// order among them is needed.
class Scheduler {
 public:
  // All references must outlive the scheduler.
  // Collective over `world`; blocking; throws CommError when the ranks do not
  // fit together.
  Scheduler(const EngineOptions& options, Communicator world, PlanTable& plans, EventLog& events,
            Traffic& traffic, BufferPool& buffers, WorkerPool& workers);

  void Accept(Task task);
  // Moves everything forward; true if anything happened.
  bool Step();
  // A collective is active or waits for another rank.
  bool is_busy() const;
  // And others are known to come soon; see PlanSpec::is_patient.
  bool is_urgent() const;
  // Nothing waits yet for what is active; see Call::is_awaited_later.
  bool is_relaxed() const;
  // Ends all collectives, these and later ones, with the first failure, and
  // notifies the other ranks.
  void Fail(const std::string& why);
  bool has_failed() const { return !failure_.ok(); }

  void AddGroup(int id, const std::vector<int>& ranks);
  // Frees a group that no plan uses and whose collectives have ended here; returns
  // false for another one, which stays. Throws CommError where the id is not known.
  bool RemoveGroup(int id);
  void Mark(MarkKind kind);
  // All ranks call this together after a step was given up: messages left from it
  // are separated from later ones. A number that was used before is
  // replaced by the next one. Throws CommError when there were too many or when
  // collectives of a plan are active, unless it is patient.
  void StartIncarnation(int incarnation);
  // The run of a plan has failed on this rank: ends slots that wait for one that
  // will never come. Active ones continue, since the other ranks join them.
  void GiveUpWaiting(int plan);
  // No step runs on this rank: ends collectives that were posted without a waiting
  // op but would start only after a slot that never came.
  void GiveUpStranded();
  // Collectives given up since the start of this incarnation.
  int64_t n_given_up() const { return n_given_up_; }

  // Announces that this rank calls no further collective. Then StepLeave
  // takes the place of Step, until it is over. Throws nothing.
  void Leave();
  bool StepLeave();
  // It has failed, or nothing is left to wait for; see Leaving.
  bool is_over() const { return has_failed() || leaving_.has_left() || leaving_.is_cut_off(); }
  bool has_left() const { return leaving_.has_left(); }
  // Why communication failed while this rank was leaving; "" while it has not.
  std::string leave_failure() const { return leaving_.has_begun() ? failure_.message : ""; }

 private:
  Group& GroupOf(int id);
  PlanQueue& QueueOf(int plan);
  Channel BaseChannel() const;
  void Start(Task task, int tag);
  void StartSlot(const PlanQueue& queue, Task task);
  void StepFailed();
  void DiscardAll();
  bool StepActive();
  bool StepQueues();
  bool StartEarly();
  bool is_early(const Task& task) const;
  void PaceEarly();
  void Finish(Task& task);
  std::string PlaceOf(const Task& task) const;
  void EndAll(const Status& why);
  // Ends tasks that a peer will not join.
  void GiveUpHopeless();
  // Ends their being under way; they have not ended.
  std::vector<Task> TakeActive(const std::function<bool(const Task&)>& is_chosen);
  void GiveUp(Task& task, const Status& why);
  // Tells the launcher why a collective failed: the program may catch the error and end well.
  void ReportFailed(const Status& why);
  std::optional<Status> WhyGivenUp(const Task& task);
  // Tells the other ranks which runs will not be completed here.
  void AnnounceGivenUp();
  void CheckStalls();
  void CountWaiting();
  Wait Describe(const Task& task, bool is_active);

  const EngineOptions& options_;
  PlanTable& plans_;
  EventLog& events_;
  Traffic& traffic_;
  BufferPool& buffers_;
  WorkerPool& workers_;
  std::map<int, Group> groups_;
  const Roster roster_;
  Marks marks_;
  std::map<int, std::unique_ptr<PlanQueue>> queues_;  // by plan id
  std::list<Task> active_;
  std::map<int, int64_t> n_eager_;  // calls by group
  int incarnation_ = 0;
  int64_t n_given_up_ = 0;
  // Why all ranks give the step up that runs here, as another rank's mark says.
  std::optional<Status> ending_;
  std::set<PlanKey> cancelled_;  // by the end of steps in this incarnation
  RunCounts announced_;          // in this incarnation
  Status failure_;
  StallWatch stalls_;
  Leaving leaving_;
  StatusFile status_file_;
  Abandoned abandoned_;
  bool can_answer_ = true;  // after a failure
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_SCHEDULER_H_
