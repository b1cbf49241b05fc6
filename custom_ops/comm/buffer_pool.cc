#include "comm/buffer_pool.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace tfscale {
namespace {
constexpr size_t kAlignment = 64;

// Sizes fall into classes, four between a power of two and the next, so that a
// caller whose requests grow a little each time does not fill the pool.
size_t RoundUp(size_t bytes) {
  size_t step = kAlignment;
  while (8 * step < bytes) step *= 2;
  return std::max<size_t>(1, (bytes + step - 1) / step) * step;
}
}  // namespace

BufferPool::~BufferPool() {
  for (auto& entry : free_) std::free(entry.second);
}

BufferPool::Buffer BufferPool::Get(size_t bytes) {
  const size_t rounded = RoundUp(bytes);
  {
    Lock lock(mutex_);
    const auto it = free_.find(rounded);
    if (it != free_.end()) {
      Buffer buffer(it->second, Returner{this, it->first});
      free_.erase(it);
      return buffer;
    }
  }
  char* data = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
  if (data == nullptr) throw std::bad_alloc();
  return Buffer(data, Returner{this, rounded});
}

void BufferPool::Return(char* data, size_t bytes) {
  Lock lock(mutex_);
  free_.emplace(bytes, data);
}

}  // namespace tfscale
