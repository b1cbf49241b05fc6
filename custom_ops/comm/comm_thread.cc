#include "comm/comm_thread.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace tfscale {
namespace {

using std::chrono::microseconds;

// Polling without pause for longer than this gains nothing: a rank that is late
// by more is late by its computation.
constexpr microseconds kHot{200};
// Then it sleeps for this share of the time since something moved last, so that an
// arrival is noticed late by at most that share.
constexpr int kShare = 8;
constexpr microseconds kLongSleep{500};
// A yield that takes longer gave the core to a thread that computes. For some time then it takes
// naps instead: a thread that wakes up gets its core back soon, one that yields does not.
constexpr microseconds kTurn{1000};
constexpr microseconds kSharedFor{50000};
constexpr microseconds kNap{20};
// While computation needs the cores and nothing waits: each look takes what the buffers of sockets
// hold by then, and moves the computation's data out of the core's cache.
constexpr microseconds kRelaxedSleep{8000};
// Marks of other ranks are looked for this often when there is nothing to do.
constexpr microseconds kIdle{20000};

// The kernel's sched_attr; C libraries before glibc 2.41 do not declare it.
struct SchedAttributes {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime;
  uint64_t deadline;
  uint64_t period;
};

// Asks for short turns on a core, so that it comes back soon after giving the core away. Linux 6.12
// and later; others refuse or ignore it, and nothing depends on it but speed.
void TakeShortTurns() {
  SchedAttributes attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.runtime = 100 * 1000;  // ns, the shortest that the kernel takes
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

CommThread::CommThread(const EngineOptions& options, WorkQueue& queue, Scheduler& scheduler)
    : options_(options), queue_(queue), scheduler_(scheduler), thread_([this] { Run(); }) {}

CommThread::~CommThread() {
  WorkQueue::Item item;
  item.command = [this] {
    is_leaving_ = true;
    scheduler_.Leave();
  };
  queue_.PushLast(item);
  thread_.join();
}

void CommThread::PinToCore() const {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<size_t>(options_.pin_core), &cores);
  const int rc = pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores);
  if (rc != 0) {
    std::fprintf(stderr, "[tfscale] cannot pin the communication thread to core %d\n",
                 options_.pin_core);
  }
}

void CommThread::TakeItems(microseconds wait) {
  for (WorkQueue::Item& item : queue_.Take(wait)) {
    if (item.command) {
      item.command();
    } else {
      scheduler_.Accept(std::move(item.task));
    }
    last_moved_ = Clock::now();
  }
}

microseconds CommThread::NextWait(bool has_moved) {
  const Clock::time_point now = Clock::now();
  if (has_moved) last_moved_ = now;
  if (!scheduler_.is_busy()) return kIdle;
  if (scheduler_.is_relaxed()) return has_moved ? microseconds(0) : kRelaxedSleep;
  if (now - last_moved_ < kHot) {
    if (now < shared_until_) return kNap;
    std::this_thread::yield();
    const Clock::time_point back = Clock::now();
    if (back - now > kTurn) shared_until_ = back + kSharedFor;
    return microseconds(0);
  }
  const microseconds longest = scheduler_.is_urgent() ? kLongSleep : kIdle;
  const auto quiet = std::chrono::duration_cast<microseconds>(now - last_moved_);
  return std::min(quiet / kShare, longest);
}

void CommThread::Run() {
  pthread_setname_np(pthread_self(), "tfscale-comm");
  // Default timer slack would turn a nap of 20 us into more than 70 us.
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  TakeShortTurns();
  if (options_.pin_core >= 0) PinToCore();
  microseconds wait = kIdle;
  while (!is_leaving_) {
    TakeItems(wait);
    wait = NextWait(scheduler_.Step());
  }
  while (!scheduler_.is_over()) {
    const Clock::time_point now = Clock::now();
    if (scheduler_.StepLeave()) last_moved_ = now;
    const auto quiet = std::chrono::duration_cast<microseconds>(now - last_moved_);
    if (quiet.count() > 0) std::this_thread::sleep_for(std::clamp(quiet / kShare, kHot, kIdle));
  }
}

}  // namespace tfscale
