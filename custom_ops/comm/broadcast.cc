#include "comm/broadcast.h"

#include <algorithm>
#include <cstring>

namespace tfscale {

Broadcast::Broadcast(const void* input, void* output, size_t bytes, int root)
    : input_(input), output_(static_cast<char*>(output)), bytes_(bytes), root_(root) {}

void Broadcast::Begin() {
  // Ranks counted from the root. A rank's parent is itself without its lowest
  // set bit; its children add one lower bit each.
  const int relative = (rank() - root_ + size()) % size();
  int parent = -1;
  int bit = 1;
  for (; bit < size() && parent < 0; bit <<= 1) {
    if (relative & bit) parent = (relative - bit + root_) % size();
  }
  const int own_bit = parent < 0 ? bit : bit >> 1;
  for (int child_bit = own_bit >> 1; child_bit > 0; child_bit >>= 1) {
    if (relative + child_bit < size()) children_.push_back((relative + child_bit + root_) % size());
  }
  const size_t n_chunks = (bytes_ + channel_.chunk_bytes - 1) / channel_.chunk_bytes;
  if (parent < 0 && input_ != output_ && bytes_ > 0) std::memcpy(output_, input_, bytes_);
  has_chunk_.assign(n_chunks, parent < 0);
  for (size_t c = 0; c < n_chunks && parent >= 0; ++c) {
    transfers_->Receive(output_ + c * channel_.chunk_bytes, ChunkBytes(c), parent, channel_.tag,
                        static_cast<int>(c));
  }
}

size_t Broadcast::ChunkBytes(size_t chunk) const {
  return std::min(channel_.chunk_bytes, bytes_ - chunk * channel_.chunk_bytes);
}

void Broadcast::SendChunk(size_t chunk) {
  for (int child : children_) {
    transfers_->Send(output_ + chunk * channel_.chunk_bytes, ChunkBytes(chunk), child,
                     channel_.tag);
  }
}

void Broadcast::Advance(const std::vector<int>& completed) {
  for (int key : completed) has_chunk_[static_cast<size_t>(key)] = true;
  for (; n_sent_ < has_chunk_.size() && has_chunk_[n_sent_]; ++n_sent_) SendChunk(n_sent_);
}

}  // namespace tfscale
