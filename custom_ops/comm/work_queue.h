// Queue of tasks and commands from any thread to the communication thread.
#ifndef TFSCALE_COMM_WORK_QUEUE_H_
#define TFSCALE_COMM_WORK_QUEUE_H_

#include <functional>
#include <utility>
#include <vector>

#include "comm/mutex.h"
#include "comm/task.h"

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
    Lock lock(mutex_);
    if (wait.count() > 0 && items_.empty()) {
      const timespec end = WakeUp::After(wait);
      while (items_.empty() && wake_.WaitUntil(lock, end)) continue;
    }
    return std::exchange(items_, {});
  }

 private:
  bool Add(Item& item, bool is_last) {
    {
      Lock lock(mutex_);
      if (is_closed_) return false;
      items_.push_back(std::move(item));
      is_closed_ = is_last;
    }
    wake_.NotifyOne();
    return true;
  }

  Mutex mutex_;
  WakeUp wake_;
  std::vector<Item> items_ TFSCALE_GUARDED_BY(mutex_);
  bool is_closed_ TFSCALE_GUARDED_BY(mutex_) = false;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_WORK_QUEUE_H_
