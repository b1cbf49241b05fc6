#include "comm/host_memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <string>

#include "comm/mpi_env.h"

namespace tfscale {
namespace {

// What a rank tells the others of itself.
struct Card {
  int64_t pid;
  MemoryRange range;
};

// Yama lets a process read another's memory only where that one has agreed.
void AllowReaders() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  if (file >> scope && scope == 1) prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0UL, 0UL, 0UL);
}

iovec Remote(const void* address, size_t bytes) { return {const_cast<void*>(address), bytes}; }

// "" if this rank can read the memory of all others of its host.
std::string WhyUnreadable(const std::vector<Card>& cards, const std::vector<int>& local, int rank) {
  for (int peer : local) {
    if (peer == rank) continue;
    const Card& card = cards[static_cast<size_t>(peer)];
    uint64_t found = 0;
    const int error = ReadRange(static_cast<pid_t>(card.pid), card.range, 0,
                                reinterpret_cast<char*>(&found), sizeof(found));
    if (error != 0) return std::string("process_vm_readv: ") + std::strerror(error);
  }
  return "";
}

}  // namespace

std::vector<pid_t> FindReadable(MPI_Comm comm, const HostLayout& hosts, bool is_wanted) {
  int rank = 0;
  int size = 0;
  Check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  Check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  if (is_wanted) AllowReaders();
  const uint64_t probe = 0;
  Permit permit;
  permit.Grant();
  const Card own{getpid(), permit.RangeOf(&probe, sizeof(probe))};
  std::vector<Card> cards(static_cast<size_t>(size));
  Check(MPI_Allgather(&own, sizeof(Card), MPI_BYTE, cards.data(), sizeof(Card), MPI_BYTE, comm),
        "MPI_Allgather");
  const std::vector<int>& local = hosts.RanksOf(hosts.HostOf(rank));
  const std::string why = is_wanted ? WhyUnreadable(cards, local, rank) : "";
  const int can_read = is_wanted && why.empty() ? 1 : 0;
  std::vector<int> all(static_cast<size_t>(size));
  // Also keeps the permit until all have tried.
  Check(MPI_Allgather(&can_read, 1, MPI_INT, all.data(), 1, MPI_INT, comm), "MPI_Allgather");
  int first_unable = -1;
  for (int peer : local) {
    if (first_unable < 0 && all[static_cast<size_t>(peer)] == 0) first_unable = peer;
  }
  if (is_wanted && rank == first_unable) {
    std::fprintf(stderr,
                 "[tfscale] the ranks of this host exchange data by messages, as they cannot read "
                 "each other's memory: %s\n",
                 why.c_str());
  }
  std::vector<pid_t> pids(static_cast<size_t>(size), 0);
  for (int peer : local) {
    if (peer == rank || first_unable >= 0) continue;
    pids[static_cast<size_t>(peer)] = static_cast<pid_t>(cards[static_cast<size_t>(peer)].pid);
  }
  return pids;
}

void Permit::Grant() {
  // Of this process and of others that may get its id.
  static std::atomic<uint64_t> next{(static_cast<uint64_t>(std::random_device()()) << 32) | 1U};
  number_.store(next.fetch_add(2));  // odd: never 0
}

void Permit::Revoke() {
  number_.store(0);
  // Before the memory is written again.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

MemoryRange Permit::RangeOf(const void* data, size_t bytes) const {
  return {static_cast<const char*>(data), bytes, &number_, number_.load()};
}

void Pieces::Add(const void* data, size_t bytes) {
  if (bytes == 0) return;
  data_.push_back(static_cast<char*>(const_cast<void*>(data)));
  ends_.push_back((ends_.empty() ? 0 : ends_.back()) + bytes);
}

Pieces::Places Pieces::Slice(size_t begin, size_t bytes) const {
  Places places;
  const size_t end = begin + bytes;
  size_t i =
      static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
  for (; begin < end; ++i) {
    const size_t first = i == 0 ? 0 : ends_[i - 1];
    const size_t next = std::min(end, ends_[i]);
    places.push_back({data_[i] + (begin - first), next - begin});
    begin = next;
  }
  return places;
}

int ReadPlaces(pid_t pid, const MemoryRange& range, Pieces::Places from, Pieces::Places to) {
  uint64_t permit = 0;
  ssize_t bytes = sizeof(permit);
  for (const iovec& place : to) bytes += static_cast<ssize_t>(place.iov_len);
  // In this order: a permit that is still there when the data have been read covers them.
  from.push_back(Remote(range.permit_address, sizeof(permit)));
  to.push_back({&permit, sizeof(permit)});
  const ssize_t n = process_vm_readv(pid, to.data(), to.size(), from.data(), from.size(), 0);
  if (n == bytes) return permit == range.permit ? 0 : ESRCH;
  if (n < 0 && errno != EFAULT) return errno;
  // Some of it is no memory of that process any more, or memory of a device.
  const bool is_there = process_vm_readv(pid, &to.back(), 1, &from.back(), 1, 0) == sizeof(permit);
  return is_there && permit == range.permit ? EFAULT : ESRCH;
}

int ReadRange(pid_t pid, const MemoryRange& range, size_t offset, char* to, size_t bytes) {
  return ReadPlaces(pid, range, {Remote(range.address + offset, bytes)}, {{to, bytes}});
}

bool IsReadable(const void* data) {
  char byte = 0;
  const iovec local{&byte, 1};
  const iovec remote = Remote(data, 1);
  return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1;
}

}  // namespace tfscale
