// The last finished collectives and when they were posted, started and ended.
#ifndef TFSCALE_COMM_EVENT_LOG_H_
#define TFSCALE_COMM_EVENT_LOG_H_

#include <algorithm>
#include <cstddef>
#include <deque>

#include "comm/mutex.h"
#include "comm/task.h"

namespace tfscale {

// A ring: events that are not taken in time are overwritten. Thread-safe.
class EventLog {
 public:
  explicit EventLog(size_t capacity) : capacity_(capacity) {}

  void Add(const Event& event) {
    Lock lock(mutex_);
    events_.push_back(event);
    if (events_.size() > capacity_) events_.pop_front();
  }

  // Moves up to `capacity` of the oldest events to `out`; returns how many.
  size_t Take(Event* out, size_t capacity) {
    Lock lock(mutex_);
    const auto end =
        events_.begin() + static_cast<std::ptrdiff_t>(std::min(capacity, events_.size()));
    const auto n = std::copy(events_.begin(), end, out) - out;
    events_.erase(events_.begin(), end);
    return static_cast<size_t>(n);
  }

 private:
  const size_t capacity_;
  Mutex mutex_;
  std::deque<Event> events_ TFSCALE_GUARDED_BY(mutex_);
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_EVENT_LOG_H_
