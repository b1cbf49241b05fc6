// Hosts of the ranks, their names in messages, and a check of their versions.
#ifndef TFSCALE_COMM_ROSTER_H_
#define TFSCALE_COMM_ROSTER_H_

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace tfscale {

// Hosts of all ranks, by rank of the world.
class Roster {
 public:
  // Collective over `world`; blocking. `identity` names the versions of this
  // rank's software. Throws CommError on all ranks when identities differ.
  Roster(const Communicator& world, const std::string& identity);

  // "rank 3 (host b)".
  std::string Name(int rank) const;
  // "rank 1 (host a), rank 3 (host b)".
  std::string Names(const std::vector<int>& ranks) const;

 private:
  std::vector<std::string> hosts_;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_ROSTER_H_
