#include "test/sim/invariants.h"

#include <algorithm>

#include "test/sim/network.h"
#include "test/sim/program.h"

namespace sim {

// Slots begin in their order, but for those that overtake where nothing else is active.
void Invariants::CheckEvents(int rank, const std::vector<tfscale::Event>& events,
                             const std::vector<int>& plans, bool are_repeated) {
  const auto is_of_plan = [&](const tfscale::Event& event) {
    return std::find(plans.begin(), plans.end(), event.plan) != plans.end();
  };
  for (const tfscale::Event& event : events) {
    if (event.started_ns < event.posted_ns || event.ended_ns < event.started_ns) {
      world_.Violate("an event ends before it begins");
    }
    if (!is_of_plan(event) || are_repeated) continue;
    const auto plan = std::find(plans.begin(), plans.end(), event.plan) - plans.begin();
    const SlotSpec& spec =
        scenario_.plans[static_cast<size_t>(plan)].slots[static_cast<size_t>(event.slot)];
    Time turn = 0;  // when the last slot before it began
    for (const tfscale::Event& other : events) {
      const bool is_before =
          other.plan == event.plan && other.execution == event.execution && other.slot < event.slot;
      if (!is_before || other.started_ns < event.started_ns) continue;
      turn = std::max<Time>(turn, other.started_ns);
      if (!spec.is_posted()) world_.Violate("slots have not begun in the order of their plan");
      // It has overtaken: nothing else was active.
      for (const tfscale::Event& active : events) {
        if (active.started_ns < event.started_ns && event.started_ns < active.ended_ns) {
          world_.Violate("a gather has overtaken while something was active");
        }
      }
    }
    if (turn > 0) world_.Note("has overtaken", plan, event.slot, turn - event.started_ns);
    if (turn > 0 && spec.kind == Kind::kGather) {
      CheckHeld(rank, events, event, plans, static_cast<int>(plan), turn);
      CheckGentle(rank, event, static_cast<int>(plan), std::min<Time>(turn, event.ended_ns));
    }
  }
}

// What has overtaken sends nothing while something else is active.
void Invariants::CheckHeld(int rank, const std::vector<tfscale::Event>& events,
                           const tfscale::Event& early, const std::vector<int>& plans, int plan,
                           Time turn) {
  const int group = scenario_.plans[static_cast<size_t>(plan)].group;
  if (!scenario_.IsSimple(group)) return;
  const int tag = scenario_.TagOf(plan, early.slot);
  const Time offset = world_.process(rank).clock_offset;
  for (const Network::Sent& sent : world_.network().sent()) {
    // One byte tells a rank that its memory has been read (Transfers::Release).
    const bool is_it = sent.process == rank && sent.bytes > 1 && sent.tag >= tag &&
                       sent.tag < tag + 3 &&
                       world_.network().comm(sent.comm).ranks == scenario_.RanksOf(group);
    const Time time = sent.time + offset;
    if (!is_it || time < early.started_ns || time > std::min<Time>(turn, early.ended_ns)) continue;
    for (const tfscale::Event& other : events) {
      const auto of = std::find(plans.begin(), plans.end(), other.plan);
      const bool is_posted =
          of != plans.end() && scenario_.plans[static_cast<size_t>(of - plans.begin())]
                                   .slots[static_cast<size_t>(other.slot)]
                                   .is_posted();
      // An eager call begins in the middle of a round.
      const bool is_beside = other.started_ns < time && time < other.ended_ns;
      if (is_posted || other.plan == tfscale::kEager || !is_beside) continue;
      world_.Violate("a gather that has overtaken sends while something else is active");
    }
  }
}

// Until its turn comes, what has overtaken is at most two chunks ahead of what others have sent.
void Invariants::CheckGentle(int rank, const tfscale::Event& early, int plan, Time end) {
  const PlanDraw& of = scenario_.plans[static_cast<size_t>(plan)];
  const SlotSpec& spec = of.slots[static_cast<size_t>(early.slot)];
  const std::vector<int>& ranks = scenario_.RanksOf(of.group);
  const bool is_apart = scenario_.IsSimple(of.group) && scenario_.NumHosts(of.group) > 1;
  if (!is_apart || scenario_.turn != Turn::kNone || !happened_.empty()) return;
  const int64_t n_others = static_cast<int64_t>(ranks.size()) - 1;
  const int64_t chunk = std::max<int64_t>(scenario_.options.chunk_bytes / 8, 64);
  // By rank, to all others; not those of earlier runs.
  std::map<int, int64_t> left, sent;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const auto segment = static_cast<int64_t>(sizeof(float) * (spec.cuts[r + 1] - spec.cuts[r]));
    left[ranks[r]] = segment * n_others;
    sent[ranks[r]] = -early.execution * left[ranks[r]];
  }
  const int tag = scenario_.TagOf(plan, early.slot);
  const Time offset = world_.process(rank).clock_offset;
  const auto chunks_of = [&](int64_t bytes) {
    return (bytes + n_others * chunk - 1) / (n_others * chunk);
  };
  for (const Network::Sent& message : world_.network().sent()) {
    const bool is_it = message.tag == tag && message.bytes > 1 &&
                       world_.network().comm(message.comm).ranks == ranks;
    if (message.time + offset >= end) break;
    if (!is_it) continue;
    sent[message.process] += message.bytes;
    if (message.process != rank || message.time + offset < early.started_ns) continue;
    for (const int other : ranks) {
      if (other == rank || sent[other] >= left[other]) continue;
      if (chunks_of(sent[rank]) <= chunks_of(std::max<int64_t>(sent[other], 0)) + 2) continue;
      world_.Violate("a gather that has overtaken is not gentle");
    }
  }
}

