#include "comm/stall_watch.h"

#include <cstdio>
#include <sstream>

#include "comm/types.h"

namespace tfscale {

bool StallWatch::IsDue(Clock::time_point now) {
  const double shorter = std::min(options_.stall_warning_s, options_.stall_shutdown_s);
  if (now - last_look_ < FromSeconds(std::min(0.5, shorter / 4))) return false;
  last_look_ = now;
  return true;
}

void StallWatch::Look(Clock::time_point now, Clock::time_point posted,
                      const std::function<std::string()>& describe) {
  const Clock::duration waited = now - posted;
  const bool is_over = waited >= FromSeconds(options_.stall_shutdown_s);
  const bool is_late = waited >= FromSeconds(options_.stall_warning_s) && now >= next_report_;
  if (!is_over && !is_late) return;
  next_report_ = now + FromSeconds(options_.stall_warning_s);
  const int64_t tenths =
      std::chrono::duration_cast<std::chrono::milliseconds>(waited).count() / 100;
  std::ostringstream text;
  text << "rank " << rank_ << " has waited " << static_cast<double>(tenths) / 10 << " s in "
       << describe();
  std::fprintf(stderr, "[tfscale] %s\n", text.str().c_str());
  if (is_over) {
    throw CommError("No answer within the time limit (TFSCALE_STALL_SHUTDOWN_S): " + text.str());
  }
}

}  // namespace tfscale
