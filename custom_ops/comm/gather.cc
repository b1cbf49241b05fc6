#include "comm/gather.h"

#include <cstring>
#include <string>
#include <utility>

namespace tfscale {
void Exchange::Begin() {
  const size_t n = static_cast<size_t>(size());
  sizes_in_.assign(n, 0);
  sizes_out_.assign(n, 0);
  n_sizes_missing_ = size() - 1;
  for (int i = 1; i < size(); ++i) {
    const size_t sender = static_cast<size_t>((rank() - i + size()) % size());
    transfers_->Receive(&sizes_in_[sender], sizeof(int64_t), static_cast<int>(sender),
                        channel_.tag + kSizes, kSizeKey);
  }
  for (int i = 1; i < size(); ++i) {
    const int peer = (rank() + i) % size();
    sizes_out_[static_cast<size_t>(peer)] = BytesFor(peer);
    transfers_->Send(&sizes_out_[static_cast<size_t>(peer)], sizeof(int64_t), peer,
                     channel_.tag + kSizes);
  }
  SendData();
}

void Exchange::Advance(const std::vector<int>& completed) {
  for (int key : completed) {
    if (key == kSizeKey) {
      --n_sizes_missing_;
    } else {
      OnData(key);
    }
  }
  if (n_sizes_missing_ > 0 || is_posted_) return;
  is_posted_ = true;
  sizes_in_[static_cast<size_t>(rank())] = BytesFor(rank());
  char* out = static_cast<char*>(allocate_(sizes_in_));
  std::vector<size_t> cuts(1, 0);
  for (int64_t bytes : sizes_in_) cuts.push_back(cuts.back() + static_cast<size_t>(bytes));
  ReceiveData(out, cuts);
}

void Exchange::Finish() {
  if (is_posted_) SetDone();
}

Allgather::Allgather(const void* input, size_t bytes, AllocateOutput allocate)
    : Exchange(std::move(allocate)), input_(static_cast<const char*>(input)), bytes_(bytes) {}

void Allgather::SendData() {
  spread_.emplace(*transfers_, hosts(), rank(), channel_.tag + kData, PieceBytes(), kFirstDataKey);
  spread_->SendAll(input_, bytes_);
}

void Allgather::ReceiveData(char* out, const std::vector<size_t>& cuts) {
  if (bytes_ > 0) std::memcpy(out + cuts[static_cast<size_t>(rank())], input_, bytes_);
  spread_->Receive(out, cuts);
}

void SegmentGather::Begin() {
  if (cuts_.size() != static_cast<size_t>(size()) + 1) {
    throw CommError("A gather needs a segment for each of the " + std::to_string(size()) +
                    " ranks. Received: " + std::to_string(cuts_.size()) +
                    " cuts. Lay the buffer out for the ranks of the group.");
  }
  spread_.emplace(*transfers_, hosts(), rank(), channel_.tag, PieceBytes(), 0);
  spread_->Receive(buffer_, cuts_);
  const size_t own = cuts_[static_cast<size_t>(rank())];
  spread_->SendAll(buffer_ + own, cuts_[static_cast<size_t>(rank()) + 1] - own);
}

void SegmentGather::Advance(const std::vector<int>& completed) {
  for (int key : completed) spread_->OnCompleted(key);
}

Alltoall::Alltoall(const void* input, std::vector<int64_t> bytes, AllocateOutput allocate)
    : Exchange(std::move(allocate)),
      input_(static_cast<const char*>(input)),
      bytes_(std::move(bytes)),
      offsets_(1, 0) {
  for (int64_t part : bytes_) offsets_.push_back(offsets_.back() + part);
}

// No two ranks get the same, so all send to each other directly.
void Alltoall::SendData() {
  for (int i = 1; i < size(); ++i) {
    const int peer = (rank() + i) % size();
    transfers_->Send(input_ + offsets_[static_cast<size_t>(peer)],
                     static_cast<size_t>(BytesFor(peer)), peer, channel_.tag + kData);
  }
}

void Alltoall::ReceiveData(char* out, const std::vector<size_t>& cuts) {
  for (int sender = 0; sender < size(); ++sender) {
    const size_t begin = cuts[static_cast<size_t>(sender)];
    const size_t bytes = cuts[static_cast<size_t>(sender) + 1] - begin;
    if (sender != rank()) {
      transfers_->Receive(out + begin, bytes, sender, channel_.tag + kData);
    } else if (bytes > 0) {
      std::memcpy(out + begin, input_ + offsets_[static_cast<size_t>(rank())], bytes);
    }
  }
}

}  // namespace tfscale
