// Memory of other ranks of a host: reading, refusal, and owners that are gone.
#include "comm/host_memory.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstddef>
#include <vector>

#include "comm/communicator.h"
#include "test/job.h"

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

// The last test, as this cannot be taken back. The ranks of a host decide alike.
TEST(WhereItIsForbiddenMessagesAreSent) {
  const Communicator before = Communicator::Duplicate(MPI_COMM_WORLD, 2, 1);
  CHECK_EQ(Reads(before), before.hosts().RanksOf(before.hosts().HostOf(before.rank())).size() > 1);
  if (before.rank() == 0) Forbid();
  const Communicator comm = Communicator::Duplicate(MPI_COMM_WORLD, 2, 1);
  CHECK_EQ(Reads(comm), Reads(before) && comm.rank() > 1);
  Job job(OptionsWith({2, 100}));
  auto values = std::make_shared<std::vector<float>>(10000, 1.0F);
  auto sums = std::make_shared<std::vector<float>>(10000);
  ReductionArgs args;
  args.inputs = {values->data()};
  args.outputs = {sums->data()};
  args.counts = {values->size()};
  CHECK_OK(Post(MakeReduction(std::move(args))));
  CHECK_TRUE(*sums == std::vector<float>(10000, static_cast<float>(job.size())));
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
