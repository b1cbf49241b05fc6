// The interface of the collectives, without MPI headers.
#ifndef TFSCALE_COMM_COLLECTIVES_H_
#define TFSCALE_COMM_COLLECTIVES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/types.h"

namespace tfscale {

class Operation;
using OperationHandle = std::unique_ptr<Operation, void (*)(Operation*)>;

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

// A sum of float32 tensors that is sent with few bits: see QuantizedReduction.
struct QuantizedArgs {
  int bits = 8;  // 16, 8 or 4
  size_t block = 256;
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<const float*> inputs;
  std::vector<size_t> counts;  // elements of each input
  // Rank r owns the elements [cuts[r], cuts[r + 1]) of an input; one list for each.
  std::vector<std::vector<size_t>> cuts;
  // What was not sent of earlier vectors, of each input, and what is not sent now.
  // Empty: errors of rounding are dropped.
  std::vector<const float*> errors;
  std::vector<float*> new_errors;
  // Allreduce: the sums, and the errors of this rank's own parts of them.
  std::vector<float*> outputs;
  std::vector<const float*> owner_errors;
  std::vector<float*> new_owner_errors;
  // Reduce-scatter: the sums of this rank's own parts, one after another.
  float* segment = nullptr;
};

// A sum of float32 tensors of which a small share is sent: see SparseReduction.
struct SparseArgs {
  double share = 1.0 / 64;  // of the values of each chunk
  size_t chunk = 4096;
  double decay = 1.0;  // of errors, before they are added
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<const float*> inputs;
  std::vector<size_t> counts;             // elements of each input
  std::vector<std::vector<size_t>> cuts;  // as for QuantizedArgs; whole chunks
  // What was not sent of earlier vectors, of each input, and what is not sent now.
  std::vector<const float*> errors;
  std::vector<float*> new_errors;
  std::vector<float*> outputs;
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

OperationHandle MakeReduction(ReductionArgs args);
OperationHandle MakeQuantizedReduction(QuantizedArgs args);
OperationHandle MakeSparseReduction(SparseArgs args);
OperationHandle MakeAllgather(const void* input, size_t bytes, AllocateOutput allocate);
// `buffer` holds this rank's bytes [cuts[rank], cuts[rank + 1]) and receives all
// others. One more cut than ranks, in ascending order from 0.
OperationHandle MakeSegmentGather(void* buffer, std::vector<size_t> cuts);
OperationHandle MakeChangeGather(ChangesArgs args);
OperationHandle MakeAlltoall(const void* input, std::vector<int64_t> bytes,
                             AllocateOutput allocate);
OperationHandle MakeBroadcast(const void* input, void* output, size_t bytes, int root);

// The position of a collective in its plan, and the callback that waits for it.
struct Call {
  std::string name;
  int group = 0;
  int plan = -1;  // -1: called outside of any traced function
  int slot = 0;
  std::string shapes;            // compared over the ranks first, unless it is empty
  std::shared_ptr<void> memory;  // kept until the operation is destroyed
  // Nothing waits for it yet, so that it may take a little longer and fewer polls.
  bool is_awaited_later = false;
  // It may start before its turn in the plan where this rank has nothing else to send.
  bool may_overtake = false;
  // Set before GiveUpWaiting, which may come before the call does.
  std::shared_ptr<std::atomic<bool>> is_cancelled;
  // Runs exactly once, on the communication thread or, without an engine, here.
  std::function<void(const Status&)> done;
};

// Hands a collective to the engine of the process and returns at once.
void Submit(OperationHandle operation, Call call);
// The run of a traced function has failed on this rank: ends collectives that
// wait for one of the run that will never be posted. Returns at once.
void GiveUpWaiting(int plan);

// Adds an event without bytes to the engine's log: computation has reached a
// point. `slot` is negative, to distinguish it from collectives. Without an engine
// nothing happens.
void Stamp(int plan, int slot);

}  // namespace tfscale

#endif  // TFSCALE_COMM_COLLECTIVES_H_
