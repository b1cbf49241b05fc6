#include "comm/leaving.h"

#include <chrono>
#include <vector>

namespace tfscale {
namespace {

// For the last mark of other ranks, on bad links: several turns of TCP.
constexpr std::chrono::seconds kLastWait{10};

}  // namespace

bool Leaving::AreAllLeaving() {
  is_cut_off_ = marks_.n_failed() > n_failed_before_;
  if (is_cut_off_) {
    // A rank that began to leave after the failure still waits for these.
    SendQuiet();
    SendSeen();
    return false;
  }
  const std::vector<int> others = marks_.Without(MarkKind::kLeft);
  if (!others.empty()) stalls_.LookAtEnd(Clock::now(), others);
  return others.empty();
}

void Leaving::SendQuiet() {
  if (!is_quiet_) marks_.Send(MarkKind::kQuiet, {});
  is_quiet_ = true;
}

void Leaving::SendSeen() {
  if (seen_at_) return;
  marks_.Send(MarkKind::kSeen, {});
  seen_at_ = Clock::now();
}

void Leaving::Step(bool is_empty) {
  const Clock::time_point now = Clock::now();
  if (!is_empty) {
    // Messages of a step with a rank whose communication failed never end.
    stalls_.LookAtEnd(now, marks_.Others());
    return;
  }
  SendQuiet();
  std::vector<int> awaited = marks_.Without(MarkKind::kQuiet);
  if (awaited.empty()) SendSeen();
  // A message that MPI has taken over is lost where its packet is lost and the process that would
  // send it again has ended. So a rank stays until the others have seen that it is quiet. The
  // last mark may be lost, too, and nothing is needed of a rank that does not wait for it.
  const bool is_seen =
      seen_at_ && (marks_.Without(MarkKind::kSeen).empty() || now - *seen_at_ > kLastWait);
  has_left_ = is_seen && marks_.is_quiet();
  if (awaited.empty()) awaited = marks_.Unquiet();
  // A rank that has not received a mark has not left: others must not be asked any more.
  if (!has_left_ && !awaited.empty()) stalls_.LookAtEnd(now, awaited);
}

}  // namespace tfscale
