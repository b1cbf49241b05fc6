// A job of engines for the C++ tests: one engine per rank, collectives, and data.
#ifndef TFSCALE_TEST_JOB_H_
#define TFSCALE_TEST_JOB_H_

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/collectives.h"
#include "comm/engine.h"
#include "test/check.h"
#include "test/data.h"

namespace tfscale {
namespace testing {

// Long vectors are sent as many messages, and a test ends long before a stall does.
inline EngineOptions SmallOptions() {
  EngineOptions options{};
  options.stall_warning_s = 30;
  options.stall_shutdown_s = 60;
  options.max_message_bytes = 1000;
  options.chunk_bytes = 640;
  options.window_bytes = 4000;
  options.host_memory_bytes = 100;
  options.reduce_threads = 2;
  options.pin_core = -1;
  return options;
}

// Hosts to be tested, with and without reading memory: see EngineOptions.
struct Layout {
  int ranks_per_host;
  int64_t host_memory_bytes;
};
constexpr Layout kLayouts[] = {{0, 100}, {0, 0}, {1, 100}, {2, 100}, {2, 0}, {3, 100}};

inline EngineOptions OptionsWith(const Layout& layout) {
  EngineOptions options = SmallOptions();
  options.ranks_per_host = layout.ranks_per_host;
  options.host_memory_bytes = layout.host_memory_bytes;
  return options;
}

// The engine of this rank from construction to destruction; both are collective.
class Job {
 public:
  explicit Job(const EngineOptions& options = SmallOptions()) {
    Engine::Start(MPI_COMM_WORLD, options, std::make_unique<MpiEnv>());
  }
  ~Job() { Engine::Stop(); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  Engine& engine() const { return *Engine::Get(); }
  int rank() const { return engine().rank(); }
  int size() const { return engine().size(); }
  // World ranks below the size for which `is_chosen` holds.
  template <typename Predicate>
  std::vector<int> Ranks(Predicate is_chosen) const {
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r) {
      if (is_chosen(r)) ranks.push_back(r);
    }
    return ranks;
  }
};

struct Place {
  std::string name = "test";
  int group = 0;
  int plan = -1;
  int slot = 0;
  bool may_overtake = false;
  bool is_cancellable = false;  // called by an op that waits for it, which its step may cancel
};

// Hands a collective over; the future holds how it ended. A second call of its
// `done` would break the promise and end the process.
inline std::future<Status> Post(OperationHandle operation, const Place& place = {},
                                std::shared_ptr<void> memory = nullptr) {
  auto promise = std::make_shared<std::promise<Status>>();
  Call call;
  call.name = place.name;
  call.group = place.group;
  call.plan = place.plan;
  call.slot = place.slot;
  call.may_overtake = place.may_overtake;
  call.memory = std::move(memory);
  if (place.is_cancellable) call.is_cancelled = std::make_shared<std::atomic<bool>>(false);
  call.done = [promise](const Status& status) { promise->set_value(status); };
  std::future<Status> result = promise->get_future();
  Submit(std::move(operation), std::move(call));
  return result;
}

inline void CheckOk(std::future<Status> result, const char* file, int line) {
  const Status status = result.get();
  if (!status.ok()) FailTest(file, line, "collective failed: " + status.message);
}
#define CHECK_OK(result) ::tfscale::testing::CheckOk(result, __FILE__, __LINE__)

inline bool IsReady(const std::future<Status>& result) {
  return result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

inline void SleepMs(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// main() of a test that talks to other ranks. MPI is started once per process,
// and ended whatever failed: mpiexec kills the others when a rank just exits.
inline int RunJobTests(unsigned limit_s = 300) {
  MpiEnv env;
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  Prefix() = "rank " + std::to_string(rank) + ": ";
  return RunTests(limit_s);
}

}  // namespace testing
}  // namespace tfscale

#endif  // TFSCALE_TEST_JOB_H_
