// Memory, threads, the way to the communication thread, and the log of events.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <set>
#include <thread>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/event_log.h"
#include "comm/work_queue.h"
#include "comm/worker_pool.h"
#include "test/check.h"

namespace tfscale {

TEST(WorkersCoverEachElementOnce) {
  for (int n_threads : {1, 2, 3, 7}) {
    WorkerPool pool(n_threads);
    CHECK_EQ(pool.size(), n_threads);
    for (size_t count : {0, 1, 7, 15, 16, 17, 1000, 4096}) {
      for (size_t grain : {1, 8, 1024}) {
        std::vector<std::atomic<int>> visits(count);
        std::atomic<int> n_odd_borders{0};
        pool.For(count, grain, [&](size_t begin, size_t end) {
          if (begin % grain != 0) ++n_odd_borders;
          for (size_t i = begin; i < end; ++i) ++visits[i];
        });
        for (size_t i = 0; i < count; ++i) CHECK_EQ(visits[i].load(), 1);
        CHECK_EQ(n_odd_borders.load(), 0);
      }
    }
  }
}

TEST(WorkersDoManyJobs) {
  WorkerPool pool(4);
  // Not atomic: `For` alone must order the parts of one job before the next.
  std::vector<int> counters(64, 0);
  for (int job = 0; job < 2000; ++job) {
    pool.For(counters.size(), 1, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) ++counters[i];
    });
  }
  for (int counter : counters) CHECK_EQ(counter, 2000);
}

TEST(BuffersAreAlignedAndLongEnough) {
  BufferPool pool;
  for (size_t bytes : {0, 1, 63, 64, 65, 1000, 100003}) {
    BufferPool::Buffer buffer = pool.Get(bytes);
    CHECK_TRUE(buffer != nullptr);
    CHECK_EQ(reinterpret_cast<uintptr_t>(buffer.get()) % 64, uintptr_t{0});
    std::memset(buffer.get(), 1, bytes);
  }
}

TEST(BuffersAreUsedAgain) {
  BufferPool pool;
  const char* first = pool.Get(100000).get();
  CHECK_TRUE(pool.Get(100000).get() == first);
  CHECK_TRUE(pool.Get(99000).get() == first);
  BufferPool::Buffer held = pool.Get(100000);
  CHECK_TRUE(held.get() == first);
  CHECK_TRUE(pool.Get(100000).get() != first);
  // A far smaller request does not take it away.
  held.reset();
  CHECK_TRUE(pool.Get(100).get() != first);
}

TEST(BuffersOfGrowingSizesDoNotPileUp) {
  BufferPool pool;
  std::set<const char*> seen;
  for (size_t bytes = 4096; bytes < 65536; bytes += 16) {
    BufferPool::Buffer buffer = pool.Get(bytes);
    CHECK_TRUE(4 * (buffer.get_deleter().bytes - bytes) <= bytes);
    seen.insert(buffer.get());
  }
  CHECK_TRUE(seen.size() <= 20);
}

TEST(BuffersOfManyThreads) {
  BufferPool pool;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      for (size_t i = 1; i < 500; ++i) {
        BufferPool::Buffer buffer = pool.Get(i * 7);
        std::memset(buffer.get(), t, i * 7);
        CHECK_EQ(static_cast<int>(buffer.get()[i * 7 - 1]), t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(EventsComeOldestFirst) {
  EventLog log(4);
  std::vector<Event> out(10);
  CHECK_EQ(log.Take(out.data(), 10), size_t{0});
  for (int32_t slot = 0; slot < 3; ++slot) {
    Event event{};
    event.slot = slot;
    log.Add(event);
  }
  CHECK_EQ(log.Take(out.data(), 2), size_t{2});
  CHECK_EQ(out[0].slot, 0);
  CHECK_EQ(out[1].slot, 1);
  CHECK_EQ(log.Take(out.data(), 10), size_t{1});
  CHECK_EQ(out[0].slot, 2);
}

TEST(OldEventsAreOverwritten) {
  EventLog log(4);
  for (int32_t slot = 0; slot < 11; ++slot) {
    Event event{};
    event.slot = slot;
    log.Add(event);
  }
  std::vector<Event> out(10);
  CHECK_EQ(log.Take(out.data(), 10), size_t{4});
  for (int32_t i = 0; i < 4; ++i) CHECK_EQ(out[static_cast<size_t>(i)].slot, 7 + i);
}

TEST(QueueKeepsOrderAndLosesNothing) {
  WorkQueue queue;
  constexpr int kThreads = 3;
  constexpr int kItems = 500;
  std::vector<int> last(kThreads, -1);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kItems; ++i) {
        WorkQueue::Item item;
        item.command = [&last, t, i] {
          CHECK_EQ(last[static_cast<size_t>(t)] + 1, i);
          last[static_cast<size_t>(t)] = i;
        };
        CHECK_TRUE(queue.Push(item));
      }
    });
  }
  for (int n = 0; n < kThreads * kItems;) {
    for (WorkQueue::Item& item : queue.Take(std::chrono::microseconds(1000))) {
      item.command();
      ++n;
    }
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(NothingFollowsTheLastItem) {
  WorkQueue queue;
  WorkQueue::Item last;
  last.command = [] {};
  CHECK_TRUE(queue.PushLast(last));
  WorkQueue::Item late;
  late.command = [] {};
  CHECK_TRUE(!queue.Push(late));
  CHECK_TRUE(late.command != nullptr);
  CHECK_EQ(queue.Take(std::chrono::microseconds(0)).size(), size_t{1});
}

// A minute passes only if a call has not woken the wait; each is pushed after one has been taken.
TEST(APushEndsTheWaitOfTake) {
  using std::chrono::steady_clock;
  WorkQueue queue;
  constexpr int kItems = 200;
  std::atomic<int> n_taken{0};
  const steady_clock::time_point start = steady_clock::now();
  std::thread pusher([&] {
    for (int i = 0; i < kItems; ++i) {
      while (n_taken.load() < i) std::this_thread::yield();
      WorkQueue::Item item;
      item.command = [&n_taken] { ++n_taken; };
      CHECK_TRUE(queue.Push(item));
    }
  });
  while (n_taken.load() < kItems) {
    for (WorkQueue::Item& item : queue.Take(std::chrono::minutes(1))) item.command();
  }
  pusher.join();
  CHECK_TRUE(steady_clock::now() - start < std::chrono::minutes(1));
}

TEST(TakeWaitsAsLongAsItIsTold) {
  WorkQueue queue;
  // Over the end of a second, too, wherever in it the first wait starts.
  for (int ms : {0, 1, 300, 400, 400}) {
    const auto start = std::chrono::steady_clock::now();
    CHECK_TRUE(queue.Take(std::chrono::milliseconds(ms)).empty());
    CHECK_TRUE(std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(ms));
  }
}

}  // namespace tfscale

int main() { return tfscale::testing::RunTests(); }
