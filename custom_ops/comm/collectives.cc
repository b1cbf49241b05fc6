#include "comm/collectives.h"

#include <utility>

#include "comm/broadcast.h"
#include "comm/engine.h"
#include "comm/gather.h"

namespace tfscale {
OperationHandle MakeAllgather(const void* input, size_t bytes, AllocateOutput allocate) {
  return HandleOf(new Allgather(input, bytes, std::move(allocate)));
}

OperationHandle MakeSegmentGather(void* buffer, std::vector<size_t> cuts) {
  return HandleOf(new SegmentGather(buffer, std::move(cuts)));
}

OperationHandle MakeChangeGather(ChangesArgs args) {
  return HandleOf(new ChangeGather(std::move(args)));
}

OperationHandle MakeAlltoall(const void* input, std::vector<int64_t> bytes,
                             AllocateOutput allocate) {
  return HandleOf(new Alltoall(input, std::move(bytes), std::move(allocate)));
}

OperationHandle MakeBroadcast(const void* input, void* output, size_t bytes, int root) {
  return HandleOf(new Broadcast(input, output, bytes, root));
}

void Submit(OperationHandle operation, Call call) {
  const std::shared_ptr<Engine> engine = Engine::Get();
  if (!engine) {
    call.done(
        Status::Failed("tfscale is not initialised or has been shut down. Call tfscale.init()."));
    return;
  }
  Task task;
  task.operation.reset(operation.release());
  task.operation->KeepAlive(std::move(call.memory));
  if (!call.shapes.empty()) task.operation->CompareFirst(call.name, call.shapes);
  task.name = std::move(call.name);
  task.is_awaited_later = call.is_awaited_later;
  task.may_overtake = call.may_overtake;
  task.group = call.group;
  task.plan = call.plan;
  task.slot = call.slot;
  task.is_cancelled = std::move(call.is_cancelled);
  task.done = std::move(call.done);
  engine->Submit(std::move(task));
}

void GiveUpWaiting(int plan) {
  if (const std::shared_ptr<Engine> engine = Engine::Get()) engine->GiveUpWaiting(plan);
}

void Stamp(int plan, int slot) {
  const std::shared_ptr<Engine> engine = Engine::Get();
  if (!engine) return;
  const int64_t now =
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
  engine->events().Add({now, now, now, 0, 0, plan, slot});
}

}  // namespace tfscale
