// The collectives of one traced function, in the order all ranks follow.
#ifndef TFSCALE_COMM_PLAN_H_
#define TFSCALE_COMM_PLAN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/mutex.h"

namespace tfscale {

// A plan as registered; `group` and `index` name it alike on all ranks of
// the group. Slot numbers are the order in which the collectives were traced,
// which is an order the graph's own dependencies allow.
struct PlanSpec {
  int id = 0;
  int group = 0;
  int index = 0;
  std::string name;
  std::vector<std::string> slots;  // what messages call them
  // Compared over ranks: a line for the collective, and one per tensor that has a name.
  std::vector<std::string> signatures;
  // Numbers that distinguish the slots of all plans of the group on the wire.
  // They are assigned while tracing, hence equal on ranks that trace alike.
  std::vector<int> tag_slots;
  // The caller has a time limit of its own, and other ranks may never join; see
  // tfscale/comm/meeting.py. Ends of epochs and of training on other ranks
  // do not end collectives of such a plan.
  bool is_patient = false;

  // The signatures, numbered, compared over ranks before the plan's first use.
  std::string Describe() const;
};

// "" when all texts are equal, else the first line that differs, and both ranks.
std::string FirstDifference(const std::vector<std::string>& descriptions,
                            const std::vector<int>& ranks);

// All plans of a job. Thread-safe. Tracing adds slots on any thread; the
// communication thread freezes a plan when its first slot arrives.
class PlanTable {
 public:
  PlanTable();
  // Returns the id of a new plan over `group`. No other plan of this process
  // ever had it: a function that was traced in an earlier job is recognised.
  int Create(int group, const std::string& name, bool is_patient = false);
  // Plans are never removed: traced functions may run again.
  bool HasPlans(int group);
  // Returns the slot number. Without a signature the name is compared. Throws
  // CommError when the plan is frozen.
  int AddSlot(int plan, const std::string& name, const std::string& signature = "");
  // A copy of the plan as it stands, which is final from now on.
  PlanSpec Freeze(int plan);

 private:
  struct Entry {
    PlanSpec spec;
    bool is_frozen = false;
  };

  // Throws CommError when there is none.
  Entry& Find(int plan) TFSCALE_REQUIRES(mutex_);

  const int first_id_;
  Mutex mutex_;
  std::vector<Entry> plans_ TFSCALE_GUARDED_BY(mutex_);
  std::vector<int> n_plans_ TFSCALE_GUARDED_BY(mutex_);        // per group
  std::vector<int> next_tag_slot_ TFSCALE_GUARDED_BY(mutex_);  // per group
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_PLAN_H_
