// What the simulated MPI sends: messages, requests and collectives of communicators.
#ifndef TFSCALE_TEST_SIM_NETWORK_H_
#define TFSCALE_TEST_SIM_NETWORK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "test/sim/world.h"

struct SimRequest;

namespace sim {

// Between two ranks of a communicator, in this order.
struct Message {
  int comm;
  int from, to;  // in the communicator
  int from_process, to_process;
  int tag;
  size_t bytes;
  uint64_t number;
  bool has_arrived = false;
  bool is_matched = false;
  bool is_lost_at_exit = false;  // its sender has to send it once more
  bool is_eager = true;
  std::vector<char> data{};       // of an eager one; else a copy, to see whether it changes
  const char* source = nullptr;   // of one that waits for its receiver
  SimRequest* send = nullptr;     // which completes with it; null: it has
  SimRequest* receive = nullptr;  // that it was matched with
};

class Network {
 public:
  explicit Network(World& world);
  ~Network();

  struct Comm {
    std::vector<int> ranks;                              // of the world
    std::vector<int> place;                              // by rank of the world; -1: no member
    std::vector<std::vector<Message*>> unmatched;        // by to * size + from, as sent
    std::vector<std::vector<SimRequest*>> posted;        // by to * size + from, as posted
    std::vector<Time> last_arrival;                      // by pair
    std::map<std::pair<size_t, int>, Time> last_of_tag;  // by pair and tag
    std::vector<int64_t> n_collectives;                  // by place
    std::map<std::pair<int64_t, int>, int> made;         // communicators, by collective and color
  };
  Comm& comm(int id) { return *comms_[static_cast<size_t>(id)]; }
  int NewComm(const std::vector<int>& ranks);
  int Place(int id);  // of the current process in it

  SimRequest* Send(const void* data, size_t bytes, int to, int tag, int comm);
  SimRequest* Receive(void* data, size_t bytes, int from, int tag, int comm);
  // The first message that a probe may find, or null.
  Message* Find(int from, int tag, int comm);
  void Free(SimRequest* request);
  bool Cancel(SimRequest* request);
  void OnDeath(int rank);
  // The peer has died, and MPI has noticed.
  bool IsBroken(const SimRequest& request) const;
  // Takes such a request back.
  void Break(SimRequest* request);

  // A collective of all members: blocks until all have called it with what they give.
  // `combine` is called once, with what each gave, by place; its result is what all take.
  using Given = std::vector<std::vector<char>>;
  std::shared_ptr<Given> Meet(int comm, const std::string& name, std::vector<char> given,
                              int64_t key = -1, const std::vector<int>* members = nullptr);

  // The memory of a process is freed, or used for something else: no request may touch it.
  void RequireUnused(int process, const void* data, size_t bytes, const char* what);
  // Requests of a process that have not completed.
  int64_t n_requests(int process) const { return n_requests_[static_cast<size_t>(process)]; }
  // Those that have, and are not freed.
  int64_t n_completed(int process) const { return n_completed_[static_cast<size_t>(process)]; }
  // Messages that no rank has received, to processes that are not dead.
  int64_t n_unmatched() const;
  // What has not arrived or completed, for reports.
  std::vector<std::string> Outstanding() const;

  struct Sent {
    Time time;
    int process, comm, tag;
    int64_t bytes;
  };
  // All messages so far.
  const std::vector<Sent>& sent() const { return sent_; }
  // What a process of a timed machine has sent so far.
  struct Load {
    int64_t n_messages = 0, bytes = 0;
  };
  const Load& load(int process) const { return loads_[static_cast<size_t>(process)]; }
  // What was sent so far in communicators of these ranks, with tags in [first, end).
  struct Sum {
    int64_t bytes = 0, longest = 0;
  };
  Sum BytesSent(const std::vector<int>& ranks, int first, int end) const;

 private:
  void Arrive(Message* message);
  void Match(Message* message, SimRequest* receive);
  void Deliver(Message* message);
  void Complete(SimRequest* request, int error, size_t bytes);
  Time TimeOf(int from, int to, size_t bytes);
  bool IsInside(const Message& message) const;
  // On a timed machine a message waits for its sender, and for the links of both hosts.
  std::deque<Message*>& PortOf(const Message& message);
  void Enter(Message* message);
  void BeginNext(std::deque<Message*>& port);
  void TakeLink(Message* message);
  void Depart(Message* message);

  World& world_;
  std::vector<std::unique_ptr<Comm>> comms_;
  std::vector<SimRequest*> requests_;        // all that are not freed
  std::vector<int64_t> n_requests_;          // by process
  std::vector<int64_t> n_completed_;         // by process
  std::vector<int64_t> n_unexpected_;        // by process: messages that have come, and no receive
  std::vector<Time> died_at_;                // by process; kNever
  std::vector<Time> link_free_;              // by host
  std::vector<Time> arrivals_free_;          // by host: the other direction
  std::vector<std::deque<Message*>> ports_;  // by process: to its host; then to others
  std::vector<Load> loads_;                  // by process
  std::set<std::pair<int, int>> broken_;     // processes between which a message was lost
  std::vector<Sent> sent_;
  std::map<std::pair<int, int>, Sum> bytes_sent_;  // by communicator and tag
  uint64_t n_messages_ = 0;
  struct Meeting {
    std::shared_ptr<Given> given;
    size_t n_missing;
    std::vector<Fiber*> waiting;
  };
  std::map<std::pair<int, int64_t>, Meeting> meetings_;
};

}  // namespace sim

struct SimRequest {
  int process;
  int comm;
  int peer;  // in the communicator
  int tag;
  bool is_receive;
  char* data;
  size_t bytes;
  bool is_complete = false;
  bool is_matched = false;
  bool is_cancelled = false;
  int error = 0;
  size_t n_received = 0;
  size_t place = 0;  // among all
  sim::Message* message = nullptr;
};

#endif  // TFSCALE_TEST_SIM_NETWORK_H_
