#include "comm/plan_queue.h"

#include <algorithm>
#include <utility>

namespace tfscale {
namespace {

// Under way at most, of tasks whose order is that of their readers, unless it is one: small ones
// are sent together. A large one must have ended here before the next begins: then all ranks have
// posted what it receives. To begin the next when half was sent was 4 % faster, until a rank was
// two large ones late: libfabric's TCP keeps a limited number of messages that come before their
// receives, then it does not read what comes after them either.
constexpr int64_t kOrderedBytes = 1 << 20;

}  // namespace

PlanQueue::PlanQueue(PlanSpec spec, const Group& group)
    : spec_(std::move(spec)),
      group_(group),
      waiting_(spec_.slots.size()),
      n_arrived_(spec_.slots.size(), 0),
      under_way_(spec_.slots.size(), UnderWay::kNo),
      is_turn_over_(spec_.slots.size(), false),
      bytes_(spec_.slots.size(), 0),
      descriptions_{spec_.Describe()} {}

void PlanQueue::Add(Task&& task) {
  const size_t slot = static_cast<size_t>(task.slot);
  if (task.slot < 0 || slot >= waiting_.size()) {
    throw CommError("slot must be one of its plan. Received: slot " + std::to_string(task.slot) +
                    " of plan '" + spec_.name + "', which has " + std::to_string(waiting_.size()) +
                    ". Trace the function again.");
  }
  task.execution = n_arrived_[slot]++;
  waiting_[slot].push_back(std::move(task));
  ++n_waiting_;
}

bool PlanQueue::StepHandshake(const Channel& base) {
  if (is_agreed_) return false;
  if (!handshake_) {
    handshake_ = descriptions_.Gather();
    Channel channel = base;
    channel.comm = group_.comm.get();
    channel.tag = group_.HandshakeTag(spec_.index);
    handshake_->Start(channel);
  }
  const bool has_moved = handshake_->Step();
  if (handshake_->is_done()) FinishHandshake();
  return has_moved;
}

void PlanQueue::FinishHandshake() {
  const std::string difference = FirstDifference(descriptions_.Split(), group_.ranks);
  handshake_.reset();
  descriptions_ = Texts();
  if (!difference.empty()) throw CommError(difference);
  is_agreed_ = true;
}

std::optional<Task> PlanQueue::TakeNext(int64_t window_bytes) {
  if (!is_agreed_ || n_waiting_ == 0 || waiting_[next_slot_].empty()) return std::nullopt;
  if (under_way_[next_slot_] != UnderWay::kNo) return std::nullopt;
  const int64_t bytes = static_cast<int64_t>(waiting_[next_slot_].front().operation->bytes());
  // Of those whose order is that of their readers, one after another has the whole link.
  const bool is_ordered = waiting_[next_slot_].front().may_overtake;
  const int64_t room = is_ordered ? std::min(window_bytes, kOrderedBytes) : window_bytes;
  if (n_under_way_ > 0 && bytes_under_way_ + bytes > room) return std::nullopt;
  const size_t slot = next_slot_;
  Task task = Take(slot);
  CountInTurn(slot);
  PassTurn();
  return task;
}

std::optional<Task> PlanQueue::TakeEarly() {
  if (!is_agreed_ || n_waiting_ == 0 || !waiting_[next_slot_].empty()) return std::nullopt;
  // Slots before the next one are those of a later run.
  for (size_t slot = waiting_.size() - 1; slot > next_slot_; --slot) {
    const std::deque<Task>& tasks = waiting_[slot];
    if (tasks.empty() || !tasks.front().may_overtake) continue;
    if (under_way_[slot] != UnderWay::kNo || is_turn_over_[slot]) continue;
    is_turn_over_[slot] = true;
    under_way_[slot] = UnderWay::kEarly;
    ++n_early_;
    return Take(slot);
  }
  return std::nullopt;
}

Task PlanQueue::Take(size_t slot) {
  Task task = std::move(waiting_[slot].front());
  waiting_[slot].pop_front();
  --n_waiting_;
  bytes_[slot] = static_cast<int64_t>(task.operation->bytes());
  return task;
}

void PlanQueue::CountInTurn(size_t slot) {
  under_way_[slot] = UnderWay::kInTurn;
  bytes_under_way_ += bytes_[slot];
  ++n_under_way_;
}

// To the next slot of which no task was taken early. The turn of those in between has come.
void PlanQueue::PassTurn() {
  while (true) {
    next_slot_ = (next_slot_ + 1) % waiting_.size();
    if (!is_turn_over_[next_slot_]) return;
    is_turn_over_[next_slot_] = false;
    if (under_way_[next_slot_] == UnderWay::kEarly) {
      --n_early_;
      CountInTurn(next_slot_);
    }
  }
}

void PlanQueue::OnFinished(const Task& task) {
  UnderWay& how = under_way_[static_cast<size_t>(task.slot)];
  if (how == UnderWay::kEarly) {
    --n_early_;
  } else {
    bytes_under_way_ -= bytes_[static_cast<size_t>(task.slot)];
    --n_under_way_;
  }
  how = UnderWay::kNo;
}

void PlanQueue::Reset() {
  std::fill(n_arrived_.begin(), n_arrived_.end(), 0);
  std::fill(is_turn_over_.begin(), is_turn_over_.end(), false);
  next_slot_ = 0;
  interruption_ = Status::Ok();
}

int64_t PlanQueue::n_executions() const {
  return n_arrived_.empty() ? 0 : *std::max_element(n_arrived_.begin(), n_arrived_.end());
}

int64_t PlanQueue::n_complete_executions() const {
  return n_arrived_.empty() ? 0 : *std::min_element(n_arrived_.begin(), n_arrived_.end());
}

std::vector<int> PlanQueue::ComparingWith() const {
  return handshake_ ? group_.RanksOf(handshake_->WaitingFor()) : std::vector<int>();
}

}  // namespace tfscale
