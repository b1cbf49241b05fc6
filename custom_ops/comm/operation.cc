#include "comm/operation.h"

#include <cstring>
#include <functional>

#include "comm/types.h"

namespace tfscale {

void Operation::CompareFirst(const std::string& name, const std::string& text) {
  compared_name_ = name;
  compared_.assign(1, Compared());
  compared_[0].hash = std::hash<std::string>()(text);
  text.copy(compared_[0].text, sizeof(compared_[0].text) - 1);
}

// The operation's own messages may have the same tag: those of one rank and tag
// arrive in the order in which they were sent.
void Operation::BeginComparison() {
  compared_.resize(static_cast<size_t>(size()), compared_[0]);
  for (int i = 1; i < size(); ++i) {
    const int sender = (rank() - i + size()) % size();
    transfers_->ReceiveMessage(&compared_[static_cast<size_t>(sender)], sizeof(Compared), sender,
                               channel_.tag);
  }
  for (int i = 1; i < size(); ++i) {
    transfers_->SendMessage(&compared_[static_cast<size_t>(rank())], sizeof(Compared),
                            (rank() + i) % size(), channel_.tag);
  }
}

void Operation::FinishComparison() {
  const std::vector<Compared> all = std::exchange(compared_, {});
  for (size_t r = 1; r < all.size(); ++r) {
    if (std::memcmp(&all[r], &all[0], sizeof(Compared)) == 0) continue;
    throw CommError("ranks have tensors of different shapes. Received: in '" + compared_name_ +
                    "', " + channel_.comm->NameOf(0) + " has " + all[0].text + " and " +
                    channel_.comm->NameOf(static_cast<int>(r)) + " has " + all[r].text +
                    ". Call the same collectives on the same shapes on every rank.");
  }
}

}  // namespace tfscale
