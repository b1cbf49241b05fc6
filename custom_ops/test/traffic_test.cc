// Waiting for a late rank, counted by each rank and known on rank 0.
#include <string>
#include <vector>

#include "test/plans_job.h"

namespace tfscale {
namespace testing {
namespace {

EngineOptions CountingOptions() {
  EngineOptions options = SmallOptions();
  options.report_s = 0.001;
  return options;
}

std::vector<double> WaitedSeconds(const Job& job) {
  std::vector<double> waited_s(static_cast<size_t>(job.size()));
  job.engine().traffic().Read(waited_s.data(), waited_s.size());
  return waited_s;
}

}  // namespace

TEST(TheLateRankWaitsLeast) {
  Job job(CountingOptions());
  if (job.size() == 1) return;
  const SumPlan plan(job, "train", 4);
  plan.Run(0);  // the first run also compares the plans
  int step = 0;
  for (int late = 0; late < job.size(); ++late) {
    const std::vector<double> before = WaitedSeconds(job);
    // Until all reports have come: rank 0 decides for all, by a sum.
    for (bool is_named = false; !is_named;) {
      for (int i = 0; i < 3; ++i) {
        if (job.rank() == late) SleepMs(50);
        plan.Run(++step);
      }
      float named = 0;
      if (job.rank() == 0) {
        const std::vector<double> now = WaitedSeconds(job);
        named = 1;
        for (int r = 0; r < job.size(); ++r) {
          const auto of = [&](int rank) {
            return now[static_cast<size_t>(rank)] - before[static_cast<size_t>(rank)];
          };
          if (r != late && of(r) <= of(late) + 0.05) named = 0;
        }
      }
      float total = 0;
      ReductionArgs args;
      args.inputs = {&named};
      args.outputs = {&total};
      args.counts = {1};
      CHECK_OK(Post(MakeReduction(std::move(args))));
      is_named = total > 0;
    }
  }
}

TEST(BytesAreThoseOfThisRank) {
  Job job(CountingOptions());
  const SumPlan plan(job, "train", 2);
  const auto n_bytes = [&job] { return job.engine().traffic().Read(nullptr, 0); };
  plan.Run(0);
  const int64_t before = n_bytes();
  plan.Run(1);
  CHECK_EQ(n_bytes() - before, int64_t{1001 * sizeof(float)});
}

TEST(NothingIsCountedUnlessAskedFor) {
  Job job;
  const SumPlan plan(job, "train", 2);
  if (job.rank() == 0) SleepMs(20);
  plan.Run(0);
  CHECK_EQ(job.engine().traffic().Read(nullptr, 0), int64_t{0});
  for (double waited_s : WaitedSeconds(job)) CHECK_EQ(waited_s, 0.0);
}

// A process that was stopped does not count that time as waiting.
TEST(GapsAreCutShort) {
  Traffic traffic(1);
  traffic.SetRanks(1, 2);
  const Clock::time_point begin = Clock::now();
  traffic.Note(begin, true);
  traffic.Note(begin + std::chrono::milliseconds(4), true);
  traffic.Note(begin + std::chrono::seconds(9), false);
  traffic.Note(begin + std::chrono::seconds(10), true);
  double waited_s[2];
  traffic.Read(waited_s, 2);
  CHECK_TRUE(waited_s[1] > 0.0239 && waited_s[1] < 0.0241);
  CHECK_EQ(traffic.TakeReport(begin), std::to_string(waited_s[1]));
  CHECK_EQ(traffic.TakeReport(begin + std::chrono::milliseconds(999)), std::string());
  CHECK_EQ(traffic.TakeReport(begin + std::chrono::seconds(2)), std::string());  // nothing new
  traffic.Hear(0, "2.5");
  traffic.Read(waited_s, 1);
  CHECK_EQ(waited_s[0], 2.5);
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
