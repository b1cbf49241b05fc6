// Allreduce and reduce-scatter.
#ifndef TFSCALE_COMM_REDUCTION_H_
#define TFSCALE_COMM_REDUCTION_H_

#include <cstddef>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "comm/collectives.h"
#include "comm/host_vectors.h"
#include "comm/operation.h"
#include "comm/relay.h"
#include "comm/spread.h"

namespace tfscale {

// The way that takes an allreduce of `bytes` the least time. Equal on all ranks, as these are.
Way BestWay(size_t n_ranks, size_t n_hosts, size_t bytes);
// The bytes of the chunks that a segment of an allreduce is sent in; `usual` if that is best.
size_t ChunkBytes(size_t n_hosts, size_t segment, size_t usual);

// out = postscale * sum over ranks of prescale * in: over the ranks of each host, in
// their order, and then over the hosts, in theirs. The order does not depend on
// message sizes, so neither do the bits of the result, and all ranks get the same.
//
// Large vectors ([T] chapter 4 applied to whole gradients): rank r owns segment r. The
// ranks of each host send it to the owner's partner there (HostLayout), which adds
// them up and sends the sum to the owner; or the partner reads it from their memory
// (HostVectors). The owner adds up the sums of the hosts and spreads the result
// (Spread). With one rank per host, or one host, that is one round each way. Segments
// are sent in chunks, so adding chunk c overlaps the transfer of chunk c+1 and of the
// sums before it. Over the link of a host 2 * (hosts-1)/hosts * bytes are sent, as by
// the best allreduce algorithms.
//
// Smaller vectors come to their owners, and the sums to all ranks, by a Relay: fewer messages,
// more bytes. Of the smallest ones all of every vector comes to all ranks (BestWay).
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
  // Part of the vector, in elements.
  struct Segment {
    size_t begin;
    size_t count;
  };
  // The segment of one rank, as far as this rank deals with it for its host.
  struct Lane {
    int owner;
    Segment segment;
    BufferPool::Buffer received;  // from the other ranks of the host, one after another
    BufferPool::Buffer sum_buffer;
    const char* sum;             // over the ranks of the host
    std::vector<int> n_missing;  // per chunk: ranks of the host not yet here or, by memory, 1
    size_t n_sent;               // chunks of the sum
  };
  // What a transfer with a key brings.
  struct Arrival {
    Lane* lane;  // null: the sum of another host, of the own segment
    size_t chunk;
    int owner;  // not -1: this rank of the host has finished a chunk of its segment
  };

  bool is_allreduce() const { return args_.scatter_counts.empty(); }
  const std::vector<int>& Local() const { return layout_->RanksOf(layout_->HostOf(rank())); }
  size_t n_chunks(const Segment& segment) const;
  Segment Chunk(const Segment& segment, size_t chunk) const;
  // Where others of `ranks` find place in a buffer of rows without this rank's own.
  static size_t Row(const std::vector<int>& ranks, int rank, int own);

  void PackInputs();
  void PlanSegments();
  void ExchangeByRelay();
  void OnRelayed();
  // Adds up the blocks of all ranks, in the order of the reduction.
  void ReduceBlocks(char* out);
  void ExchangeSegments();
  // Those whose segments `rank` adds up for its host, other hosts' first.
  std::vector<int> OwnersAt(int rank) const;
  void OpenLane(int owner);
  // Adds up elements of several vectors in parallel.
  void Add(const std::vector<const void*>& sources, char* out, size_t count, double scale);
  // The received parts of a lane, from an offset in bytes on, and this rank's own.
  std::vector<const void*> RowsOf(const Lane& lane, size_t offset) const;
  // A chunk of one more rank of the host is here.
  void OnContribution(Lane& lane, size_t chunk);
  // By memory: the other ranks of the host are told where this one's vectors are.
  void ShareVectors();
  // Adds up a chunk of a lane, or fetches one that another rank has added up. True if there
  // was any.
  bool DoNextChunk();
  // A chunk of the sum of one more host is here.
  void OnHostSum(size_t chunk);
  // Sends sums to their owner in their order: it expects them so, but the
  // last chunk, being shorter, may be complete before the one ahead of it.
  void SendSums(Lane& lane);
  void SendResults();

  ReductionArgs args_;
  const size_t element_;
  size_t total_ = 0;
  const char* in_ = nullptr;
  char* out_ = nullptr;  // all of the vector, or the own segment when scattering
  BufferPool::Buffer packed_in_{nullptr, {}};
  BufferPool::Buffer packed_out_{nullptr, {}};
  BufferPool::Buffer received_{nullptr, {}};  // sums of other hosts
  std::optional<HostLayout> flat_;
  const HostLayout* layout_ = nullptr;
  double host_scale_ = 1.0;  // of the sum over a host
  double end_scale_ = 1.0;   // of the sum over all
  std::vector<Segment> segments_;
  Segment own_{0, 0};
  size_t chunk_elements_ = 0;
  Way way_{false, 0};
  std::optional<Relay> relay_;
  size_t block_ = 0;         // of the relay, in elements
  bool is_summed_ = false;   // the blocks of the relay are sums
  std::vector<Lane> lanes_;  // the last one is this rank's own
  // Inside of the host ranks read each other's vectors, and their results, too, if there
  // is no other host. Then in_ and out_ are null where tensors stay in their places.
  bool is_by_memory_ = false;
  bool is_fetched_ = false;
  std::optional<HostVectors> vectors_;
  std::vector<std::pair<size_t, size_t>> left_;  // lanes and chunks to be added up, the last first
  std::deque<Arrival> fetches_;
  bool has_computed_ = false;         // in the last step
  std::deque<char> signals_;          // of other ranks: a chunk is finished
  std::vector<Arrival> arrivals_;     // by key
  std::vector<int> n_hosts_missing_;  // per chunk of the own segment
  size_t n_results_sent_ = 0;         // chunks
  std::optional<Spread> spread_;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_REDUCTION_H_
