// Allgather, alltoall and broadcast on the engine.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "test/job.h"

namespace tfscale {
namespace testing {
namespace {

// Elements that rank `from` has for rank `to`.
size_t Share(int from, int to, size_t unit) {
  return static_cast<size_t>((from * 3 + to * 5) % 4) * unit;
}

// Receives into a vector of its own and remembers the announced sizes.
struct Receiver {
  std::shared_ptr<Bytes> data = std::make_shared<Bytes>();
  std::shared_ptr<std::vector<int64_t>> sizes = std::make_shared<std::vector<int64_t>>();

  AllocateOutput Allocator() const {
    return [data = data, sizes = sizes](const std::vector<int64_t>& bytes) {
      CHECK_TRUE(sizes->empty());
      *sizes = bytes;
      int64_t total = 0;
      for (int64_t n : bytes) total += n;
      data->assign(static_cast<size_t>(total), 'x');
      return static_cast<void*>(data->data());
    };
  }

  void Check(const std::vector<Bytes>& parts) const {
    Bytes all;
    CHECK_EQ(sizes->size(), parts.size());
    for (size_t r = 0; r < parts.size(); ++r) {
      CHECK_EQ((*sizes)[r], static_cast<int64_t>(parts[r].size()));
      all.insert(all.end(), parts[r].begin(), parts[r].end());
    }
    CHECK_TRUE(*data == all);
  }
};

void CheckAllgather(const Job& job, const std::vector<size_t>& counts) {
  const Bytes own = MakeData(DType::kInt32, counts[static_cast<size_t>(job.rank())], job.rank());
  const Receiver receiver;
  CHECK_OK(Post(MakeAllgather(own.data(), own.size(), receiver.Allocator())));
  std::vector<Bytes> parts;
  for (int r = 0; r < job.size(); ++r) {
    parts.push_back(MakeData(DType::kInt32, counts[static_cast<size_t>(r)], r));
  }
  receiver.Check(parts);
}

void CheckBroadcast(const Job& job, int root, size_t bytes, bool is_in_place) {
  const Bytes expected = MakeData(DType::kBfloat16, bytes / 2 + 1, root);
  Bytes output = job.rank() == root && is_in_place ? expected : Bytes(bytes + 1, 'x');
  output.resize(bytes + 1, 'x');
  output.back() = 'x';
  const void* input = nullptr;
  if (job.rank() == root) input = is_in_place ? output.data() : expected.data();
  CHECK_OK(Post(MakeBroadcast(input, output.data(), bytes, root)));
  CHECK_TRUE(std::equal(output.begin(), output.end() - 1, expected.begin()));
  CHECK_EQ(output.back(), 'x');
}

}  // namespace

TEST(AllgatherOfAnyLengths) {
  for (const Layout& layout : kLayouts) {
    Job job(OptionsWith(layout));
    const size_t n = static_cast<size_t>(job.size());
    for (size_t count : {0, 1, 7, 1000, 100003}) CheckAllgather(job, std::vector<size_t>(n, count));
    std::vector<size_t> uneven;
    for (size_t r = 0; r < n; ++r) uneven.push_back(r * 777);
    CheckAllgather(job, uneven);
    std::vector<size_t> one(n, 0);
    one[n - 1] = 12345;
    CheckAllgather(job, one);
  }
}

TEST(AlltoallOfAnyLengths) {
  for (const Layout& layout : kLayouts) {
    Job job(OptionsWith(layout));
    for (size_t unit : {0, 1, 7, 1000, 30001}) {
      Bytes input;
      std::vector<int64_t> bytes;
      std::vector<Bytes> parts;
      for (int r = 0; r < job.size(); ++r) {
        const Bytes part = MakeData(DType::kFloat64, Share(job.rank(), r, unit), job.rank(), r);
        input.insert(input.end(), part.begin(), part.end());
        bytes.push_back(static_cast<int64_t>(part.size()));
        parts.push_back(MakeData(DType::kFloat64, Share(r, job.rank(), unit), r, job.rank()));
      }
      const Receiver receiver;
      CHECK_OK(Post(MakeAlltoall(input.data(), bytes, receiver.Allocator())));
      receiver.Check(parts);
    }
  }
}

TEST(BroadcastFromEveryRank) {
  for (const Layout& layout : kLayouts) {
    Job job(OptionsWith(layout));
    for (int root = 0; root < job.size(); ++root) {
      for (size_t bytes : {0, 1, 7, 640, 1000, 100003}) {
        CheckBroadcast(job, root, bytes, false);
        CheckBroadcast(job, root, bytes, true);
      }
    }
  }
}

// The last chunk is short and overtakes long ones on the way.
TEST(BroadcastWithShortLastChunks) {
  EngineOptions options = SmallOptions();
  options.max_message_bytes = 1 << 30;
  options.chunk_bytes = 300000;
  Job job(options);
  for (size_t extra = 1; extra <= 8; ++extra) {
    CheckBroadcast(job, 0, 600000 + extra, false);
    CheckBroadcast(job, job.size() - 1, 300000 + extra, false);
  }
}

// The cores on which the communication thread may run.
cpu_set_t CoresOfCommThread() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    const pid_t id = std::stoi(task.path().filename());
    if (name == "tfscale-comm") CHECK_EQ(sched_getaffinity(id, sizeof(cores), &cores), 0);
  }
  return cores;
}

// Share of a core that this process takes while it waits for the last rank.
double ShareOfCoreOfWait(const Job& job, int wait_ms) {
  const auto now = [](clockid_t clock) {
    timespec time{};
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  CheckBroadcast(job, 0, 1000, false);
  if (job.rank() == job.size() - 1) SleepMs(wait_ms);
  const double began = now(CLOCK_MONOTONIC), before = now(CLOCK_PROCESS_CPUTIME_ID);
  CheckBroadcast(job, job.size() - 1, 1000, false);
  return (now(CLOCK_PROCESS_CPUTIME_ID) - before) / (now(CLOCK_MONOTONIC) - began);
}

TEST(WaitingTakesNoProcessorTime) {
  Job job(SmallOptions());
  const double share = ShareOfCoreOfWait(job, 300);
  if (job.size() > 1 && job.rank() != job.size() - 1) CHECK_TRUE(share < 0.5);
}

TEST(Pinning) {
  EngineOptions options = SmallOptions();
  options.pin_core = 0;
  {
    Job job(options);
    CheckAllgather(job, std::vector<size_t>(static_cast<size_t>(job.size()), 5000));
    const cpu_set_t cores = CoresOfCommThread();
    CHECK_TRUE(CPU_COUNT(&cores) == 1 && CPU_ISSET(0, &cores));
  }
  options.pin_core = 100000;  // not there: a message, no error
  Job job(options);
  CheckBroadcast(job, 0, 1000, false);
}

TEST(LimitsMayBeInfinite) {
  EngineOptions options = SmallOptions();
  options.stall_warning_s = std::numeric_limits<double>::infinity();
  options.stall_shutdown_s = std::numeric_limits<double>::infinity();
  Job job(options);
  if (job.rank() == 0) SleepMs(100);
  CheckBroadcast(job, 0, 1000, false);
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
