// Allreduce of float32 of which each host sends a small share.
#ifndef TFSCALE_COMM_SPARSE_REDUCTION_H_
#define TFSCALE_COMM_SPARSE_REDUCTION_H_

#include <cstddef>
#include <optional>
#include <vector>

#include "comm/collectives.h"
#include "comm/operation.h"
#include "comm/sparse_code.h"
#include "comm/spread.h"

namespace tfscale {

// postscale times the sum over the hosts of what their codes decode to (SparseCode),
// with the errors kept for the next sum. A host's vector is the sum of prescale * in
// over its ranks.
//
// The chunks of a host are divided among its ranks. Each receives these from the
// others in float32, adds them up in the order of ranks, adds its error, encodes them
// once, and spreads the codes (Spread). Every rank, the one that has encoded them
// included, adds up what the codes decode to, in the order of hosts: so all ranks hold
// the same bits. Sums of few values are no longer sparse, so they are not encoded again.
//
// Chunks are counted from the beginning of each tensor, so the bits do not depend on
// which tensors are sent together.
class SparseReduction : public Operation {
 public:
  explicit SparseReduction(SparseArgs args);
  // As sent: what an uncompressed vector has four bytes for.
  size_t bytes() const override;

 protected:
  void Begin() override;
  void Advance(const std::vector<int>& completed) override;
  void Finish() override;
  bool has_computed() const override { return has_computed_; }

 private:
  // Whole chunks of a tensor. Positions are in the tensor, and in the segment.
  struct Run {
    size_t tensor;
    size_t begin;
    size_t count;
    size_t value;
    size_t byte;
  };
  // What one rank encodes for its host.
  struct Segment {
    std::vector<Run> runs;
    size_t n_values = 0;
    size_t n_bytes = 0;
  };

  const std::vector<int>& Local() const { return layout_->RanksOf(layout_->HostOf(rank())); }
  const Segment& SegmentOf(int rank) const { return segments_[static_cast<size_t>(rank)]; }
  Segment PlanSegment(int rank) const;
  // The own values that other ranks of the host encode, and what they have of this rank's.
  void ExchangeOnHost();
  void SendEncoded();
  void Encode(const Run& run);
  void Decode(const Run& run, const char* codes);
  // Calls work(begin, end) for parts of a run, in parallel; parts begin with chunks.
  template <typename Work>
  void ForChunks(const Run& run, Work work) {
    channel_.workers->For(run.count, 4 * code_.chunk(), work);
  }

  SparseArgs args_;
  const SparseCode code_;
  const HostLayout* layout_ = nullptr;
  std::vector<Segment> segments_;             // by rank
  std::vector<size_t> cuts_;                  // of the codes of all segments, in bytes
  BufferPool::Buffer packed_{nullptr, {}};    // the own values, of each local rank's segment
  BufferPool::Buffer received_{nullptr, {}};  // the own segment of each other local rank
  BufferPool::Buffer host_sum_{nullptr, {}};  // of one run
  std::vector<const char*> sources_;          // of the own segment, in the order of ranks
  size_t n_missing_ = 0;                      // messages of local ranks
  size_t message_bytes_ = 0;                  // of codes
  int first_key_ = 0;                         // of the spread
  BufferPool::Buffer codes_{nullptr, {}};     // of all segments
  std::optional<Spread> spread_;
  size_t n_encoded_ = 0;  // runs of the own segment
  size_t n_sent_ = 0;     // bytes of it
  size_t n_cleared_ = 0;  // outputs
  int next_host_ = 0;     // to be decoded, its rank and run
  size_t next_local_ = 0;
  size_t next_run_ = 0;
  bool has_computed_ = false;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_SPARSE_REDUCTION_H_
