// MPI's functions on the simulated network.
#include "test/sim/mpi.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "test/sim/network.h"
#include "test/sim/world.h"

namespace {

using sim::Message;
using sim::Network;
using sim::World;

constexpr sim::Time kCallTime = 100;  // ns

World& Called() {
  World& world = *World::Get();
  world.Spend(kCallTime);
  world.Tick();
  return world;
}

std::vector<char> Bytes(const void* data, size_t bytes) {
  const char* begin = static_cast<const char*>(data);
  return {begin, begin + bytes};
}

std::vector<std::vector<int>>& Groups() {
  static std::vector<std::vector<int>> groups;
  return groups;
}

// Communicators by color of the members of `comm`; each member gets its own.
int Split(MPI_Comm comm, int color, const char* name, MPI_Comm* made) {
  World& world = Called();
  Network& network = world.network();
  const int64_t call = network.comm(comm).n_collectives[static_cast<size_t>(network.Place(comm))];
  const auto colors = network.Meet(comm, name, Bytes(&color, sizeof(color)));
  Network::Comm& of = network.comm(comm);
  const auto known = of.made.find({call, color});
  if (known != of.made.end()) {
    *made = known->second;
    return MPI_SUCCESS;
  }
  std::vector<int> ranks;
  for (size_t i = 0; i < of.ranks.size(); ++i) {
    if (std::memcmp((*colors)[i].data(), &color, sizeof(color)) == 0) ranks.push_back(of.ranks[i]);
  }
  const int id = network.NewComm(ranks);
  network.comm(comm).made[{call, color}] = id;
  *made = id;
  return MPI_SUCCESS;
}

template <typename Add>
void AddUp(const Network::Given& given, size_t n_ranks, int n, Add add) {
  for (size_t r = 0; r < n_ranks; ++r) {
    for (int i = 0; i < n; ++i) {
      int value = 0;
      std::memcpy(&value, given[r].data() + static_cast<size_t>(i) * sizeof(int), sizeof(int));
      add(i, value);
    }
  }
}

void SetStatus(MPI_Status* status, int source, int tag, size_t bytes) {
  if (status == MPI_STATUS_IGNORE) return;
  status->MPI_SOURCE = source;
  status->MPI_TAG = tag;
  status->count = static_cast<int>(bytes);
}

}  // namespace

