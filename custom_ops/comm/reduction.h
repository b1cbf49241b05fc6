// Allreduce and reduce-scatter.
#ifndef TFSCALE_COMM_REDUCTION_H_
#define TFSCALE_COMM_REDUCTION_H_

#include <cstddef>
#include <vector>

#include "comm/collectives.h"
#include "comm/operation.h"

namespace tfscale {

// out = postscale * sum over ranks, in rank order, of prescale * in. The order
// does not depend on message sizes, so neither do the bits of the result, and
// all ranks get the same ones.
//
// Large vectors ([T] chapter 4 applied to whole gradients): rank r receives
// segment r of every rank, adds them up and sends the sum to all. Segments are
// sent in chunks, so adding chunk c overlaps the transfer of chunk c+1 and of
// the sums before it. 2 * (size-1)/size * bytes sent per rank, as the best
// allreduce algorithms, in 2 rounds.
// Inputs and outputs must not overlap.
class Reduction : public Operation {
 public:
  explicit Reduction(ReductionArgs args);
  size_t bytes() const override { return total_ * element_; }

 protected:
  void Begin() override;
  void Advance(const std::vector<int>& completed) override;
  void Finish() override;

 private:
  struct Segment {
    size_t begin;
    size_t count;
  };

  bool is_allreduce() const { return args_.scatter_counts.empty(); }
  void PackInputs();
  void PlanSegments();
  void ExchangeWhole();
  void ExchangeSegments();
  size_t n_chunks(const Segment& segment) const;
  Segment Chunk(const Segment& segment, size_t chunk) const;
  // Adds up elements [begin, begin+count) of the own segment into the result.
  void ReduceRange(size_t begin, size_t count);
  void ReduceChunk(size_t chunk);
  // Sends reduced chunks on, in their order: receivers expect them so, but the
  // last chunk, being shorter, may arrive here before the one ahead of it.
  void SendResults();
  // Where the contribution of `sender` to the own segment arrives.
  char* Received(int sender) const;

  ReductionArgs args_;
  const size_t element_;
  size_t total_ = 0;
  const char* in_ = nullptr;
  char* out_ = nullptr;  // all of the vector, or the own segment when scattering
  BufferPool::Buffer packed_in_{nullptr, {}};
  BufferPool::Buffer packed_out_{nullptr, {}};
  BufferPool::Buffer received_{nullptr, {}};
  std::vector<Segment> segments_;
  Segment own_{0, 0};
  bool is_whole_ = false;       // every rank reduces everything
  std::vector<int> n_missing_;  // per chunk of the own segment: ranks not yet here
  size_t n_results_sent_ = 0;   // chunks
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_REDUCTION_H_
