// Allreduce and reduce-scatter.
#ifndef TFSCALE_COMM_REDUCTION_H_
#define TFSCALE_COMM_REDUCTION_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "comm/arguments.h"
#include "comm/host_memory.h"
#include "comm/lanes.h"
#include "comm/operation.h"

namespace tfscale {

// The way that takes an allreduce of `bytes` the least time. Equal on all ranks, as these are.
Way BestWay(size_t n_ranks, size_t n_hosts, size_t bytes);
// The bytes of the chunks that a segment of an allreduce is sent in; `usual` if that is best.
size_t ChunkBytes(size_t n_hosts, size_t segment, size_t usual);

// The vector of a reduction, and what an algorithm may use for it.
struct ReducedVector {
  const ReductionArgs& args;
  const Channel& channel;
  Transfers& transfers;
  const HostLayout& hosts;
  const Way way;
  const size_t element;  // bytes
  const size_t total;    // elements
  // Of the sum over a host, and over all.
  const double host_scale, end_scale;
  // Null where tensors stay in their places. `out` is all of the vector, or the own segment.
  const char* in = nullptr;
  char* out = nullptr;
  // All of both, where ranks of the host read them from memory.
  Pieces in_places, out_places;

  bool is_allreduce() const { return args.scatter_counts.empty(); }
  int rank() const { return channel.comm->rank(); }
  size_t n_ranks() const { return static_cast<size_t>(channel.comm->size()); }
  const std::vector<int>& Local() const { return hosts.RanksOf(hosts.HostOf(rank())); }
  // Elements of a segment if all are equally long.
  size_t even_count() const;
  // Of the chunks of segments.
  size_t chunk_bytes() const;
  // The segments of all ranks; their sums are as long as their rows.
  std::vector<Lanes::Segment> Segments() const;
  // Sums, or whatever the reduction is, elements of several vectors, in parallel.
  void Add(const std::vector<const char*>& sources, char* to, size_t bytes, double scale) const;
};

// How the vector is exchanged and summed. Part of a Reduction, which calls these methods as its
// own.
class ReductionAlgorithm {
 public:
  virtual ~ReductionAlgorithm() = default;
  virtual void Begin() = 0;
  // True if it has computed though no transfer ended, and may again.
  virtual bool Advance(const std::vector<int>& completed) = 0;
  // No more is to be done once all transfers have ended.
  virtual bool is_complete() const { return true; }
};
// Each in a file of its name, such as relayed_reduction.cc.
std::unique_ptr<ReductionAlgorithm> MakeRelayedReduction(const ReducedVector& vector);
std::unique_ptr<ReductionAlgorithm> MakeSegmentReduction(const ReducedVector& vector,
                                                         bool is_by_memory);
std::unique_ptr<ReductionAlgorithm> MakeMemoryReduction(const ReducedVector& vector);

// out = postscale * sum over ranks of prescale * in: over the ranks of each host, in
// their order, and then over the hosts, in theirs. The order does not depend on
// message sizes, so neither do the bits of the result, and all ranks get the same.
// Inputs and outputs must not overlap.
class Reduction : public Operation {
 public:
  explicit Reduction(ReductionArgs args);
  size_t bytes() const override { return total_ * element_; }

 protected:
  void Begin() override;
  void Advance(const std::vector<int>& completed) override;
  void Finish() override;
  bool has_computed() const override { return has_computed_; }

 private:
  // Puts tensors together that cannot stay where they are, which others of the host may read.
  void Pack(bool are_inputs_read, bool are_outputs_read);

  ReductionArgs args_;
  const size_t element_;
  size_t total_ = 0;
  BufferPool::Buffer packed_in_{nullptr, {}};
  BufferPool::Buffer packed_out_{nullptr, {}};
  std::optional<HostLayout> flat_;
  std::optional<ReducedVector> vector_;
  std::unique_ptr<ReductionAlgorithm> algorithm_;
  bool has_computed_ = false;  // in the last step
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_REDUCTION_H_