extern "C" {

int MPI_Init_thread(int*, char***, int required, int* provided) {
  *provided = required;
  return MPI_SUCCESS;
}
int MPI_Initialized(int* flag) { return *flag = 1, MPI_SUCCESS; }
int MPI_Finalize() { return MPI_SUCCESS; }
int MPI_Finalized(int* flag) { return *flag = 0, MPI_SUCCESS; }
int MPI_Query_thread(int* provided) { return *provided = MPI_THREAD_MULTIPLE, MPI_SUCCESS; }
int MPI_Abort(MPI_Comm, int) { return MPI_ERR_OTHER; }
int MPI_Error_class(int code, int* error_class) { return *error_class = code, MPI_SUCCESS; }
int MPI_Error_string(int code, char* text, int* length) {
  *length = std::snprintf(text, MPI_MAX_ERROR_STRING, "%s",
                          code == MPI_ERR_TRUNCATE ? "Message truncated" : "Process failed");
  return MPI_SUCCESS;
}
int MPI_Get_processor_name(char* name, int* length) {
  World& world = *World::Get();
  const int host = world.machine().host_of[static_cast<size_t>(world.current())];
  *length = std::snprintf(name, MPI_MAX_PROCESSOR_NAME, "host%d", host);
  return MPI_SUCCESS;
}
MPI_Comm MPI_Comm_f2c(MPI_Fint handle) { return handle; }

int MPI_Comm_set_errhandler(MPI_Comm, MPI_Errhandler) { return MPI_SUCCESS; }
int MPI_Comm_rank(MPI_Comm comm, int* rank) {
  *rank = World::Get()->network().Place(comm);
  return MPI_SUCCESS;
}
int MPI_Comm_size(MPI_Comm comm, int* size) {
  *size = static_cast<int>(World::Get()->network().comm(comm).ranks.size());
  return MPI_SUCCESS;
}
int MPI_Comm_get_attr(MPI_Comm, int, void* value, int* flag) {
  static int max_tag;
  max_tag = World::Get()->machine().max_tag;
  *static_cast<int**>(value) = &max_tag;
  *flag = 1;
  return MPI_SUCCESS;
}
int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* made) { return Split(comm, 0, "dup", made); }
int MPI_Comm_split(MPI_Comm comm, int color, int, MPI_Comm* made) {
  return Split(comm, color, "split", made);
}
int MPI_Comm_split_type(MPI_Comm comm, int, int, MPI_Info, MPI_Comm* made) {
  const World& world = *World::Get();
  const int host = world.machine().host_of[static_cast<size_t>(world.current())];
  return Split(comm, host, "split by hosts", made);
}
int MPI_Comm_group(MPI_Comm comm, MPI_Group* group) {
  Groups().push_back(World::Get()->network().comm(comm).ranks);
  *group = static_cast<int>(Groups().size()) - 1;
  return MPI_SUCCESS;
}
int MPI_Group_incl(MPI_Group group, int n, const int* ranks, MPI_Group* made) {
  std::vector<int> members;
  for (int i = 0; i < n; ++i) {
    members.push_back(Groups()[static_cast<size_t>(group)][static_cast<size_t>(ranks[i])]);
  }
  Groups().push_back(std::move(members));
  *made = static_cast<int>(Groups().size()) - 1;
  return MPI_SUCCESS;
}
int MPI_Group_free(MPI_Group* group) {
  if (*group == static_cast<int>(Groups().size()) - 1) Groups().pop_back();
  *group = MPI_GROUP_NULL;
  return MPI_SUCCESS;
}
int MPI_Comm_create_group(MPI_Comm comm, MPI_Group group, int tag, MPI_Comm* made) {
  World& world = Called();
  Network& network = world.network();
  const std::vector<int> ranks = Groups()[static_cast<size_t>(group)];
  // Groups that are made at the same time have different tags.
  const int64_t key = (int64_t{1} << 40) + tag;
  const auto all = network.Meet(comm, "create group", {}, key, &ranks);
  // The first that continues makes it for all.
  std::vector<char>& made_by_first =
      (*all)[static_cast<size_t>(network.comm(comm).place[static_cast<size_t>(ranks[0])])];
  if (made_by_first.empty()) {
    const int id = network.NewComm(ranks);
    made_by_first = Bytes(&id, sizeof(id));
  }
  std::memcpy(made, made_by_first.data(), sizeof(*made));
  return MPI_SUCCESS;
}
int MPI_Comm_free(MPI_Comm* comm) { return *comm = MPI_COMM_NULL, MPI_SUCCESS; }

int MPI_Allgather(const void* in, int n_in, MPI_Datatype type, void* out, int, MPI_Datatype,
                  MPI_Comm comm) {
  const size_t bytes = static_cast<size_t>(n_in) * static_cast<size_t>(type);
  const auto all = Called().network().Meet(comm, "allgather", Bytes(in, bytes));
  for (size_t r = 0; r < all->size(); ++r) {
    std::memcpy(static_cast<char*>(out) + r * bytes, (*all)[r].data(), bytes);
  }
  return MPI_SUCCESS;
}
int MPI_Allreduce(const void* in, void* out, int n, MPI_Datatype, MPI_Op, MPI_Comm comm) {
  const size_t bytes = static_cast<size_t>(n) * sizeof(int);
  const auto all = Called().network().Meet(comm, "allreduce", Bytes(in, bytes));
  std::memset(out, 0, bytes);
  AddUp(*all, all->size(), n, [out](int i, int value) { static_cast<int*>(out)[i] += value; });
  return MPI_SUCCESS;
}
int MPI_Exscan(const void* in, void* out, int n, MPI_Datatype, MPI_Op, MPI_Comm comm) {
  const size_t bytes = static_cast<size_t>(n) * sizeof(int);
  const auto all = Called().network().Meet(comm, "exscan", Bytes(in, bytes));
  const size_t place = static_cast<size_t>(World::Get()->network().Place(comm));
  if (place > 0) std::memset(out, 0, bytes);
  AddUp(*all, place, n, [out](int i, int value) { static_cast<int*>(out)[i] += value; });
  return MPI_SUCCESS;
}
int MPI_Bcast(void* data, int n, MPI_Datatype type, int root, MPI_Comm comm) {
  const size_t bytes = static_cast<size_t>(n) * static_cast<size_t>(type);
  const auto all = Called().network().Meet(comm, "bcast", Bytes(data, bytes));
  std::memcpy(data, (*all)[static_cast<size_t>(root)].data(), bytes);
  return MPI_SUCCESS;
}

