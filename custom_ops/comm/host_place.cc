#include "comm/host_place.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "comm/mpi_env.h"
#include "comm/types.h"

namespace tfscale {

namespace {

constexpr size_t kMostSets = 1024;  // of 1024 cores each: more than any kernel has

// Returns a 1 at each core that this process may run on. The length is the one that the host's
// kernel asks for, hence the same on all its ranks.
std::vector<int> UsableCores() {
  std::vector<cpu_set_t> sets(1);
  while (sched_getaffinity(0, sets.size() * sizeof(cpu_set_t), sets.data()) != 0) {
    if (errno != EINVAL || sets.size() > kMostSets) {
      throw CommError(
          "Could not read which cores this rank may use. Received: sched_getaffinity: " +
          std::string(std::strerror(errno)) + ". Allow this call where a sandbox forbids it.");
    }
    sets.resize(2 * sets.size());
  }
  std::vector<int> usable(sets.size() * CPU_SETSIZE);
  const size_t bytes = sets.size() * sizeof(cpu_set_t);
  for (size_t core = 0; core < usable.size(); ++core) {
    usable[core] = CPU_ISSET_S(core, bytes, sets.data()) ? 1 : 0;
  }
  return usable;
}

}  // namespace

int CoresOfRank(const std::vector<int>& mine, const std::vector<int>& users) {
  double share = 0;
  for (size_t core = 0; core < mine.size(); ++core) {
    if (mine[core] > 0) share += 1.0 / users[core];
  }
  constexpr double kRounding = 1e-6;  // three thirds are one core
  return std::max(1, static_cast<int>(share + kRounding));
}

HostPlace FindHostPlace(MPI_Comm parent) {
  HostPlace place{};
  MPI_Comm local = MPI_COMM_NULL;
  Check(MPI_Comm_split_type(parent, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local),
        "MPI_Comm_split_type");
  Check(MPI_Comm_rank(local, &place.local_rank), "MPI_Comm_rank");
  Check(MPI_Comm_size(local, &place.local_size), "MPI_Comm_size");
  const std::vector<int> mine = UsableCores();
  std::vector<int> users(mine.size());
  Check(MPI_Allreduce(mine.data(), users.data(), static_cast<int>(mine.size()), MPI_INT, MPI_SUM,
                      local),
        "MPI_Allreduce");
  place.cores = CoresOfRank(mine, users);
  std::vector<int> before(mine.size());  // of rank 0 MPI_Exscan sets nothing
  Check(MPI_Exscan(mine.data(), before.data(), static_cast<int>(mine.size()), MPI_INT, MPI_SUM,
                   local),
        "MPI_Exscan");
  for (size_t core = 0; place.local_rank > 0 && core < mine.size(); ++core) {
    if (mine[core] > 0) place.sharers_before = std::max(place.sharers_before, before[core]);
  }
  MPI_Comm_free(&local);

  MPI_Comm cross = MPI_COMM_NULL;
  Check(MPI_Comm_split(parent, place.local_rank, 0, &cross), "MPI_Comm_split");
  Check(MPI_Comm_rank(cross, &place.cross_rank), "MPI_Comm_rank");
  Check(MPI_Comm_size(cross, &place.cross_size), "MPI_Comm_size");
  MPI_Comm_free(&cross);
  return place;
}

}  // namespace tfscale
