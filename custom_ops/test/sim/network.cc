#include "test/sim/network.h"

#include <algorithm>
#include <cstring>

#include "test/sim/mpi.h"

namespace sim {
namespace {

// A packet that is lost is sent again after this, as TCP does it.
constexpr Time kResend = 200 * kMilli;
// After this MPI may report that a peer has died.
constexpr Time kNoticed = 20 * kMilli;

}  // namespace

Network::Network(World& world)
    : world_(world),
      n_requests_(static_cast<size_t>(world.size()), 0),
      n_completed_(static_cast<size_t>(world.size()), 0),
      n_unexpected_(static_cast<size_t>(world.size()), 0),
      died_at_(static_cast<size_t>(world.size()), kNever),
      link_free_(static_cast<size_t>(world.size()), 0),
      arrivals_free_(static_cast<size_t>(world.size()), 0),
      ports_(static_cast<size_t>(2 * world.size())),
      loads_(static_cast<size_t>(world.size())) {
  std::vector<int> all;
  for (int rank = 0; rank < world.size(); ++rank) all.push_back(rank);
  NewComm(all);
}

Network::~Network() {
  for (SimRequest* request : requests_) delete request;
  for (const auto& of : comms_) {
    for (const auto& pair : of->unmatched) {
      for (const Message* message : pair) delete message;
    }
  }
}

int Network::NewComm(const std::vector<int>& ranks) {
  auto made = std::make_unique<Comm>();
  const size_t n = ranks.size();
  made->ranks = ranks;
  made->place.assign(static_cast<size_t>(world_.size()), -1);
  for (size_t i = 0; i < n; ++i) made->place[static_cast<size_t>(ranks[i])] = static_cast<int>(i);
  made->unmatched.resize(n * n);
  made->posted.resize(n * n);
  made->last_arrival.resize(n * n, 0);
  made->n_collectives.resize(n, 0);
  comms_.push_back(std::move(made));
  return static_cast<int>(comms_.size()) - 1;
}

int Network::Place(int id) { return comm(id).place[static_cast<size_t>(world_.current())]; }

// Of a message on its way. Messages of a host share its link.
Time Network::TimeOf(int from, int to, size_t bytes) {
  const Machine& machine = world_.machine();
  const size_t host = static_cast<size_t>(machine.host_of[static_cast<size_t>(from)]);
  const bool is_inside =
      machine.host_of[static_cast<size_t>(from)] == machine.host_of[static_cast<size_t>(to)];
  const double slowness = world_.SlownessOf(from, to);
  const double rate = machine.bytes_per_ns * (is_inside ? 20 : 1) / slowness;
  const Time wire = static_cast<Time>(static_cast<double>(bytes + 40) / rate);
  Time time = world_.now() + wire;
  if (!is_inside) {
    time = std::max(world_.now(), link_free_[host]) + wire;
    link_free_[host] = time;
  }
  const Time latency = static_cast<Time>(static_cast<double>(machine.latency) * slowness);
  return time + (is_inside ? latency / 20 : latency) + world_.random().Below(machine.jitter);
}

bool Network::IsInside(const Message& message) const {
  const std::vector<int>& host_of = world_.machine().host_of;
  return host_of[static_cast<size_t>(message.from_process)] ==
         host_of[static_cast<size_t>(message.to_process)];
}

std::deque<Message*>& Network::PortOf(const Message& message) {
  const int port = 2 * message.from_process + (IsInside(message) ? 0 : 1);
  return ports_[static_cast<size_t>(port)];
}

void Network::Enter(Message* message) {
  std::deque<Message*>& port = PortOf(*message);
  port.push_back(message);
  if (port.size() == 1) BeginNext(port);
}

void Network::BeginNext(std::deque<Message*>& port) {
  Message* message = port.front();
  const Machine& machine = world_.machine();
  const double bytes = static_cast<double>(message->bytes);
  if (IsInside(*message)) {
    const Time copy = static_cast<Time>(bytes / machine.host_bytes_per_ns);
    const Time end = world_.now() + machine.host_message_time + copy;
    world_.At(end, [this, message] { Depart(message); });
  } else {
    world_.At(world_.now() + machine.message_time, [this, message] { TakeLink(message); });
  }
}

void Network::TakeLink(Message* message) {
  const Machine& machine = world_.machine();
  const int host = machine.host_of[static_cast<size_t>(message->from_process)];
  Time& free = link_free_[static_cast<size_t>(host)];
  const double wire = static_cast<double>(message->bytes) / machine.bytes_per_ns;
  free = std::max(free, world_.now()) + static_cast<Time>(wire);
  world_.At(free, [this, message] { Depart(message); });
}

void Network::Depart(Message* message) {
  std::deque<Message*>& port = PortOf(*message);
  port.pop_front();
  if (!port.empty()) BeginNext(port);
  if (message->send != nullptr) Complete(std::exchange(message->send, nullptr), 0, 0);
  if (IsInside(*message)) return Arrive(message);
  const Machine& machine = world_.machine();
  Time& free = arrivals_free_[static_cast<size_t>(
      machine.host_of[static_cast<size_t>(message->to_process)])];
  const Time wire = static_cast<Time>(static_cast<double>(message->bytes) / machine.bytes_per_ns);
  free = std::max(world_.now(), free + wire);
  world_.At(free, [this, message] { Arrive(message); });
}

SimRequest* Network::Send(const void* data, size_t bytes, int to, int tag, int id) {
  Comm& of = comm(id);
  Random& random = world_.random();
  const int from = Place(id);
  auto* request = new SimRequest{world_.current(), id, to, tag, false, nullptr, bytes};
  request->place = requests_.size();
  requests_.push_back(request);
  ++n_requests_[static_cast<size_t>(request->process)];
  // It is only read.
  request->data = const_cast<char*>(static_cast<const char*>(data));
  auto* message = new Message{
      id, from, to, request->process, of.ranks[static_cast<size_t>(to)], tag, bytes, n_messages_++};
  const bool is_timed = world_.machine().is_timed();
  const bool is_short = bytes <= static_cast<size_t>(world_.machine().eager_bytes);
  message->is_eager = is_short || is_timed;
  const bool is_hollow = world_.machine().IsHollow(data);
  if (!is_hollow) message->data.assign(request->data, request->data + bytes);
  message->source = request->data;
  world_.Note("sends", message->to_process, tag, static_cast<int64_t>(bytes));
  if (!is_timed) {
    sent_.push_back({world_.now(), request->process, id, tag, static_cast<int64_t>(bytes)});
    Sum& sum = bytes_sent_[{id, tag}];
    sum.bytes += static_cast<int64_t>(bytes);
    sum.longest = std::max(sum.longest, static_cast<int64_t>(bytes));
  }
  const size_t pair = static_cast<size_t>(to) * of.ranks.size() + static_cast<size_t>(from);
  of.unmatched[pair].push_back(message);
  if (is_timed ? is_short : is_short && random.Chance(0.9)) {
    request->is_complete = true;
    ++n_completed_[static_cast<size_t>(request->process)];
  } else {
    message->send = request;
    request->message = message;
  }
  if (is_timed) {
    Load& load = loads_[static_cast<size_t>(request->process)];
    ++load.n_messages;
    load.bytes += static_cast<int64_t>(bytes);
    world_.At(world_.now(), [this, message] { Enter(message); });
    return request;
  }
  Time arrival = TimeOf(message->from_process, message->to_process, message->is_eager ? bytes : 0);
  if (world_.machine().lost > 0 && world_.has_begun() && random.Chance(world_.machine().lost)) {
    arrival += kResend << random.Below(3);
    message->is_lost_at_exit = true;
  }
  Time& last = world_.machine().overtakes ? of.last_of_tag[{pair, tag}] : of.last_arrival[pair];
  arrival = last = std::max(arrival, last);
  world_.At(arrival, [this, message] { Arrive(message); });
  return request;
}

SimRequest* Network::Receive(void* data, size_t bytes, int from, int tag, int id) {
  Comm& of = comm(id);
  auto* request =
      new SimRequest{world_.current(), id, from, tag, true, static_cast<char*>(data), bytes};
  request->place = requests_.size();
  requests_.push_back(request);
  ++n_requests_[static_cast<size_t>(request->process)];
  const size_t pair = static_cast<size_t>(Place(id)) * of.ranks.size() + static_cast<size_t>(from);
  for (Message* message : of.unmatched[pair]) {
    if (message->tag != tag) continue;
    if (!message->has_arrived) break;
    --n_unexpected_[static_cast<size_t>(request->process)];
    Match(message, request);
    return request;
  }
  of.posted[pair].push_back(request);
  return request;
}

void Network::Arrive(Message* message) {
  Comm& of = comm(message->comm);
  const size_t pair =
      static_cast<size_t>(message->to) * of.ranks.size() + static_cast<size_t>(message->from);
  const Process& sender = world_.process(message->from_process);
  const Process& receiver = world_.process(message->to_process);
  const bool is_gone = sender.is_dead || sender.has_ended;
  const bool is_cut = world_.IsCut(message->from_process, message->to_process);
  const std::pair<int, int> processes(message->from_process, message->to_process);
  const bool is_lost = (message->is_lost_at_exit && is_gone) || is_cut ||
                       broken_.count(processes) > 0 ||
                       (sender.is_dead && world_.random().Chance(0.5));
  if (is_lost) broken_.insert(processes);  // nothing comes after what is lost
  if (is_lost || receiver.is_dead || receiver.has_ended) {
    if (!is_lost && receiver.has_ended) return;  // stays, see n_unmatched
    auto& queue = of.unmatched[pair];
    queue.erase(std::find(queue.begin(), queue.end(), message));
    // Its sender may have freed the request with its memory.
    if (!message->is_eager && message->send != nullptr) return;
    if (message->send != nullptr && !is_gone) Complete(message->send, 0, 0);
    delete message;
    return;
  }
  message->has_arrived = true;
  auto& posted = of.posted[pair];
  for (auto it = posted.begin(); it != posted.end(); ++it) {
    if ((*it)->tag != message->tag) continue;
    SimRequest* receive = *it;
    posted.erase(it);
    Match(message, receive);
    return;
  }
  ++n_unexpected_[static_cast<size_t>(message->to_process)];
  if (message->is_eager && message->send != nullptr && world_.random().Chance(0.5)) {
    Complete(std::exchange(message->send, nullptr), 0, 0);
  }
  world_.Notify(message->to_process);
}

void Network::Match(Message* message, SimRequest* receive) {
  Comm& of = comm(message->comm);
  auto& queue = of.unmatched[static_cast<size_t>(message->to) * of.ranks.size() +
                             static_cast<size_t>(message->from)];
  queue.erase(std::find(queue.begin(), queue.end(), message));
  message->is_matched = receive->is_matched = true;
  message->receive = receive;
  receive->message = message;
  if (message->is_eager) {
    Deliver(message);
  } else {
    const Time back = world_.machine().latency;
    const Time time = TimeOf(message->from_process, message->to_process, message->bytes) + back;
    world_.At(time, [this, message] { Deliver(message); });
  }
}

void Network::Deliver(Message* message) {
  const Process& sender = world_.process(message->from_process);
  const Process& receiver = world_.process(message->to_process);
  if (!message->is_eager) {
    const bool is_gone = sender.is_dead || sender.has_ended;
    if (is_gone || world_.IsCut(message->from_process, message->to_process)) return;
    const Time paused_until = std::max(sender.paused_until, receiver.paused_until);
    if (paused_until > world_.now()) {
      world_.At(paused_until, [this, message] { Deliver(message); });
      return;
    }
  }
  if (receiver.is_dead) return;
  // Memory of a send must stay as it is until it has completed.
  if (message->send != nullptr && !message->data.empty() &&
      std::memcmp(message->source, message->data.data(), message->bytes) != 0) {
    world_.Violate("what rank " + std::to_string(message->from_process) +
                   " sends changed under way, tag " + std::to_string(message->tag));
  }
  SimRequest* receive = message->receive;
  const size_t n = std::min(receive->bytes, message->bytes);
  if (n > 0 && !message->data.empty()) std::memcpy(receive->data, message->data.data(), n);
  receive->message = nullptr;
  Complete(receive, message->bytes > receive->bytes ? MPI_ERR_TRUNCATE : 0, n);
  if (message->send != nullptr) Complete(message->send, 0, 0);
  delete message;
}

void Network::Complete(SimRequest* request, int error, size_t bytes) {
  request->is_complete = true;
  ++n_completed_[static_cast<size_t>(request->process)];
  request->error = error;
  request->n_received = bytes;
  request->message = nullptr;
  world_.Notify(request->process);
}

Message* Network::Find(int from, int tag, int id) {
  Comm& of = comm(id);
  const size_t n = of.ranks.size();
  const size_t own = static_cast<size_t>(Place(id));
  const int process = world_.current();
  // Most probes find nothing.
  if (world_.machine().is_timed() && n_unexpected_[static_cast<size_t>(process)] == 0)
    return nullptr;
  const size_t first = static_cast<size_t>(world_.random().Below(static_cast<int64_t>(n)));
  for (size_t i = 0; i < n; ++i) {
    const size_t sender = (first + i) % n;
    if (from != MPI_ANY_SOURCE && static_cast<size_t>(from) != sender) continue;
    for (Message* message : of.unmatched[own * n + sender]) {
      if (tag != MPI_ANY_TAG && message->tag != tag) continue;
      // No later one that would match may be found before.
      if (message->has_arrived) return message;
      break;
    }
  }
  return nullptr;
}

void Network::Free(SimRequest* request) {
  --n_requests_[static_cast<size_t>(request->process)];
  if (request->is_complete) --n_completed_[static_cast<size_t>(request->process)];
  requests_.back()->place = request->place;
  requests_[request->place] = requests_.back();
  requests_.pop_back();
  delete request;
}

void Network::Break(SimRequest* request) {
  if (!request->is_receive) {
    request->message->send = nullptr;
  } else if (!request->is_matched) {
    Cancel(request);
  }
}

bool Network::Cancel(SimRequest* request) {
  if (request->is_complete || request->is_matched) return false;
  Comm& of = comm(request->comm);
  const size_t pair = static_cast<size_t>(Place(request->comm)) * of.ranks.size() +
                      static_cast<size_t>(request->peer);
  auto& posted = of.posted[pair];
  posted.erase(std::find(posted.begin(), posted.end(), request));
  request->is_cancelled = true;
  Complete(request, 0, 0);
  return true;
}

void Network::OnDeath(int rank) { died_at_[static_cast<size_t>(rank)] = world_.now(); }

bool Network::IsBroken(const SimRequest& request) const {
  if (!world_.machine().reports_death || request.is_complete) return false;
  const Comm& of = *comms_[static_cast<size_t>(request.comm)];
  const Time died_at = died_at_[static_cast<size_t>(of.ranks[static_cast<size_t>(request.peer)])];
  return died_at != kNever && world_.now() - died_at > kNoticed;
}

std::shared_ptr<Network::Given> Network::Meet(int id, const std::string& name,
                                              std::vector<char> given, int64_t key,
                                              const std::vector<int>* members) {
  Comm& of = comm(id);
  const size_t place = static_cast<size_t>(Place(id));
  const size_t n = members == nullptr ? of.ranks.size() : members->size();
  if (key < 0) key = of.n_collectives[place]++;
  world_.Note(name.c_str(), key);
  Meeting& meeting = meetings_[{id, key}];
  if (!meeting.given) {
    meeting.given = std::make_shared<Given>(of.ranks.size());
    meeting.n_missing = n;
  }
  const std::shared_ptr<Given> all = meeting.given;
  (*all)[place] = std::move(given);
  if (--meeting.n_missing > 0) {
    meeting.waiting.push_back(world_.fiber());
    world_.Wait(nullptr, kNever, "in a collective of MPI");
    return all;
  }
  for (Fiber* fiber : meeting.waiting) {
    world_.Wake(fiber, world_.now() + world_.machine().latency + world_.random().Below(kMicro));
  }
  meetings_.erase({id, key});
  return all;
}

void Network::RequireUnused(int process, const void* data, size_t bytes, const char* what) {
  if (n_requests_[static_cast<size_t>(process)] == 0) return;
  const char* begin = static_cast<const char*>(data);
  for (const SimRequest* request : requests_) {
    if (request->process != process || request->is_complete || request->bytes == 0) continue;
    if (request->data < begin + bytes && begin < request->data + request->bytes) {
      world_.Violate(std::string(what) + " is freed on rank " + std::to_string(process) +
                     " while MPI may touch it, tag " + std::to_string(request->tag));
    }
  }
}

std::vector<std::string> Network::Outstanding() const {
  std::vector<std::string> lines;
  for (const SimRequest* request : requests_) {
    if (request->is_complete || world_.process(request->process).is_dead) continue;
    lines.push_back("rank " + std::to_string(request->process) +
                    (request->is_receive ? " receives from " : " sends to ") +
                    std::to_string(request->peer) + " of communicator " +
                    std::to_string(request->comm) + ", tag " + std::to_string(request->tag) + ", " +
                    std::to_string(request->bytes) + " bytes" +
                    (request->is_matched ? ", matched" : "") +
                    (request->message != nullptr ? ", with a message" : ""));
  }
  return lines;
}

Network::Sum Network::BytesSent(const std::vector<int>& ranks, int first, int end) const {
  Sum sum;
  for (const auto& [where, of_tag] : bytes_sent_) {
    const auto [id, tag] = where;
    if (tag < first || tag >= end || comms_[static_cast<size_t>(id)]->ranks != ranks) continue;
    sum.bytes += of_tag.bytes;
    sum.longest = std::max(sum.longest, of_tag.longest);
  }
  return sum;
}

int64_t Network::n_unmatched() const {
  int64_t n = 0;
  for (const auto& of : comms_) {
    for (const auto& pair : of->unmatched) {
      for (const Message* message : pair) n += !world_.process(message->to_process).is_dead;
    }
  }
  return n;
}

}  // namespace sim
