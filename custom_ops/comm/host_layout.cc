#include "comm/host_layout.h"

#include <map>
#include <numeric>

#include "comm/mpi_env.h"

namespace tfscale {

std::vector<int> FindHosts(MPI_Comm comm, int ranks_per_host) {
  int rank = 0;
  int size = 0;
  Check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  Check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  std::vector<int> hosts(static_cast<size_t>(size));
  if (ranks_per_host > 0) {
    for (int r = 0; r < size; ++r) hosts[static_cast<size_t>(r)] = r / ranks_per_host;
    return hosts;
  }
  MPI_Comm local = MPI_COMM_NULL;
  Check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local),
        "MPI_Comm_split_type");
  int first = rank;
  Check(MPI_Bcast(&first, 1, MPI_INT, 0, local), "MPI_Bcast");
  MPI_Comm_free(&local);
  Check(MPI_Allgather(&first, 1, MPI_INT, hosts.data(), 1, MPI_INT, comm), "MPI_Allgather");
  return hosts;
}

HostLayout::HostLayout(const std::vector<int>& host_of) {
  std::map<int, int> indices;  // by the number of a host
  for (size_t r = 0; r < host_of.size(); ++r) {
    const int next = static_cast<int>(hosts_.size());
    const int host = indices.emplace(host_of[r], next).first->second;
    if (host == next) hosts_.emplace_back();
    std::vector<int>& ranks = hosts_[static_cast<size_t>(host)];
    host_of_.push_back(host);
    local_of_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(r));
  }
}

HostLayout HostLayout::Flat(int size) {
  std::vector<int> hosts(static_cast<size_t>(size));
  std::iota(hosts.begin(), hosts.end(), 0);
  return HostLayout(hosts);
}

int HostLayout::Partner(int host, int owner) const {
  if (host == HostOf(owner)) return owner;
  const std::vector<int>& ranks = RanksOf(host);
  return ranks[static_cast<size_t>(local_of_[static_cast<size_t>(owner)]) % ranks.size()];
}

std::vector<int> HostLayout::Remote(int rank) const {
  std::vector<int> owners;
  const int size = static_cast<int>(host_of_.size());
  for (int i = 1; i < size; ++i) {
    const int owner = (rank + i) % size;
    if (HostOf(owner) != HostOf(rank) && Partner(HostOf(rank), owner) == rank) {
      owners.push_back(owner);
    }
  }
  return owners;
}

}  // namespace tfscale
