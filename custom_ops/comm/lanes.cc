#include "comm/lanes.h"

#include <utility>

namespace tfscale {

Lanes::Lanes(const Channel& channel, Transfers& transfers, const HostLayout& hosts,
             std::vector<Segment> segments)
    : channel_(channel),
      transfers_(transfers),
      hosts_(hosts),
      rank_(channel.comm->rank()),
      segments_(std::move(segments)) {
  const int n_others = static_cast<int>(Local().size()) - 1;
  for (int owner : OwnersAt(rank_)) {
    const size_t n_chunks = SegmentOf(owner).chunks.size();
    lanes_.push_back({owner,
                      {nullptr, {}},
                      {nullptr, {}},
                      nullptr,
                      std::vector<int>(n_chunks, n_others),
                      std::vector<bool>(n_chunks, false),
                      0});
  }
  n_sums_missing_.assign(own().chunks.size(), hosts_.n_hosts());
}

std::vector<int> Lanes::OwnersAt(int rank) const {
  std::vector<int> owners = hosts_.Remote(rank);
  owners.push_back(rank);
  return owners;
}

int Lanes::NewKey(size_t lane, size_t chunk) {
  arrivals_.push_back({lane, chunk, false});
  return n_keys() - 1;
}

void Lanes::ReceiveRows() {
  for (size_t l = 0; l < size(); ++l) {
    const Segment& segment = SegmentOf(lanes_[l].owner);
    lanes_[l].rows = channel_.buffers->Get(segment.row_bytes * (Local().size() - 1));
    for (size_t c = 0; c < segment.chunks.size(); ++c) {
      const Chunk& chunk = segment.chunks[c];
      const int key = NewKey(l, c);
      char* row = lanes_[l].rows.get();
      for (int peer : Local()) {
        if (peer == rank_) continue;
        transfers_.Receive(row + chunk.row, chunk.row_bytes, peer, channel_.tag, key);
        row += segment.row_bytes;
      }
    }
  }
}

void Lanes::ReceiveSums() {
  if (hosts_.n_hosts() == 1) return;
  const size_t bytes = own().sum_bytes;
  sums_ = channel_.buffers->Get(bytes * static_cast<size_t>(hosts_.n_hosts()));
  for (size_t c = 0; c < own().chunks.size(); ++c) {
    const Chunk& chunk = own().chunks[c];
    const int key = NewKey(size(), c);
    for (int host = 0; host < hosts_.n_hosts(); ++host) {
      if (host == hosts_.HostOf(rank_)) continue;
      transfers_.Receive(sums_.get() + static_cast<size_t>(host) * bytes + chunk.sum,
                         chunk.sum_bytes, hosts_.Partner(host, rank_), channel_.tag, key);
    }
  }
}

void Lanes::SendRows(const char* vector) {
  for (int peer : Local()) {
    if (peer == rank_) continue;
    for (int owner : OwnersAt(peer)) {
      const Segment& segment = SegmentOf(owner);
      for (const Chunk& chunk : segment.chunks) {
        transfers_.Send(vector + segment.begin + chunk.row, chunk.row_bytes, peer, channel_.tag);
      }
    }
  }
}

void Lanes::PlaceSums(const char* vector) {
  for (Lane& lane : lanes_) {
    const Segment& segment = SegmentOf(lane.owner);
    if (vector == nullptr) lane.sum = channel_.buffers->Get(segment.sum_bytes);
    lane.summed = vector == nullptr ? lane.sum.get() : vector + segment.begin;
  }
}

Lanes::Arrival Lanes::OnCompleted(int key) {
  Arrival arrival = arrivals_[static_cast<size_t>(key)];
  std::vector<int>& n_missing =
      arrival.lane < size() ? lanes_[arrival.lane].n_missing : n_sums_missing_;
  arrival.is_complete = --n_missing[arrival.chunk] == 0;
  return arrival;
}

bool Lanes::OnSum(size_t lane, size_t chunk) {
  const Segment& segment = SegmentOf(lanes_[lane].owner);
  if (lanes_[lane].owner == rank_) return --n_sums_missing_[chunk] == 0;
  std::vector<bool>& is_summed = lanes_[lane].is_summed;
  is_summed[chunk] = true;
  // In their order, in which the owner expects them: the last one, being shorter, may be complete
  // before the one ahead of it.
  for (size_t& next = lanes_[lane].n_sent; next < is_summed.size() && is_summed[next]; ++next) {
    const Chunk& sent = segment.chunks[next];
    transfers_.Send(lanes_[lane].summed + sent.sum, sent.sum_bytes, lanes_[lane].owner,
                    channel_.tag);
  }
  return false;
}

std::vector<const char*> Lanes::Rows(size_t lane, const char* vector, size_t offset) const {
  const Segment& segment = SegmentOf(lanes_[lane].owner);
  const char* row = lanes_[lane].rows.get() + offset;
  std::vector<const char*> rows;
  for (int r : Local()) {
    rows.push_back(r == rank_ ? vector + segment.begin + offset : row);
    if (r != rank_) row += segment.row_bytes;
  }
  return rows;
}

std::vector<const char*> Lanes::Sums(size_t offset) const {
  std::vector<const char*> sums;
  for (int host = 0; host < hosts_.n_hosts(); ++host) {
    const char* received = sums_.get() + static_cast<size_t>(host) * own().sum_bytes;
    sums.push_back((host == hosts_.HostOf(rank_) ? lanes_.back().summed : received) + offset);
  }
  return sums;
}

}  // namespace tfscale
