#include "comm/stall_watch.h"

#include <signal.h>

#include <cstdio>
#include <sstream>

#include "comm/types.h"

namespace tfscale {
namespace {

// An answer takes a peer's communication thread as long as its longest sleep; on
// a loaded machine a little more.
constexpr double kAnswerS = 0.1;
// A communication thread that waits looks many times a second.
constexpr double kStoppedS = 5;
// A rank that waits for ranks which answer gives up later, by this share of the limit or so many
// seconds: they may wait for one that does not answer, and name it.
constexpr double kGrace = 0.25;
constexpr double kLongestGraceS = 30;

std::string Seconds(Clock::duration time) {
  const int64_t tenths = std::chrono::duration_cast<std::chrono::milliseconds>(time).count() / 100;
  std::ostringstream text;
  text << static_cast<double>(tenths) / 10 << " s";
  return text.str();
}

void Print(const std::string& text) { std::fprintf(stderr, "[tfscale] %s\n", text.c_str()); }

}  // namespace

StallWatch::StallWatch(const EngineOptions& options, int rank, const Roster& roster, Marks& marks)
    : options_(options), rank_(rank), roster_(roster), marks_(marks) {
  marks_.Listen(
      [this](int sender, MarkKind kind, const std::string& text) { Hear(sender, kind, text); });
}

double StallWatch::WarningTime() const {
  return std::min(options_.stall_warning_s, options_.stall_shutdown_s);
}

void StallWatch::Rest() { last_step_ = Clock::time_point::max(); }

void StallWatch::NoteGap(Clock::time_point& last, Clock::time_point now) {
  // A gap this long means that the process was stopped: then the others may have
  // been, too, and the time limits of all start again.
  const bool was_stopped = last < now && now - last > FromSeconds(kStoppedS);
  last = now;
  if (!was_stopped) return;
  began_ = next_question_ = now;
  if (next_end_report_ != Clock::time_point::max()) {
    next_end_report_ = now + FromSeconds(options_.stall_warning_s);
  }
  asked_.clear();
}

bool StallWatch::IsDue(Clock::time_point now) {
  NoteGap(last_step_, now);
  if (now - last_look_ < FromSeconds(std::min(0.5, WarningTime() / 4))) return false;
  last_look_ = now;
  return true;
}

void StallWatch::Look(Clock::time_point now, Clock::time_point posted,
                      const std::function<Wait()>& describe) {
  const Clock::duration waited = now - std::max(posted, began_);
  if (waited < FromSeconds(WarningTime() / 2)) return;
  const bool is_over = waited >= FromSeconds(options_.stall_shutdown_s);
  const bool is_late = waited >= FromSeconds(options_.stall_warning_s) && now >= next_report_;
  if (!is_over && !is_late && now < next_question_) return;
  const Wait wait = describe();
  const Clock::duration grace =
      FromSeconds(std::min(options_.stall_shutdown_s * kGrace, kLongestGraceS) + kAnswerS);
  const bool must_end = is_over && (waited - grace >= FromSeconds(options_.stall_shutdown_s) ||
                                    !Silent(now, wait.ranks, FromSeconds(kAnswerS)).empty());
  if (!must_end && !is_late) {
    Ask(now, wait.ranks);
    return;
  }
  next_report_ = now + FromSeconds(options_.stall_warning_s);
  const std::string text = roster_.Name(rank_) + " has waited " + Seconds(waited) + " in " +
                           wait.what + ": " + Explain(wait, now);
  Complain(wait, text);
  if (must_end) {
    throw CommError("No answer within the time limit (TFSCALE_STALL_SHUTDOWN_S): " + text);
  }
}

void StallWatch::LookAtEnd(Clock::time_point now, const std::vector<int>& ranks) {
  if (next_end_report_ == Clock::time_point::max()) {
    next_end_report_ = now + FromSeconds(options_.stall_warning_s);
  }
  // A clock of its own: a save that others never joined is checked in between.
  NoteGap(last_end_step_, now);
  if (now - last_end_look_ < FromSeconds(std::min(0.5, WarningTime() / 4))) return;
  last_end_look_ = now;
  if (now >= next_question_) Ask(now, ranks);
  const double limit_s = options_.stall_shutdown_s;
  if (!Silent(now, ranks, FromSeconds(limit_s)).empty()) {
    // One of them may have ended because another died, and have been heard last by chance.
    const std::vector<int> dead = Silent(now, ranks, FromSeconds(std::min(kAnswerS, limit_s)));
    throw CommError(roster_.Name(rank_) + " has finished, and others have not answered for " +
                    "TFSCALE_STALL_SHUTDOWN_S: " + roster_.Names(dead) +
                    ". Look for a process that was stopped or has died.");
  }
  if (now < next_end_report_) return;
  next_end_report_ = now + FromSeconds(options_.stall_warning_s);
  Print(roster_.Name(rank_) +
        " is finished and waits for others to finish: " + Explain({"", ranks, ""}, now));
}

void StallWatch::Ask(Clock::time_point now, const std::vector<int>& ranks) {
  next_question_ = now + FromSeconds(WarningTime() / 4);
  for (int rank : ranks) {
    if (rank == rank_) continue;
    asked_.emplace(rank, now);
    marks_.Notify(rank, MarkKind::kPing);
  }
}

void StallWatch::Complain(const Wait& wait, const std::string& text) {
  Print(text);
  for (int rank : wait.ranks) {
    if (rank != rank_) marks_.Notify(rank, MarkKind::kWaiting, wait.what);
  }
  // What it waits for is to come from this rank itself.
  if (wait.ranks.empty()) ShowStacks();
}

void StallWatch::Hear(int sender, MarkKind kind, const std::string& text) {
  if (kind == MarkKind::kPing) marks_.Notify(sender, MarkKind::kAlive);
  if (kind == MarkKind::kAlive) asked_.erase(sender);
  if (kind != MarkKind::kWaiting) return;
  Print(roster_.Name(rank_) + " keeps " + roster_.Name(sender) + " waiting, in " + text);
  ShowStacks();
}

void StallWatch::ShowStacks() {
  const Clock::time_point now = Clock::now();
  if (options_.stack_signal <= 0 || now < next_stacks_) return;
  next_stacks_ = now + FromSeconds(WarningTime() / 2);
  Print("where " + roster_.Name(rank_) + " is:");
  pthread_kill(pthread_self(), options_.stack_signal);
}

std::vector<int> StallWatch::Silent(Clock::time_point now, const std::vector<int>& ranks,
                                    Clock::duration age) const {
  std::vector<int> silent;
  for (int rank : ranks) {
    const auto it = asked_.find(rank);
    if (it != asked_.end() && now - it->second >= age) silent.push_back(rank);
  }
  return silent;
}

std::string StallWatch::Explain(const Wait& wait, Clock::time_point now) const {
  if (wait.ranks.empty()) return wait.reason;
  std::string text = wait.reason.empty() ? "waiting for " : wait.reason + " ";
  text += roster_.Names(wait.ranks);
  const std::vector<int> silent = Silent(now, wait.ranks, FromSeconds(kAnswerS));
  if (silent.empty()) return text + ", whose output says where";
  return text + "; " + roster_.Names(silent) +
         (silent.size() > 1 ? " do not answer" : " does not answer") +
         ": the process was stopped or has died, or its host cannot be reached";
}

}  // namespace tfscale
