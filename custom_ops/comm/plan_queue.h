// The collectives of one plan that have arrived, and which may start next.
#ifndef TFSCALE_COMM_PLAN_QUEUE_H_
#define TFSCALE_COMM_PLAN_QUEUE_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/gather.h"
#include "comm/group.h"
#include "comm/marks.h"
#include "comm/plan.h"
#include "comm/task.h"

namespace tfscale {

// Slots start in plan order, whatever order they arrive in, so that all ranks
// give their bandwidth to the same collectives. Only where a rank has nothing else
// to send, tasks that may overtake start before their turn. The turns of the others
// come nevertheless, so that ranks which choose differently do not wait for each other.
// Before the first one the ranks compare their plans. Used by the communication thread only.
class PlanQueue {
 public:
  PlanQueue(PlanSpec spec, const Group& group);

  // Sets the task's execution number and keeps it until it may start. Throws
  // CommError, and leaves the task alone, when the plan has no such slot.
  void Add(Task&& task);
  // Moves the comparison of plans forward; throws CommError when they differ.
  bool StepHandshake(const Channel& base);
  // The next task in plan order, if it is here and the window has room for it.
  std::optional<Task> TakeNext(int64_t window_bytes);
  // The last task of this run that may overtake, where the next one is not here. All ranks choose
  // alike where the last slots arrive first.
  std::optional<Task> TakeEarly();
  void OnFinished(const Task& task);

  // Tasks that have not started and that `is_chosen`, removed from the queue.
  template <typename Predicate>
  std::vector<Task> TakeIf(Predicate is_chosen) {
    std::vector<Task> tasks;
    for (auto& slot : waiting_) {
      for (auto it = slot.begin(); it != slot.end();) {
        if (is_chosen(*it)) {
          tasks.push_back(std::move(*it));
          it = slot.erase(it);
        } else {
          ++it;
        }
      }
    }
    n_waiting_ -= tasks.size();
    return tasks;
  }
  // The comparison of plans, if it is in progress.
  std::unique_ptr<Operation> TakeHandshake() { return std::move(handshake_); }
  // The run of a task that was taken has failed here. It is no complete one, or other ranks would
  // wait for it when this rank has left.
  void Uncount(const Task& task) { --n_arrived_[static_cast<size_t>(task.slot)]; }
  // After a step was given up ranks stand at different slots: `why` is then the
  // end of all that comes, until Reset.
  void Interrupt(const Status& why) { interruption_ = why; }
  const Status& interruption() const { return interruption_; }
  // Forgets how far the plan got; the queue must hold no task.
  void Reset();
  // Calls `visit` on every task that has not started.
  template <typename Visit>
  void ForEachWaiting(Visit visit) const {
    for (const auto& slot : waiting_) {
      for (const Task& task : slot) visit(task);
    }
  }

  // Whether an earlier collective of the slot has not ended.
  bool is_running(int slot) const {
    const size_t place = static_cast<size_t>(slot);
    return place < waiting_.size() &&
           (under_way_[place] != UnderWay::kNo || !waiting_[place].empty());
  }
  // The task under way was taken before its turn, which has not come.
  bool is_early(int slot) const {
    return under_way_[static_cast<size_t>(slot)] == UnderWay::kEarly;
  }
  bool is_waiting() const { return n_waiting_ > 0; }
  // The next slot has arrived, whatever keeps it from starting.
  bool is_next_due() const { return n_waiting_ > 0 && !waiting_[next_slot_].empty(); }
  bool is_idle() const { return n_waiting_ == 0 && n_under_way_ == 0 && n_early_ == 0; }
  bool is_comparing() const { return n_waiting_ > 0 && !is_agreed_; }
  PlanKey key() const { return {spec_.group, spec_.index}; }
  const PlanSpec& spec() const { return spec_; }
  bool is_patient() const { return spec_.is_patient; }
  const Group& group() const { return group_; }
  // How often the plan has run, counting a run from its first slot.
  int64_t n_executions() const;
  // How often all slots have arrived, without runs that failed here.
  int64_t n_complete_executions() const;
  // All slots of each run have arrived.
  bool is_whole() const { return n_executions() == n_complete_executions(); }
  // The slot that keeps later ones from starting.
  const std::string& next_slot_name() const { return spec_.slots[next_slot_]; }
  // World ranks whose plan is still awaited.
  std::vector<int> ComparingWith() const;

 private:
  void FinishHandshake();
  enum class UnderWay { kNo, kInTurn, kEarly };

  Task Take(size_t slot);
  void CountInTurn(size_t slot);
  void PassTurn();

  const PlanSpec spec_;
  const Group& group_;
  std::vector<std::deque<Task>> waiting_;  // per slot
  std::vector<int64_t> n_arrived_;         // per slot
  // Per slot. One at a time: all executions of a slot have the same tag.
  std::vector<UnderWay> under_way_;
  std::vector<bool> is_turn_over_;  // per slot: this run's task was taken before its turn
  std::vector<int64_t> bytes_;      // per slot: of the task that was taken last
  size_t n_waiting_ = 0;
  size_t next_slot_ = 0;
  // In their turn. Early ones take no room of the window: another rank may begin them only after
  // those whose turn it is.
  int64_t bytes_under_way_ = 0;
  int n_under_way_ = 0;
  int n_early_ = 0;
  Status interruption_;

  bool is_agreed_ = false;
  Texts descriptions_;
  std::unique_ptr<Operation> handshake_;
};

inline bool IsPatient(const Task& task) { return task.queue && task.queue->is_patient(); }

}  // namespace tfscale

#endif  // TFSCALE_COMM_PLAN_QUEUE_H_
