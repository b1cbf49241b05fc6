#include "comm/spread.h"

#include <algorithm>

namespace tfscale {
namespace {
// Tag offsets. Apart, because what is passed on waits for other hosts, which the
// own segment must not.
constexpr int kOwn = 0;
constexpr int kPassedOn = 1;
}  // namespace

Spread::Spread(Transfers& transfers, const HostLayout& hosts, int rank, int tag, size_t chunk_bytes,
               int first_key)
    : transfers_(transfers),
      hosts_(hosts),
      rank_(rank),
      tag_(tag),
      chunk_bytes_(chunk_bytes),
      first_key_(first_key) {}

void Spread::SendChunk(const char* data, size_t bytes) {
  const int own = hosts_.HostOf(rank_);
  // Other hosts first: they have the longer way.
  for (int i = 1; i < hosts_.n_hosts(); ++i) {
    const int host = (own + i) % hosts_.n_hosts();
    transfers_.Send(data, bytes, hosts_.Partner(host, rank_), tag_ + kOwn);
  }
  for (int peer : hosts_.RanksOf(own)) {
    if (peer != rank_) transfers_.Send(data, bytes, peer, tag_ + kOwn);
  }
}

void Spread::SendAll(const char* data, size_t bytes) {
  for (size_t begin = 0; begin < bytes; begin += chunk_bytes_) {
    SendChunk(data + begin, std::min(chunk_bytes_, bytes - begin));
  }
}

std::vector<Spread::Chunk> Spread::PassedOnBy(int rank, char* vector,
                                              const std::vector<size_t>& cuts) const {
  std::vector<Chunk> chunks;
  const std::vector<int> owners = hosts_.Remote(rank);
  bool is_any_left = true;
  for (size_t offset = 0; is_any_left; offset += chunk_bytes_) {
    is_any_left = false;
    for (int owner : owners) {
      const size_t begin = cuts[static_cast<size_t>(owner)] + offset;
      const size_t end = cuts[static_cast<size_t>(owner) + 1];
      if (begin >= end) continue;
      chunks.push_back({offset / chunk_bytes_, owner, vector + begin,
                        std::min(chunk_bytes_, end - begin), false});
      is_any_left = true;
    }
  }
  return chunks;
}

void Spread::Receive(char* vector, const std::vector<size_t>& cuts) {
  passed_on_ = PassedOnBy(rank_, vector, cuts);
  for (size_t i = 0; i < passed_on_.size(); ++i) {
    const Chunk& chunk = passed_on_[i];
    transfers_.Receive(chunk.data, chunk.bytes, chunk.owner, tag_ + kOwn,
                       first_key_ + static_cast<int>(i));
  }
  for (int peer : hosts_.RanksOf(hosts_.HostOf(rank_))) {
    if (peer == rank_) continue;
    const size_t end = cuts[static_cast<size_t>(peer) + 1];
    for (size_t begin = cuts[static_cast<size_t>(peer)]; begin < end; begin += chunk_bytes_) {
      transfers_.Receive(vector + begin, std::min(chunk_bytes_, end - begin), peer, tag_ + kOwn);
    }
    for (const Chunk& chunk : PassedOnBy(peer, vector, cuts)) {
      transfers_.Receive(chunk.data, chunk.bytes, peer, tag_ + kPassedOn);
    }
  }
}

bool Spread::HasArrived(size_t n_chunks) const {
  // Those before n_passed_on_ are.
  for (size_t i = n_passed_on_; i < passed_on_.size() && passed_on_[i].number < n_chunks; ++i) {
    if (!passed_on_[i].has_arrived) return false;
  }
  return true;
}

bool Spread::OnCompleted(int key) {
  if (key < first_key_) return false;
  passed_on_[static_cast<size_t>(key - first_key_)].has_arrived = true;
  // In their order, in which they are expected.
  for (; n_passed_on_ < passed_on_.size() && passed_on_[n_passed_on_].has_arrived; ++n_passed_on_) {
    const Chunk& chunk = passed_on_[n_passed_on_];
    for (int peer : hosts_.RanksOf(hosts_.HostOf(rank_))) {
      if (peer != rank_) transfers_.Send(chunk.data, chunk.bytes, peer, tag_ + kPassedOn);
    }
  }
  return true;
}

}  // namespace tfscale
