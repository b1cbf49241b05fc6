// The last finished collectives and when they were posted, started and ended.
#ifndef TFSCALE_COMM_EVENT_LOG_H_
#define TFSCALE_COMM_EVENT_LOG_H_

#include <cstddef>
#include <mutex>
#include <vector>

#include "comm/task.h"

namespace tfscale {

// A ring: events that are not taken in time are overwritten. Thread-safe.
class EventLog {
 public:
  explicit EventLog(size_t capacity) : ring_(capacity) {}

  void Add(const Event& event) {
    std::lock_guard<std::mutex> lock(mutex_);
    ring_[n_added_++ % ring_.size()] = event;
    if (n_added_ - n_taken_ > ring_.size()) n_taken_ = n_added_ - ring_.size();
  }

  // Moves up to `capacity` of the oldest events to `out`; returns how many.
  size_t Take(Event* out, size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t n = 0;
    for (; n < capacity && n_taken_ < n_added_; ++n) out[n] = ring_[n_taken_++ % ring_.size()];
    return n;
  }

 private:
  std::mutex mutex_;
  std::vector<Event> ring_;  // all below guarded by mutex_
  size_t n_added_ = 0;
  size_t n_taken_ = 0;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_EVENT_LOG_H_
