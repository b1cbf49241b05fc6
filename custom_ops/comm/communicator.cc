#include "comm/communicator.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "comm/mpi_env.h"
#include "comm/types.h"

namespace tfscale {
namespace {
// Read at a time, so that other operations move in between.
constexpr size_t kReadBytes = size_t{1} << 20;
}  // namespace

Communicator::Communicator(MPI_Comm comm, std::vector<int> in_world, HostLayout hosts,
                           std::vector<pid_t> readable, size_t least_read_bytes)
    : comm_(new MPI_Comm(comm)),
      in_world_(std::move(in_world)),
      hosts_(std::move(hosts)),
      readable_(std::move(readable)),
      least_read_bytes_(least_read_bytes) {
  Check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  Check(MPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
  Check(MPI_Comm_size(comm, &size_), "MPI_Comm_size");
  int* value = nullptr;
  int is_set = 0;
  // The attribute is predefined on the world communicator only.
  Check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&value), &is_set),
        "MPI_Comm_get_attr");
  max_tag_ = is_set ? *value : 32767;
}

Communicator Communicator::Duplicate(MPI_Comm parent, int ranks_per_host, size_t least_read_bytes) {
  MPI_Comm comm = MPI_COMM_NULL;
  Check(MPI_Comm_dup(parent, &comm), "MPI_Comm_dup");
  HostLayout hosts(FindHosts(comm, ranks_per_host));
  std::vector<pid_t> readable = FindReadable(comm, hosts, least_read_bytes > 0);
  return {comm, {}, std::move(hosts), std::move(readable), least_read_bytes};
}

std::string Communicator::NameOf(int rank) const {
  return "rank " + std::to_string(in_world_.empty() ? rank : in_world_[static_cast<size_t>(rank)]);
}

Communicator Communicator::ForRanks(const Communicator& parent, const std::vector<int>& ranks,
                                    int tag) {
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group chosen = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  Check(MPI_Comm_group(parent.get(), &all), "MPI_Comm_group");
  Check(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &chosen),
        "MPI_Group_incl");
  Check(MPI_Comm_create_group(parent.get(), chosen, tag, &comm), "MPI_Comm_create_group");
  MPI_Group_free(&chosen);
  MPI_Group_free(&all);
  std::vector<int> hosts;
  std::vector<pid_t> readable;
  for (int rank : ranks) {
    hosts.push_back(parent.hosts().HostOf(rank));
    readable.push_back(parent.ReadablePid(rank));
  }
  return {comm, ranks, HostLayout(hosts), std::move(readable), parent.least_read_bytes()};
}

void Communicator::Free::operator()(MPI_Comm* comm) const {
  int is_finalized = 0;
  if (MPI_Finalized(&is_finalized) == MPI_SUCCESS && !is_finalized) MPI_Comm_free(comm);
  delete comm;
}

Transfers::Transfers(const Communicator& comm, size_t max_message_bytes)
    : comm_(comm),
      max_message_bytes_(max_message_bytes),
      has_heard_from_(static_cast<size_t>(comm.size()), false) {}

template <typename Post>
void Transfers::Cut(size_t bytes, int peer, bool is_receive, int key, Post post) {
  if (bytes == 0) {
    Complete(key);
    return;
  }
  const size_t n_messages = (bytes + max_message_bytes_ - 1) / max_message_bytes_;
  transfers_.push_back({key, n_messages});
  for (size_t begin = 0; begin < bytes; begin += max_message_bytes_) {
    const size_t n = std::min(max_message_bytes_, bytes - begin);
    requests_.push_back(MPI_REQUEST_NULL);
    infos_.push_back({peer, is_receive, static_cast<int>(n), transfers_.size() - 1});
    post(begin, static_cast<int>(n), &requests_.back());
  }
}

void Transfers::Send(const void* data, size_t bytes, int peer, int tag, int key) {
  if (IsByMemory(peer, bytes)) {
    if (!IsReadable(data)) {
      copies_.push_back(std::make_unique<char[]>(bytes));
      data = std::memcpy(copies_.back().get(), data, bytes);
    }
    Offer(data, bytes, peer, tag);
    Complete(key);
  } else {
    SendMessage(data, bytes, peer, tag, key);
  }
}

