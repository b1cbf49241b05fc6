#include "comm/gather.h"

#include <cstring>
#include <string>
#include <utility>

namespace tfscale {
namespace {
constexpr int kSizes = 0;  // tag offsets
constexpr int kData = 1;
}  // namespace

void Exchange::Begin() {
  const size_t n = static_cast<size_t>(size());
  sizes_in_.assign(n, 0);
  sizes_out_.assign(n, 0);
  n_sizes_missing_ = size() - 1;
  for (int i = 1; i < size(); ++i) {
    const size_t sender = static_cast<size_t>((rank() - i + size()) % size());
    transfers_->Receive(&sizes_in_[sender], sizeof(int64_t), static_cast<int>(sender),
                        channel_.tag + kSizes, 0);
  }
  for (int i = 1; i < size(); ++i) {
    const int peer = (rank() + i) % size();
    sizes_out_[static_cast<size_t>(peer)] = BytesFor(peer);
    transfers_->Send(&sizes_out_[static_cast<size_t>(peer)], sizeof(int64_t), peer,
                     channel_.tag + kSizes);
    transfers_->Send(DataFor(peer), static_cast<size_t>(BytesFor(peer)), peer,
                     channel_.tag + kData);
  }
}

void Exchange::Advance(const std::vector<int>& completed) {
  n_sizes_missing_ -= static_cast<int>(completed.size());
  if (n_sizes_missing_ > 0 || is_posted_) return;
  is_posted_ = true;
  sizes_in_[static_cast<size_t>(rank())] = BytesFor(rank());
  char* out = static_cast<char*>(allocate_(sizes_in_));
  for (int sender = 0; sender < size(); ++sender) {
    const size_t bytes = static_cast<size_t>(sizes_in_[static_cast<size_t>(sender)]);
    if (sender == rank()) {
      if (bytes > 0) std::memcpy(out, DataFor(rank()), bytes);
    } else {
      transfers_->Receive(out, bytes, sender, channel_.tag + kData);
    }
    out += bytes;
  }
}

void Exchange::Finish() {
  if (is_posted_) SetDone();
}

Allgather::Allgather(const void* input, size_t bytes, AllocateOutput allocate)
    : Exchange(std::move(allocate)), input_(static_cast<const char*>(input)), bytes_(bytes) {}

void SegmentGather::Begin() {
  if (cuts_.size() != static_cast<size_t>(size()) + 1) {
    throw CommError("A gather needs a segment for each of the " + std::to_string(size()) +
                    " ranks. Received: " + std::to_string(cuts_.size()) +
                    " cuts. Lay the buffer out for the ranks of the group.");
  }
  const auto length = [this](int r) {
    return cuts_[static_cast<size_t>(r) + 1] - cuts_[static_cast<size_t>(r)];
  };
  for (int i = 1; i < size(); ++i) {
    const int sender = (rank() - i + size()) % size();
    transfers_->Receive(buffer_ + cuts_[static_cast<size_t>(sender)], length(sender), sender,
                        channel_.tag);
  }
  for (int i = 1; i < size(); ++i) {
    const int peer = (rank() + i) % size();
    transfers_->Send(buffer_ + cuts_[static_cast<size_t>(rank())], length(rank()), peer,
                     channel_.tag);
  }
}

Alltoall::Alltoall(const void* input, std::vector<int64_t> bytes, AllocateOutput allocate)
    : Exchange(std::move(allocate)),
      input_(static_cast<const char*>(input)),
      bytes_(std::move(bytes)),
      offsets_(1, 0) {
  for (int64_t part : bytes_) offsets_.push_back(offsets_.back() + part);
}

}  // namespace tfscale
