// Marks: messages by which a rank announces that it joins no further step.
#ifndef TFSCALE_COMM_MARKS_H_
#define TFSCALE_COMM_MARKS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/group.h"
#include "comm/types.h"

namespace tfscale {

// Values are part of the C interface, in which the first two may be set.
// kFailed: communication failed on that rank; it takes part in nothing any more.
// kQuiet: after kLeft, when no message that the rank sent is pending.
// kSeen: after kQuiet, when the rank has that of all others and needs nothing more from them.
// kPing, kAlive and kWaiting are notices and change no count: a rank that waits asks
// another whether it lives (answered by kAlive), and reports that it waits. kTraffic: see Traffic.
// kGivenUp: as all ranks give a step up, no further run of some plans is completed; see Announce.
enum class MarkKind : int {
  kEpochEnd = 0,
  kStop = 1,
  kLeft = 2,
  kFailed = 3,
  kQuiet = 4,
  kPing = 5,
  kAlive = 6,
  kWaiting = 7,
  kSeen = 8,
  kTraffic = 9,
  kGivenUp = 10
};

// Names a plan alike on all ranks: group id and plan index; index kEager for
// the eager collectives of the group.
using PlanKey = std::pair<int, int>;
using RunCounts = std::map<PlanKey, int64_t>;

// A rank sets a mark at the end of each epoch of `fit`, with the number of
// times it ran each plan so far. The time between two marks is a generation.
// All ranks set marks at the same places of their program, so a collective of
// generation g that a peer's mark g+1 does not count will never be joined by
// this peer: it is given up at once, with the reason, instead of waiting.
// Giving up leaves ranks at different places; StartIncarnation, called by all,
// resets the counts, except those of eager collectives and patient plans. Costs one small message
// per peer and epoch, none per step. Used by the communication thread only.
class Marks {
 public:
  explicit Marks(const Group& world) : world_(world) {}

  // Sends a mark to all other ranks. Non-blocking. `text` says why a rank failed.
  void Send(MarkKind kind, const RunCounts& counts, const std::string& text = "");
  // The same at once, in the middle of a step that all ranks give up, as `why` says: how many runs
  // of some plans this rank completes in this incarnation. Others may wait in a later one.
  void Announce(const RunCounts& counts, const Status& why);
  // Plans of which other ranks have announced it in this incarnation.
  std::set<PlanKey> Announced() const;
  // Receives what has arrived; true if anything did. Non-blocking.
  bool Poll();
  // Sends a notice to one rank. Non-blocking. After the mark kSeen nothing is sent: it may be the
  // last that the others wait for.
  void Notify(int rank, MarkKind kind, const std::string& text = "");
  // `listen` is called by Poll with each notice and its sender, as are those of earlier calls.
  using Listener = std::function<void(int rank, MarkKind kind, const std::string& text)>;
  void Listen(Listener listen) { listeners_.push_back(std::move(listen)); }
  // Marks this rank has set in this incarnation.
  int64_t generation() const { return generation_; }
  bool has_received() const { return n_received_ > 0; }
  // Marks of earlier incarnations are forgotten. `counts` are complete runs in the one that ends,
  // of plans whose counts are reset.
  void StartIncarnation(int64_t incarnation, const RunCounts& counts);

  std::vector<int> Others() const;
  // Other ranks that have neither set a mark of this kind nor failed.
  std::vector<int> Without(MarkKind kind) const;
  // Other ranks that have failed.
  int n_failed() const;
  // All marks of this rank have been taken over by MPI or the peers, and none is on its way here.
  bool is_quiet() const { return is_sent() && incoming_.empty(); }

  // Ranks that have not taken a mark yet, or have not sent one that they have begun to send.
  std::vector<int> Unquiet() const;

  // Why the collective number `execution` of `plan`, posted in `generation`,
  // will not be joined by one of `ranks`; nothing if it may be. Of a patient plan
  // (see PlanSpec) only marks that hold for good say so.
  std::optional<Status> WhyGivenUp(const PlanKey& plan, int64_t execution, int64_t generation,
                                   const std::vector<int>& ranks, bool is_patient) const;

 private:
  struct Mark {
    int64_t incarnation = 0;
    int64_t number = 0;
    MarkKind kind = MarkKind::kEpochEnd;
    // By incarnation. A rank that leaves sends all: it may have done its part of a collective of
    // an earlier one that others have not completed.
    std::map<int64_t, RunCounts> counts;
    std::string text;
  };

  // A message that is being received: a long one comes when its sender has been told to send it.
  struct Incoming {
    int sender;
    std::vector<int64_t> data;
    bool has_arrived;
  };

  bool is_sent() const { return !sends_ || sends_->is_empty(); }
  void Receive(int sender, size_t bytes);
  void TakeArrived();
  void Hear(int sender, Mark mark);
  static std::vector<int64_t> Pack(const Mark& mark);
  static Mark Unpack(const std::vector<int64_t>& data);
  // Runs of `plan` that the mark counts where this rank is: in its incarnation, or since the start.
  int64_t CountOf(const Mark& mark, const PlanKey& plan, bool is_patient) const;
  bool Excludes(const Mark& mark, const PlanKey& plan, int64_t execution, int64_t generation,
                bool is_patient) const;
  void DropOld();
  void SendToAll(const Mark& mark);
  void SendTo(int rank, const std::vector<int64_t>& data);

  const Group& world_;
  int64_t incarnation_ = 0;
  int64_t generation_ = 0;
  std::map<int64_t, RunCounts> past_counts_;  // of this rank, by incarnation
  int n_received_ = 0;
  std::map<int, std::deque<Mark>> received_;  // by world rank
  // Pending messages: their data must stay in place.
  std::list<std::vector<int64_t>> outgoing_;
  std::optional<Transfers> sends_;
  std::map<int, Incoming> incoming_;  // by key of the transfer, in the order of arrival
  std::optional<Transfers> receives_;
  int n_incoming_ = 0;
  bool has_seen_all_ = false;  // has sent kSeen
  std::vector<Listener> listeners_;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_MARKS_H_
