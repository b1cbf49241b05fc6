// Communication that fails, and engines that end with work under way.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "test/plans_job.h"

namespace tfscale {
namespace testing {
namespace {

std::vector<int> All(const Job& job) {
  return job.Ranks([](int) { return true; });
}

}  // namespace

TEST(PlansThatDifferFailOnAllRanks) {
  Job job;
  if (job.size() == 1) return;
  const int last = job.size() - 1;
  const int plan = job.engine().plans().Create(0, "train");
  job.engine().plans().AddSlot(plan, "kernel [3,3]");
  job.engine().plans().AddSlot(plan, job.rank() == last ? "bias [8]" : "bias [9]");
  Sum sum(All(job), job.rank(), 10, 0, {"kernel", 0, plan, 0});
  const Status status = sum.Wait();
  CHECK_TRUE(status.code == StatusCode::kFailed);
  CHECK_CONTAINS(status.message, "ranks run different collectives.");
  CHECK_CONTAINS(status.message, "at slot 1, rank 0 has '#1 bias [9]' and rank " +
                                     std::to_string(last) + " has '#1 bias [8]'");
  // Later calls report the first error.
  const Status later = Sum(All(job), job.rank(), 10, 0, {}).Wait();
  CHECK_EQ(later.message, status.message);
}

TEST(AFailureIsHeardOnAllRanks) {
  Job job;
  if (job.rank() == 0) {
    SleepMs(20);
    job.engine().Fail("the reason");
    CHECK_EQ(Sum(All(job), job.rank(), 10, 0, {}).Wait().message, std::string("the reason"));
    job.engine().Fail("another");
    CHECK_EQ(Sum(All(job), job.rank(), 10, 0, {}).Wait().message, std::string("the reason"));
    return;
  }
  const int plan = job.engine().plans().Create(0, "train");
  job.engine().plans().AddSlot(plan, "slot");
  Sum eager(All(job), job.rank(), 1000, 0, {});
  Sum planned(All(job), job.rank(), 10, 0, {"slot", 0, plan, 0});
  for (Sum* sum : {&eager, &planned}) {
    const Status status = sum->Wait();
    CHECK_TRUE(status.code == StatusCode::kFailed);
    CHECK_CONTAINS(status.message, "Communication failed on rank 0: the reason");
  }
}

TEST(ALongWaitNamesTheMissingRank) {
  Job job(ShortLimits());
  if (job.size() == 1) return;
  const int missing = job.size() - 1;
  if (job.rank() == missing) {
    SleepMs(1200);
    return;
  }
  const Status status = Sum(All(job), job.rank(), 5000, 0, {"gradients"}).Wait();
  CHECK_TRUE(status.code == StatusCode::kFailed);
  CHECK_CONTAINS(status.message, "TFSCALE_STALL_SHUTDOWN_S");
  CHECK_CONTAINS(status.message, "s in gradients: waiting for rank " + std::to_string(missing));
}

TEST(ALongWaitForAPlan) {
  Job job(ShortLimits());
  if (job.size() == 1) return;
  const SumPlan plan(job, "train", 2);
  if (job.rank() == 0) {
    SleepMs(1200);
    return;
  }
  const Status status = plan.Post(0, 0).Wait();
  CHECK_CONTAINS(status.message, "sum0 (slot 0 of train): waiting to compare plans with rank 0");
}

TEST(ALongWaitForASlotOfTheRankItself) {
  Job job(ShortLimits());
  const SumPlan plan(job, "train", 3);
  plan.Run(0);
  std::vector<Sum> sums;
  sums.push_back(plan.Post(0, 1));
  sums.back().Check();
  const Status status = plan.Post(2, 1).Wait();
  CHECK_TRUE(status.code == StatusCode::kFailed);
  CHECK_CONTAINS(status.message, "slot 2 of train");
  CHECK_CONTAINS(status.message, "waiting for 'sum1' to be reached on this rank");
}

TEST(WarningsAreNoFailures) {
  EngineOptions options = ShortLimits();
  options.stall_shutdown_s = 60;
  Job job(options);
  if (job.rank() == 0) SleepMs(300);
  Sum(All(job), job.rank(), 1000, 0, {}).Check();
}

// The last rank is alive and late: it is notified that it keeps the others waiting,
// so that it shows where it is.
TEST(AWaitIsToldToTheRankThatIsLate) {
  EngineOptions options = ShortLimits();
  options.stall_warning_s = 0.5;  // no other rank may be as late by chance
  options.stall_shutdown_s = 60;
  options.stack_signal = SIGRTMIN;
  static std::atomic<int> n_signals{0};
  n_signals = 0;
  signal(SIGRTMIN, [](int) { ++n_signals; });
  Job job(options);
  const bool is_late = job.rank() == job.size() - 1;
  if (is_late) SleepMs(2000);
  Sum(All(job), job.rank(), 1000, 0, {}).Check();
  CHECK_TRUE((n_signals > 0) == (is_late && job.size() > 1));
}

TEST(RanksThatNameOtherGroupsAreRefused) {
  Job job;
  if (job.size() == 1) return;
  const std::vector<int> ranks = job.rank() == 0 ? std::vector<int>{0} : std::vector<int>{0, 1};
  CHECK_THROWS(job.engine().AddGroup(ranks),
               "'add process set 0' on rank 0 and 'add process set 0 1' on rank 1");
  // Nothing was broken by it.
  CHECK_EQ(job.engine().AddGroup({0}), 1);
}

TEST(RanksOfOtherVersionsAreRefused) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size == 1) return;
  EngineOptions options = SmallOptions();
  options.identity = rank == size - 1 ? "tfscale 2" : "tfscale 1";
  CHECK_THROWS(Job{options},
               "ranks run different versions, or have different settings. Received: 'tfscale 1' on "
               "rank 0");
  CHECK_TRUE(Engine::Get() == nullptr);
}

