// Gathers and alltoalls of equal blocks in few messages, through other ranks.
#ifndef TFSCALE_COMM_RELAY_H_
#define TFSCALE_COMM_RELAY_H_

#include <cstddef>
#include <vector>

#include "comm/operation.h"

namespace tfscale {

// A block of each rank comes to the others in log(ranks) rounds, in which ranks pass on what
// they have received (Bruck et al. 1997). With `radix` a rank sends at most radix - 1 messages
// in a round, which do not wait for each other, and the base of the logarithm is the radix. If
// that is the number of ranks or more, there is one round, and nothing is passed on.
//
// A gather sends no more bytes than ranks that send directly. In an alltoall each block is sent
// once per digit, other than zero, of the distance of its way, written with the radix as base.
// So nothing is added up on the way, and its receiver can choose the order of the sum.
//
// Part of an operation, which it shares the transfers with.
class Relay {
 public:
  // What one rank sends.
  struct Load {
    size_t n_messages;
    size_t n_blocks;
  };
  static Load GatherLoad(size_t n_ranks, size_t radix);
  static Load AlltoallLoad(size_t n_ranks, size_t radix);
  // Of a gather, which takes no more bytes than with a larger one.
  static constexpr size_t kGatherRadix = 2;

  // Uses the tag `tag`, and keys from 0 on.
  Relay(const Channel& channel, Transfers& transfers, int tag, size_t block_bytes);

  // Where an alltoall takes the block for a rank from; before it begins.
  char* BlockFor(int rank) const { return Row(Distance(rank, rank_)); }
  // Where the block from a rank is when the exchange is complete. A gather takes this rank's own
  // block from there.
  char* BlockFrom(int rank) const { return Row(Distance(rank_, rank)); }

  // One exchange at a time. They may follow each other: blocks stay in their places.
  void Alltoall(size_t radix) { Start(false, radix); }
  void Gather(size_t radix) { Start(true, radix); }
  // For each completed key.
  void OnCompleted(int key);
  bool is_complete() const { return n_missing_ == 0 && stride_ >= n_ranks_; }

 private:
  // Of an alltoall, the rows that move by `step`, one after another. Freed with the operation,
  // when the messages have gone.
  struct Message {
    size_t step;
    BufferPool::Buffer sent, received;
  };

  char* Row(size_t row) const { return blocks_.get() + row * block_bytes_; }
  size_t Distance(int from, int to) const {
    return (static_cast<size_t>(to) + n_ranks_ - static_cast<size_t>(from)) % n_ranks_;
  }
  void Start(bool is_gather, size_t radix);
  void PostRound();
  // Calls copy(rows, bytes) for each run of the rows that move by `step` in this round.
  template <typename Copy>
  void ForRuns(size_t step, Copy copy) const;

  const Channel& channel_;
  Transfers& transfers_;
  const int tag_;
  const size_t block_bytes_;
  const int rank_;
  const size_t n_ranks_;
  BufferPool::Buffer blocks_;
  std::vector<Message> messages_;  // by key
  bool is_gather_ = false;
  size_t radix_ = 2;
  size_t stride_ = 1;     // the ranks of this round's messages are multiples of it away
  size_t n_missing_ = 0;  // messages of this round
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_RELAY_H_
