// The end of a rank's part in a job.
#ifndef TFSCALE_COMM_LEAVING_H_
#define TFSCALE_COMM_LEAVING_H_

#include <optional>

#include "comm/marks.h"
#include "comm/stall_watch.h"
#include "comm/task.h"

namespace tfscale {

// A rank that has announced that it calls no further collective (the mark kLeft) stays until all
// others have, until no message among them is pending, and until they know it. Fails (CommError)
// when a rank that has not left gives no sign of life for too long. Used by the communication
// thread only; not blocking.
class Leaving {
 public:
  // Both references must outlive it.
  Leaving(Marks& marks, StallWatch& stalls) : marks_(marks), stalls_(stalls) {}

  // To be followed by the mark kLeft.
  void Begin() {
    has_begun_ = true;
    n_failed_before_ = marks_.n_failed();
  }
  bool has_begun() const { return has_begun_; }
  // All ranks have left: what this one still has is joined by none of them.
  bool AreAllLeaving();
  // Then: `is_empty` says that no message of this rank is pending.
  void Step(bool is_empty);
  // All ranks have left and no message among them is pending.
  bool has_left() const { return has_left_; }
  // Another rank has failed since this one began to leave: most likely because it
  // counted on this one. There is nothing left to wait for.
  bool is_cut_off() const { return is_cut_off_; }

 private:
  // The marks kQuiet and kSeen, each once.
  void SendQuiet();
  void SendSeen();

  Marks& marks_;
  StallWatch& stalls_;
  bool has_begun_ = false;
  int n_failed_before_ = 0;  // other ranks
  bool is_cut_off_ = false;
  bool is_quiet_ = false;                     // has sent the mark
  std::optional<Clock::time_point> seen_at_;  // when it has sent the mark
  bool has_left_ = false;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_LEAVING_H_