void Transfers::SendMessage(const void* data, size_t bytes, int peer, int tag, int key) {
  Cut(bytes, peer, false, key, [&](size_t begin, int n, MPI_Request* request) {
    Check(MPI_Isend(static_cast<const char*>(data) + begin, n, MPI_BYTE, peer, tag, comm_.get(),
                    request),
          "MPI_Isend");
  });
}

void Transfers::Receive(void* data, size_t bytes, int peer, int tag, int key) {
  if (IsByMemory(peer, bytes)) {
    ReceiveRange({{}, nullptr, peer, static_cast<char*>(data), bytes, 0, key}, tag);
  } else {
    ReceiveMessage(data, bytes, peer, tag, key);
  }
}

void Transfers::ReceiveMessage(void* data, size_t bytes, int peer, int tag, int key) {
  Cut(bytes, peer, true, key, [&](size_t begin, int n, MPI_Request* request) {
    Check(MPI_Irecv(static_cast<char*>(data) + begin, n, MPI_BYTE, peer, tag, comm_.get(), request),
          "MPI_Irecv");
  });
}

void Transfers::Offer(const void* data, size_t bytes, int peer, int tag) {
  if (!permit_.is_granted()) permit_.Grant();
  readers_.insert(peer);
  offers_.push_back(permit_.RangeOf(data, bytes));
  SendMessage(&offers_.back(), sizeof(MemoryRange), peer, tag);
}

void Transfers::Expect(MemoryRange* range, size_t bytes, int peer, int tag, int key) {
  ReceiveRange({{}, range, peer, nullptr, bytes, 0, key}, tag);
}

void Transfers::ReceiveRange(const Arriving& arriving, int tag) {
  sources_.insert(arriving.peer);
  arriving_.push_back(arriving);
  Arriving& kept = arriving_.back();
  ReceiveMessage(&kept.range, sizeof(MemoryRange), kept.peer, tag);
  transfers_.back().arriving = &kept;
}

void Transfers::OnUnread(int peer, int error) {
  if (error == ESRCH) {
    lost_.insert(peer);
    return;
  }
  throw CommError("Could not read the memory of another rank. Received: process_vm_readv of " +
                  comm_.NameOf(peer) + ": " + std::strerror(error) +
                  ". Set TFSCALE_HOST_MEMORY=0: the ranks of a host then send messages.");
}

void Transfers::Release(int tag) {
  answers_.resize(readers_.size() + sources_.size());
  char* next = answers_.data();
  for (int peer : sources_) SendMessage(next++, 1, peer, tag);
  for (int peer : readers_) ReceiveMessage(next++, 1, peer, tag);
}

void Transfers::OnRange(Arriving& arriving) {
  if (arriving.range.bytes != arriving.bytes) {
    ThrowLength(arriving.range.bytes > arriving.bytes, arriving.bytes, arriving.peer);
  }
  if (arriving.expected == nullptr) {
    unread_.push_back(&arriving);
  } else {
    *arriving.expected = arriving.range;
    Complete(arriving.key);
  }
}

void Transfers::Complete(int key) {
  if (key != kNoKey) completed_.push_back(key);
}

bool Transfers::ReadSome() {
  const bool has_any = !unread_.empty();
  for (size_t n_bytes = 0; n_bytes < kReadBytes && !unread_.empty();) {
    Arriving& next = *unread_.front();
    const size_t n = std::min(kReadBytes - n_bytes, next.bytes - next.n_read);
    const int error = Read(next.peer, next.range, next.n_read, next.to + next.n_read, n);
    n_bytes += n;
    next.n_read += n;
    if (error != 0) OnUnread(next.peer, error);
    if (error == 0 && next.n_read < next.bytes) continue;
    if (error == 0) Complete(next.key);
    unread_.pop_front();
  }
  return has_any;
}

