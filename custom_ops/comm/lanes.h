// Segments on their way to their owners: summed on each host, and sent on as one sum.
#ifndef TFSCALE_COMM_LANES_H_
#define TFSCALE_COMM_LANES_H_

#include <cstddef>
#include <vector>

#include "comm/operation.h"

namespace tfscale {

// Rank r owns segment r of a vector. The ranks of each host send it, as rows, to the owner's
// partner there (HostLayout), which sums the rows and sends the sum to the owner. What a rank
// sums for one owner is a lane. Segments are sent in chunks, so summing chunk c overlaps the
// transfer of chunk c+1 and of the sums before it. Part of an operation, which it shares the
// transfers with; how rows are summed is up to the operation, and which of the steps it needs.
class Lanes {
 public:
  static constexpr int kTags = 1;  // of the operation's, the first
  // Places in a segment, in bytes: as it is in a row, and in a sum, which may be encoded.
  struct Chunk {
    size_t row, row_bytes;
    size_t sum, sum_bytes;
  };
  struct Segment {
    size_t begin = 0;  // in the vector
    size_t row_bytes = 0;
    size_t sum_bytes = 0;
    std::vector<Chunk> chunks;
  };
  struct Lane {
    int owner;
    BufferPool::Buffer rows;     // of the other ranks of the host, one after another
    BufferPool::Buffer sum;      // over the host, if it has room here
    const char* summed;          // the same, or what needs no sum
    std::vector<int> n_missing;  // by chunk: rows of the host
    std::vector<bool> is_summed;
    size_t n_sent;  // chunks of the sum
  };
  // What has come with a transfer: a row of a chunk, or the sum of another host.
  struct Arrival {
    size_t lane;  // size() for a sum
    size_t chunk;
    bool is_complete;  // no other row, or sum, of the chunk is missing
  };

  // Segments by rank. Uses keys below n_keys().
  Lanes(const Channel& channel, Transfers& transfers, const HostLayout& hosts,
        std::vector<Segment> segments);

  // Rows of the other ranks of the host will arrive.
  void ReceiveRows();
  // Sums of the own segment will arrive, from other hosts.
  void ReceiveSums();
  // Sends the rows of this rank's vector to those who sum them.
  void SendRows(const char* vector);
  // Room for the sums; or they are segments of `vector`, if that is not null.
  void PlaceSums(const char* vector);
  Arrival OnCompleted(int key);
  // A chunk of a lane's sum is in its place: sends it, if its owner is another rank. True if the
  // sums of all hosts are here.
  bool OnSum(size_t lane, size_t chunk);

  int n_keys() const { return static_cast<int>(arrivals_.size()); }
  size_t size() const { return lanes_.size(); }
  // The last one is this rank's own.
  const Lane& operator[](size_t lane) const { return lanes_[lane]; }
  const Segment& SegmentOf(int owner) const { return segments_[static_cast<size_t>(owner)]; }
  const Segment& own() const { return SegmentOf(lanes_.back().owner); }
  bool HasSums(size_t chunk) const { return n_sums_missing_[chunk] == 0; }
  // The rows of a lane in the order of ranks, from an offset on; with that of `vector`, the own.
  std::vector<const char*> Rows(size_t lane, const char* vector, size_t offset) const;
  // The sums of the own segment in the order of hosts, from an offset on.
  std::vector<const char*> Sums(size_t offset) const;

 private:
  const std::vector<int>& Local() const { return hosts_.RanksOf(hosts_.HostOf(rank_)); }
  // Those whose segments `rank` sums for its host, other hosts' first.
  std::vector<int> OwnersAt(int rank) const;
  // A key for transfers that bring rows or sums of a chunk.
  int NewKey(size_t lane, size_t chunk);

  const Channel& channel_;
  Transfers& transfers_;
  const HostLayout& hosts_;
  const int rank_;
  const std::vector<Segment> segments_;  // by owner
  std::vector<Lane> lanes_;
  BufferPool::Buffer sums_{nullptr, {}};  // of other hosts, one place for each host
  std::vector<int> n_sums_missing_;       // by chunk of the own segment: hosts
  std::vector<Arrival> arrivals_;         // by key
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_LANES_H_
