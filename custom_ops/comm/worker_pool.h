// A few threads that share the work of a local reduction.
#ifndef TFSCALE_COMM_WORKER_POOL_H_
#define TFSCALE_COMM_WORKER_POOL_H_

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

#include "comm/mutex.h"

namespace tfscale {

// Owns its threads. `For` is called by one thread at a time (the communication
// thread) and blocks until all parts are done; the caller works too, so a pool
// of one has no thread at all. Exceptions in `work` are not allowed.
class WorkerPool {
 public:
  explicit WorkerPool(int n_threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Calls work(begin, end) on disjoint ranges that cover [0, count); each range
  // but the last is a multiple of `grain` long.
  void For(size_t count, size_t grain, const std::function<void(size_t, size_t)>& work);

  int size() const { return static_cast<int>(threads_.size()) + 1; }

 private:
  void Run(size_t part);
  void RunPart(size_t part) const;

  Mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  // Written under mutex_, read by the parts of a job, which runs while they do not change.
  const std::function<void(size_t, size_t)>* work_ = nullptr;
  size_t count_ = 0;
  size_t part_size_ = 0;
  size_t n_running_ TFSCALE_GUARDED_BY(mutex_) = 0;
  size_t job_ TFSCALE_GUARDED_BY(mutex_) = 0;
  bool is_stopping_ TFSCALE_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_WORKER_POOL_H_
