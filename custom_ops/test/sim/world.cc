#include "test/sim/world.h"

#include <cxxabi.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>

#include "test/sim/network.h"

namespace sim {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
World* the_world = nullptr;

// Stacks are used again: fresh ones would cost page faults.
std::vector<char*>& FreeStacks() {
  static std::vector<char*> stacks;
  return stacks;
}

char* TakeStack() {
  if (!FreeStacks().empty()) {
    char* stack = FreeStacks().back();
    FreeStacks().pop_back();
    return stack;
  }
  void* map = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) std::abort();
  return static_cast<char*>(map);
}

const char* NameOf(FaultKind kind) {
  switch (kind) {
    case FaultKind::kDeath:
      return "death";
    case FaultKind::kPause:
      return "pause";
    case FaultKind::kSlowLink:
      return "slow link";
    case FaultKind::kCutLink:
      return "cut link";
    case FaultKind::kBadRead:
      return "bad read";
    case FaultKind::kFail:
      return "failure";
  }
  return "";
}

}  // namespace

int64_t Random::Scale(int64_t low, int64_t high) {
  const double unit = static_cast<double>(Next() >> 11) * 0x1p-53;
  const double from = std::log(static_cast<double>(low) + 1);
  const double to = std::log(static_cast<double>(high) + 2);
  return std::clamp(static_cast<int64_t>(std::exp(from + unit * (to - from))) - 1, low, high);
}

Fiber::Fiber(int rank, std::function<void()> body)
    : process(rank), body_(std::move(body)), stack_(TakeStack()) {}

// What lives on the stack of a fiber that has not ended is not destroyed, as in a killed process.
Fiber::~Fiber() { FreeStacks().push_back(stack_); }

void Fiber::Start() {
  Fiber* self = World::Get()->fiber();
  try {
    self->body_();
  } catch (const std::exception& error) {
    World::Get()->Violate(std::string("an exception ends a thread: ") + error.what());
  }
  self->is_done_ = true;
  World::Get()->Signal(self);  // to what joins it
  self->Leave();
}

void Fiber::Resume() {
  void** handled = reinterpret_cast<void**>(abi::__cxa_get_globals());
  std::swap(handled[0], exceptions_[0]);
  std::swap(handled[1], exceptions_[1]);
  if (_setjmp(loop_) == 0) {
    if (is_started_) _longjmp(own_, 1);
    is_started_ = true;
    getcontext(&first_);
    first_.uc_stack.ss_sp = stack_;
    first_.uc_stack.ss_size = kStackBytes;
    first_.uc_link = nullptr;
    makecontext(&first_, Start, 0);
    setcontext(&first_);
  }
  std::swap(handled[0], exceptions_[0]);
  std::swap(handled[1], exceptions_[1]);
}

void Fiber::Leave() {
  if (_setjmp(own_) == 0) _longjmp(loop_, 1);
}

World* World::Get() { return the_world; }

World::World(uint64_t seed, const Machine& machine, bool is_logged)
    : random_(seed), machine_(machine), is_logged_(is_logged) {
  for (int rank = 0; rank < machine.n_ranks; ++rank) {
    processes_.push_back(std::make_unique<Process>());
    processes_.back()->rank = rank;
    // Clocks of hosts are not compared.
    processes_.back()->clock_offset = 1000 * kSecond + random_.Below(1000 * kSecond);
  }
  network_ = std::make_unique<Network>(*this);
  the_world = this;
}

World::~World() { Close(); }

void World::Close() {
  the_world = nullptr;
  for (const auto& of : processes_) of->fibers.clear();
  network_.reset();
  events_.clear();
  actions_.clear();
}

Time World::ReadClock() {
  spent_ += 20;
  const int rank = current();
  return now() + (rank < 0 ? 0 : process(rank).clock_offset);
}

Fiber* World::Spawn(int rank, std::function<void()> body) {
  Process& of = process(rank);
  of.fibers.push_back(std::make_unique<Fiber>(rank, std::move(body)));
  Fiber* fiber = of.fibers.back().get();
  Wake(fiber, now() + random_.Below(20 * kMicro));
  return fiber;
}

void World::Push(Time time, Fiber* fiber, uint64_t token) {
  events_.push_back({time, n_events_++, fiber, token});
  std::push_heap(events_.begin(), events_.end(), IsLater);
}

