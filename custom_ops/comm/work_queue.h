// Queue of tasks and commands from any thread to the communication thread.
#ifndef TFSCALE_COMM_WORK_QUEUE_H_
#define TFSCALE_COMM_WORK_QUEUE_H_

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/task.h"
#include "comm/wake_up.h"

namespace tfscale {

// Unbounded, many producers, one consumer. A command is a function that the
// communication thread runs between tasks, in the order of arrival.
class WorkQueue {
 public:
  struct Item {
    Task task;                      // has an operation, or
    std::function<void()> command;  // this is set
  };

  // False when the queue is closed; the item is then left untouched.
  bool Push(Item& item) { return Add(item, false); }
  // Pushes and closes in one, so that nothing can come after it unseen.
  bool PushLast(Item& item) { return Add(item, true); }

  // All items, at once if there are any, else after at most `wait`.
  std::vector<Item> Take(std::chrono::microseconds wait) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wait.count() > 0 && items_.empty()) {
      wake_.WaitFor(lock, wait, [this] { return !items_.empty(); });
    }
    return std::exchange(items_, {});
  }

 private:
  bool Add(Item& item, bool is_last) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_closed_) return false;
      items_.push_back(std::move(item));
      is_closed_ = is_last;
    }
    wake_.NotifyOne();
    return true;
  }

  std::mutex mutex_;
  WakeUp wake_;
  std::vector<Item> items_;  // guarded by mutex_
  bool is_closed_ = false;   // guarded by mutex_
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_WORK_QUEUE_H_
