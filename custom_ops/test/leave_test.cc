// Ranks that have finished, and others that are dead, late or were suspended.
#include <signal.h>
#include <unistd.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "test/plans_job.h"

namespace tfscale {
namespace testing {
namespace {

// The communication thread of this rank does nothing meanwhile, as if it were dead.
void Deafen(int ms) {
  // It is refused at once, there.
  Call call;
  call.plan = std::numeric_limits<int>::max();
  call.done = [ms](const Status&) { SleepMs(ms); };
  Submit(MakeReduction(ReductionArgs{}), std::move(call));
}

}  // namespace

// A rank alone at a meeting does not wait for ever for a rank that has died.
TEST(ADeadRankIsNoticedBesideAnOpenMeeting) {
  Job job(ShortLimits());
  if (job.size() == 1) return;
  const SumPlan meeting = Meeting(job);
  meeting.Run(0);
  if (job.rank() != 0) {
    Deafen(1500);
    return;
  }
  Sum open = meeting.Post(0, 1);
  CHECK_CONTAINS(Engine::Stop().failure, "has finished, and others have not answered");
  CHECK_TRUE(!open.Wait().ok());
}

// A failure while a rank leaves is reported, wherever it is found.
TEST(AFailureOfWorkUnderWayWhileLeaving) {
  Job job(ShortLimits());
  if (job.size() == 1) return;
  const std::vector<int> all = job.Ranks([](int) { return true; });
  Sum(all, job.rank(), 10, 0, {}).Check();
  if (job.rank() != 0) {
    Deafen(1500);
    return;
  }
  Sum open(all, job.rank(), 1000, 0, {"the last"});
  const Engine::End end = Engine::Stop();
  CHECK_TRUE(!end.is_together);
  CHECK_CONTAINS(end.failure, "in the last: waiting for ");
  CHECK_EQ(open.Wait().message, end.failure);
}

TEST(AFailureBeforeLeavingIsNoneOfLeaving) {
  Job job;
  job.engine().Fail("the reason");
  const Engine::End end = Engine::Stop();
  CHECK_TRUE(!end.is_together);
  CHECK_EQ(end.failure, std::string());
}

// All ranks are suspended for longer than the limit, and wake one after another.
TEST(ASuspensionOfFinishedRanksIsNoDeath) {
  EngineOptions options = ShortLimits();
  options.stall_shutdown_s = 2;
  Job job(options);
  if (job.size() != 2) return;
  if (job.rank() != 0) {
    Deafen(6800);
    return;
  }
  const pid_t own = getpid();
  if (fork() == 0) {
    usleep(1000000);
    kill(own, SIGSTOP);
    usleep(5400000);
    kill(own, SIGCONT);
    _exit(0);
  }
  CHECK_EQ(Engine::Stop().failure, std::string());
}

// What moves slowly is no stall, though it takes three times as long as one may wait. On a busy
// machine several of the times at which it may move can pass without.
TEST(ASlowTransferIsNotStalled) {
  EngineOptions options = ShortLimits();
  options.stall_shutdown_s = 2;
  options.chunk_bytes = 1 << 13;
  options.max_message_bytes = 1 << 30;
  Job job(options);
  if (job.size() != 2) return;
  const std::vector<int> all = job.Ranks([](int) { return true; });
  Sum slow(all, job.rank(), 1 << 24, 0, {"slow"});
  for (int i = 0; i < 20 && job.rank() == 1; ++i) {
    Deafen(280);
    SleepMs(300);
  }
  slow.Check();
}

// The root of a broadcast needs no other rank for its part: it can be an incarnation ahead, and
// leave, before the others begin. They get what it sent, and no more.
TEST(WhatARankSentInAnEarlierIncarnationArrivesAfterItLeft) {
  for (bool is_patient : {false, true}) {
    Job job;
    if (job.size() == 1) return;
    const int plan = job.engine().plans().Create(0, "train", is_patient);
    const Place place{"train", 0, plan, job.engine().plans().AddSlot(plan, "broadcast")};
    std::vector<int> number(1);
    const auto broadcast = [&](int step) {
      number[0] = job.rank() == 0 ? step : -1;
      return Post(MakeBroadcast(number.data(), number.data(), sizeof(int), 0), place).get();
    };
    CHECK_TRUE(broadcast(5).ok());
    if (job.rank() == 0) {
      CHECK_TRUE(broadcast(6).ok());
      job.engine().StartIncarnation(1);
      continue;
    }
    CHECK_EQ(number[0], 5);
    // Ends when this rank knows that the other has left.
    const std::vector<int> all = job.Ranks([](int) { return true; });
    CHECK_CONTAINS(Sum(all, job.rank(), 10, 0, {}).Wait().message, "rank 0 has left the job");
    CHECK_EQ(broadcast(-1).message, std::string());
    CHECK_EQ(number[0], 6);
    CHECK_CONTAINS(broadcast(-1).message, "rank 0 has left the job");
  }
}

// What it did in an earlier incarnation counts for nothing in the next.
TEST(ARankThatLeftTakesNoPartInTheNextIncarnation) {
  Job job;
  if (job.size() == 1) return;
  const SumPlan plan(job, "train", 2);
  for (int step = 0; step < 3; ++step) plan.Run(step);
  if (job.rank() == 0) return;
  job.engine().StartIncarnation(1);
  for (Sum& sum : plan.PostAll(0)) {
    CHECK_CONTAINS(sum.Wait().message, "rank 0 has left the job");
  }
}

// Its step failed once all collectives had arrived: those that had not begun are never run.
TEST(ARankThatLeavesAfterAStepFailedIsNotWaitedFor) {
  EngineOptions options = SmallOptions();
  options.stall_shutdown_s = 10;
  for (int n_before : {0, 1}) {  // or while plans are compared
    Job job(options);
    if (job.size() == 1) return;
    const SumPlan plan(job, "train", 3);
    for (int step = 0; step < n_before; ++step) plan.Run(step);
    const std::vector<int> all = job.Ranks([](int) { return true; });
    if (job.rank() == 0) {
      std::vector<Sum> sums = plan.PostCancellable(1);
      job.engine().GiveUpWaiting(plan.id());
      CHECK_CONTAINS(sums[1].Wait().message, "The step failed on this rank.");
      Sum(all, job.rank(), 10, 0, {}).Check();
      continue;
    }
    Sum(all, job.rank(), 10, 0, {}).Check();
    std::vector<Sum> sums = plan.PostAll(1);
    for (size_t slot : {1, 2}) {
      CHECK_CONTAINS(sums[slot].Wait().message, "rank 0 has left the job");
    }
  }
}

// A failed rank still receives long messages while its program continues.
TEST(AFailedRankLetsTheOthersEnd) {
  EngineOptions options = ShortLimits();
  options.max_message_bytes = 1 << 30;
  options.chunk_bytes = 1 << 20;
  Job job(options);
  if (job.size() == 1) return;
  const std::vector<int> all = job.Ranks([](int) { return true; });
  if (job.rank() == 0) {
    job.engine().Fail("the reason");
    SleepMs(1500);
    return;
  }
  CHECK_CONTAINS(Sum(all, job.rank(), 1 << 22, 0, {}).Wait().message, "the reason");
  CHECK_EQ(Engine::Stop().failure, std::string());
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
