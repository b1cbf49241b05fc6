#include "comm/marks.h"

#include <algorithm>
#include <cstring>

#include "comm/mpi_env.h"
#include "comm/task.h"

namespace tfscale {
namespace {

// Marks of this many generations ago are kept: collectives may be active
// while this rank sets a mark.
constexpr int64_t kKeptGenerations = 4;
// A mark is one message.
constexpr size_t kLongest = size_t{1} << 30;

// These hold for good, whatever the generation.
bool IsFinal(MarkKind kind) {
  return kind == MarkKind::kLeft || kind == MarkKind::kFailed || kind == MarkKind::kQuiet ||
         kind == MarkKind::kSeen;
}

bool IsNotice(MarkKind kind) {
  return kind == MarkKind::kPing || kind == MarkKind::kAlive || kind == MarkKind::kWaiting ||
         kind == MarkKind::kTraffic;
}

std::string Explain(MarkKind kind, int rank, int64_t count, const std::string& text) {
  const std::string who = "rank " + std::to_string(rank);
  switch (kind) {
    case MarkKind::kGivenUp:
      if (!text.empty()) return text;
      [[fallthrough]];
    case MarkKind::kStop:
      return who + " stopped training after step " + std::to_string(count);
    case MarkKind::kEpochEnd:
      return "ranks have unequal numbers of steps. Received: " + who +
             " ended its epoch after step " + std::to_string(count) +
             " in all, this rank runs one more. Give every rank the same number of batches, for "
             "example with tfscale.data.GlobalBatches.";
    case MarkKind::kFailed:
      return "Communication failed on " + who + ": " + text;
    default:
      break;
  }
  return who + " has left the job (its program ended or called shutdown) and takes part in no " +
         "further collective, but this rank calls one more. Call the same collectives on every " +
         "rank.";
}

}  // namespace

std::vector<int64_t> Marks::Pack(const Mark& mark) {
  std::vector<int64_t> data = {mark.incarnation, mark.number, static_cast<int64_t>(mark.kind), 0,
                               static_cast<int64_t>(mark.text.size())};
  for (const auto& [incarnation, counts] : mark.counts) {
    data[3] += static_cast<int64_t>(counts.size());
    for (const auto& [plan, count] : counts) {
      data.insert(data.end(), {incarnation, plan.first, plan.second, count});
    }
  }
  const size_t end = data.size();
  data.resize(end + (mark.text.size() + sizeof(int64_t) - 1) / sizeof(int64_t));
  if (!mark.text.empty()) std::memcpy(&data[end], mark.text.data(), mark.text.size());
  return data;
}

Marks::Mark Marks::Unpack(const std::vector<int64_t>& data) {
  Mark mark;
  mark.incarnation = data.at(0);
  mark.number = data.at(1);
  mark.kind = static_cast<MarkKind>(data.at(2));
  size_t i = 5;
  for (int64_t n = data.at(3); n > 0; --n, i += 4) {
    const PlanKey plan{static_cast<int>(data.at(i + 1)), static_cast<int>(data.at(i + 2))};
    mark.counts[data.at(i)][plan] = data.at(i + 3);
  }
  if (data.at(4) > 0) {
    mark.text.assign(reinterpret_cast<const char*>(&data.at(i)), static_cast<size_t>(data[4]));
  }
  return mark;
}

void Marks::Send(MarkKind kind, const RunCounts& counts, const std::string& text) {
  ++generation_;
  has_seen_all_ = has_seen_all_ || kind == MarkKind::kSeen;
  DropOld();
  Mark mark{incarnation_, generation_, kind, {}, text};
  if (kind == MarkKind::kLeft) mark.counts = past_counts_;
  mark.counts[incarnation_] = counts;
  SendToAll(mark);
}

void Marks::Announce(const RunCounts& counts, const Status& why) {
  const bool is_stop = why.code == StatusCode::kStopped;
  SendToAll({incarnation_,
             generation_,
             MarkKind::kGivenUp,
             {{incarnation_, counts}},
             is_stop ? "" : why.message});
}

std::set<PlanKey> Marks::Announced() const {
  std::set<PlanKey> plans;
  for (const auto& [rank, marks] : received_) {
    for (const Mark& mark : marks) {
      if (mark.kind != MarkKind::kGivenUp || mark.incarnation != incarnation_) continue;
      for (const auto& [plan, count] : mark.counts.at(incarnation_)) plans.insert(plan);
    }
  }
  return plans;
}

void Marks::SendToAll(const Mark& mark) {
  outgoing_.push_back(Pack(mark));
  for (int i = 1; i < world_.comm->size(); ++i) {
    SendTo((world_.comm->rank() + i) % world_.comm->size(), outgoing_.back());
  }
}

void Marks::Notify(int rank, MarkKind kind, const std::string& text) {
  if (has_seen_all_) return;
  outgoing_.push_back(Pack({incarnation_, generation_, kind, {}, text}));
  SendTo(rank, outgoing_.back());
}

void Marks::SendTo(int rank, const std::vector<int64_t>& data) {
  if (!sends_) sends_.emplace(*world_.comm, kLongest);
  sends_->SendMessage(data.data(), data.size() * sizeof(int64_t), rank, world_.MarkTag());
}

bool Marks::Poll() {
  if (sends_ && !sends_->is_empty()) sends_->Poll();
  if (sends_ && is_sent()) {
    outgoing_.clear();
    sends_.reset();  // it remembers each message
  }
  const int n_before = n_received_;
  while (true) {
    int is_there = 0;
    MPI_Status status;
    Check(MPI_Iprobe(MPI_ANY_SOURCE, world_.MarkTag(), world_.comm->get(), &is_there, &status),
          "MPI_Iprobe");
    if (!is_there) break;
    int bytes = 0;
    Check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    Receive(status.MPI_SOURCE, static_cast<size_t>(bytes));
  }
  if (receives_) TakeArrived();
  return n_received_ > n_before;
}

// Its sender may be stopped, or have died, before it sends the rest.
void Marks::Receive(int sender, size_t bytes) {
  if (!receives_) receives_.emplace(*world_.comm, kLongest);
  std::vector<int64_t> data(bytes / sizeof(int64_t));
  const auto it = incoming_.emplace(n_incoming_++, Incoming{sender, std::move(data), false}).first;
  receives_->ReceiveMessage(it->second.data.data(), bytes, sender, world_.MarkTag(), it->first);
}

void Marks::TakeArrived() {
  receives_->Poll();
  for (int key : receives_->TakeCompleted()) incoming_.at(key).has_arrived = true;
  std::set<int> late_senders;  // ranks of which an earlier one has not arrived
  for (auto it = incoming_.begin(); it != incoming_.end();) {
    Incoming& next = it->second;
    if (!next.has_arrived) late_senders.insert(next.sender);
    if (late_senders.count(next.sender) > 0) {
      ++it;
      continue;
    }
    Hear(next.sender, Unpack(next.data));
    it = incoming_.erase(it);
  }
  if (incoming_.empty()) receives_.reset();
}

void Marks::Hear(int sender, Mark mark) {
  if (IsNotice(mark.kind)) {
    for (const Listener& listen : listeners_) listen(sender, mark.kind, mark.text);
    return;
  }
  received_[sender].push_back(std::move(mark));
  ++n_received_;
  DropOld();
}

int64_t Marks::CountOf(const Mark& mark, const PlanKey& plan, bool is_patient) const {
  const bool is_reset = plan.second != kEager && !is_patient;
  const auto counts = mark.counts.find(is_reset ? incarnation_ : mark.incarnation);
  // The rank left before the incarnation of this one, or never called the plan.
  if (counts == mark.counts.end()) return 0;
  const auto count = counts->second.find(plan);
  return count == counts->second.end() ? 0 : count->second;
}

bool Marks::Excludes(const Mark& mark, const PlanKey& plan, int64_t execution, int64_t generation,
                     bool is_patient) const {
  if (mark.kind == MarkKind::kFailed) return true;
  if (mark.kind == MarkKind::kQuiet || mark.kind == MarkKind::kSeen) return false;
  if (mark.kind == MarkKind::kGivenUp) {
    const bool is_now = mark.incarnation == incarnation_;
    return is_now && mark.counts.at(incarnation_).count(plan) > 0 &&
           execution >= CountOf(mark, plan, is_patient);
  }
  if (mark.kind != MarkKind::kLeft) {
    if (plan.second == kEager) return false;
    if (mark.incarnation != incarnation_ || mark.number != generation + 1) return false;
  }
  return execution >= CountOf(mark, plan, is_patient);
}

std::optional<Status> Marks::WhyGivenUp(const PlanKey& plan, int64_t execution, int64_t generation,
                                        const std::vector<int>& ranks, bool is_patient) const {
  std::optional<Status> has_left;
  for (const auto& [rank, marks] : received_) {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
    for (const Mark& mark : marks) {
      if (is_patient && !IsFinal(mark.kind)) continue;
      if (!Excludes(mark, plan, execution, generation, is_patient)) continue;
      const int64_t count = CountOf(mark, plan, is_patient);
      const std::string text = Explain(mark.kind, rank, count, mark.text);
      const bool is_stop =
          mark.kind == MarkKind::kStop || (mark.kind == MarkKind::kGivenUp && mark.text.empty());
      if (is_stop) return Status::Stopped(text);
      if (mark.kind != MarkKind::kLeft) return Status::Failed(text);
      if (!has_left) has_left = Status::Failed(text);
    }
  }
  return has_left;  // unless another rank says why: that it stops, with which this one has left
}

void Marks::StartIncarnation(int64_t incarnation, const RunCounts& counts) {
  past_counts_[incarnation_] = counts;
  incarnation_ = incarnation;
  generation_ = 0;
  DropOld();
}

void Marks::DropOld() {
  const auto is_old = [this](const Mark& mark) {
    if (IsFinal(mark.kind)) return false;
    return mark.incarnation < incarnation_ ||
           (mark.kind != MarkKind::kGivenUp && mark.incarnation == incarnation_ &&
            mark.number + kKeptGenerations <= generation_);
  };
  for (auto& [rank, marks] : received_) {
    marks.erase(std::remove_if(marks.begin(), marks.end(), is_old), marks.end());
  }
}

std::vector<int> Marks::Others() const {
  std::vector<int> ranks = world_.ranks;
  ranks.erase(ranks.begin() + world_.comm->rank());
  return ranks;
}

std::vector<int> Marks::Without(MarkKind kind) const {
  std::vector<int> ranks = Others();
  const auto has_set = [&](int rank) {
    const auto it = received_.find(rank);
    return it != received_.end() &&
           std::any_of(it->second.begin(), it->second.end(), [kind](const Mark& mark) {
             return mark.kind == kind || mark.kind == MarkKind::kFailed;
           });
  };
  ranks.erase(std::remove_if(ranks.begin(), ranks.end(), has_set), ranks.end());
  return ranks;
}

std::vector<int> Marks::Unquiet() const {
  std::set<int> ranks;
  if (sends_) {
    for (int rank : sends_->PendingPeers()) ranks.insert(rank);
  }
  for (const auto& [key, next] : incoming_) ranks.insert(next.sender);
  return {ranks.begin(), ranks.end()};
}

int Marks::n_failed() const {
  return static_cast<int>(std::count_if(received_.begin(), received_.end(), [](const auto& entry) {
    return std::any_of(entry.second.begin(), entry.second.end(),
                       [](const Mark& mark) { return mark.kind == MarkKind::kFailed; });
  }));
}

}  // namespace tfscale
