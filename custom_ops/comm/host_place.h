// Where a rank is: among the ranks of its host, and its host among the hosts.
#ifndef TFSCALE_COMM_HOST_PLACE_H_
#define TFSCALE_COMM_HOST_PLACE_H_

#include <mpi.h>

#include <cstdint>
#include <vector>

namespace tfscale {

// Part of the C interface: plain data, fixed layout.
struct HostPlace {
  int32_t local_rank;  // this rank among those of its host
  int32_t local_size;
  int32_t cross_rank;  // this host among those that have a rank of this local rank
  int32_t cross_size;  // how many do; hosts may have different numbers of ranks
  // This rank's share of the cores it may use, at least 1. Launchers bind ranks to cores of their
  // own, or let all ranks of a host use all.
  int32_t cores;
  int32_t sharers_before;  // with a lower local rank: how many of them share one of its cores
};

// Returns a rank's share, in whole cores, at least 1. `mine` is 1 at each core it is allowed to
// run on, `users` is how many ranks of its host are. Of cores that only it may use it has all; a
// rank that no launcher has bound shares with the others.
int CoresOfRank(const std::vector<int>& mine, const std::vector<int>& users);

// Collective over `parent`. Throws CommError if the system does not provide it.
HostPlace FindHostPlace(MPI_Comm parent);

}  // namespace tfscale

#endif  // TFSCALE_COMM_HOST_PLACE_H_
