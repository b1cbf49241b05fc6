// A collective inside the engine.
#ifndef TFSCALE_COMM_TASK_H_
#define TFSCALE_COMM_TASK_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/operation.h"
#include "comm/types.h"

namespace tfscale {

using Clock = std::chrono::steady_clock;

class PlanQueue;

constexpr int kEager = -1;  // the plan of a collective called outside any traced function

struct Task {
  std::unique_ptr<Operation> operation;
  // Runs exactly once, on the communication thread.
  std::function<void(const Status&)> done;
  std::string name;
  bool is_awaited_later = false;  // see Call
  bool may_overtake = false;      // see Call
  int group = 0;
  int plan = kEager;
  PlanQueue* queue = nullptr;  // of the plan; null for eager ones
  int slot = 0;
  int64_t execution = 0;   // how often this slot ran before; eager: call number in the group
  int64_t generation = 0;  // marks this rank had set when the task arrived
  std::shared_ptr<std::atomic<bool>> is_cancelled;  // of a step that has failed; may be null
  Clock::time_point posted;
  Clock::time_point started;
  Clock::time_point moved;  // when anything of it last arrived or was sent
};

// Times of one finished collective, in nanoseconds of the steady clock; of a
// stamp (see collectives.h) if `slot` is negative.
// Part of the C interface: plain data, fixed layout.
struct Event {
  int64_t posted_ns;
  int64_t started_ns;
  int64_t ended_ns;
  int64_t bytes;
  int64_t execution;
  int32_t plan;
  int32_t slot;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_TASK_H_
