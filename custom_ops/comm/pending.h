// Variables with a pending gather, and the callbacks that wait for it.
#ifndef TFSCALE_COMM_PENDING_H_
#define TFSCALE_COMM_PENDING_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "comm/mutex.h"
#include "comm/types.h"

namespace tfscale {

// One list per process. A key is the address of a variable: the caller of
// Begin keeps the variable alive until End, so that an address never
// stands for two variables. Thread-safe; callbacks run without the lock.
class PendingVariables {
 public:
  using Key = const void*;
  using Waiter = std::function<void(const Status&)>;

  static PendingVariables& Get();

  // New values are pending; End follows exactly once. A variable may be begun
  // again before that: it is then pending until the last End.
  void Begin(const std::vector<Key>& keys);
  // The values are in place, or never will be. A failure is what readers get
  // from now on, until the next success or Forget; `anchors`, one per key, are
  // kept as long and may forget it when the variable is deleted.
  void End(const std::vector<Key>& keys, const Status& status,
           std::vector<std::shared_ptr<void>> anchors = {});
  // Calls `waiter` once nothing is pending for the keys: at once, on this
  // thread, or later on the one that calls End. With the first failure of them,
  // if there is one.
  void Await(const std::vector<Key>& keys, Waiter waiter);
  // The variable has a value again, or is no more.
  void Forget(Key key);

  // Nothing is pending and no failure is remembered; takes no lock.
  bool is_empty() const { return n_entries_.load(std::memory_order_acquire) == 0; }
  int64_t n_pending();
  // Something waits for values that are on their way.
  bool is_awaited();
  // Variables of which a failure is remembered.
  int64_t n_failed();
  // Blocks until nothing is pending.
  void WaitForAll();

 private:
  // A call of Await that waits for several variables.
  struct Waiting {
    size_t n_left = 0;
    Status status;
    Waiter waiter;
  };
  struct Entry {
    int n_under_way = 0;
    Status failure;
    std::shared_ptr<void> anchor;
    std::vector<std::shared_ptr<Waiting>> waiting;
  };

  void EndOne(Key key, const Status& status, std::shared_ptr<void>* anchor,
              std::vector<std::shared_ptr<Waiting>>* ready) TFSCALE_REQUIRES(mutex_);
  void CountEntries() TFSCALE_REQUIRES(mutex_) {
    n_entries_.store(entries_.size(), std::memory_order_release);
  }

  Mutex mutex_;
  std::condition_variable all_ended_;
  std::unordered_map<Key, Entry> entries_ TFSCALE_GUARDED_BY(mutex_);
  int64_t n_pending_ TFSCALE_GUARDED_BY(mutex_) = 0;  // variables
  int n_blocked_ TFSCALE_GUARDED_BY(mutex_) = 0;      // threads in WaitForAll
  std::atomic<size_t> n_entries_{0};
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_PENDING_H_
