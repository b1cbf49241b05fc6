#include "comm/broadcast.h"

#include <algorithm>
#include <cstring>

namespace tfscale {
namespace {

// A place in a binomial tree of `size` places.
struct Node {
  int parent = -1;  // of the root
  std::vector<int> children;
};

Node NodeOf(int place, int root, int size) {
  // Counted from the root. The parent is the place without its lowest set bit; the
  // children add one lower bit each.
  const int relative = (place - root + size) % size;
  Node node;
  int bit = 1;
  for (; bit < size && node.parent < 0; bit <<= 1) {
    if (relative & bit) node.parent = (relative - bit + root) % size;
  }
  const int own_bit = node.parent < 0 ? bit : bit >> 1;
  for (int child_bit = own_bit >> 1; child_bit > 0; child_bit >>= 1) {
    if (relative + child_bit < size) {
      node.children.push_back((relative + child_bit + root) % size);
    }
  }
  return node;
}

}  // namespace

Broadcast::Broadcast(const void* input, void* output, size_t bytes, int root)
    : input_(input), output_(static_cast<char*>(output)), bytes_(bytes), root_(root) {}

void Broadcast::Begin() {
  // The first rank of each host, or the root on its own, gets the data for all of them.
  const auto leader_of = [this](int host) {
    return host == hosts().HostOf(root_) ? root_ : hosts().RanksOf(host)[0];
  };
  const int host = hosts().HostOf(rank());
  int parent = -1;
  if (rank() == leader_of(host)) {
    const Node among_hosts = NodeOf(host, hosts().HostOf(root_), hosts().n_hosts());
    if (among_hosts.parent >= 0) parent = leader_of(among_hosts.parent);
    for (int child : among_hosts.children) children_.push_back(leader_of(child));
  }
  const std::vector<int>& ranks = hosts().RanksOf(host);
  const auto place_of = [&](int rank) {
    return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  };
  const Node inside =
      NodeOf(place_of(rank()), place_of(leader_of(host)), static_cast<int>(ranks.size()));
  if (inside.parent >= 0) parent = ranks[static_cast<size_t>(inside.parent)];
  for (int child : inside.children) children_.push_back(ranks[static_cast<size_t>(child)]);

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