void World::At(Time time, std::function<void()> action) {
  if (free_actions_.empty()) {
    free_actions_.push_back(actions_.size());
    actions_.emplace_back();
  }
  const uint64_t number = free_actions_.back();
  free_actions_.pop_back();
  actions_[number] = std::move(action);
  Push(std::max(time, now()), nullptr, number);
}

void World::Wake(Fiber* fiber, Time time) {
  fiber->token = ++n_tokens_;
  Push(time, fiber, fiber->token);
}

bool World::Wait(const void* condition, Time until, const char* where) {
  Fiber* fiber = fiber_;
  fiber->condition = condition;
  fiber->is_signalled = false;
  fiber->where = where;
  fiber->token = ++n_tokens_;
  if (until != kNever) {
    Time end = std::max(until, now());
    if (machine_.late > 0 && random_.Chance(machine_.late)) end += random_.Below(machine_.lateness);
    Push(end, fiber, fiber->token);
  }
  if (condition != nullptr && machine_.spurious > 0 && random_.Chance(machine_.spurious)) {
    fiber->is_signalled = true;  // for no reason
    const Time longest = until == kNever ? kMilli : std::max<Time>(1, until - now());
    Push(now() + random_.Below(longest), fiber, fiber->token);
  }
  fiber->Leave();
  fiber->condition = nullptr;
  return fiber->is_signalled;
}

void World::Poll(Time time) {
  fiber_->is_polling = true;
  Wait(nullptr, now() + 200 + random_.Below(time), "polls");
  fiber_->is_polling = false;
}

void World::Signal(const void* condition) {
  if (fiber_ == nullptr) return;
  Process& of = process(fiber_->process);
  for (const auto& fiber : of.fibers) {
    if (fiber->condition != condition || fiber->is_done()) continue;
    fiber->is_signalled = true;
    Time time = now() + 1000 + random_.Below(4 * kMicro);
    if (machine_.late > 0 && random_.Chance(machine_.late)) {
      time += random_.Below(machine_.lateness);
    }
    Wake(fiber.get(), time);
  }
  Notify(of.rank);
}

void World::Notify(int rank) {
  for (const auto& fiber : process(rank).fibers) {
    if (fiber->is_polling) {
      fiber->is_polling = false;
      Wake(fiber.get(), now() + 50 + random_.Below(400));
    }
  }
}

void World::Tick() {
  ++n_ticks_;
  if (faults_.empty()) return;
  const int64_t tick = n_ticks_ - first_tick_;
  for (size_t i = 0; i < faults_.size(); ++i) {
    if (faults_[i].tick > tick) continue;
    const Fault fault = faults_[i];
    faults_.erase(faults_.begin() + static_cast<std::ptrdiff_t>(i));
    Happen(fault);
    return;
  }
}

void World::Happen(const Fault& drawn) {
  Fault fault = drawn;
  const auto is_there = [this](int rank) {
    return !process(rank).is_dead && !process(rank).has_ended;
  };
  if (fault.process < 0) {
    std::vector<int> alive;
    for (int rank = 0; rank < size(); ++rank) {
      if (is_there(rank)) alive.push_back(rank);
    }
    if (alive.empty()) return;
    fault.process = current() >= 0 && random_.Chance(0.7) ? current() : random_.Of(alive);
  }
  if (!is_there(fault.process)) return;
  Note(std::string("fault: ") + NameOf(fault.kind) + " at rank " + std::to_string(fault.process) +
       " for " + std::to_string(fault.duration / kMicro) + " us");
  last_fault_end_ = std::max(last_fault_end_, now() + fault.duration);
  if (on_fault) on_fault(fault);
  const int host = machine_.host_of[static_cast<size_t>(fault.process)];
  const int other = machine_.host_of[static_cast<size_t>(random_.Below(size()))];
  switch (fault.kind) {
    case FaultKind::kDeath:
      Kill(fault.process);
      break;
    case FaultKind::kPause:
      Pause(fault.process, fault.duration);
      break;
    case FaultKind::kSlowLink:
      slow_.push_back(
          {host, other, now() + fault.duration, 1.0 + static_cast<double>(random_.Scale(1, 1000))});
      break;
    case FaultKind::kCutLink:
      if (host != other) cut_hosts_.emplace_back(host, other);
      break;
    case FaultKind::kBadRead:
      read_error_ = random_.Of(std::vector<int>{EPERM, ENOMEM, EFAULT});
      break;
    case FaultKind::kFail:
      break;
  }
}

