// A simulated job: processes whose threads are fibers of one thread, a virtual clock and faults.
#ifndef TFSCALE_TEST_SIM_WORLD_H_
#define TFSCALE_TEST_SIM_WORLD_H_

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace sim {

using Time = int64_t;  // ns
constexpr Time kMicro = 1000;
constexpr Time kMilli = 1000 * kMicro;
constexpr Time kSecond = 1000 * kMilli;
constexpr Time kNever = INT64_MAX;

// All that is drawn in a run comes from one of these.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ULL + 0x1234567) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  // In [0, n).
  int64_t Below(int64_t n) {
    return n <= 1 ? 0 : static_cast<int64_t>(Next() % static_cast<uint64_t>(n));
  }
  int64_t Between(int64_t low, int64_t high) { return low + Below(high - low + 1); }
  bool Chance(double p) { return static_cast<double>(Next() >> 11) * 0x1p-53 < p; }
  // Between the bounds, small ones as likely as large ones.
  int64_t Scale(int64_t low, int64_t high);
  template <typename T>
  const T& Of(const std::vector<T>& values) {
    return values[static_cast<size_t>(Below(static_cast<int64_t>(values.size())))];
  }
  template <typename T>
  void Shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) {
      std::swap(values[i - 1], values[static_cast<size_t>(Below(static_cast<int64_t>(i)))]);
    }
  }

 private:
  uint64_t state_;
};

// A thread of a process. It runs until it blocks.
class Fiber {
 public:
  Fiber(int process, std::function<void()> body);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // From the loop: continues it until it calls Leave or ends.
  void Resume();
  // On the fiber: returns to the loop.
  void Leave();
  bool is_done() const { return is_done_; }

  const int process;
  uint64_t token = 0;               // of the wake-up that is due
  const void* condition = nullptr;  // which it waits for
  bool is_polling = false;          // it continues as soon as anything happens to its process
  bool is_signalled = false;        // the condition has been
  const char* where = "";           // for reports

 private:
  static void Start();

  std::function<void()> body_;
  char* stack_;
  bool is_started_ = false;
  bool is_done_ = false;
  jmp_buf own_, loop_;
  ucontext_t first_;
  void* exceptions_[2] = {nullptr, nullptr};  // that are being handled; see __cxa_get_globals
};

// What a fault does to the job; `process` is -1 where it is drawn when it happens.
enum class FaultKind { kDeath, kPause, kSlowLink, kCutLink, kBadRead, kFail };
struct Fault {
  FaultKind kind;
  int64_t tick;  // calls of MPI and events since the beginning of the training
  int process = -1;
  Time duration = 0;
};

// How the system behaves, drawn per run.
struct Machine {
  int n_ranks = 4;
  std::vector<int> host_of;    // by rank
  Time latency = 20 * kMicro;  // between hosts; inside of one a twentieth
  double bytes_per_ns = 0.125;
  Time jitter = 10 * kMicro;  // added to a message, at most
  bool overtakes = false;     // messages of a pair with different tags overtake each other
  int eager_bytes = 4096;     // longer messages wait for their receiver
  int max_tag = 1 << 28;
  double late = 0.0;           // chance that a thread wakes up late
  Time lateness = kMilli;      // at most
  double spurious = 0.0;       // chance that a wait ends early
  double lost = 0.0;           // chance that a packet is sent again
  bool reports_death = false;  // MPI notices that a peer has died
  bool shuffles = false;       // MPI reports what has completed in any order, not all at once

  // Of a machine whose steps are timed, as the planner describes it (steps.cc): a rank sends one
  // message after another, each of which takes so long besides its bytes.
  Time message_time = 0, host_message_time = 0;  // between hosts, and inside of one
  double host_bytes_per_ns = 0;                  // inside of a host
  // Memory without contents: time is charged for its bytes, but they are never touched.
  const char* hollow = nullptr;
  size_t hollow_bytes = 0;

  bool is_timed() const { return hollow != nullptr; }
  bool IsHollow(const void* data) const {
    const char* at = static_cast<const char*>(data);
    return is_timed() && hollow <= at && at < hollow + hollow_bytes;
  }
};

class Network;

// One process of the job.
struct Process {
  int rank = 0;
  bool is_dead = false;
  bool has_ended = false;
  Time paused_until = 0;
  Time clock_offset = 0;
  Time busy_until = 0;  // its threads see each other's work in order
  std::vector<std::unique_ptr<Fiber>> fibers;
};

// One run. The fibers find it, and themselves, by `World::Get`.
class World {
 public:
  World(uint64_t seed, const Machine& machine, bool is_logged);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // After a run: frees what its processes have not.
  void Close();

  // Null outside of a run.
  static World* Get();