// A rank is said not to answer only where it has died or ended.
void Invariants::CheckText(const Programs& programs, const std::string& text) {
  CheckNamed(programs, text);
  const bool are_deaths =
      scenario_.machine.lost == 0 &&
      std::all_of(happened_.begin(), happened_.end(), [](const Fault& fault) {
        return fault.kind == FaultKind::kDeath || fault.kind == FaultKind::kFail;
      });
  size_t end = std::min(text.find(" does not answer"), text.find(" do not answer"));
  size_t begin = end == std::string::npos ? end : text.rfind("; ", end);
  if (end == std::string::npos) {
    begin = text.find(" not answered for ");
    end = text.find(". Look", begin);
  }
  if (!are_deaths || begin >= end) return;
  const std::string silent = text.substr(begin, end - begin);
  for (int rank = 0; rank < world_.size(); ++rank) {
    const Program& program = *programs[static_cast<size_t>(rank)];
    const bool may_be_silent = world_.process(rank).is_dead || world_.process(rank).has_ended ||
                               program.is_leaving || !program.failure.empty();
    if (may_be_silent) continue;
    if (silent.find("rank " + std::to_string(rank) + " ") == std::string::npos) continue;
    world_.Violate("rank " + std::to_string(rank) + " lives and answers, and yet: " + text);
    return;
  }
}

// Ranks that have died are named by those that wait for nothing else.
void Invariants::CheckNamed(const Programs& programs, const std::string& text) {
  const bool are_deaths =
      !happened_.empty() && std::all_of(happened_.begin(), happened_.end(), [](const Fault& fault) {
        return fault.kind == FaultKind::kDeath;
      });
  if (!are_deaths || scenario_.turn != Turn::kNone || world_.current() < 0) return;
  if (scenario_.machine.lost > 0 || scenario_.machine.late > 0) return;
  const auto is_named = [&](int rank) {
    return text.find("rank " + std::to_string(rank) + " ") != std::string::npos;
  };
  // Where another one has died, too, a collective may have got no further than that one's part.
  const Program& program = *programs[static_cast<size_t>(world_.current())];
  const int dead = happened_[0].process;
  const std::string own = "[tfscale] rank " + std::to_string(world_.current()) + " ";
  const bool waits = text.rfind(own, 0) == 0 && text.find(" has waited ") != std::string::npos;
  const auto age = static_cast<Time>(0.9 * static_cast<double>(program.LongestWait()));
  if (waits && happened_.size() == 1 && !is_named(dead) &&
      program.AwaitsOnly(dead, programs, age)) {
    world_.Violate("a rank waits for rank " + std::to_string(dead) + ", which is dead: " + text);
  }
  if (text.find(" not answered for ") == std::string::npos) return;
  // One that has failed has asked only those that it waited for, and is awaited by none.
  if (!program.failure.empty() || scenario_.machine.reports_death) return;
  // The next question, and what an answer may take.
  const double question_s =
      std::min(scenario_.options.stall_warning_s, scenario_.options.stall_shutdown_s) / 4;
  const auto answer = static_cast<Time>((2 * question_s + 0.15) * static_cast<double>(kSecond));
  for (const auto& [rank, died] : died_) {
    const bool has_left = programs[static_cast<size_t>(rank)]->is_leaving;
    if (is_named(rank) || has_left || world_.now() - died < answer) continue;
    world_.Violate("a rank does not name rank " + std::to_string(rank) +
                   ", which is dead: " + text);
  }
}

