// Times of allreduces of the engine and of MPI's own, in turn in the same job, and how many
// messages and bytes a rank sends: mpiexec -n RANKS allreduce_times [RANKS_PER_HOST [SECONDS
// [TENSORS]]].
#include <sys/syscall.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "test/job.h"

namespace {

// Of this rank, by the communication thread.
std::atomic<int64_t> n_messages{0};
std::atomic<int64_t> n_sent{0};  // bytes
std::atomic<int64_t> n_read{0};  // bytes, out of the memory of other ranks

}  // namespace

// In the place of the libraries' functions, for everything that is linked into this program.
extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int peer, int tag,
                         MPI_Comm comm, MPI_Request* request) {
  n_messages += 1;
  n_sent += count;
  return PMPI_Isend(data, count, type, peer, tag, comm, request);
}

extern "C" ssize_t process_vm_readv(pid_t pid, const iovec* to, unsigned long n_to,
                                    const iovec* from, unsigned long n_from, unsigned long flags) {
  const ssize_t n = syscall(SYS_process_vm_readv, pid, to, n_to, from, n_from, flags);
  if (n > 0) n_read += n;
  return n;
}

namespace tfscale {
namespace testing {
namespace {

EngineOptions Options(int ranks_per_host) {
  EngineOptions options{};
  options.stall_warning_s = 60;
  options.stall_shutdown_s = 120;
  options.max_message_bytes = 1 << 30;
  options.chunk_bytes = 1 << 20;
  options.window_bytes = 128 << 20;
  options.host_memory_bytes = 512 * 1024;
  options.reduce_threads = 1;
  options.pin_core = -1;
  options.ranks_per_host = ranks_per_host;
  return options;
}

double Now() { return MPI_Wtime(); }

double Median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void TimeSize(const Job& job, size_t bytes, double seconds, size_t n_tensors) {
  const size_t count = bytes / sizeof(float);
  const std::vector<float> in(count, 1.0F);
  std::vector<float> ours(count), theirs(count);
  std::vector<double> our_times, their_times;
  int64_t messages = 0, sent = 0, read = 0;
  int is_over = 0;
  const double begin = Now();
  for (int i = 0; is_over == 0; ++i) {
    ReductionArgs args;
    for (size_t t = 0; t < n_tensors; ++t) {
      const size_t first = count * t / n_tensors;
      args.inputs.push_back(in.data() + first);
      args.outputs.push_back(ours.data() + first);
      args.counts.push_back(count * (t + 1) / n_tensors - first);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    n_messages = n_sent = n_read = 0;
    double start = Now();
    CHECK_OK(Post(MakeReduction(std::move(args))));
    const double our_time = Now() - start;
    messages = n_messages, sent = n_sent, read = n_read;
    MPI_Barrier(MPI_COMM_WORLD);
    start = Now();
    MPI_Allreduce(in.data(), theirs.data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
    const double their_time = Now() - start;
    if (i > 1) {
      our_times.push_back(our_time);
      their_times.push_back(their_time);
    }
    is_over = i >= 4 && Now() - begin > seconds;
    MPI_Bcast(&is_over, 1, MPI_INT, 0, MPI_COMM_WORLD);
  }
  CHECK_TRUE(ours == theirs);
  double own[2] = {Median(our_times), Median(their_times)}, slowest[2];
  MPI_Allreduce(own, slowest, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  if (job.rank() != 0) return;
  std::printf("%10zu %10.3f %10.3f %7.2f %9ld %12ld %12ld\n", bytes, 1e3 * slowest[0],
              1e3 * slowest[1], slowest[0] / slowest[1], static_cast<long>(messages),
              static_cast<long>(sent), static_cast<long>(read));
  std::fflush(stdout);
}

void TimeAll(int ranks_per_host, double seconds, size_t n_tensors) {
  Job job(Options(ranks_per_host));
  if (job.rank() == 0) {
    std::printf("     bytes     engine        MPI   ratio  messages   bytes sent   bytes read\n");
  }
  for (size_t kib : {1, 4, 16, 64, 256, 1024, 4096, 16384, 32768, 65536}) {
    TimeSize(job, kib << 10, seconds, n_tensors);
  }
}

}  // namespace
}  // namespace testing
}  // namespace tfscale

int main(int argc, char** argv) {
  tfscale::MpiEnv env;
  tfscale::testing::TimeAll(argc > 1 ? std::atoi(argv[1]) : 0, argc > 2 ? std::atof(argv[2]) : 0.5,
                            argc > 3 ? static_cast<size_t>(std::atoi(argv[3])) : 1);
  return 0;
}