  Random& random() { return random_; }
  const Machine& machine() const { return machine_; }
  Network& network() { return *network_; }
  Process& process(int rank) { return *processes_[static_cast<size_t>(rank)]; }
  int size() const { return machine_.n_ranks; }
  // The process whose fiber runs; -1 in the loop.
  int current() const { return fiber_ == nullptr ? -1 : fiber_->process; }
  Fiber* fiber() { return fiber_; }

  // Of the fiber that runs, or the event.
  Time now() const { return now_ + spent_; }
  // The clock of the current process; each reading is later.
  Time ReadClock();
  void Spend(Time time) { spent_ += time; }
  // Lets others run, where the fiber has run for long without a pause.
  void Preempt() {
    if (spent_ > kTurn && fiber_ != nullptr) Wait(nullptr, now(), "runs");
  }

  void Wake(Fiber* fiber, Time time);
  Fiber* Spawn(int rank, std::function<void()> body);
  // Runs `action` at a time, in the loop.
  void At(Time time, std::function<void()> action);
  // Blocks the fiber until a time, or until `condition` is signalled; kNever: no time. True if it
  // was signalled, or woken up for no reason.
  bool Wait(const void* condition, Time until, const char* where);
  void Sleep(Time time, const char* where) { Wait(nullptr, now() + time, where); }
  // The fiber needs its core for so long; other threads have others.
  void Work(int64_t bytes, double bytes_per_ns) {
    Sleep(static_cast<Time>(static_cast<double>(bytes) / bytes_per_ns), "works");
  }
  // Gives the core away: at most for `time`, less if anything happens to the process.
  void Poll(Time time);
  void Signal(const void* condition);
  // Something has happened to a process: a thread that polls notices soon.
  void Notify(int rank);

  // An event or a call of MPI: a fault may be due. Does not return where the fiber's process dies.
  void Tick();
  void AddFault(const Fault& fault) { faults_.push_back(fault); }
  // From now on faults are due, by their ticks.
  void BeginFaults() { first_tick_ = n_ticks_; }
  bool has_begun() const { return first_tick_ <= n_ticks_; }
  void Kill(int rank);
  void Pause(int rank, Time time);
  // Between the hosts of two ranks.
  bool IsCut(int from, int to) const;
  double SlownessOf(int from, int to) const;
  // The next read of another process's memory fails with this; 0: it does not.
  int TakeReadError();
  std::function<void(const Fault&)> on_fault;

  // Until all processes have ended or died. False where some have not at `limit`.
  bool Run(Time limit);
  std::vector<std::string> Unfinished() const;
  int64_t n_ticks() const { return n_ticks_; }
  Time last_fault_end() const { return last_fault_end_; }

  // Notes what happens; equal seeds give equal notes. Printed where the run is logged.
  bool is_logged() const { return is_logged_; }
  void Note(const char* what, int64_t a = 0, int64_t b = 0, int64_t c = 0);
  void Note(const std::string& text);
  // Called with each text that is noted.
  std::function<void(const std::string&)> on_text;
  // What was noted as text so far: what ranks print, and how they fail.
  const std::vector<std::string>& texts() const { return texts_; }
  uint64_t digest() const { return digest_; }

  // An invariant does not hold. The run ends after the event.
  void Violate(const std::string& what);
  const std::string& violation() const { return violation_; }

 private:
  struct Event {
    Time time;
    uint64_t order;
    Fiber* fiber;    // to be woken up with this token, or
    uint64_t token;  // the action with this number
  };
  static constexpr Time kTurn = 200 * kMicro;
  static bool IsLater(const Event& a, const Event& b) {
    return a.time != b.time ? a.time > b.time : a.order > b.order;
  }
  void Push(Time time, Fiber* fiber, uint64_t token);
  void Happen(const Fault& fault);
  void Mix(uint64_t value) { digest_ = (digest_ ^ value) * 0x100000001B3ULL; }

  Random random_;
  const Machine machine_;
  const bool is_logged_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::unique_ptr<Network> network_;
  std::vector<Event> events_;  // a heap
  std::vector<std::function<void()>> actions_;
  std::vector<uint64_t> free_actions_;
  uint64_t n_events_ = 0;
  uint64_t n_tokens_ = 0;
  Fiber* fiber_ = nullptr;
  Time now_ = 0;
  Time spent_ = 0;
  int64_t n_ticks_ = 0;
  int64_t first_tick_ = INT64_MAX / 2;
  std::vector<Fault> faults_;
  std::vector<std::pair<int, int>> cut_hosts_;
  struct Slow {
    int host_a, host_b;
    Time until;
    double factor;
  };
  std::vector<Slow> slow_;
  int read_error_ = 0;
  Time last_fault_end_ = 0;
  uint64_t digest_ = 0xCBF29CE484222325ULL;
  std::string violation_;
  std::vector<std::string> texts_;
};

}  // namespace sim

#endif  // TFSCALE_TEST_SIM_WORLD_H_
