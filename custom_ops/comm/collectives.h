// The interface of the collectives, without MPI headers.
#ifndef TFSCALE_COMM_COLLECTIVES_H_
#define TFSCALE_COMM_COLLECTIVES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/arguments.h"
#include "comm/types.h"

namespace tfscale {

class Operation;
using OperationHandle = std::unique_ptr<Operation, void (*)(Operation*)>;
template <typename T>
OperationHandle HandleOf(T* operation) {
  return {operation, [](Operation* deleted) { delete static_cast<T*>(deleted); }};
}

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
