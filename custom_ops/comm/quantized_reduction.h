// Allreduce and reduce-scatter of float32 with 8 or 4 bits per value.
#ifndef TFSCALE_COMM_QUANTIZED_REDUCTION_H_
#define TFSCALE_COMM_QUANTIZED_REDUCTION_H_

#include <cstddef>
#include <optional>
#include <vector>

#include "comm/collectives.h"
#include "comm/operation.h"
#include "comm/quantize.h"
#include "comm/spread.h"

namespace tfscale {

// The sum over the ranks of prescale * in, rounded on its way (see BlockCode), with
// the errors of rounding kept for the next sum.
//
// Every rank owns a part of each tensor; the parts of one owner, one after another,
// are its segment. The ranks of each host send a segment, in float32, to the owner's
// partner there (HostLayout), which adds it up in the order of ranks, adds its error,
// encodes it and sends it to the owner. The owner encodes its own host's sum, too, so
// that the result does not depend on who owns what. It adds up what the hosts' codes
// decode to, in the order of hosts, multiplies by postscale, adds its own error,
// encodes again and spreads the codes (Spread); every rank, the owner included,
// takes what they decode to. A reduce-scatter ends before that, with the exact sum of
// what the codes decode to.
//
// Blocks are counted from the beginning of each part, so the bits do not depend on
// which tensors are sent together, nor on chunks. Encoding one chunk overlaps the
// transfer of those before it.
class QuantizedReduction : public Operation {
 public:
  explicit QuantizedReduction(QuantizedArgs args);
  // As sent: what an uncompressed vector has four bytes for.
  size_t bytes() const override;

 protected:
  void Begin() override;
  void Advance(const std::vector<int>& completed) override;
  void Finish() override;
  bool has_computed() const override { return has_computed_; }

 private:
  // Whole blocks of one part. Positions are in the tensor, and in the segment.
  struct Run {
    size_t tensor;
    size_t begin;
    size_t count;
    size_t value;
    size_t byte;
  };
  struct Chunk {
    std::vector<Run> runs;
    size_t value;
    size_t n_values;
    size_t byte;
    size_t n_bytes;
  };
  struct Segment {
    std::vector<Chunk> chunks;
    size_t n_values;
    size_t n_bytes;
  };
  // The segment of one rank, as far as this rank deals with it for its host.
  struct Lane {
    int owner;
    BufferPool::Buffer received;  // from the other ranks of the host, one after another
    BufferPool::Buffer codes;
    std::vector<int> n_missing;  // per chunk: other ranks of the host not yet here
  };
  // What a transfer with a key brings.
  struct Arrival {
    size_t lane;  // lanes_.size(): the codes of another host, of the own segment
    size_t chunk;
  };

  bool is_allreduce() const { return !args_.outputs.empty(); }
  bool keeps_errors() const { return !args_.errors.empty(); }
  const std::vector<int>& Local() const { return layout_->RanksOf(layout_->HostOf(rank())); }
  const Segment& SegmentOf(int owner) const { return segments_[static_cast<size_t>(owner)]; }
  std::vector<int> OwnersAt(int rank) const;

  Segment PlanSegment(size_t owner) const;
  void AppendRun(Segment& segment, Run run) const;
  // The own values in the order of the segments, for the other ranks of the host.
  void Pack();
  void OpenLanes();
  void SendToHost();
  // Encodes the next chunk of a lane that is complete; false if there is none.
  bool EncodeNext();
  void EncodeChunk(Lane& lane, const Chunk& chunk);
  // Reduces the next chunk of the own segment that is complete.
  bool ReduceNext();
  void ReduceChunk(const Chunk& chunk);
  void DecodeChunk(const char* codes, const Chunk& chunk);
  // Calls work(begin, end) for parts of a run, in parallel; parts begin with blocks.
  template <typename Work>
  void ForBlocks(const Run& run, Work work) {
    constexpr size_t kGrain = 16 * 1024;  // values, a multiple of every block
    channel_.workers->For(run.count, kGrain, work);
  }

  QuantizedArgs args_;
  const BlockCode code_;
  const HostLayout* layout_ = nullptr;
  size_t chunk_bytes_ = 0;         // of codes
  std::vector<Segment> segments_;  // by owner
  std::vector<size_t> cuts_;       // of the codes of all segments, in bytes
  BufferPool::Buffer packed_{nullptr, {}};
  std::vector<size_t> packed_at_;             // where segments begin in it, in values
  BufferPool::Buffer host_sum_{nullptr, {}};  // of one chunk
  std::vector<Lane> lanes_;                   // the last one is this rank's own
  size_t n_chunks_ = 0;                       // of the longest of their segments
  size_t next_chunk_ = 0;                     // to be encoded, and the lane
  size_t next_lane_ = 0;
  BufferPool::Buffer received_{nullptr, {}};  // codes of other hosts, of the own segment
  std::vector<Arrival> arrivals_;             // by key
  std::vector<int> n_hosts_missing_;          // per chunk of the own segment
  size_t n_reduced_ = 0;                      // chunks of it
  BufferPool::Buffer result_{nullptr, {}};    // codes of all segments
  std::optional<Spread> spread_;
  size_t next_decoded_ = 0;  // the segment
  size_t n_decoded_ = 0;     // chunks of it
  bool has_computed_ = false;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_QUANTIZED_REDUCTION_H_
