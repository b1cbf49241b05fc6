// Mutexes whose use clang checks: see -Wthread-safety in .clang-tidy.
#ifndef TFSCALE_COMM_MUTEX_H_
#define TFSCALE_COMM_MUTEX_H_

#include <pthread.h>
#include <time.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#if defined(__clang__)
#define TFSCALE_CHECKED(attribute) __attribute__((attribute))
#else
#define TFSCALE_CHECKED(attribute)
#endif
// Of a member: it is read and written while the mutex is held.
#define TFSCALE_GUARDED_BY(mutex) TFSCALE_CHECKED(guarded_by(mutex))
// Of a function: it is called while the mutex is held.
#define TFSCALE_REQUIRES(mutex) TFSCALE_CHECKED(requires_capability(mutex))

namespace tfscale {

class TFSCALE_CHECKED(capability("mutex")) Mutex {
 private:
  friend class Lock;
  std::mutex mutex_;
};

// Holds a mutex, but for the time of a wait.
class TFSCALE_CHECKED(scoped_lockable) Lock {
 public:
  explicit Lock(Mutex& mutex) TFSCALE_CHECKED(acquire_capability(mutex)) : lock_(mutex.mutex_) {}
  ~Lock() TFSCALE_CHECKED(release_capability()) {}
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // May end for no reason.
  void Wait(std::condition_variable& condition) { condition.wait(lock_); }

 private:
  friend class WakeUp;
  std::unique_lock<std::mutex> lock_;
};

// A condition variable whose waits may end at a time, by a clock that is never set back.
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

  static timespec After(std::chrono::microseconds wait) {
    timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    const int64_t ns = end.tv_nsec + std::chrono::nanoseconds(wait).count();
    end.tv_sec += static_cast<time_t>(ns / 1000000000);
    end.tv_nsec = static_cast<long>(ns % 1000000000);
    return end;
  }
  // False when the time has come; true before, perhaps for no reason.
  bool WaitUntil(Lock& lock, const timespec& end) {
    return pthread_cond_timedwait(&condition_, lock.lock_.mutex()->native_handle(), &end) == 0;
  }

 private:
  pthread_cond_t condition_;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_MUTEX_H_
