#include "comm/comm_thread.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace tfscale {
namespace {

using std::chrono::microseconds;

// Polling without pause for longer than this gains nothing: a rank that is late
// by more is late by its computation.
constexpr microseconds kHot{200};
constexpr microseconds kShortSleep{50};
constexpr microseconds kLongSleep{500};
// Marks of other ranks are looked for this often when there is nothing to do.
constexpr microseconds kIdle{20000};

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
  if (scheduler_.is_relaxed()) return kLongSleep;  // computation needs the core
  if (now - last_moved_ < kHot) {
    sleep_ = kShortSleep;
    std::this_thread::yield();
    return microseconds(0);
  }
  const microseconds longest = scheduler_.is_urgent() ? kLongSleep : kIdle;
  const microseconds wait = std::min(sleep_, longest);
  sleep_ = std::min(2 * wait, longest);
  return wait;
}

void CommThread::Run() {
  pthread_setname_np(pthread_self(), "tfscale-comm");
  // Default timer slack would turn a sleep of 50 us into more than 100 us.
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  if (options_.pin_core >= 0) PinToCore();
  microseconds wait = kIdle;
  while (!is_leaving_) {
    TakeItems(wait);
    wait = NextWait(scheduler_.Step());
  }
  WaitForOthersToLeave();
}

void CommThread::WaitForOthersToLeave() {
  while (!scheduler_.has_failed() && !scheduler_.has_left() && !scheduler_.is_cut_off()) {
    if (!scheduler_.StepLeave()) std::this_thread::sleep_for(microseconds(200));
  }
}

}  // namespace tfscale
