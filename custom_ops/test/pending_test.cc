// Gathers of segments, and the list of variables whose values they bring.
#include "comm/pending.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "comm/c_api.h"
#include "test/job.h"

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

// A buffer cut among the ranks; every byte tells whose it is.
struct Parts {
  std::shared_ptr<Bytes> buffer;
  std::vector<size_t> cuts;
  int step;

  Parts(std::vector<size_t> ends, int rank, int step_)
      : buffer(std::make_shared<Bytes>(ends.back(), 'x')), cuts(std::move(ends)), step(step_) {
    for (size_t i = Begin(rank); i < cuts[static_cast<size_t>(rank) + 1]; ++i) {
      (*buffer)[i] = ValueOf(rank, i);
    }
  }
  size_t Begin(int rank) const { return cuts[static_cast<size_t>(rank)]; }
  char ValueOf(int rank, size_t i) const {
    return static_cast<char>((static_cast<size_t>(rank + step) * 31 + i) % 127);
  }
  OperationHandle Gather() const { return MakeSegmentGather(buffer->data(), cuts); }
  void Check() const {
    for (size_t r = 0; r + 1 < cuts.size(); ++r) {
      for (size_t i = cuts[r]; i < cuts[r + 1]; ++i) {
        CHECK_EQ((*buffer)[i], ValueOf(static_cast<int>(r), i));
      }
    }
  }
};

// Posts a gather that brings a variable's value, as the op does.
void PostFor(PendingVariables::Key key, const Parts& parts, const Place& place) {
  Pending().Begin({key});
  Call call;
  call.name = place.name;
  call.plan = place.plan;
  call.slot = place.slot;
  call.memory = parts.buffer;
  call.done = [key](const Status& status) { Pending().End({key}, status); };
  Submit(parts.Gather(), std::move(call));
}

std::vector<size_t> EvenCuts(int size, size_t length) {
  std::vector<size_t> cuts;
  for (int r = 0; r <= size; ++r) cuts.push_back(length * static_cast<size_t>(r) / size);
  return cuts;
}

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
  const Waiter first({keys[0]}), all(keys), other({keys[2]});
  CHECK_TRUE(!first.has_ended() && !all.has_ended() && other.has_ended());
  Pending().End({keys[0]}, Status::Ok());
  CHECK_TRUE(first.has_ended() && !all.has_ended());
  Pending().End({keys[1]}, Status::Ok());
  CHECK_TRUE(all.has_ended() && all.message->empty());
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
  CHECK_EQ(anchor.use_count(), 3L);
  CHECK_EQ(*Waiter(keys).message, std::string("broken"));

  Pending().Begin({keys[0]});
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

TEST(SegmentsOfAnyLengths) {
  Job job;
  const size_t n = static_cast<size_t>(job.size());
  std::vector<std::vector<size_t>> all = {EvenCuts(job.size(), 0), EvenCuts(job.size(), 7),
                                          EvenCuts(job.size(), 10007)};
  std::vector<size_t> one(n + 1, 0), uneven(n + 1, 0);
  one.back() = 12345;
  for (size_t r = 0; r < n; ++r) uneven[r + 1] = uneven[r] + (r % 2 == 0 ? 777 * r : 0) + 1;
  all.push_back(one);
  all.push_back(uneven);
  for (int step = 0; step < 3; ++step) {
    for (const std::vector<size_t>& cuts : all) {
      const Parts parts(cuts, job.rank(), step);
      CHECK_OK(Post(parts.Gather(), {}, parts.buffer));
      parts.Check();
    }
  }
}

TEST(CutsForOtherRanksFail) {
  auto job = std::make_unique<Job>();
  const Parts parts(EvenCuts(job->size() + 1, 100), job->rank(), 0);
  const Status status = Post(parts.Gather(), {}, parts.buffer).get();
  CHECK_TRUE(status.code == StatusCode::kFailed);
  CHECK_CONTAINS(status.message, "a segment for each of the " + std::to_string(job->size()));
}

TEST(AGatherThatAPeerNeverPosts) {
  Job job;
  if (job.size() == 1) return;
  const int plan = job.engine().plans().Create(0, "train");
  job.engine().plans().AddSlot(plan, "gather");
  const Place place{"gather", 0, plan, 0};
  {
    const Parts parts(EvenCuts(job.size(), 5000), job.rank(), 0);
    PostFor(&variables[0], parts, place);
    const Waiter waiter({&variables[0]});
    Pending().WaitForAll();
    parts.Check();
  }
  if (job.rank() > 0) {
    // The buffer goes while what was sent to rank 0 is still on its way.
    PostFor(&variables[0], Parts(EvenCuts(job.size(), 5000), job.rank(), 1), place);
    Pending().WaitForAll();
    CHECK_CONTAINS(*Waiter({&variables[0]}).message, "rank 0 stopped training after step 1");
    Pending().Forget(&variables[0]);
  } else {
    SleepMs(30);
    job.engine().Mark(MarkKind::kStop);
  }
  CHECK_TRUE(Pending().is_empty());
}

TEST(StoppingWaitsForWhatWasPosted) {
  const EngineOptions options = SmallOptions();
  for (const bool is_new_incarnation : {true, false}) {
    int local_rank = 0, local_size = 0;
    CHECK_EQ(tfscale_local(-1, &local_rank, &local_size), 0);
    CHECK_EQ(tfscale_start(-1, &options), 0);
    const int plan = tfscale_plan_create(0, "train");
    CHECK_EQ(tfscale_plan_add_slot(plan, "gather"), 0);
    const Parts parts(EvenCuts(tfscale_size(), 100003), tfscale_rank(), 2);
    if (tfscale_rank() == 0) SleepMs(100);
    PostFor(&variables[0], parts, {"gather", 0, plan, 0});
    if (tfscale_rank() > 0) CHECK_EQ(tfscale_num_pending(), int64_t{1});
    if (is_new_incarnation) CHECK_EQ(tfscale_start_incarnation(1), 0);
    if (!is_new_incarnation) tfscale_stop();
    CHECK_EQ(tfscale_num_pending(), int64_t{0});
    parts.Check();
    tfscale_stop();
  }
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
