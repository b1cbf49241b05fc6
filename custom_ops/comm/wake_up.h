// A condition variable whose waits may end at a time, by a clock that is never set back.
#ifndef TFSCALE_COMM_WAKE_UP_H_
#define TFSCALE_COMM_WAKE_UP_H_

#include <pthread.h>
#include <time.h>

#include <chrono>
#include <cstdint>
#include <mutex>

namespace tfscale {

// std::condition_variable::wait_for needs glibc 2.30 (pthread_cond_clockwait), or follows the
// system's clock, which may be set back by hours.
class WakeUp {
 public:
  WakeUp() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  ~WakeUp() { pthread_cond_destroy(&condition_); }
  WakeUp(const WakeUp&) = delete;
  WakeUp& operator=(const WakeUp&) = delete;

  void NotifyOne() { pthread_cond_signal(&condition_); }

  // Until `is_over` holds, which is called with the lock, or at most for `wait`.
  template <typename Predicate>
  void WaitFor(std::unique_lock<std::mutex>& lock, std::chrono::microseconds wait,
               Predicate is_over) {
    timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    const int64_t ns = end.tv_nsec + std::chrono::nanoseconds(wait).count();
    end.tv_sec += static_cast<time_t>(ns / 1000000000);
    end.tv_nsec = static_cast<long>(ns % 1000000000);
    int result = 0;
    while (!is_over() && result == 0) {
      result = pthread_cond_timedwait(&condition_, lock.mutex()->native_handle(), &end);
    }
  }

 private:
  pthread_cond_t condition_;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_WAKE_UP_H_