TEST(CallsAfterTheEndAreRefused) {
  std::shared_ptr<Engine> engine;
  std::vector<int> all;
  {
    Job job;
    all = All(job);
    Sum(all, job.rank(), 10, 0, {}).Check();
  }
  CHECK_TRUE(Engine::Get() == nullptr);
  const Status status = Sum(all, 0, 10, 0, {}).Wait();
  CHECK_CONTAINS(status.message, "not initialised or has been shut down");
}

TEST(ARankThatLeavesIsNotWaitedFor) {
  auto job = std::make_unique<Job>();
  const int rank = job->rank();
  const std::vector<int> all = All(*job);
  const SumPlan plan(*job, "train", 3);
  plan.Run(0);
  if (rank != 0) {
    std::vector<Sum> sums = plan.PostAll(1);
    sums.emplace_back(all, rank, 1000, 0, Place());
    for (Sum& sum : sums) {
      const Status status = sum.Wait();
      CHECK_TRUE(status.code == StatusCode::kFailed);
      CHECK_CONTAINS(status.message, "rank 0 has left the job");
    }
  }
}

// In the middle of a step: what it has begun does not keep the others waiting.
TEST(ARankThatLeavesInTheMiddleOfAStep) {
  Job job;
  if (job.size() == 1) return;
  const SumPlan plan(job, "train", 3);
  plan.Run(0);
  if (job.rank() == 0) {
    plan.Post(0, 1).Check();
    return;
  }
  std::vector<Sum> sums = plan.PostAll(1);
  CHECK_CONTAINS(sums[2].Wait().message, "rank 0 has left the job");
}

TEST(ShutdownWithWorkUnderWay) {
  for (int round = 0; round < 5; ++round) {
    std::vector<Sum> sums;
    EngineOptions options = SmallOptions();
    options.max_message_bytes = 1 << 20;
    options.chunk_bytes = 1 << 18;
    auto job = std::make_unique<Job>(options);
    const SumPlan plan(*job, "train", 4);
    plan.Run(0);
    if (job->rank() % 2 == 0) {
      sums.push_back(plan.Post(3, 1));
      sums.push_back(plan.Post(0, 1));
      for (int i = 0; i < 20; ++i) sums.emplace_back(All(*job), job->rank(), 3000, i, Place());
      sums.emplace_back(All(*job), job->rank(), 1 << 19, 0, Place());
    }
    job.reset();
    // Whatever became of them, they ended.
    for (Sum& sum : sums) {
      CHECK_TRUE(sum.is_ready());
      sum.Wait();
    }
  }
}

TEST(ShutdownWhileThreadsSubmit) {
  for (int round = 0; round < 10; ++round) {
    auto job = std::make_unique<Job>();
    const std::vector<int> all = All(*job);
    const int rank = job->rank();
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        // `Wait` returns: each of them ends, one way or another.
        for (int i = 0; i < 30; ++i) Sum(all, rank, 100, t, {}).Wait();
      });
    }
    SleepMs(round % 3);
    job.reset();
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