bool Transfers::Poll() {
  const bool has_read = ReadSome();
  if (requests_.empty()) return has_read;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int n_done = 0;
  const int rc = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &n_done,
                              indices_.data(), statuses_.data());
  if (rc != MPI_ERR_IN_STATUS) {
    Check(rc, "MPI_Testsome");
    // Without an error MPI leaves this field as it was.
    for (int i = 0; i < n_done; ++i) statuses_[static_cast<size_t>(i)].MPI_ERROR = MPI_SUCCESS;
  }
  if (n_done == MPI_UNDEFINED || n_done == 0) return has_read;
  for (int i = 0; i < n_done; ++i) {
    const Info& info = infos_[static_cast<size_t>(indices_[i])];
    if (!is_cancelled_) CheckLength(info, statuses_[static_cast<size_t>(i)]);
    if (info.is_receive) has_heard_from_[static_cast<size_t>(info.peer)] = true;
    Transfer& transfer = transfers_[info.transfer];
    if (--transfer.n_left > 0) continue;
    if (transfer.arriving == nullptr) {
      Complete(transfer.key);
    } else if (!is_cancelled_) {
      OnRange(*transfer.arriving);
    }
  }
  // MPI has set the completed requests to null; keep the others in order.
  size_t kept = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    requests_[kept] = requests_[i];
    infos_[kept] = infos_[i];
    ++kept;
  }
  requests_.resize(kept);
  infos_.resize(kept);
  return true;
}

void Transfers::Cancel() {
  is_cancelled_ = true;
  permit_.Revoke();
  unread_.clear();
  lost_.clear();
  for (size_t i = 0; i < requests_.size(); ++i) {
    // Null: completed in a Poll that found an error. What MPI refuses to take back
    // stays, as sends do.
    if (infos_[i].is_receive && requests_[i] != MPI_REQUEST_NULL) MPI_Cancel(&requests_[i]);
  }
}

std::vector<int> Transfers::TakeCompleted() { return std::exchange(completed_, {}); }

void Transfers::CheckLength(const Info& info, MPI_Status& status) const {
  int error_class = MPI_SUCCESS;
  MPI_Error_class(status.MPI_ERROR, &error_class);
  if (error_class != MPI_ERR_TRUNCATE) {
    if (status.MPI_ERROR != MPI_SUCCESS) {
      const std::string way = info.is_receive ? "from " : "to ";
      Check(status.MPI_ERROR,
            ("MPI_Testsome, of a message " + way + comm_.NameOf(info.peer)).c_str());
    }
    if (!info.is_receive) return;
    int bytes = 0;
    Check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    if (bytes == info.bytes) return;
  }
  ThrowLength(error_class == MPI_ERR_TRUNCATE, static_cast<size_t>(info.bytes), info.peer);
}

void Transfers::ThrowLength(bool is_more, size_t bytes, int peer) const {
  throw CommError(
      "ranks have tensors of different sizes, or call different collectives. Received: " +
      std::string(is_more ? "more" : "less") + " than the " + std::to_string(bytes) +
      " bytes expected from " + comm_.NameOf(peer) +
      ". Call the same collectives on the same shapes on every rank.");
}

bool Transfers::has_unheard() const {
  return std::any_of(infos_.begin(), infos_.end(), [this](const Info& info) {
    return info.is_receive && !has_heard_from_[static_cast<size_t>(info.peer)];
  });
}

std::vector<int> Transfers::PendingPeers() const {
  if (!lost_.empty()) return {lost_.begin(), lost_.end()};
  std::set<int> silent;
  std::set<int> senders;
  std::set<int> receivers;
  for (const Info& info : infos_) {
    (info.is_receive ? senders : receivers).insert(info.peer);
    if (info.is_receive && !has_heard_from_[static_cast<size_t>(info.peer)]) {
      silent.insert(info.peer);
    }
  }
  const std::set<int>& peers = !silent.empty() ? silent : !senders.empty() ? senders : receivers;
  return {peers.begin(), peers.end()};
}

}  // namespace tfscale