int MPI_Isend(const void* data, int n, MPI_Datatype, int to, int tag, MPI_Comm comm,
              MPI_Request* request) {
  World& world = Called();
  if (tag < 0 || tag > world.machine().max_tag) world.Violate("a tag is too large for MPI");
  *request = world.network().Send(data, static_cast<size_t>(n), to, tag, comm);
  return MPI_SUCCESS;
}
int MPI_Irecv(void* data, int n, MPI_Datatype, int from, int tag, MPI_Comm comm,
              MPI_Request* request) {
  *request = Called().network().Receive(data, static_cast<size_t>(n), from, tag, comm);
  return MPI_SUCCESS;
}
int MPI_Recv(void* data, int n, MPI_Datatype, int from, int tag, MPI_Comm comm,
             MPI_Status* status) {
  World& world = Called();
  SimRequest* request = world.network().Receive(data, static_cast<size_t>(n), from, tag, comm);
  while (!request->is_complete) world.Sleep(sim::kMicro, "in MPI_Recv");
  SetStatus(status, from, tag, request->n_received);
  const int error = request->error;
  world.network().Free(request);
  return error;
}
int MPI_Iprobe(int from, int tag, MPI_Comm comm, int* flag, MPI_Status* status) {
  World& world = Called();
  world.Preempt();
  const Message* message = world.network().Find(from, tag, comm);
  *flag = message != nullptr;
  if (message != nullptr) SetStatus(status, message->from, message->tag, message->bytes);
  return MPI_SUCCESS;
}
int MPI_Testsome(int n, MPI_Request* requests, int* n_done, int* indices, MPI_Status* statuses) {
  World& world = Called();
  Network& network = world.network();
  const bool shuffles = world.machine().shuffles;
  bool has_error = false;
  bool has_any = false;
  *n_done = 0;
  // Most polls of many requests find nothing.
  const bool is_quick = world.machine().is_timed() && n > 0;
  if (is_quick && network.n_completed(world.current()) == 0) return MPI_SUCCESS;
  for (int i = 0; i < n; ++i) {
    SimRequest* request = requests[i];
    if (request == MPI_REQUEST_NULL) continue;
    has_any = true;
    const bool is_broken = network.IsBroken(*request);
    if (!request->is_complete && !is_broken) continue;
    // It completes at least one.
    if (shuffles && *n_done > 0 && world.random().Chance(0.3)) continue;
    indices[(*n_done)++] = i;
  }
  if (!has_any) return *n_done = MPI_UNDEFINED, MPI_SUCCESS;
  if (shuffles) {
    std::vector<int> order(indices, indices + *n_done);
    world.random().Shuffle(order);
    std::copy(order.begin(), order.end(), indices);
  }
  for (int k = 0; k < *n_done; ++k) {
    SimRequest* request = requests[indices[k]];
    const int error = request->is_complete ? request->error : MPI_ERR_OTHER;
    has_error = has_error || error != MPI_SUCCESS;
    SetStatus(&statuses[k], request->peer, request->tag, request->n_received);
    statuses[k].MPI_ERROR = error;
    requests[indices[k]] = MPI_REQUEST_NULL;
    if (!request->is_complete) network.Break(request);
    network.Free(request);
  }
  return has_error ? MPI_ERR_IN_STATUS : MPI_SUCCESS;
}
int MPI_Get_count(const MPI_Status* status, MPI_Datatype, int* count) {
  *count = status->count;
  return MPI_SUCCESS;
}
int MPI_Cancel(MPI_Request* request) {
  Called().network().Cancel(*request);
  return MPI_SUCCESS;
}
}
