// The interface that Python calls.
#include "comm/c_api.h"

#include <sched.h>

#include <string>
#include <vector>

#include "test/plans_job.h"

namespace tfscale {
namespace testing {
namespace {

void CheckFails(int64_t result, const std::string& text) {
  CHECK_EQ(result, int64_t{-1});
  CHECK_CONTAINS(tfscale_last_error(), text);
}

}  // namespace

TEST(NothingWorksBeforeTheStart) {
  CHECK_EQ(std::string(tfscale_last_error()), std::string());
  CheckFails(tfscale_rank(), "tfscale is not initialised. Call tfscale.init() first.");
  CheckFails(tfscale_mark(0), "not initialised");
  CheckFails(tfscale_num_given_up(), "not initialised");
  CheckFails(tfscale_plan_create(0, "f", 0), "not initialised");
  tfscale_stop();
}

TEST(RanksBoundToTheSameCoresAreCounted) {
  cpu_set_t before, all;
  CHECK_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  all = before;  // of the first rank: launchers may bind each to other cores
  MPI_Bcast(&all, sizeof(all), MPI_BYTE, 0, MPI_COMM_WORLD);
  CHECK_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
  HostPlace place{};
  CHECK_EQ(tfscale_host_place(-1, &place), 0);
  CHECK_EQ(place.sharers_before, place.local_rank);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE && cores.size() < 2; ++core) {
    if (CPU_ISSET(core, &all)) cores.push_back(core);
  }
  const int n_cores = static_cast<int>(cores.size());
  cpu_set_t own;
  CPU_ZERO(&own);
  CPU_SET(cores[place.local_rank % n_cores], &own);
  CHECK_EQ(sched_setaffinity(0, sizeof(own), &own), 0);
  CHECK_EQ(tfscale_host_place(-1, &place), 0);
  CHECK_EQ(place.sharers_before, place.local_rank / n_cores);
  CHECK_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST(StartAndStop) {
  for (int round = 0; round < 2; ++round) {
    HostPlace place{};
    CHECK_EQ(tfscale_host_place(-1, &place), 0);
    CHECK_TRUE(place.cores >= 1);
    const EngineOptions options = SmallOptions();
    CHECK_EQ(tfscale_start(round == 0 ? -1 : MPI_Comm_c2f(MPI_COMM_WORLD), &options), 0);
    CheckFails(tfscale_start(-1, &options), "already initialised");
    CHECK_TRUE(tfscale_thread_level() >= MPI_THREAD_SERIALIZED);
    // The tests run on one host.
    CHECK_EQ(place.local_size, tfscale_size());
    CHECK_EQ(place.local_rank, tfscale_rank());
    CHECK_EQ(place.cross_size, 1);
    CHECK_EQ(place.cross_rank, 0);

    const int last[] = {tfscale_size() - 1};
    CHECK_EQ(tfscale_add_group(last, 1), 1);
    std::vector<Event> events(8);
    // Ranks compare the members of a group by a gather.
    CHECK_EQ(tfscale_take_events(events.data(), 8), int64_t{1});
    const int plan = tfscale_plan_create(0, "train", 0);
    CHECK_EQ(tfscale_plan_add_slot(plan, "a", ""), 0);
    CHECK_EQ(tfscale_plan_add_slot(plan, "b", ""), 1);
    CheckFails(tfscale_plan_add_slot(plan + 1, "c", ""), "plan " + std::to_string(plan + 1));
    CheckFails(tfscale_plan_create(-1, "f", 0), "-1");

    std::vector<int> all;
    for (int r = 0; r < tfscale_size(); ++r) all.push_back(r);
    const int64_t before = tfscale_clock_ns();
    for (int slot = 0; slot < 2; ++slot) {
      Sum(all, tfscale_rank(), 100, slot, {"sum", 0, plan, slot}).Check();
    }
    CHECK_EQ(tfscale_take_events(events.data(), 8), int64_t{2});
    CHECK_EQ(events[1].slot, 1);
    CHECK_EQ(events[1].bytes, int64_t{400});
    CHECK_TRUE(events[0].posted_ns >= before && events[1].ended_ns <= tfscale_clock_ns());
    Stamp(plan, -1);
    CHECK_EQ(tfscale_take_events(events.data(), 8), int64_t{1});
    CHECK_EQ(events[0].slot, -1);
    CHECK_TRUE(events[0].posted_ns > events[1].posted_ns);

    CHECK_EQ(tfscale_mark(0), 0);
    CHECK_EQ(tfscale_start_incarnation(1), 0);
    CheckFails(tfscale_start_incarnation(1 << 20), "stopped early");
    CHECK_EQ(tfscale_num_given_up(), int64_t{0});
    tfscale_stop();
    CheckFails(tfscale_size(), "not initialised");
  }
}

TEST(Fail) {
  const EngineOptions options = SmallOptions();
  CHECK_EQ(tfscale_start(-1, &options), 0);
  CHECK_EQ(tfscale_fail("on purpose"), 0);
  CHECK_EQ(Sum({0}, 0, 1, 0, {}).Wait().message, std::string("on purpose"));
  tfscale_stop();
}

// MPI's texts have several lines, and the last ones say why.
TEST(ErrorsOfMpiAreOneLine) {
  Job job;
  int error_class = 0, code = 0;
  CHECK_EQ(MPI_Add_error_class(&error_class), MPI_SUCCESS);
  CHECK_EQ(MPI_Add_error_code(error_class, &code), MPI_SUCCESS);
  CHECK_EQ(MPI_Add_error_string(code, "Other error, stack:\nsocket closed"), MPI_SUCCESS);
  CHECK_THROWS(Check(code, "MPI_Test"), "MPI_Test: Other error, stack: socket closed");
}

}  // namespace testing
}  // namespace tfscale

int main() {
  const int failed = tfscale::testing::RunJobTests();
  // MPI has ended, and would end the process at the next question.
  const tfscale::EngineOptions options = tfscale::testing::SmallOptions();
  tfscale::testing::CheckFails(tfscale_start(-1, &options), "MPI has been ended");
  return failed;
}
