// The ranks of a communicator by host, and who exchanges with other hosts for whom.
#ifndef TFSCALE_COMM_HOST_LAYOUT_H_
#define TFSCALE_COMM_HOST_LAYOUT_H_

#include <mpi.h>

#include <cstddef>
#include <vector>

namespace tfscale {

// Numbers the host of every rank of `comm`: that of its lowest rank, or rank /
// ranks_per_host where that is not 0. Collective; blocking; throws CommError.
std::vector<int> FindHosts(MPI_Comm comm, int ranks_per_host);

// Data of a rank crosses to another host once, to its partner there, which deals
// with the other ranks of that host. Partners of the ranks of one host are spread
// over all ranks of the other, so that all of them drive the link.
class HostLayout {
 public:
  // `host_of` has a number for each rank, equal for ranks of one host.
  explicit HostLayout(const std::vector<int>& host_of);
  // Every rank on a host of its own: all exchange with each other directly.
  static HostLayout Flat(int size);

  int n_hosts() const { return static_cast<int>(hosts_.size()); }
  // In ascending order; hosts are ordered by their first rank.
  const std::vector<int>& RanksOf(int host) const { return hosts_[static_cast<size_t>(host)]; }
  int HostOf(int rank) const { return host_of_[static_cast<size_t>(rank)]; }
  // Messages of a collective pass a second rank.
  bool is_two_level() const { return n_hosts() > 1 && hosts_.size() < host_of_.size(); }

  // The rank on `host` that deals with the data of `owner`: on its own host it itself.
  int Partner(int host, int owner) const;
  // The ranks of other hosts whose partner on its own host `rank` is: in ascending
  // order from `rank` on, so that not all ranks begin with the same one.
  std::vector<int> Remote(int rank) const;

 private:
  std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_;   // by rank, in the order of hosts_
  std::vector<int> local_of_;  // by rank: its place among the ranks of its host
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_HOST_LAYOUT_H_
