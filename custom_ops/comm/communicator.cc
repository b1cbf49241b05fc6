#include "comm/communicator.h"

#include <algorithm>
#include <set>
#include <utility>

#include "comm/mpi_env.h"
#include "comm/types.h"

namespace tfscale {

Communicator::Communicator(MPI_Comm comm, HostLayout hosts)
    : comm_(comm), hosts_(std::move(hosts)) {
  Check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  Check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  Check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  int* value = nullptr;
  int is_set = 0;
  // The attribute is predefined on the world communicator only.
  Check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&value), &is_set),
        "MPI_Comm_get_attr");
  max_tag_ = is_set ? *value : 32767;
}

Communicator Communicator::Duplicate(MPI_Comm parent, int ranks_per_host) {
  MPI_Comm comm = MPI_COMM_NULL;
  Check(MPI_Comm_dup(parent, &comm), "MPI_Comm_dup");
  return {comm, HostLayout(FindHosts(comm, ranks_per_host))};
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
  hosts.reserve(ranks.size());
  for (int rank : ranks) hosts.push_back(parent.hosts().HostOf(rank));
  return {comm, HostLayout(hosts)};
}

Communicator::Communicator(Communicator&& other) noexcept : hosts_(HostLayout::Flat(0)) {
  *this = std::move(other);
}

Communicator& Communicator::operator=(Communicator&& other) noexcept {
  std::swap(comm_, other.comm_);
  rank_ = other.rank_;
  size_ = other.size_;
  max_tag_ = other.max_tag_;
  std::swap(hosts_, other.hosts_);
  return *this;
}

Communicator::~Communicator() {
  int is_finalized = 0;
  if (comm_ == MPI_COMM_NULL) return;
  if (MPI_Finalized(&is_finalized) == MPI_SUCCESS && !is_finalized) MPI_Comm_free(&comm_);
}

Transfers::Transfers(const Communicator& comm, size_t max_message_bytes)
    : comm_(comm),
      max_message_bytes_(max_message_bytes),
      has_heard_from_(static_cast<size_t>(comm.size()), false) {}

template <typename Post>
void Transfers::Cut(size_t bytes, int peer, bool is_receive, int key, Post post) {
  if (bytes == 0) {
    if (key != kNoKey) completed_.push_back(key);
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
  Cut(bytes, peer, false, key, [&](size_t begin, int n, MPI_Request* request) {
    Check(MPI_Isend(static_cast<const char*>(data) + begin, n, MPI_BYTE, peer, tag, comm_.get(),
                    request),
          "MPI_Isend");
  });
}

void Transfers::Receive(void* data, size_t bytes, int peer, int tag, int key) {
  Cut(bytes, peer, true, key, [&](size_t begin, int n, MPI_Request* request) {
    Check(MPI_Irecv(static_cast<char*>(data) + begin, n, MPI_BYTE, peer, tag, comm_.get(), request),
          "MPI_Irecv");
  });
}

bool Transfers::Poll() {
  if (requests_.empty()) return false;
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
  if (n_done == MPI_UNDEFINED || n_done == 0) return false;
  for (int i = 0; i < n_done; ++i) {
    const Info& info = infos_[static_cast<size_t>(indices_[i])];
    if (!is_cancelled_) CheckLength(info, statuses_[static_cast<size_t>(i)]);
    if (info.is_receive) has_heard_from_[static_cast<size_t>(info.peer)] = true;
    Transfer& transfer = transfers_[info.transfer];
    if (--transfer.n_left == 0 && transfer.key != kNoKey) completed_.push_back(transfer.key);
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
    Check(status.MPI_ERROR, "MPI_Testsome");
    if (!info.is_receive) return;
    int bytes = 0;
    Check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    if (bytes == info.bytes) return;
  }
  throw CommError(
      "All ranks must call the same collective on tensors of the same size. Received: " +
      std::string(error_class == MPI_ERR_TRUNCATE ? "more" : "less") + " than the " +
      std::to_string(info.bytes) + " bytes expected from rank " + std::to_string(info.peer) +
      " of the group. Call the same collectives on the same shapes on every rank.");
}

std::vector<int> Transfers::PendingPeers() const {
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
