// Sets of ranks that communicate among themselves (process sets).
#ifndef TFSCALE_COMM_GROUP_H_
#define TFSCALE_COMM_GROUP_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/operation.h"
#include "comm/types.h"

namespace tfscale {

// Group 0 holds all ranks. Ids are equal on all ranks. Ranks outside a group
// know its members only. Used by the communication thread.
struct Group {
  int id = 0;
  std::vector<int> ranks;              // in the world, ascending
  std::unique_ptr<Communicator> comm;  // null on ranks outside

  // Tag ranges of the kinds of messages of the communicator. `incarnation`
  // changes when a step was given up, so that messages left from it are not
  // received by a later step.
  int SlotTag(int tag_slot, int incarnation) const {
    const int64_t tag =
        (static_cast<int64_t>(tag_slot) * n_incarnations() + incarnation) * kTagsPerOperation;
    if (tag + kTagsPerOperation > comm->max_tag() / 2) {
      throw CommError("MPI's tags are used up: too many functions with collectives were traced.");
    }
    return static_cast<int>(tag);
  }
  int EagerTag(int64_t call) const {
    const int first = comm->max_tag() / 2;
    return first + static_cast<int>(call % kEagerTags) * kTagsPerOperation;
  }
  int HandshakeTag(int plan_index) const {
    const int first = comm->max_tag() / 2 + kEagerTags * kTagsPerOperation;
    const int available = (comm->max_tag() - 1 - first) / kTagsPerOperation;
    return first + plan_index % available * kTagsPerOperation;
  }
  // In the world, of members by their places.
  std::vector<int> RanksOf(std::vector<int> members) const {
    for (int& member : members) member = ranks[static_cast<size_t>(member)];
    return members;
  }
  int MarkTag() const { return comm->max_tag(); }
  // MPI promises 32767 tags only; most have 2^28 or more.
  int n_incarnations() const { return std::clamp(comm->max_tag() >> 18, 16, 1024); }

  static constexpr int kEagerTags = 1024;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_GROUP_H_
