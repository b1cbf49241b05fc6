// Tells the user what keeps a rank waiting, and ends waits that are too long.
#ifndef TFSCALE_COMM_STALL_WATCH_H_
#define TFSCALE_COMM_STALL_WATCH_H_

#include <algorithm>
#include <functional>
#include <string>

#include "comm/options.h"
#include "comm/task.h"

namespace tfscale {

// Limits may be infinite: more than any job lasts.
inline Clock::duration FromSeconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(seconds, 1e8)));
}

// Used by the communication thread only.
class StallWatch {
 public:
  StallWatch(const EngineOptions& options, int rank) : options_(options), rank_(rank) {}

  // True a few times per second at most: looking is not free.
  bool IsDue(Clock::time_point now);
  // Warns when `posted` is too long ago; throws CommError when much too long.
  // `describe` says what is waited for.
  void Look(Clock::time_point now, Clock::time_point posted,
            const std::function<std::string()>& describe);

 private:
  const EngineOptions& options_;
  const int rank_;
  Clock::time_point last_look_ = Clock::now();
  Clock::time_point next_report_ = Clock::time_point::min();
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_STALL_WATCH_H_
