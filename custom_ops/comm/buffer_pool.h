// Scratch memory that is reused in every step.
#ifndef TFSCALE_COMM_BUFFER_POOL_H_
#define TFSCALE_COMM_BUFFER_POOL_H_

#include <cstddef>
#include <map>
#include <memory>

#include "comm/mutex.h"

namespace tfscale {

// Fresh memory of tens of megabytes costs a page fault per 4 KiB, every step;
// a pooled buffer costs that once. Thread-safe. Buffers go back when their
// handle is destroyed and must not outlive the pool.
class BufferPool {
 public:
  struct Returner {
    BufferPool* pool;
    size_t bytes;
    void operator()(char* data) const { pool->Return(data, bytes); }
  };
  using Buffer = std::unique_ptr<char, Returner>;

  BufferPool() = default;
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // 64-byte aligned, contents undefined, at least `bytes` long.
  Buffer Get(size_t bytes);

 private:
  void Return(char* data, size_t bytes);

  Mutex mutex_;
  std::multimap<size_t, char*> free_ TFSCALE_GUARDED_BY(mutex_);
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_BUFFER_POOL_H_
