#include "comm/worker_pool.h"

#include <algorithm>

namespace tfscale {

WorkerPool::WorkerPool(int n_threads) {
  for (int part = 1; part < n_threads; ++part) {
    threads_.emplace_back([this, part] { Run(static_cast<size_t>(part)); });
  }
}

WorkerPool::~WorkerPool() {
  {
    Lock lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::For(size_t count, size_t grain, const std::function<void(size_t, size_t)>& work) {
  const size_t n_parts = threads_.size() + 1;
  // A reduction of less than two grains is over before another thread is awake.
  if (n_parts == 1 || count < 2 * grain) {
    work(0, count);
    return;
  }
  const size_t n_grains = (count + grain - 1) / grain;
  {
    Lock lock(mutex_);
    work_ = &work;
    count_ = count;
    part_size_ = (n_grains + n_parts - 1) / n_parts * grain;
    n_running_ = threads_.size();
    ++job_;
  }
  wake_.notify_all();
  RunPart(0);
  Lock lock(mutex_);
  while (n_running_ > 0) lock.Wait(done_);
  work_ = nullptr;
}

void WorkerPool::RunPart(size_t part) const {
  const size_t begin = std::min(count_, part * part_size_);
  const size_t end = std::min(count_, begin + part_size_);
  if (begin < end) (*work_)(begin, end);
}

void WorkerPool::Run(size_t part) {
  size_t last_job = 0;
  while (true) {
    {
      Lock lock(mutex_);
      while (!is_stopping_ && job_ == last_job) lock.Wait(wake_);
      if (is_stopping_) return;
      last_job = job_;
    }
    RunPart(part);
    Lock lock(mutex_);
    if (--n_running_ == 0) done_.notify_one();
  }
}

}  // namespace tfscale
