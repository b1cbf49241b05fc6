// Operations that were given up while messages were in transfer.
#ifndef TFSCALE_COMM_ABANDONED_H_
#define TFSCALE_COMM_ABANDONED_H_

#include <list>
#include <memory>

#include "comm/communicator.h"
#include "comm/operation.h"

namespace tfscale {

// Owns them until MPI no longer touches their memory. Receives are taken back
// at once; sends stay until the peer takes them, at the latest when all ranks
// leave (Discard). Used by the communication thread only; not blocking.
class Abandoned {
 public:
  void Add(std::unique_ptr<Operation> operation);
  // Frees those that have become quiet.
  void Step();
  // Receives and discards messages that no operation waits for, so that their
  // senders can end. Messages with the tag `kept_tag` stay. For a communicator
  // on which no message is expected any more. It does not wait for long messages either:
  // their sender may have failed meanwhile, and never sends the rest.
  void Discard(const Communicator& comm, int kept_tag);
  bool is_empty() const { return operations_.empty() && discarded_.empty(); }

 private:
  std::list<std::unique_ptr<Operation>> operations_;
  std::list<std::unique_ptr<Operation>> discarded_;  // on their way
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_ABANDONED_H_
