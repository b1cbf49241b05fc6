// Inputs and outputs of a reduction on all ranks of a host, each in its owner's memory.
#ifndef TFSCALE_COMM_HOST_VECTORS_H_
#define TFSCALE_COMM_HOST_VECTORS_H_

#include <cstddef>
#include <vector>

#include "comm/arguments.h"
#include "comm/host_memory.h"
#include "comm/operation.h"

namespace tfscale {

// Part of an operation, which it shares the transfers with. Each rank reads what it sums
// or needs; nothing is copied first, wherever the tensors of a vector are.
class HostVectors {
 public:
  // Of its transfers; the operation's other keys are at least 0.
  static constexpr int kKey = -2;

  // `ranks` are those of the host, in ascending order, with this one among them.
  HostVectors(const Channel& channel, Transfers& transfers, const std::vector<int>& ranks);

  // Tells the others where this rank's vectors of `bytes` are, which must stay until the
  // operation ends. The output may be empty where it is not fetched.
  void Share(Pieces input, Pieces output, size_t bytes, int tag);
  // For each completed transfer with the key.
  void OnCompleted();
  bool is_complete() const { return n_missing_ == 0; }

  // The methods below return false where a rank is gone, see Transfers::OnUnread.
  // Reduces elements of all inputs, in the order of ranks, to `out`, or to their place in
  // the output if that is null.
  bool Reduce(const ReductionArgs& args, size_t begin, size_t count, double scale, char* out);
  // Copies bytes of another rank's output to their place in this one's.
  bool Fetch(int rank, size_t begin, size_t bytes);

 private:
  struct Vectors {
    MemoryRange table;  // where the places of the pieces are
    Pieces input, output;
  };

  bool ReadTable(size_t i);

  const Channel channel_;
  Transfers& transfers_;
  const std::vector<int> ranks_;
  size_t own_ = 0;                // place of this rank among ranks_
  std::vector<Vectors> vectors_;  // beside ranks_
  Pieces::Places table_;          // of this rank
  size_t n_missing_ = 0;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_HOST_VECTORS_H_
