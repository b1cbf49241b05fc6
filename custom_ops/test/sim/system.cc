// What the engine asks of the system, for the fibers of a World: these definitions take the place
// of those of the C and C++ libraries when the simulator is linked.
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <random>
#include <thread>

#include "test/sim/network.h"
#include "test/sim/world.h"

namespace {

using sim::Time;
using sim::World;

World* Running() {
  World* world = World::Get();
  return world != nullptr && world->current() >= 0 ? world : nullptr;
}

Time ToTime(const timespec& time) { return time.tv_sec * sim::kSecond + time.tv_nsec; }

constexpr pid_t kFirstPid = 1000000;
// A thread that gives its core away gets it back within this.
constexpr Time kTurn = 200 * sim::kMicro;
// Or, where a thread that computes has got it, much later.
constexpr Time kLongTurn = 3 * sim::kMilli;

}  // namespace

namespace std {

chrono::steady_clock::time_point chrono::steady_clock::now() noexcept {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time_point(nanoseconds(ToTime(time)));
}

void condition_variable::wait(unique_lock<mutex>& lock) noexcept(true) {
  lock.unlock();
  Running()->Wait(this, sim::kNever, "waits for an answer");
  lock.lock();
}
void condition_variable::notify_one() noexcept { notify_all(); }
void condition_variable::notify_all() noexcept {
  if (World* world = Running()) world->Signal(this);
}

// A thread is known by its number, which is that of the fiber in its process.
void thread::_M_start_thread(_State_ptr state, void (*)()) {
  World* world = Running();
  const int rank = world->current();
  shared_ptr<_State> body = std::move(state);
  sim::Fiber* fiber = world->Spawn(rank, [body] { body->_M_run(); });
  _M_id = id(reinterpret_cast<native_handle_type>(fiber));
}
void thread::join() {
  const auto* fiber = reinterpret_cast<const sim::Fiber*>(native_handle());
  while (!fiber->is_done()) Running()->Wait(fiber, sim::kNever, "joins a thread");
  _M_id = id();
}

// Asked for once per process, for what must differ from that of other processes.
random_device::result_type random_device::_M_getval() { return 12345; }

}  // namespace std

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  World* world = Running();
  if (world == nullptr) return static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  const Time now = world->ReadClock();
  time->tv_sec = now / sim::kSecond;
  time->tv_nsec = now % sim::kSecond;
  return 0;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* until) {
  World* world = Running();
  const Time end = ToTime(*until) - world->process(world->current()).clock_offset;
  pthread_mutex_unlock(mutex);
  const bool is_signalled = world->Wait(condition, end, "sleeps");
  pthread_mutex_lock(mutex);
  return is_signalled ? 0 : ETIMEDOUT;
}
int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  if (World* world = Running()) world->Signal(condition);
  return 0;
}

int nanosleep(const timespec* time, timespec*) {
  World* world = Running();
  if (world == nullptr) return 0;
  world->Sleep(ToTime(*time), "sleeps a while");
  return 0;
}
int sched_yield() noexcept {
  World* world = Running();
  if (world == nullptr) return 0;
  const bool is_long = !world->machine().is_timed() && world->random().Chance(0.02);
  world->Poll(is_long ? kLongTurn : kTurn);
  return 0;
}
int pthread_kill(pthread_t, int signal) noexcept {
  if (World* world = Running()) world->Note("signal", signal);
  return 0;
}

pid_t getpid() noexcept {
  World* world = Running();
  return world == nullptr ? static_cast<pid_t>(syscall(SYS_getpid)) : kFirstPid + world->current();
}

// All processes share this one's memory.
ssize_t process_vm_readv(pid_t pid, const iovec* to, unsigned long n_to, const iovec* from,
                         unsigned long n_from, unsigned long) noexcept {
  World* world = Running();
  const int rank = pid - kFirstPid;
  const sim::Process& other = world->process(rank);
  if (other.is_dead || other.has_ended) return errno = ESRCH, -1;
  if (rank != world->current()) {
    world->Spend(1000);
    const int error = world->TakeReadError();
    if (error == EFAULT) {
      return static_cast<ssize_t>(to[0].iov_len) / 2;  // as of memory that ends there
    }
    if (error != 0) return errno = error, -1;
  }
  ssize_t total = 0;
  size_t i = 0;
  size_t offset = 0;
  for (unsigned long k = 0; k < n_to; ++k) {
    size_t done = 0;
    while (done < to[k].iov_len && i < n_from) {
      const size_t n = std::min(to[k].iov_len - done, from[i].iov_len - offset);
      if (n > 0 && from[i].iov_base == nullptr) return total > 0 ? total : (errno = EFAULT, -1);
      if (n > 0 && !world->machine().IsHollow(from[i].iov_base)) {
        std::memcpy(static_cast<char*>(to[k].iov_base) + done,
                    static_cast<const char*>(from[i].iov_base) + offset, n);
      }
      done += n;
      offset += n;
      total += static_cast<ssize_t>(n);
      if (offset == from[i].iov_len) {
        ++i;
        offset = 0;
      }
    }
  }
  const bool is_charged = rank != world->current() && world->machine().is_timed();
  if (is_charged) world->Work(total, world->machine().host_bytes_per_ns);
  return total;
}
}
