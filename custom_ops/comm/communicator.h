// An MPI communicator of our own and the transfers that run on it.
#ifndef TFSCALE_COMM_COMMUNICATOR_H_
#define TFSCALE_COMM_COMMUNICATOR_H_

#include <mpi.h>

#include <cstddef>
#include <vector>

#include "comm/host_layout.h"

namespace tfscale {

// Owns a duplicate of a communicator, so that no message of ours meets one of
// the user's. Movable. Errors of MPI calls on it return codes instead of
// ending the process. Used by the communication thread only.
class Communicator {
 public:
  // Collective over `parent`; blocking. `ranks_per_host`: see FindHosts.
  static Communicator Duplicate(MPI_Comm parent, int ranks_per_host = 0);
  // Collective over the ranks of `parent` named in `ranks`; blocking. `tag`
  // distinguishes groups that are made at the same time.
  static Communicator ForRanks(const Communicator& parent, const std::vector<int>& ranks, int tag);

  Communicator(Communicator&& other) noexcept;
  Communicator& operator=(Communicator&& other) noexcept;
  ~Communicator();

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Largest tag that MPI accepts here.
  int max_tag() const { return max_tag_; }
  MPI_Comm get() const { return comm_; }
  const HostLayout& hosts() const { return hosts_; }

 private:
  Communicator(MPI_Comm comm, HostLayout hosts);

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  int max_tag_ = 0;
  HostLayout hosts_;
};

// Pending non-blocking sends and receives of an operation. A transfer longer
// than `max_message_bytes` is sent as several messages; both sides cut
// alike. Messages between two ranks with one tag arrive in the order posted.
class Transfers {
 public:
  Transfers(const Communicator& comm, size_t max_message_bytes);

  // `key` is handed back by TakeCompleted; zero bytes complete at once and are
  // never sent.
  void Send(const void* data, size_t bytes, int peer, int tag, int key = kNoKey);
  void Receive(void* data, size_t bytes, int peer, int tag, int key = kNoKey);

  // Asks MPI for progress. True if any message completed since the last call.
  // Throws CommError, naming the peer, when a message does not have the expected
  // length: ranks then do not call the same collective on the same shapes.
  bool Poll();
  // Keys of transfers whose last message completed, each once, in no order.
  std::vector<int> TakeCompleted();
  bool is_empty() const { return requests_.empty(); }
  // Takes receives back where MPI can; Poll until it is empty. Sends stay until
  // the peer takes them.
  void Cancel();
  // Ranks from which a message is still expected: those that have sent nothing
  // yet if there are any, as the others may wait for these too. If none is
  // expected, ranks that have not received what was sent to them.
  std::vector<int> PendingPeers() const;

  static constexpr int kNoKey = -1;

 private:
  struct Info {
    int peer;
    bool is_receive;
    int bytes;
    size_t transfer;  // index into transfers_
  };
  struct Transfer {
    int key;
    size_t n_left;
  };

  template <typename Post>
  void Cut(size_t bytes, int peer, bool is_receive, int key, Post post);
  void CheckLength(const Info& info, MPI_Status& status) const;

  const Communicator& comm_;
  const size_t max_message_bytes_;
  std::vector<MPI_Request> requests_;
  std::vector<Info> infos_;  // beside requests_
  std::vector<Transfer> transfers_;
  std::vector<int> completed_;
  bool is_cancelled_ = false;
  std::vector<bool> has_heard_from_;  // by rank
  std::vector<int> indices_;          // scratch of Poll
  std::vector<MPI_Status> statuses_;  // scratch of Poll
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_COMMUNICATOR_H_
