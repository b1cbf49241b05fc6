// Ranks that end an epoch, stop or leave while others continue.
#include <string>
#include <vector>

#include "test/plans_job.h"

namespace tfscale {
namespace testing {
namespace {

constexpr int kSlots = 4;

// Rank `early` makes 3 steps and sets a mark; the others begin a fourth.
void CheckGivenUp(const Job& job, const SumPlan& plan, int early, MarkKind kind, bool is_late) {
  for (int step = 0; step < 3; ++step) plan.Run(step);
  if (job.rank() == early) {
    if (is_late) SleepMs(30);
    job.engine().Mark(kind);
    return;
  }
  if (!is_late) SleepMs(30);
  const std::string who = "rank " + std::to_string(early);
  for (Sum& sum : plan.PostAll(3)) {
    const Status status = sum.Wait();
    CHECK_TRUE(status.code ==
               (kind == MarkKind::kStop ? StatusCode::kStopped : StatusCode::kFailed));
    CHECK_CONTAINS(status.message, kind == MarkKind::kStop
                                       ? who + " stopped training after step 3"
                                       : who + " ended its epoch after step 3 in all");
  }
  CHECK_EQ(job.engine().NumGivenUp(), int64_t{kSlots});
  // Until all ranks start an incarnation this function cannot run: their slots differ.
  CHECK_TRUE(!plan.Post(0, 4).Wait().ok());
  job.engine().Mark(MarkKind::kEpochEnd);
}

// As tfscale.fit.progress does it: eager calls work throughout.
void StartTogether(const Job& job, int incarnation) {
  Sum(job.Ranks([](int) { return true; }), job.rank(), 10, incarnation, {}).Check();
  job.engine().StartIncarnation(incarnation);
  CHECK_EQ(job.engine().NumGivenUp(), int64_t{0});
}

}  // namespace

TEST(EqualEpochsGiveNothingUp) {
  Job job;
  const SumPlan plan(job, "train", kSlots);
  for (int epoch = 0; epoch < 12; ++epoch) {
    if (job.rank() == epoch % job.size()) SleepMs(5);
    for (int step = 0; step < 3; ++step) plan.Run(step);
    job.engine().Mark(MarkKind::kEpochEnd);
  }
  CHECK_EQ(job.engine().NumGivenUp(), int64_t{0});
}

// An op has failed: slot 0 will never come, and slot 1 must not wait for it.
TEST(AStepThatFailsOnARankEndsWhatWaitsThere) {
  Job job;
  const SumPlan plan(job, "train", kSlots), other(job, "other", kSlots);
  plan.Run(0);
  Sum waiting = plan.Post(1, 1);
  SleepMs(20);
  CHECK_TRUE(!waiting.is_ready());
  // One that comes after its step was cancelled, and before the engine has heard of that.
  std::promise<Status> ended;
  Call late;
  late.plan = plan.id();
  late.slot = 3;
  late.is_cancelled = std::make_shared<std::atomic<bool>>(true);
  late.done = [&ended](const Status& status) { ended.set_value(status); };
  Submit(MakeReduction(ReductionArgs{}), std::move(late));
  CHECK_CONTAINS(ended.get_future().get().message, "The step failed on this rank.");
  job.engine().GiveUpWaiting(plan.id());
  CHECK_CONTAINS(waiting.Wait().message, "The step failed on this rank.");
  CHECK_CONTAINS(plan.Post(2, 1).Wait().message, "The step failed on this rank.");
  CHECK_EQ(job.engine().NumGivenUp(), int64_t{3});
  other.Run(1);
  StartTogether(job, 1);
  plan.Run(2);
}

// What the step before has posted comes to an end: other ranks wait for it before their next one.
TEST(AStepThatFailsLeavesWholeRunsWaiting) {
  EngineOptions options = SmallOptions();
  options.window_bytes = 1;  // one after another
  Job job(options);
  if (job.size() == 1) return;
  const SumPlan plan(job, "train", 2);
  if (job.rank() == 0) SleepMs(20);  // the first slot is under way on the others, the last waits
  std::vector<Sum> whole = plan.PostAll(0);
  if (job.rank() != 0) {
    Sum begun = plan.Post(0, 1);
    job.engine().GiveUpWaiting(plan.id());
    CHECK_CONTAINS(begun.Wait().message, "The step failed on this rank.");
  }
  for (Sum& sum : whole) sum.Check();
  StartTogether(job, 1);
  plan.Run(2);
}

TEST(StepsThatAPeerDoesNotJoinAreGivenUp) {
  Job job;
  if (job.size() == 1) return;
  const SumPlan plan(job, "train", kSlots), other(job, "other", kSlots);
  int incarnation = 0;
  for (MarkKind kind : {MarkKind::kStop, MarkKind::kEpochEnd}) {
    for (bool is_late : {false, true}) {
      for (int early = 0; early < job.size(); ++early) {
        CheckGivenUp(job, plan, early, kind, is_late);
        StartTogether(job, ++incarnation);
        // Everything works as before, and the next mark is counted from here.
        other.Run(incarnation);
      }
    }
  }
  for (int step = 0; step < 5; ++step) plan.Run(step);
}

// A rank that stops between epochs sets one mark less than those that notice it
// in the next epoch; that must not confuse the next training.
TEST(GenerationsAreCountedAnew) {
  Job job;
  if (job.size() == 1) return;
  const SumPlan plan(job, "train", kSlots);
  for (int incarnation = 1; incarnation < 4; ++incarnation) {
    CheckGivenUp(job, plan, 0, MarkKind::kStop, false);
    if (job.rank() != 0) job.engine().Mark(MarkKind::kStop);
    if (job.rank() == 1) job.engine().Mark(MarkKind::kEpochEnd);
    StartTogether(job, incarnation);
  }
}

// Each model counts its own incarnations; none of the engine's comes twice.
TEST(NumbersOfIncarnationsMayRepeat) {
  Job job;
  if (job.size() == 1) return;
  const SumPlan plan(job, "train", kSlots);
  for (int i = 0; i < 3; ++i) {
    CheckGivenUp(job, plan, 0, MarkKind::kStop, false);
    StartTogether(job, 1);
  }
}

// Long messages to a rank that stopped are never taken while the job runs; yet
// the job ends in order.
TEST(LongMessagesGivenUp) {
  EngineOptions options = SmallOptions();
  options.max_message_bytes = 1 << 30;
  options.chunk_bytes = 1 << 20;
  Job job(options);
  const std::vector<int> all = job.Ranks([](int) { return true; });
  const int plan = job.engine().plans().Create(0, "train");
  job.engine().plans().AddSlot(plan, "long");
  const Place place{"long", 0, plan, 0};
  Sum(all, job.rank(), 1 << 20, 0, place).Check();
  if (job.rank() == 0) {
    job.engine().Mark(MarkKind::kStop);
  } else {
    CHECK_TRUE(Sum(all, job.rank(), 1 << 20, 1, place).Wait().code == StatusCode::kStopped);
    job.engine().Mark(MarkKind::kStop);
  }
  StartTogether(job, 1);
  Sum(all, job.rank(), 1 << 20, 2, place).Check();
}

TEST(OnlyGroupsWithThePeerAreGivenUp) {
  Job job;
  if (job.size() < 3) return;
  const std::vector<int> with = job.Ranks([](int r) { return r < 2; });
  const std::vector<int> without = job.Ranks([](int r) { return r > 0; });
  const int group_with = job.engine().AddGroup(with);
  const int group_without = job.engine().AddGroup(without);
  const SumPlan plan_with(job, "with", 2, group_with, with);
  const SumPlan plan_without(job, "without", 2, group_without, without);
  if (job.rank() == 0) job.engine().Mark(MarkKind::kStop);
  if (job.rank() == 1) {
    for (Sum& sum : plan_with.PostAll(0)) CHECK_TRUE(sum.Wait().code == StatusCode::kStopped);
  }
  if (job.rank() > 0) {
    plan_without.Run(0);
    // A step that fails where the stop is known leaves a run that has begun on all members.
    std::vector<Sum> whole = plan_without.PostAll(1);
    if (job.rank() == 1) job.engine().GiveUpWaiting(plan_without.id());
    for (Sum& sum : whole) sum.Check();
    // And ends, on all of them, one of which a slot never comes.
    Sum begun = plan_without.Post(1, 2);
    if (job.rank() == 1) job.engine().GiveUpWaiting(plan_without.id());
    CHECK_TRUE(begun.Wait().code == StatusCode::kStopped);
    job.engine().Mark(MarkKind::kStop);
  }
  StartTogether(job, 1);
  if (job.rank() < 2) plan_with.Run(1);
}

// Two ranks, whose steps end by the mark of a third, wait in runs that the other has not begun.
TEST(RunsThatAnEndedStepNeverBeginsAreGivenUp) {
  Job job(ShortLimits());
  if (job.size() < 3) return;
  const int last = job.size() - 1;
  const std::vector<int> members = job.Ranks([last](int r) { return r < last; });
  const int group = job.engine().AddGroup(members);
  const SumPlan world(job, "world", 2), first(job, "first", 1, group, members),
      second(job, "second", 1, group, members);
  int incarnation = 0;
  for (MarkKind kind : {MarkKind::kStop, MarkKind::kEpochEnd}) {
    world.Run(0);
    if (job.rank() == last) {
      job.engine().Mark(kind);
    } else {
      first.Run(0);
      Sum given_up = world.Post(0, 1);
      const SumPlan& begun = job.rank() == 0 ? first : second;
      Sum waiting = begun.Post(0, 1);
      const bool is_stop = kind == MarkKind::kStop;
      const auto check = [&](const Status& status) {
        CHECK_TRUE(status.code == (is_stop ? StatusCode::kStopped : StatusCode::kFailed));
        CHECK_CONTAINS(status.message, is_stop ? "stopped training after step" : "ended its epoch");
      };
      check(given_up.Wait());
      job.engine().GiveUpWaiting(begun.id());
      check(waiting.Wait());
      job.engine().Mark(kind);
    }
    StartTogether(job, ++incarnation);
    if (job.rank() != last) second.Run(2);
  }
}

// The mark of this rank does not hide that of a peer from what is under way.
TEST(CollectivesUnderWayAcrossTheOwnMark) {
  Job job;
  if (job.size() == 1) return;
  const SumPlan plan(job, "train", 1);
  plan.Run(0);
  if (job.rank() == 0) {
    SleepMs(30);
    job.engine().Mark(MarkKind::kEpochEnd);
  } else {
    Sum sum = plan.Post(0, 1);
    job.engine().Mark(MarkKind::kEpochEnd);
    CHECK_TRUE(sum.Wait().code == StatusCode::kFailed);
  }
  StartTogether(job, 1);
  plan.Run(2);
}

TEST(IncarnationsStartWhenNothingRuns) {
  Job job;
  const SumPlan plan(job, "train", 2);
  Sum waiting = plan.Post(1, 0);
  CHECK_THROWS(job.engine().StartIncarnation(1), "'train' has collectives under way");
  plan.Post(0, 0).Check();
  waiting.Check();
  CHECK_THROWS(job.engine().StartIncarnation(1 << 20), "fit can be stopped early");
}

// Ranks come to a meeting at any time: before others end epochs, and incarnations later.
TEST(AnOpenMeetingOutlivesMarksAndIncarnations) {
  Job job;
  if (job.size() == 1) return;
  const SumPlan plan(job, "train", kSlots), meeting = Meeting(job);
  for (int round = 0; round < 3; ++round) {
    const int first = round % job.size();
    std::vector<Sum> open;
    if (job.rank() == first) open.push_back(meeting.Post(0, round));
    plan.Run(round);
    job.engine().Mark(MarkKind::kEpochEnd);
    // Stops alone: the others' marks are no end of its meeting, nor is its own of theirs.
    if (job.rank() == first) job.engine().Mark(MarkKind::kStop);
    SleepMs(30);
    CHECK_EQ(job.engine().NumGivenUp(), int64_t{0});
    StartTogether(job, round + 1);
    plan.Run(round);
    if (job.rank() != first) open.push_back(meeting.Post(0, round));
    open[0].Check();
    meeting.Run(round + 5);
  }
}

TEST(AMeetingEndsWhereARankHasLeft) {
  Job job;
  const SumPlan meeting = Meeting(job);
  meeting.Run(0);
  if (job.rank() == 0) return;
  CHECK_CONTAINS(meeting.Post(0, 1).Wait().message, "rank 0 has left the job");
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
