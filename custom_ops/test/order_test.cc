// Several plans, groups and eager calls side by side, in different orders on each rank.
#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "test/plans_job.h"

namespace tfscale {
namespace testing {
namespace {

std::mt19937 RandomOf(const Job& job, int seed) {
  return std::mt19937(static_cast<unsigned>(1000 * seed + job.rank()));
}

}  // namespace

TEST(PlansAndEagerCallsProgressTogether) {
  Job job;
  const SumPlan first(job, "first", 6), second(job, "second", 4), third(job, "third", 1);
  const std::vector<int> all = job.Ranks([](int) { return true; });
  const auto run_plan = [&job](const SumPlan& plan, int seed) {
    std::mt19937 random = RandomOf(job, seed);
    for (int step = 0; step < 15; ++step) {
      for (Sum& sum : plan.PostAll(step, &random)) sum.Check();
    }
  };
  std::thread thread1(run_plan, std::cref(first), 1);
  std::thread thread2(run_plan, std::cref(second), 2);
  std::thread thread3(run_plan, std::cref(third), 3);
  std::mt19937 random = RandomOf(job, 4);
  for (int call = 0; call < 40; ++call) {
    SleepMs(static_cast<int>(random() % 3));
    Sum(all, job.rank(), 500, call, {}).Check();
  }
  thread1.join();
  thread2.join();
  thread3.join();
}

// Executions of one plan may be handed over before the former ones have ended.
TEST(StepsHandedOverAhead) {
  for (int64_t window_bytes : {1, 4000, 1 << 30}) {
    EngineOptions options = SmallOptions();
    options.window_bytes = window_bytes;
    Job job(options);
    const SumPlan plan(job, "train", 5);
    std::mt19937 random = RandomOf(job, 5);
    std::vector<Sum> sums;
    for (int step = 0; step < 10; ++step) {
      for (Sum& sum : plan.PostAll(step, &random)) sums.push_back(std::move(sum));
    }
    for (Sum& sum : sums) sum.Check();
  }
}

// Ranks choose different tasks to start early, and each of them also waits for a turn.
TEST(TasksThatMayOvertakeDoNotBlockEachOther) {
  for (int64_t window_bytes : {1, 4000, 1 << 30}) {
    EngineOptions options = SmallOptions();
    options.window_bytes = window_bytes;
    Job job(options);
    const SumPlan gradients(job, "gradients", 4), parameters(job, "parameters", 5, 0, {}, true);
    std::mt19937 random = RandomOf(job, 6);
    std::vector<Sum> sums;
    for (int step = 0; step < 15; ++step) {
      for (Sum& sum : parameters.PostAll(step, &random)) sums.push_back(std::move(sum));
      for (Sum& sum : gradients.PostAll(step, &random)) sums.push_back(std::move(sum));
      if (step % 4 == 0) {
        for (Sum& sum : sums) sum.Check();
        sums.clear();
      }
    }
    for (Sum& sum : sums) sum.Check();
  }
}

TEST(ATaskThatMayOvertakeStartsWhereNothingElseIsSent) {
  Job job;
  const SumPlan plan(job, "parameters", 3, 0, {}, true);
  for (int step = 0; step < 2; ++step) {
    plan.Post(2, step).Check();
    Sum middle = plan.Post(1, step), first = plan.Post(0, step);
    middle.Check();
    first.Check();
  }
  // The early run of a slot is not one of the next step: that comes in its turn.
  Sum next_last = plan.Post(2, 2), next_first = plan.Post(0, 2), next_middle = plan.Post(1, 2);
  next_first.Check();
  next_middle.Check();
  next_last.Check();
}

TEST(SlotsStartInPlanOrder) {
  Job job;
  const SumPlan plan(job, "train", 3);
  Sum last = plan.Post(2, 0);
  Sum middle = plan.Post(1, 0);
  SleepMs(30);
  CHECK_TRUE(!last.is_ready() && !middle.is_ready());
  Sum first = plan.Post(0, 0);
  last.Check();
  middle.Check();
  first.Check();
  std::vector<Event> events(10);
  CHECK_EQ(job.engine().events().Take(events.data(), 10), size_t{3});
  std::sort(events.begin(), events.begin() + 3,
            [](const Event& a, const Event& b) { return a.slot < b.slot; });
  for (int slot = 0; slot < 3; ++slot) {
    const Event& event = events[static_cast<size_t>(slot)];
    CHECK_EQ(event.slot, slot);
    CHECK_EQ(event.plan, plan.id());
    CHECK_EQ(event.execution, int64_t{0});
    CHECK_TRUE(event.posted_ns <= event.started_ns && event.started_ns <= event.ended_ns);
    if (slot > 0) CHECK_TRUE(events[static_cast<size_t>(slot) - 1].started_ns <= event.started_ns);
  }
  CHECK_EQ(events[1].bytes, int64_t{4000});
}

// More eager calls under way than there are slots in the window or tags nearby.
TEST(ManyEagerCalls) {
  Job job;
  const std::vector<int> all = job.Ranks([](int) { return true; });
  std::vector<Sum> sums;
  for (int call = 0; call < 300; ++call) {
    sums.emplace_back(all, job.rank(), static_cast<size_t>(call), call, Place());
  }
  for (Sum& sum : sums) sum.Check();
  for (int call = 0; call < 1200; ++call) Sum(all, job.rank(), 1, call, {}).Check();
}

TEST(Groups) {
  Job job;
  const auto ranks_of = [&](auto is_chosen) { return job.Ranks(is_chosen); };
  const std::vector<std::vector<int>> sets = {
      ranks_of([](int r) { return r % 2 == 0; }), ranks_of([](int r) { return r == 0; }),
      ranks_of([&](int r) { return r == job.size() - 1; }), ranks_of([](int r) { return r > 0; })};
  std::vector<int> groups;
  for (const std::vector<int>& ranks : sets) {
    if (!ranks.empty()) groups.push_back(job.engine().AddGroup(ranks));
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    CHECK_EQ(groups[g], static_cast<int>(g) + 1);
    const std::vector<int>& ranks = sets[g];
    const bool is_member = std::count(ranks.begin(), ranks.end(), job.rank()) > 0;
    const SumPlan plan(job, "of a group", 3, groups[g], ranks);
    if (is_member) {
      for (int step = 0; step < 3; ++step) plan.Run(step);
      Place place;
      place.group = groups[g];
      Sum(ranks, job.rank(), 1000, 1, place).Check();
      continue;
    }
    // A call from outside is refused and disturbs no member.
    Place place;
    place.group = groups[g];
    std::vector<Sum> sums;
    sums.emplace_back(ranks, job.rank(), 5, 1, place);
    for (int step = 0; step < 2; ++step) sums.push_back(plan.Post(0, step));
    for (Sum& sum : sums) {
      const Status status = sum.Wait();
      CHECK_TRUE(status.code == StatusCode::kInvalid);
      CHECK_CONTAINS(status.message, "process_set may be used by its members only.");
    }
  }
  SumPlan(job, "of all", 2).Run(0);
}

// The first rank cannot free the group of a plan; the others had none of it.
TEST(IdsOfRemovedGroupsAreUsedAgain) {
  Job job;
  const std::vector<int> all = job.Ranks([](int) { return true; });
  CHECK_EQ(job.engine().AddGroup(all), 1);
  CHECK_EQ(job.engine().AddGroup({0}), 2);
  Place place;
  place.group = 1;
  Sum(all, job.rank(), 1000, 1, place).Check();
  job.engine().RemoveGroup(1);
  CHECK_TRUE(Sum(all, job.rank(), 5, 1, place).Wait().code == StatusCode::kInvalid);
  CHECK_EQ(job.engine().AddGroup(all), 1);
  Sum(all, job.rank(), 1000, 1, place).Check();
  if (job.rank() == 0) job.engine().plans().Create(2, "kept");
  job.engine().RemoveGroup(2);
  CHECK_EQ(job.engine().AddGroup(all), 3);
  CHECK_THROWS(job.engine().RemoveGroup(0), "No process set to remove has the id 0");
  CHECK_THROWS(job.engine().RemoveGroup(7), "No process set to remove has the id 7");
}

TEST(UnknownPlacesAreRefused) {
  Job job;
  const std::vector<int> all = job.Ranks([](int) { return true; });
  const SumPlan plan(job, "train", 2), empty(job, "empty", 0);
  const std::vector<std::pair<Place, std::string>> cases = {
      {{"a", 7, -1, 0}, "No process set has the id 7"},
      {{"b", 0, 99, 0}, "plan 99, of 2 plans here"},
      {{"c", 0, plan.id(), 2}, "slot 2 of plan 'train', which has 2"},
      {{"d", 0, plan.id(), -1}, "slot -1"},
      {{"e", 0, empty.id(), 0}, "slot 0 of plan 'empty', which has 0"}};
  for (const auto& [place, text] : cases) {
    const Status status = Sum(all, job.rank(), 5, 0, place).Wait();
    CHECK_TRUE(status.code == StatusCode::kInvalid);
    CHECK_CONTAINS(status.message, text);
  }
  plan.Run(0);
  job.engine().Mark(MarkKind::kEpochEnd);
  plan.Run(1);
}

// Ranks that never join a meeting do no harm; see tfscale/comm/meeting.py.
TEST(AMeetingMayWaitForEver) {
  EngineOptions options = SmallOptions();
  options.stall_warning_s = 0.1;
  options.stall_shutdown_s = 0.3;
  Job job(options);
  const SumPlan plan = Meeting(job);
  if (job.rank() == 0) SleepMs(900);
  plan.Run(0);
}

// The window has room for slot 0 alone, so slot 1, which was posted first, waits for the peer too.
TEST(ALongWaitAfterAFullWindowNamesTheMissingRank) {
  EngineOptions options = ShortLimits();
  options.window_bytes = 1;
  Job job(options);
  if (job.size() == 1) return;
  const SumPlan plan(job, "train", 2);
  plan.Run(0);
  if (job.rank() == 0) {
    SleepMs(1200);
    return;
  }
  Sum second = plan.Post(1, 1);
  SleepMs(20);
  const Status status = plan.Post(0, 1).Wait();
  CHECK_CONTAINS(status.message, "waiting for rank 0");
  CHECK_TRUE(second.Wait().code == StatusCode::kFailed);
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
