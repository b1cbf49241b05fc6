// An MPI communicator of our own and the transfers that run on it.
#ifndef TFSCALE_COMM_COMMUNICATOR_H_
#define TFSCALE_COMM_COMMUNICATOR_H_

#include <mpi.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/host_layout.h"
#include "comm/host_memory.h"

namespace tfscale {

// Owns a duplicate of a communicator, so that no message of ours meets one of
// the user's. Movable. Errors of MPI calls on it return codes instead of
// ending the process. Used by the communication thread only.
class Communicator {
 public:
  // Collective over `parent`; blocking. `ranks_per_host`: see FindHosts. Ranks of a
  // host that can read each other's memory exchange `least_read_bytes` and more that
  // way; 0: they send messages.
  static Communicator Duplicate(MPI_Comm parent, int ranks_per_host = 0,
                                size_t least_read_bytes = 0);
  // Collective over the ranks of `parent` named in `ranks`; blocking. `tag`
  // distinguishes groups that are made at the same time.
  static Communicator ForRanks(const Communicator& parent, const std::vector<int>& ranks, int tag);

  int rank() const { return rank_; }
  int size() const { return size_; }
  // "rank N", as all of the job know it.
  std::string NameOf(int rank) const;
  // Largest tag that MPI accepts here.
  int max_tag() const { return max_tag_; }
  MPI_Comm get() const { return *comm_; }
  const HostLayout& hosts() const { return hosts_; }
  // The process of a rank whose memory this one can read; 0 for others.
  pid_t ReadablePid(int rank) const { return readable_[static_cast<size_t>(rank)]; }
  size_t least_read_bytes() const { return least_read_bytes_; }

 private:
  Communicator(MPI_Comm comm, std::vector<int> in_world, HostLayout hosts,
               std::vector<pid_t> readable, size_t least_read_bytes);

  struct Free {
    void operator()(MPI_Comm* comm) const;
  };
  std::unique_ptr<MPI_Comm, Free> comm_;
  int rank_ = 0;
  int size_ = 1;
  int max_tag_ = 0;
  std::vector<int> in_world_;  // by rank; empty where they are the same
  HostLayout hosts_;
  std::vector<pid_t> readable_;  // by rank
  size_t least_read_bytes_ = 0;
};

// Pending non-blocking sends and receives of an operation. A transfer longer
// than `max_message_bytes` is sent as several messages; both sides cut
// alike. Messages between two ranks with one tag arrive in the order posted.
// Between ranks that can read each other's memory only a message of where the
// bytes are is sent, unless they are few.
class Transfers {
 public:
  Transfers(const Communicator& comm, size_t max_message_bytes);

  // `key` is handed back by TakeCompleted; zero bytes complete at once and are
  // never sent.
  void Send(const void* data, size_t bytes, int peer, int tag, int key = kNoKey);
  void Receive(void* data, size_t bytes, int peer, int tag, int key = kNoKey);
  // As these, but never by memory: what is sent may go when the message has gone.
  void SendMessage(const void* data, size_t bytes, int peer, int tag, int key = kNoKey);
  void ReceiveMessage(void* data, size_t bytes, int peer, int tag, int key = kNoKey);

  // A transfer of so many bytes with this rank is a read of the sender's memory.
  bool IsByMemory(int peer, size_t bytes) const {
    return bytes >= comm_.least_read_bytes() && bytes > 0 && comm_.ReadablePid(peer) != 0;
  }
  // A Send that is by memory, for a peer that calls Expect. It may also bring the place of
  // something else from which both know how to find so many bytes.
  void Offer(const void* data, size_t bytes, int peer, int tag);
  // Receives where the peer's bytes are, for Read. `range` must stay in its place.
  void Expect(MemoryRange* range, size_t bytes, int peer, int tag, int key);
  // Copy memory that an arrived range permits to read; return as ReadPlaces. Thread-safe.
  int Read(int peer, const MemoryRange& range, size_t offset, char* to, size_t bytes) const {
    return ReadRange(comm_.ReadablePid(peer), range, offset, to, bytes);
  }
  int Read(int peer, const MemoryRange& range, Pieces::Places from, Pieces::Places to) const {
    return ReadPlaces(comm_.ReadablePid(peer), range, std::move(from), std::move(to));
  }
  // A Read has failed. A peer that is gone never sends what is missing, so the transfers stay
  // pending. Throws CommError where the system does not allow it.
  void OnUnread(int peer, int error);
  // When all bytes have arrived: lets those continue whose memory was read, and waits
  // for all that may read this rank's memory. To be called once; then Poll until empty.
  void Release(int tag);

  // Asks MPI for progress. True if any message completed since the last call.
  // Throws CommError, naming the peer, when a message does not have the expected
  // length: ranks then do not call the same collective on the same shapes.
  bool Poll();
  // Keys of transfers whose last message completed, each once, in no order.
  std::vector<int> TakeCompleted();
  // A message is expected from a rank that has sent none yet.
  bool has_unheard() const;
  bool is_empty() const { return requests_.empty() && unread_.empty() && lost_.empty(); }
  // Takes receives back where MPI can; Poll until it is empty. Sends stay until
  // the peer takes them.
  void Cancel();
  // Ranks from which a message is still expected: those that have sent nothing
  // yet if there are any, as the others may wait for these too. If none is
  // expected, ranks that have not received what was sent to them.
  std::vector<int> PendingPeers() const;

  static constexpr int kNoKey = -1;

 private:
  // A transfer by memory.
  struct Arriving {
    MemoryRange range;
    MemoryRange* expected;  // by a caller that reads itself; else null
    int peer;
    char* to;
    size_t bytes;
    size_t n_read;
    int key;
  };
  struct Info {
    int peer;
    bool is_receive;
    int bytes;
    size_t transfer;  // index into transfers_
  };
  struct Transfer {
    int key;
    size_t n_left;
    Arriving* arriving = nullptr;
  };

  template <typename Post>
  void Cut(size_t bytes, int peer, bool is_receive, int key, Post post);
  void CheckLength(const Info& info, MPI_Status& status) const;
  [[noreturn]] void ThrowLength(bool is_more, size_t bytes, int peer) const;
  void ReceiveRange(const Arriving& arriving, int tag);
  void OnRange(Arriving& arriving);
  void Complete(int key);
  // Reads a part of what has arrived; true if there was any.
  bool ReadSome();

  const Communicator& comm_;
  const size_t max_message_bytes_;
  std::vector<MPI_Request> requests_;
  std::vector<Info> infos_;  // beside requests_
  std::vector<Transfer> transfers_;
  std::vector<int> completed_;
  bool is_cancelled_ = false;
  // Of transfers by memory:
  Permit permit_;
  std::deque<MemoryRange> offers_;               // under way
  std::vector<std::unique_ptr<char[]>> copies_;  // of memory that cannot be read
  std::deque<Arriving> arriving_;                // all
  std::deque<Arriving*> unread_;                 // whose range is here
  std::vector<char> answers_;                    // of Release
  std::set<int> readers_, sources_;              // ranks
  std::set<int> lost_;                           // ranks that are gone
  std::vector<bool> has_heard_from_;             // by rank
  std::vector<int> indices_;                     // scratch of Poll
  std::vector<MPI_Status> statuses_;             // scratch of Poll
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_COMMUNICATOR_H_
