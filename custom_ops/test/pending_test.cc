// The list of variables whose values are on their way.
#include "comm/pending.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "test/check.h"

namespace tfscale {
namespace testing {
namespace {

using Keys = std::vector<PendingVariables::Key>;

// Stand for variables: only their addresses count.
char variables[64];

PendingVariables& Pending() { return PendingVariables::Get(); }

// How a call of Await ended; "" while it waits.
struct Waiter {
  std::shared_ptr<std::atomic<int>> n_calls = std::make_shared<std::atomic<int>>(0);
  std::shared_ptr<std::string> message = std::make_shared<std::string>();

  explicit Waiter(const Keys& keys) {
    Pending().Await(keys, [n = n_calls, text = message](const Status& status) {
      *text = status.message;
      ++*n;
    });
  }
  bool has_ended() const { return *n_calls == 1; }
};

}  // namespace

TEST(NothingPendingCostsNothing) {
  CHECK_TRUE(Pending().is_empty());
  CHECK_TRUE(Waiter({&variables[0], &variables[1]}).has_ended());
  Pending().Forget(&variables[0]);
  Pending().WaitForAll();
}

TEST(AWaiterWaitsForAllItsVariables) {
  const Keys keys = {&variables[0], &variables[1], &variables[2]};
  Pending().Begin({keys[0], keys[1]});
  CHECK_EQ(Pending().n_pending(), int64_t{2});
  CHECK_TRUE(!Pending().is_awaited());
  const Waiter first({keys[0]}), all(keys), other({keys[2]});
  CHECK_TRUE(!first.has_ended() && !all.has_ended() && other.has_ended());
  CHECK_TRUE(Pending().is_awaited());
  Pending().End({keys[0]}, Status::Ok());
  CHECK_TRUE(first.has_ended() && !all.has_ended());
  Pending().End({keys[1]}, Status::Ok());
  CHECK_TRUE(all.has_ended() && all.message->empty());
  CHECK_TRUE(!Pending().is_awaited());
  CHECK_TRUE(Pending().is_empty());
}

TEST(AVariableBegunTwiceEndsTwice) {
  const Keys keys = {&variables[0]};
  Pending().Begin(keys);
  Pending().Begin(keys);
  CHECK_EQ(Pending().n_pending(), int64_t{1});
  const Waiter waiter(keys);
  Pending().End(keys, Status::Failed("the first"));
  CHECK_TRUE(!waiter.has_ended());
  Pending().End(keys, Status::Ok());
  CHECK_TRUE(waiter.has_ended() && waiter.message->empty());
  CHECK_TRUE(Pending().is_empty());
}

TEST(AFailureStaysUntilTheNextSuccessOrWrite) {
  const Keys keys = {&variables[0], &variables[1]};
  auto anchor = std::make_shared<int>(1);
  Pending().Begin(keys);
  const Waiter early(keys);
  Pending().End(keys, Status::Failed("broken"), {anchor, anchor});
  CHECK_EQ(*early.message, std::string("broken"));
  CHECK_EQ(Pending().n_pending(), int64_t{0});
  CHECK_EQ(Pending().n_failed(), int64_t{2});
  CHECK_EQ(anchor.use_count(), 3L);
  CHECK_EQ(*Waiter(keys).message, std::string("broken"));

  Pending().Begin({keys[0]});
  CHECK_EQ(Pending().n_failed(), int64_t{1});
  const Waiter hopeful({keys[0]});
  Pending().Forget(keys[0]);  // not while values are under way
  CHECK_TRUE(!hopeful.has_ended());
  Pending().End({keys[0]}, Status::Ok());
  CHECK_TRUE(hopeful.message->empty() && Waiter({keys[0]}).message->empty());

  CHECK_EQ(*Waiter({keys[1]}).message, std::string("broken"));
  Pending().Forget(keys[1]);
  CHECK_TRUE(Waiter({keys[1]}).message->empty());
  CHECK_TRUE(Pending().is_empty());
  CHECK_EQ(anchor.use_count(), 1L);
}

// An anchor may call back when it is destroyed.
TEST(AnchorsAreDestroyedWithoutTheLock) {
  const Keys keys = {&variables[0]};
  const auto anchor = [&] {
    return std::shared_ptr<void>(nullptr, [&](void*) { Pending().Forget(&variables[1]); });
  };
  for (const bool is_forgotten : {true, false}) {
    Pending().Begin(keys);
    Pending().End(keys, Status::Stopped("on purpose"), {anchor()});
    if (is_forgotten) {
      Pending().Forget(keys[0]);
    } else {
      Pending().Begin(keys);
      Pending().End(keys, Status::Ok());
    }
    CHECK_TRUE(Pending().is_empty());
  }
}

TEST(ManyThreads) {
  std::atomic<int> n_ended{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        const Keys own = {&variables[t]}, both = {&variables[t], &variables[(t + i) % 4]};
        Pending().Begin(own);
        Pending().Await(both, [&](const Status&) { ++n_ended; });
        Pending().End(own, i % 3 == 0 ? Status::Failed("now and then") : Status::Ok());
        if (i % 5 == 0) Pending().Forget(own[0]);
      }
      Pending().Forget(&variables[t]);
    });
  }
  Pending().WaitForAll();
  for (std::thread& thread : threads) thread.join();
  Pending().WaitForAll();
  CHECK_EQ(n_ended.load(), 2000);
  CHECK_TRUE(Pending().is_empty());
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunTests(); }
