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
  explicit EventLog(size_t capacity) : capacity_(capacity) { ring_.reserve(capacity); }

  void Add(const Event& event) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ring_.size() < capacity_) {
      ring_.push_back(event);
    } else {
      ring_[n_added_ % capacity_] = event;
    }
    ++n_added_;
    if (n_added_ - n_taken_ > capacity_) n_taken_ = n_added_ - capacity_;
  }

  // Moves up to `capacity` of the oldest events to `out`; returns how many.
  size_t Take(Event* out, size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t n = 0;
    for (; n < capacity && n_taken_ < n_added_; ++n) out[n] = ring_[n_taken_++ % capacity_];
    return n;
  }

 private:
  const size_t capacity_;
  std::mutex mutex_;
  std::vector<Event> ring_;  // up to its capacity; all below guarded by mutex_
  size_t n_added_ = 0;
  size_t n_taken_ = 0;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_EVENT_LOG_H_