// Which failures may be, and whom they name.
void Invariants::CheckFailures(const Programs& programs) {
  const auto limit =
      static_cast<Time>(scenario_.options.stall_shutdown_s * static_cast<double>(kSecond));
  bool may_fail = scenario_.machine.lost > 0 || scenario_.turn > Turn::kStop;
  std::vector<std::string> names;  // of ranks that may be named
  for (const Fault& fault : happened_) {
    const bool is_pause = fault.kind == FaultKind::kPause;
    if (is_pause && fault.duration < limit / 3) continue;
    may_fail = true;
    names.push_back("rank " + std::to_string(fault.process));
  }
  bool is_named = names.empty();
  bool has_failed = false;
  for (const auto& program : programs) {
    if (world_.process(static_cast<int>(&program - programs.data())).is_dead) continue;
    const std::string text = program->failure + program->end.failure;
    if (text.empty() && (program->end.is_together || may_fail)) continue;
    has_failed = true;
    if (!may_fail) world_.Violate("nothing was wrong, and yet: " + text);
    const bool is_late = text.find("No answer within the time limit") != std::string::npos;
    if (is_late && happened_.empty() && scenario_.machine.lost == 0) {
      world_.Violate("a rank was waited for that had ended its step: " + text);
    }
    for (const std::string& name : names)
      is_named = is_named || text.find(name) != std::string::npos;
  }
  // A rank that waits for one that waits for it says so, and the latter whom it waits for.
  for (const std::string& text : world_.texts()) {
    const size_t begin = std::min(text.find("waiting for "), text.size());
    for (const std::string& name : names) {
      is_named = is_named || text.find(name, begin) != std::string::npos;
    }
  }
  const bool is_one = happened_.size() == 1 && scenario_.turn == Turn::kNone &&
                      scenario_.machine.lost == 0 && happened_[0].kind == FaultKind::kDeath;
  if (is_one && has_failed && !is_named) {
    world_.Violate("no failure names the rank that has died");
  }
}

// What was sent is what the algorithms say, where each execution has ended well.
void Invariants::CheckBytes() {
  if (scenario_.options.host_memory_bytes > 0) return;
  for (size_t p = 0; p < scenario_.plans.size(); ++p) {
    const PlanDraw& plan = scenario_.plans[p];
    const std::vector<int>& ranks = scenario_.RanksOf(plan.group);
    if (std::count(scenario_.groups.begin(), scenario_.groups.end(), ranks) > 1) continue;
    for (size_t slot = 0; slot < plan.slots.size(); ++slot) {
      const int tag = scenario_.TagOf(static_cast<int>(p), static_cast<int>(slot));
      int64_t expected = 0;
      bool is_known = true;
      for (uint64_t seed : seeds_[{static_cast<int>(p), static_cast<int>(slot)}]) {
        const auto bytes = BytesSent(plan.slots[slot], static_cast<int>(ranks.size()),
                                     scenario_.IsSimple(plan.group), seed);
        is_known = is_known && bytes.has_value();
        expected += bytes.value_or(0);
      }
      const Network::Sum sent = world_.network().BytesSent(ranks, tag, tag + 3);
      const std::string name = NameOf(plan.slots[slot].kind);
      if (is_known && sent.bytes != expected) {
        world_.Violate(name + " sends " + std::to_string(sent.bytes) + " bytes, by the formula " +
                       std::to_string(expected));
      }
      const auto longest = LongestMessage(plan.slots[slot], scenario_.NumHosts(plan.group),
                                          scenario_.options.chunk_bytes);
      if (longest && sent.longest > *longest) {
        world_.Violate(name + " sends " + std::to_string(sent.longest) +
                       " bytes at once, in chunks of " + std::to_string(*longest));
      }
    }
  }
}

void Invariants::CheckEnd(const Programs& programs) {
  CheckFailures(programs);
  bool are_together = true;
  for (const auto& program : programs) are_together = are_together && program->end.is_together;
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (world_.process(rank).is_dead) return;
    Program& program = *programs[static_cast<size_t>(rank)];
    if (are_together && program.n_buffers != 0) world_.Violate("a buffer was not given back");
    if (program.pending.n_pending() > 0) world_.Violate("a variable is pending");
  }
  if (are_together && happened_.empty() && scenario_.machine.lost == 0 &&
      world_.network().n_unmatched() > 0) {
    world_.Violate("messages are left that no rank has received");
  }
  if (happened_.empty() && scenario_.turn == Turn::kNone && scenario_.machine.lost == 0)
    CheckBytes();
}

}  // namespace sim
