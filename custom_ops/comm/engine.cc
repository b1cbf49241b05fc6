#include "comm/engine.h"

#include <condition_variable>
#include <exception>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "comm/gather.h"
#include "comm/mutex.h"

namespace tfscale {
namespace {

constexpr size_t kEvents = 1 << 16;

Mutex engine_mutex;
// Never destroyed by the process's exit: MPI must not be called after main.
std::shared_ptr<Engine>& Instance() TFSCALE_REQUIRES(engine_mutex) {
  static auto* engine = new std::shared_ptr<Engine>();
  return *engine;
}

[[noreturn]] void ThrowDifference(const std::string& first, const std::string& other, size_t rank) {
  throw CommError("ranks called different collectives. Received: '" + first + "' on rank 0 and '" +
                  other + "' on rank " + std::to_string(rank) +
                  ". Call it with the same arguments, in the same order, on every rank.");
}

// A status that another thread sets once. std::promise needs the C++ library of GCC 11.
class Answer {
 public:
  void Set(const Status& status) {
    Lock lock(mutex_);
    status_ = status;
    is_set_.notify_one();
  }
  Status Wait() {
    Lock lock(mutex_);
    while (!status_) lock.Wait(is_set_);
    return *status_;
  }

 private:
  Mutex mutex_;
  std::condition_variable is_set_;
  std::optional<Status> status_ TFSCALE_GUARDED_BY(mutex_);
};

// Until the process ends.
void Keep(std::unique_ptr<Scheduler> scheduler) {
  static auto* kept = new std::vector<std::unique_ptr<Scheduler>>();
  kept->push_back(std::move(scheduler));
}

}  // namespace

Engine::Engine(MPI_Comm comm, const EngineOptions& options, std::unique_ptr<MpiEnv> env)
    : options_(options),
      env_(std::move(env)),
      workers_(std::max(1, options.reduce_threads)),
      events_(kEvents),
      traffic_(options.report_s) {
  Communicator world = Communicator::Duplicate(comm, options.ranks_per_host,
                                               static_cast<size_t>(options.host_memory_bytes));
  rank_ = world.rank();
  size_ = world.size();
  scheduler_ = std::make_unique<Scheduler>(options_, std::move(world), plans_, events_, traffic_,
                                           buffers_, workers_);
  thread_ = std::make_unique<CommThread>(options_, queue_, *scheduler_);
}

Engine::~Engine() {
  thread_.reset();
  if (scheduler_->has_left()) return;
  // After a failure messages may be under way: ending MPI could wait for them,
  // and they go to and from memory that the scheduler owns.
  env_->LeaveUnfinalized();
  Keep(std::move(scheduler_));
}

std::shared_ptr<Engine> Engine::Get() {
  Lock lock(engine_mutex);
  return Instance();
}

void Engine::Start(MPI_Comm comm, const EngineOptions& options, std::unique_ptr<MpiEnv> env) {
  auto engine = std::make_shared<Engine>(comm, options, std::move(env));
  Lock lock(engine_mutex);
  Instance() = std::move(engine);
}

Engine::End Engine::Stop() {
  std::shared_ptr<Engine> engine;
  {
    Lock lock(engine_mutex);
    engine = std::exchange(Instance(), nullptr);
  }
  // Threads that submit hold it for a moment. It must end here, on the main
  // thread: least of all on the communication thread, which it joins.
  while (engine.use_count() > 1) std::this_thread::yield();
  return engine ? engine->Leave() : End();
}

Engine::End Engine::Leave() {
  thread_.reset();
  return {scheduler_->has_left(), scheduler_->leave_failure()};
}

std::string Engine::WhyForked() const {
  return "tfscale cannot communicate in a forked process. Received: a call in process " +
         std::to_string(getpid()) + ", forked by rank " + std::to_string(rank_) +
         ". Start helpers as programs of their own, or by the method " +
         "'spawn' of multiprocessing, and let only the rank call tfscale.";
}

void Engine::Submit(Task task) {
  if (getpid() != process_) {
    task.done(Status::Failed(WhyForked()));
    return;
  }
  task.posted = Clock::now();
  WorkQueue::Item item;
  item.task = std::move(task);
  if (!queue_.Push(item)) item.task.done(Status::Failed("tfscale has been shut down."));
}

void Engine::GiveUpWaiting(int plan) {
  WorkQueue::Item item;
  item.command = [this, plan] { scheduler_->GiveUpWaiting(plan); };
  queue_.Push(item);  // nothing waits any more where the thread has ended
}

void Engine::RunOnCommThread(const std::function<void()>& command) {
  if (getpid() != process_) throw CommError(WhyForked());
  auto answer = std::make_shared<Answer>();
  WorkQueue::Item item;
  item.command = [command, answer] {
    try {
      command();
      answer->Set(Status::Ok());
    } catch (const std::exception& error) {
      answer->Set(Status::Failed(error.what()));
    }
  };
  if (!queue_.Push(item)) throw CommError("tfscale has been shut down.");
  const Status status = answer->Wait();
  if (!status.ok()) throw CommError(status.message);
}

std::vector<std::string> Engine::GatherTexts(const std::string& name, const std::string& text) {
  // On the heap: a cancelled gather may outlive this call.
  auto texts = std::make_shared<Texts>(Texts{text});
  Task task;
  task.operation = texts->Gather();
  task.operation->KeepAlive(texts);
  task.name = name;
  auto ended = std::make_shared<Answer>();
  task.done = [ended](const Status& status) { ended->Set(status); };
  Submit(std::move(task));
  const Status status = ended->Wait();
  if (!status.ok()) throw CommError(status.message);
  return texts->Split();
}

int Engine::AddGroup(const std::vector<int>& ranks) {
  const std::string name = "add process set";
  std::string call = name;
  for (int rank : ranks) call += " " + std::to_string(rank);
  std::string ids;
  for (int id : group_ids_) ids += " " + std::to_string(id);
  const std::vector<std::string> texts = GatherTexts(name, call + "\n" + ids);
  const auto call_of = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  // The smallest id that is free on all ranks: TensorFlow keeps a kernel for each
  // id that a collective was called with.
  std::set<int> used;
  for (size_t r = 0; r < texts.size(); ++r) {
    if (call_of(texts[r]) != call_of(texts[0]))
      ThrowDifference(call_of(texts[0]), call_of(texts[r]), r);
    std::istringstream stream(texts[r].substr(texts[r].find('\n')));
    for (int id = 0; stream >> id;) used.insert(id);
  }
  int id = 0;
  while (used.count(id) > 0) ++id;
  RunOnCommThread([&] { scheduler_->AddGroup(id, ranks); });
  group_ids_.insert(id);
  return id;
}

void Engine::RemoveGroup(int id) {
  bool is_free = false;
  RunOnCommThread([&] { is_free = scheduler_->RemoveGroup(id); });
  if (is_free) group_ids_.erase(id);
}

}  // namespace tfscale
