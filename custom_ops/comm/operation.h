// One collective of one rank: an object that is started once and stepped until done.
#ifndef TFSCALE_COMM_OPERATION_H_
#define TFSCALE_COMM_OPERATION_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/communicator.h"
#include "comm/worker_pool.h"

namespace tfscale {

// What an operation may use; owned by the engine and outlives every operation.
struct Channel {
  const Communicator* comm;
  // The operation may use tags [tag, tag + kTagsPerOperation).
  int tag;
  BufferPool* buffers;
  WorkerPool* workers;
  size_t max_message_bytes;
  size_t chunk_bytes;
};

constexpr int kTagsPerOperation = 3;

// kGentle: little at a time, so that a message that is urgent soon waits for little; kHeld:
// nothing.
enum class Pace { kFree, kGentle, kHeld };

// All methods run on the communication thread and never block. They throw
// CommError or std::bad_alloc. All ranks of the communicator must start the
// matching operation with the same tag, in any order among different tags.
class Operation {
 public:
  Operation() = default;
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Before Start: all ranks' texts are compared before anything else is sent, and
  // Step throws on every rank, naming `name`, unless they are equal. All ranks must
  // call this or none.
  void CompareFirst(const std::string& name, const std::string& text);

  // Posts the first transfers.
  void Start(const Channel& channel) {
    channel_ = channel;
    transfers_.emplace(*channel.comm, channel.max_message_bytes);
    if (is_comparing()) {
      BeginComparison();
    } else {
      Begin();
    }
  }

  // Does what can be done now; true if anything happened.
  bool Step() {
    const bool has_moved = transfers_->Poll();
    if (is_comparing()) {
      if (!transfers_->is_empty()) return has_moved;
      FinishComparison();
      Begin();
      return true;
    }
    Advance(transfers_->TakeCompleted());
    if (transfers_->is_empty() && !is_done_) Finish();
    return has_moved || is_done() || has_computed();
  }

  bool is_done() const { return is_done_ && transfers_->is_empty(); }
  // How much of the link to take from now on. Some operations do not listen.
  virtual void SetPace(Pace pace) { static_cast<void>(pace); }
  // Payload of this rank in bytes, for the window of the scheduler and reports.
  virtual size_t bytes() const = 0;
  // Ranks, within the communicator, that keep it from ending.
  std::vector<int> WaitingFor() const {
    return transfers_ ? transfers_->PendingPeers() : std::vector<int>();
  }
  // Whether a rank from which this one expects a message has sent it none yet.
  bool is_waiting() const { return transfers_ && transfers_->has_unheard(); }
  // Ends it without a result. Step must not be called any more, but IsQuiet
  // until it is true: only then does MPI no longer touch the memory.
  void Cancel() {
    if (transfers_) transfers_->Cancel();
  }
  bool IsQuiet() {
    if (transfers_) transfers_->Poll();
    return !transfers_ || transfers_->is_empty();
  }
  // Keeps the memory that the operation reads and writes until it is destroyed,
  // which for a cancelled operation is later than its caller's return.
  void KeepAlive(std::shared_ptr<void> memory) { memory_ = std::move(memory); }

 protected:
  virtual void Begin() = 0;
  // `completed` holds the keys of transfers that ended since the last call.
  virtual void Advance(const std::vector<int>& completed) = 0;
  // Called when no transfer is pending: posts more, calls SetDone, or waits for Advance.
  virtual void Finish() = 0;
  // Whether the last step did something though no transfer ended, and the next may.
  virtual bool has_computed() const { return false; }

  // All that this rank waits for is here. It ends when others need nothing of it.
  void SetDone() {
    is_done_ = true;
    transfers_->Release(channel_.tag);
  }
  int rank() const { return channel_.comm->rank(); }
  int size() const { return channel_.comm->size(); }
  const HostLayout& hosts() const { return channel_.comm->hosts(); }
  // The size of messages of what is complete from the start: small enough to be
  // passed on while the next one arrives, where ranks pass on.
  size_t PieceBytes() const {
    return hosts().is_two_level() ? channel_.chunk_bytes : channel_.max_message_bytes;
  }

  Channel channel_{};
  std::optional<Transfers> transfers_;

 private:
  // Of a fixed size, so that one message suffices.
  struct Compared {
    size_t hash;  // of all of the text, which may be longer
    char text[1016];
  };

  bool is_comparing() const { return !compared_.empty(); }
  void BeginComparison();
  void FinishComparison();

  std::vector<Compared> compared_;  // this rank's; then of all ranks
  std::string compared_name_;
  bool is_done_ = false;
  std::shared_ptr<void> memory_;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_OPERATION_H_
