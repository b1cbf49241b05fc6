// Memory of other ranks of a host: reading, refusal, and owners that are gone.
#include "comm/host_memory.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "test/job.h"

namespace {
std::atomic<int> longest_message{0};  // of this rank, in bytes
}  // namespace

// In the place of the library's function.
extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int peer, int tag,
                         MPI_Comm comm, MPI_Request* request) {
  longest_message = std::max(longest_message.load(), count);
  return PMPI_Isend(data, count, type, peer, tag, comm, request);
}

namespace tfscale {
namespace testing {
namespace {

constexpr int kTag = 11;
constexpr size_t kBytes = 3 << 20;

// process_vm_readv fails from now on, as in some containers.
void Forbid() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program{sizeof(code) / sizeof(code[0]), code};
  CHECK_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1UL, 0UL, 0UL, 0UL), 0);
  CHECK_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

bool Reads(const Communicator& comm) {
  bool reads = false;
  for (int peer = 0; peer < comm.size(); ++peer) reads = reads || comm.ReadablePid(peer) != 0;
  return reads;
}

// What an action writes to standard error.
template <typename Action>
std::string ErrorsOf(Action action) {
  std::FILE* file = std::tmpfile();
  const int kept = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  action();
  dup2(kept, STDERR_FILENO);
  close(kept);
  std::string text(4096, ' ');
  std::rewind(file);
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

ReductionArgs SumOf(const std::vector<float>& values, std::vector<float>& sums) {
  ReductionArgs args;
  args.inputs = {values.data()};
  args.outputs = {sums.data()};
  args.counts = {values.size()};
  return args;
}

}  // namespace

TEST(RangesOfAProcess) {
  Permit permit;
  permit.Grant();
  const Bytes data = MakeData(DType::kInt32, 1000, 1);
  const MemoryRange range = permit.RangeOf(data.data(), data.size());
  Bytes found(100);
  CHECK_EQ(ReadRange(getpid(), range, 50, found.data(), 100), 0);
  CHECK_TRUE(std::equal(found.begin(), found.end(), data.begin() + 50));

  void* page = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const MemoryRange hidden = permit.RangeOf(page, 100);
  CHECK_TRUE(!IsReadable(page) && IsReadable(data.data()));
  CHECK_EQ(ReadRange(getpid(), hidden, 0, found.data(), 100), EFAULT);

  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  CHECK_EQ(ReadRange(child, range, 0, found.data(), 100), 0);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  CHECK_EQ(ReadRange(child, range, 0, found.data(), 100), ESRCH);

  permit.Revoke();
  CHECK_EQ(ReadRange(getpid(), range, 0, found.data(), 100), ESRCH);
  CHECK_EQ(ReadRange(getpid(), hidden, 0, found.data(), 100), ESRCH);
  munmap(page, 4096);
}

// Rank 0 gives an operation up. What the others read afterwards they do not use: they
// keep waiting for it.
TEST(MemoryThatIsTakenBack) {
  const Communicator comm = Communicator::Duplicate(MPI_COMM_WORLD, 0, 1);
  Transfers transfers(comm, 1000);
  Bytes data(kBytes, 'x');
  if (comm.rank() == 0) {
    for (int peer = 1; peer < comm.size(); ++peer) transfers.Send(data.data(), kBytes, peer, kTag);
    transfers.Cancel();
    while (!transfers.is_empty()) transfers.Poll();
    data.assign(kBytes, 'y');
    MPI_Barrier(comm.get());
    return;
  }
  MPI_Barrier(comm.get());
  transfers.Receive(data.data(), kBytes, 0, kTag, 7);
  for (int i = 0; i < 100; ++i) {
    SleepMs(1);
    transfers.Poll();
  }
  CHECK_TRUE(transfers.TakeCompleted().empty() && !transfers.is_empty());
  CHECK_TRUE((transfers.PendingPeers() == std::vector<int>{0}));
  transfers.Cancel();
  CHECK_TRUE(transfers.is_empty());
}

// Messages say where the data are, and that they have been read.
TEST(OnOneHostNoMessagesOfDataAreSent) {
  constexpr size_t kCount = 120000;  // of floats; divisible by the number of ranks
  Job job(OptionsWith({0, 1}));
  const size_t n = static_cast<size_t>(job.size());
  const std::vector<float> values(kCount, 1.0F);
  std::vector<float> out(kCount * n);
  const AllocateOutput allocate = [&](const std::vector<int64_t>&) { return out.data(); };
  constexpr size_t kSize = kCount * sizeof(float);
  std::vector<size_t> cuts;
  for (size_t r = 0; r <= n; ++r) cuts.push_back(kSize * r / n);
  longest_message = 0;
  ReductionArgs scatter = SumOf(values, out);
  scatter.scatter_counts.assign(n, kCount / n);
  CHECK_OK(Post(MakeReduction(SumOf(values, out))));
  CHECK_OK(Post(MakeReduction(std::move(scatter))));
  CHECK_OK(Post(MakeAllgather(values.data(), kSize, allocate)));
  CHECK_OK(Post(MakeAlltoall(values.data(), std::vector<int64_t>(n, kSize / n), allocate)));
  CHECK_OK(Post(MakeBroadcast(job.rank() == 0 ? values.data() : nullptr, out.data(), kSize, 0)));
  CHECK_OK(Post(MakeSegmentGather(reinterpret_cast<char*>(out.data()), cuts)));
  CHECK_TRUE(longest_message <= static_cast<int>(sizeof(MemoryRange)));
}

// The last test, as this cannot be taken back. The ranks of a host decide alike, and
// one of them says why.
TEST(WhereItIsForbiddenMessagesAreSent) {
  const Communicator before = Communicator::Duplicate(MPI_COMM_WORLD, 2, 1);
  CHECK_EQ(Reads(before), before.hosts().RanksOf(before.hosts().HostOf(before.rank())).size() > 1);
  if (before.rank() < 2) Forbid();
  const Communicator comm = Communicator::Duplicate(MPI_COMM_WORLD, 2, 1);
  CHECK_EQ(Reads(comm), Reads(before) && comm.rank() > 1);
  std::optional<Job> job;
  const std::string said = ErrorsOf([&] { job.emplace(OptionsWith({2, 100})); });
  const bool is_first = Reads(before) && comm.rank() == 0;
  CHECK_EQ(said, is_first ? "[tfscale] the ranks of this host exchange data by messages, as they "
                            "cannot read each other's memory: process_vm_readv: Operation not "
                            "permitted\n"
                          : "");
  longest_message = 0;
  const std::vector<float> values(10000, 1.0F);
  std::vector<float> sums(10000);
  CHECK_OK(Post(MakeReduction(SumOf(values, sums))));
  CHECK_TRUE(sums == std::vector<float>(10000, static_cast<float>(job->size())));
  CHECK_EQ(longest_message > 100, job->size() > 1);
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
