// Times steps of a whole plan on many simulated ranks: see tools/simulate_steps.py, which writes
// the plan. Vectors have no contents, and what the engine computes with them takes time only.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/collectives.h"
#include "comm/engine.h"
#include "comm/pending.h"
#include "comm/reduce.h"
#include "test/sim/network.h"
#include "test/sim/world.h"

namespace sim {
namespace {

constexpr size_t kHollowBytes = size_t{1} << 38;
constexpr Time kLimit = 3600 * kSecond;
constexpr size_t kAlignElements = 16;  // of segments
constexpr size_t kElement = sizeof(float);

// A task of a step, as the planner has it. Compute: takes its time on the rank's compute stream,
// where the task of the earliest step, and then of the smallest priority, goes first. Join: takes
// none. The others are collectives.
enum class Kind { kCompute, kJoin, kSum, kScatter, kGather };
struct Task {
  Kind kind;
  int priority;
  Time duration;
  int slot;                          // of a collective: its place in the engine's plan
  std::vector<size_t> counts;        // elements of its tensors
  std::vector<int> after, previous;  // tasks of the same step, and of the step before
};

struct Input {
  Machine machine;
  tfscale::EngineOptions options{};
  double reduced_bytes_per_ns, memory_bytes_per_ns;
  int n_steps, radix, n_slots = 0;
  std::vector<Task> tasks;
};

template <typename T>
std::vector<T> ReadList() {
  size_t n = 0;
  std::cin >> n;
  std::vector<T> values(n);
  for (T& value : values) std::cin >> value;
  return values;
}

Input Read() {
  Input input;
  Machine& machine = input.machine;
  int per_host = 1;
  size_t n_tasks = 0;
  std::cin >> machine.n_ranks >> per_host >> machine.message_time >> machine.bytes_per_ns >>
      machine.host_message_time >> machine.host_bytes_per_ns >> input.reduced_bytes_per_ns >>
      input.memory_bytes_per_ns;
  std::cin >> input.options.chunk_bytes >> input.options.window_bytes >>
      input.options.host_memory_bytes >> input.radix >> input.n_steps >> n_tasks;
  for (int rank = 0; rank < machine.n_ranks; ++rank) machine.host_of.push_back(rank / per_host);
  machine.jitter = 0;
  machine.latency = machine.message_time;
  machine.eager_bytes = 64 * 1024;
  machine.hollow_bytes = kHollowBytes;
  machine.hollow = static_cast<const char*>(
      mmap(nullptr, kHollowBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  input.options.stall_warning_s = input.options.stall_shutdown_s = 3600;
  input.options.max_message_bytes = 1 << 30;
  input.options.reduce_threads = 1;
  input.options.pin_core = -1;
  for (size_t i = 0; i < n_tasks; ++i) {
    std::string kind;
    Task task;
    std::cin >> kind >> task.priority >> task.duration >> task.slot;
    task.kind = static_cast<Kind>(std::string("cjrsg").find(kind));
    task.counts = ReadList<size_t>();
    task.after = ReadList<int>();
    task.previous = ReadList<int>();
    input.n_slots = std::max(input.n_slots, task.slot + 1);
    input.tasks.push_back(std::move(task));
  }
  if (!std::cin || machine.hollow == MAP_FAILED) std::exit(2);
  return input;
}

// The program of one rank.
class Program {
 public:
  Program(const Input& input, World& world, int rank) : input_(input), world_(world), rank_(rank) {}

  void Main();

  std::unique_ptr<tfscale::Engine> engine;
  tfscale::PendingVariables pending;
  std::vector<Time> begins;          // of steps
  std::vector<Network::Load> loads;  // when they begin

 private:
  int n_tasks() const { return static_cast<int>(input_.tasks.size()); }
  // Tasks of all steps are numbered, those of the first step first.
  const Task& TaskOf(int number) const {
    return input_.tasks[static_cast<size_t>(number % n_tasks())];
  }
  void Begin(int number);
  void End(int number);
  tfscale::OperationHandle Operation(const Task& task) const;

  const Input& input_;
  World& world_;
  const int rank_;
  int plan_ = -1;
  int n_left_ = 0;
  std::vector<int> missing_;                      // by task, those that must end first
  std::vector<std::vector<int>> followers_;       // by task
  std::set<std::tuple<int, int, int>> computed_;  // ready: step, priority, number
};

tfscale::OperationHandle Program::Operation(const Task& task) const {
  char* memory = const_cast<char*>(input_.machine.hollow);
  size_t total = 0;
  for (size_t count : task.counts) total += count;
  const size_t n = static_cast<size_t>(input_.machine.n_ranks);
  const size_t even = ((total + n - 1) / n + kAlignElements - 1) / kAlignElements * kAlignElements;
  std::vector<size_t> cuts;  // in elements
  for (size_t r = 0; r <= n; ++r) cuts.push_back(std::min(r * even, total));
  if (task.kind == Kind::kGather) {
    for (size_t& cut : cuts) cut *= kElement;
    return tfscale::MakeSegmentGather(memory, cuts);
  }
  tfscale::ReductionArgs args;
  args.counts = task.counts;
  args.inputs.assign(task.counts.size(), memory);
  if (task.kind == Kind::kSum) {
    args.outputs.assign(task.counts.size(), memory);
    if (input_.radix >= 0) args.way = tfscale::Way{false, static_cast<size_t>(input_.radix)};
  } else {
    args.outputs.push_back(memory);
    for (size_t r = 0; r < n; ++r) args.scatter_counts.push_back(cuts[r + 1] - cuts[r]);
  }
  return tfscale::MakeReduction(std::move(args));
}

void Program::Begin(int number) {
  const Task& task = TaskOf(number);
  if (task.kind == Kind::kCompute) {
    computed_.emplace(number / n_tasks(), task.priority, number);
    return;
  }
  if (task.kind == Kind::kJoin) return End(number);
  tfscale::Call call;
  call.plan = plan_;
  call.slot = task.slot;
  call.may_overtake = task.kind == Kind::kGather;
  call.done = [this, number](const tfscale::Status& status) {
    if (!status.ok()) world_.Violate(status.message);
    End(number);
    world_.Signal(this);
  };
  tfscale::Submit(Operation(task), std::move(call));
}

void Program::End(int number) {
  --n_left_;
  for (int follower : followers_[static_cast<size_t>(number)]) {
    if (--missing_[static_cast<size_t>(follower)] == 0) Begin(follower);
  }
}

void Program::Main() {
  engine = std::make_unique<tfscale::Engine>(MPI_COMM_WORLD, input_.options,
                                             std::make_unique<tfscale::MpiEnv>());
  plan_ = engine->plans().Create(0, "steps");
  for (int slot = 0; slot < input_.n_slots; ++slot) {
    engine->plans().AddSlot(plan_, "slot " + std::to_string(slot));
  }
  n_left_ = input_.n_steps * n_tasks();
  missing_.assign(static_cast<size_t>(n_left_), 0);
  followers_.resize(static_cast<size_t>(n_left_));
  for (int number = 0; number < n_left_; ++number) {
    const int first = number / n_tasks() * n_tasks();
    const auto wait_for = [&](int other) {
      if (other < 0) return;  // of no step
      followers_[static_cast<size_t>(other)].push_back(number);
      ++missing_[static_cast<size_t>(number)];
    };
    for (int other : TaskOf(number).after) wait_for(first + other);
    for (int other : TaskOf(number).previous) wait_for(first - n_tasks() + other);
  }
  std::vector<int> ready;
  for (int number = 0; number < n_left_; ++number) {
    if (missing_[static_cast<size_t>(number)] == 0) ready.push_back(number);
  }
  for (int number : ready) Begin(number);
  while (n_left_ > 0) {
    if (computed_.empty()) {
      world_.Wait(this, kNever, "waits for messages");
      continue;
    }
    const int number = std::get<2>(*computed_.begin());
    computed_.erase(computed_.begin());
    if (number % n_tasks() == 0) {
      begins.push_back(world_.now());
      loads.push_back(world_.network().load(rank_));
    }
    world_.Sleep(TaskOf(number).duration, "computes");
    End(number);
  }
}

std::vector<std::unique_ptr<Program>> the_programs;

Program& Current() { return *the_programs[static_cast<size_t>(World::Get()->current())]; }

const Input* the_input = nullptr;

}  // namespace
}  // namespace sim

// Each process has its own of what the engine has one of, and nothing is computed: see
// simulate_engine.py for --wrap.
extern "C" {

std::shared_ptr<tfscale::Engine> __wrap__ZN7tfscale6Engine3GetEv() {
  return {std::shared_ptr<void>(), sim::Current().engine.get()};
}

tfscale::PendingVariables& __wrap__ZN7tfscale16PendingVariables3GetEv() {
  return sim::Current().pending;
}

tfscale::BufferPool::Buffer __wrap__ZN7tfscale10BufferPool3GetEm(tfscale::BufferPool* pool,
                                                                 size_t bytes) {
  return {const_cast<char*>(sim::the_input->machine.hollow),
          tfscale::BufferPool::Returner{pool, bytes}};
}
void __wrap__ZN7tfscale10BufferPool6ReturnEPcm(tfscale::BufferPool*, char*, size_t) {}

void __wrap__ZN7tfscale6ReduceERKSt6vectorIPKvSaIS2_EEPvmNS_5DTypeENS_8ReduceOpEd(
    const std::vector<const void*>& sources, void*, size_t count, tfscale::DType dtype,
    tfscale::ReduceOp, double) {
  const size_t bytes = sources.size() * count * tfscale::SizeOf(dtype);
  sim::World::Get()->Work(static_cast<int64_t>(bytes), sim::the_input->reduced_bytes_per_ns);
}

void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  sim::World* world = sim::World::Get();
  if (world == nullptr || !world->machine().IsHollow(from)) return __real_memcpy(to, from, bytes);
  // It is read and written.
  world->Work(2 * static_cast<int64_t>(bytes), sim::the_input->memory_bytes_per_ns);
  return to;
}

void* __real_memset(void* to, int value, size_t bytes);
void* __wrap_memset(void* to, int value, size_t bytes) {
  const sim::World* world = sim::World::Get();
  if (world != nullptr && world->machine().IsHollow(to)) return to;
  return __real_memset(to, value, bytes);
}
}

// Prints when the steps of rank 0 begin, and what it has sent by then.
int main() {
  const sim::Input input = sim::Read();
  sim::the_input = &input;
  sim::World world(1, input.machine, false);
  for (int rank = 0; rank < world.size(); ++rank) {
    sim::the_programs.push_back(std::make_unique<sim::Program>(input, world, rank));
    world.Spawn(rank, [rank, &world] {
      sim::the_programs[static_cast<size_t>(rank)]->Main();
      world.process(rank).has_ended = true;
    });
  }
  if (!world.Run(sim::kLimit)) {
    std::fprintf(stderr, "%s\n", world.violation().c_str());
    for (const std::string& line : world.Unfinished()) std::fprintf(stderr, "%s\n", line.c_str());
    return 1;
  }
  const sim::Program& first = *sim::the_programs[0];
  for (size_t step = 0; step < first.begins.size(); ++step) {
    std::printf("%lld %lld %lld\n", static_cast<long long>(first.begins[step]),
                static_cast<long long>(first.loads[step].n_messages),
                static_cast<long long>(first.loads[step].bytes));
  }
  std::fflush(stdout);
  std::_Exit(0);  // the engines are still there
}