void World::Kill(int rank) {
  process(rank).is_dead = true;
  network_->OnDeath(rank);
  if (current() == rank) {
    fiber_->where = "dead";
    fiber_->Leave();
  }
}

void World::Pause(int rank, Time time) {
  process(rank).paused_until = std::max(process(rank).paused_until, now() + time);
  if (current() == rank) {
    // Inside of whatever it does.
    const bool was_signalled = fiber_->is_signalled;
    Wait(nullptr, process(rank).paused_until, "paused");
    fiber_->is_signalled = was_signalled;
  }
}

bool World::IsCut(int from, int to) const {
  const int a = machine_.host_of[static_cast<size_t>(from)];
  const int b = machine_.host_of[static_cast<size_t>(to)];
  return std::any_of(cut_hosts_.begin(), cut_hosts_.end(), [&](const auto& cut) {
    return cut == std::make_pair(a, b) || cut == std::make_pair(b, a);
  });
}

double World::SlownessOf(int from, int to) const {
  double factor = 1.0;
  const int a = machine_.host_of[static_cast<size_t>(from)];
  const int b = machine_.host_of[static_cast<size_t>(to)];
  for (const Slow& slow : slow_) {
    const bool is_it =
        (slow.host_a == a && slow.host_b == b) || (slow.host_a == b && slow.host_b == a);
    if (is_it && now() < slow.until) factor = std::max(factor, slow.factor);
  }
  return factor;
}

int World::TakeReadError() { return std::exchange(read_error_, 0); }

bool World::Run(Time limit) {
  const auto is_over = [this] {
    return std::all_of(processes_.begin(), processes_.end(),
                       [](const auto& of) { return of->has_ended || of->is_dead; });
  };
  while (violation_.empty() && !is_over()) {
    if (events_.empty() || events_.front().time > limit) return false;
    std::pop_heap(events_.begin(), events_.end(), IsLater);
    const Event event = events_.back();
    events_.pop_back();
    now_ = event.time;
    spent_ = 0;
    if (event.fiber == nullptr) {
      const std::function<void()> action = std::move(actions_[event.token]);
      free_actions_.push_back(event.token);
      Tick();
      action();
      continue;
    }
    Fiber* fiber = event.fiber;
    Process& of = process(fiber->process);
    if (fiber->token != event.token || fiber->is_done() || of.is_dead) continue;
    if (of.paused_until > now_) {
      Push(of.paused_until, fiber, event.token);
      continue;
    }
    Tick();
    if (of.is_dead || of.paused_until > now_) {
      if (!of.is_dead) Push(of.paused_until, fiber, event.token);
      continue;
    }
    Mix(static_cast<uint64_t>(now_) * 31 + static_cast<uint64_t>(fiber->process));
    fiber_ = fiber;
    spent_ = std::max<Time>(0, of.busy_until - now_);
    fiber->Resume();
    of.busy_until = now();
    fiber_ = nullptr;
  }
  return violation_.empty();
}

std::vector<std::string> World::Unfinished() const {
  std::vector<std::string> lines;
  for (const auto& of : processes_) {
    if (of->has_ended || of->is_dead) continue;
    for (const auto& fiber : of->fibers) {
      if (fiber->is_done()) continue;
      lines.push_back("rank " + std::to_string(of->rank) + ": " + fiber->where);
    }
  }
  return lines;
}

void World::Note(const char* what, int64_t a, int64_t b, int64_t c) {
  for (const char* next = what; *next != '\0'; ++next) Mix(static_cast<uint64_t>(*next));
  Mix(static_cast<uint64_t>(a));
  Mix(static_cast<uint64_t>(b));
  Mix(static_cast<uint64_t>(c));
  if (!is_logged_) return;
  std::printf("%12.3f us  rank %2d  %s %lld %lld %lld\n", static_cast<double>(now()) / 1000,
              current(), what, static_cast<long long>(a), static_cast<long long>(b),
              static_cast<long long>(c));
}

void World::Note(const std::string& text) {
  for (char next : text) Mix(static_cast<uint64_t>(next));
  texts_.push_back(text);
  if (on_text && violation_.empty()) on_text(text);
  if (!is_logged_) return;
  std::printf("%12.3f us  rank %2d  %s\n", static_cast<double>(now()) / 1000, current(),
              text.c_str());
}

void World::Violate(const std::string& what) {
  if (violation_.empty()) violation_ = what;
  Note("violated: " + what);
}

}  // namespace sim
