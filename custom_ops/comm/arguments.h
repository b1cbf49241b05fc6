// Arguments of the collectives.
#ifndef TFSCALE_COMM_ARGUMENTS_H_
#define TFSCALE_COMM_ARGUMENTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "comm/types.h"

namespace tfscale {

// How the ranks of an allreduce get what they add up, and the sums.
struct Way {
  bool is_whole;  // each rank adds up all of the vector, or a segment
  size_t radix;   // of the Relay; 0: segments are sent directly
};

struct ReductionArgs {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  // The pieces are exchanged as one vector, in this order.
  std::vector<const void*> inputs;
  std::vector<void*> outputs;  // beside `inputs`; one for a reduce-scatter
  std::vector<size_t> counts;  // elements of each input
  // Reduce-scatter: elements that rank r receives; must add up to all. Empty:
  // allreduce, every rank receives everything.
  std::vector<size_t> scatter_counts;
  // Of an allreduce, for tests. Default: BestWay.
  std::optional<Way> way;
};

// A sum of float32 tensors that is sent as codes: see CodedReduction.
struct CodedArgs {
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<const float*> inputs;
  std::vector<size_t> counts;  // elements of each input
  // Rank r owns the elements [cuts[r], cuts[r + 1]) of an input, whole blocks or chunks of its
  // code; one list for each.
  std::vector<std::vector<size_t>> cuts;
  // What was not sent of earlier vectors, of each input, and what is not sent now.
  // Empty: errors are dropped.
  std::vector<const float*> errors;
  std::vector<float*> new_errors;
  std::vector<float*> outputs;  // the sums
};

struct QuantizedArgs : CodedArgs {
  int bits = 8;  // 16, 8 or 4
  size_t block = 256;
  // The errors of this rank's own parts of the sums.
  std::vector<const float*> owner_errors;
  std::vector<float*> new_owner_errors;
  // Reduce-scatter, without outputs: the sums of this rank's own parts, one after another.
  float* segment = nullptr;
};

// Errors are always kept.
struct SparseArgs : CodedArgs {
  double share = 1.0 / 64;  // of the values of each chunk
  size_t chunk = 4096;
  double decay = 1.0;  // of errors, before they are added
};

// A gather of float32 segments that is sent as changes: see ChangeGather. Positions
// are in values.
struct ChangesArgs {
  struct Vector {
    size_t begin;  // in the buffer
    size_t count;
    const float* old;  // equal on all ranks, not in the buffer; null: sent as it is
  };
  int bits = 8;  // 16, 8 or 4
  size_t block = 256;
  float* buffer = nullptr;
  std::vector<size_t> cuts;     // of the buffer, as for MakeSegmentGather
  std::vector<Vector> vectors;  // all that the buffer holds
};

// Called once, on the communication thread, when the sizes are known: bytes
// that arrive from each rank, in rank order. Returns where they are to be put,
// one after another.
using AllocateOutput = std::function<void*(const std::vector<int64_t>& bytes)>;

}  // namespace tfscale

#endif  // TFSCALE_COMM_ARGUMENTS_H_
