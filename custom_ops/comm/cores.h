// The cores that a rank may use.
#ifndef TFSCALE_COMM_CORES_H_
#define TFSCALE_COMM_CORES_H_

#include <mpi.h>

#include <vector>

namespace tfscale {

// Returns a rank's share, in whole cores, at least 1. `mine` is 1 at each core it is allowed to
// run on, `users` is how many ranks of its host are. Of cores that only it may use it has all; a
// rank that no launcher has bound shares with the others.
int CoresOfRank(const std::vector<int>& mine, const std::vector<int>& users);

// Returns this rank's share. Collective over `local`, the ranks of a host.
// Throws CommError where the system does not tell.
int CoresOfThisRank(MPI_Comm local);

}  // namespace tfscale

#endif  // TFSCALE_COMM_CORES_H_
