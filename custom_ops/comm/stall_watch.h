// Reports what keeps a rank waiting, and ends waits that are too long.
#ifndef TFSCALE_COMM_STALL_WATCH_H_
#define TFSCALE_COMM_STALL_WATCH_H_

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "comm/marks.h"
#include "comm/options.h"
#include "comm/roster.h"
#include "comm/task.h"

namespace tfscale {

// Limits may be infinite: more than any job lasts.
inline Clock::duration FromSeconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(seconds, 1e8)));
}

// What a rank waits for.
struct Wait {
  std::string what;        // "<name of the collective> (<its place>)"
  std::vector<int> ranks;  // of the world, that keep it from ending
  std::string reason;      // what is waited for where it is no rank
};

// Half a warning time before the warning, a rank asks those it waits for
// whether they live: their communication threads answer. With the warning they
// are notified that they keep others waiting, and show where their program is.
// A process that was stopped or has died, or whose host cannot be reached, does
// not answer, and the warning says so. Used by the communication thread only.
class StallWatch {
 public:
  // All references must outlive the watch.
  StallWatch(const EngineOptions& options, int rank, const Roster& roster, Marks& marks);

  // True a few times per second at most: a check is not free.
  bool IsDue(Clock::time_point now);
  // Nothing is waited for: IsDue may not be called for a long time.
  void Rest();
  // Warns when `posted` is too long ago; throws CommError when much too long.
  // `describe` says what is waited for.
  void Look(Clock::time_point now, Clock::time_point posted, const std::function<Wait()>& describe);
  // The same where this rank has finished and waits for others to finish, which
  // may take them long: throws only when one of them has not answered for as
  // long as the limit.
  void LookAtEnd(Clock::time_point now, const std::vector<int>& ranks);

 private:
  void Hear(int rank, MarkKind kind, const std::string& text);
  void Ask(Clock::time_point now, const std::vector<int>& ranks);
  void Complain(const Wait& wait, const std::string& text);
  void ShowStacks();
  void NoteGap(Clock::time_point& last, Clock::time_point now);
  // Of `ranks`, those that were asked at least `age` ago and have not answered.
  std::vector<int> Silent(Clock::time_point now, const std::vector<int>& ranks,
                          Clock::duration age) const;
  std::string Explain(const Wait& wait, Clock::time_point now) const;
  double WarningTime() const;

  const EngineOptions& options_;
  const int rank_;
  const Roster& roster_;
  Marks& marks_;
  Clock::time_point last_look_ = Clock::now();
  Clock::time_point last_step_ = Clock::time_point::max();
  Clock::time_point last_end_look_ = Clock::now();
  Clock::time_point last_end_step_ = Clock::time_point::max();
  // No wait counts from before; see NoteGap.
  Clock::time_point began_ = Clock::time_point::min();
  Clock::time_point next_report_ = Clock::time_point::min();
  Clock::time_point next_question_ = Clock::time_point::min();
  Clock::time_point next_stacks_ = Clock::time_point::min();
  Clock::time_point next_end_report_ = Clock::time_point::max();
  std::map<int, Clock::time_point> asked_;  // for the first time without an answer, by rank
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_STALL_WATCH_H_
