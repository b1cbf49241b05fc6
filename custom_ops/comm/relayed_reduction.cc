// Allreduces of short vectors: fewer messages, more bytes.
#include <algorithm>
#include <cstring>

#include "comm/reduction.h"
#include "comm/relay.h"

namespace tfscale {
namespace {

// Segments come to their owners, and the sums to all ranks, by a Relay. Of the shortest vectors
// all of every vector comes to all ranks, each of which sums them.
class RelayedReduction : public ReductionAlgorithm {
 public:
  explicit RelayedReduction(const ReducedVector& vector)
      : v_(vector),
        // Segments that are equally long, filled up with zeros, or whole vectors.
        block_((v_.way.is_whole ? v_.total : v_.even_count()) * v_.element),
        relay_(v_.channel, v_.transfers, v_.channel.tag, block_) {}

  void Begin() override {
    if (v_.way.is_whole) {
      if (block_ > 0) std::memcpy(relay_.BlockFrom(v_.rank()), v_.in, block_);
      relay_.Gather(v_.way.radix);
    } else {
      ForBlocks([&](int r, size_t begin, size_t bytes) {
        if (bytes > 0) std::memcpy(relay_.BlockFor(r), v_.in + begin, bytes);
        std::memset(relay_.BlockFor(r) + bytes, 0, block_ - bytes);
      });
      relay_.Alltoall(v_.way.radix);
    }
    if (relay_.is_complete()) OnRelayed();  // one rank
  }

  bool Advance(const std::vector<int>& completed) override {
    for (int key : completed) {
      relay_.OnCompleted(key);
      if (relay_.is_complete()) OnRelayed();
    }
    return false;
  }

 private:
  // Calls work(rank, begin, bytes) for the block of each rank, without what fills it up.
  template <typename Work>
  void ForBlocks(Work work) const {
    for (size_t r = 0; r < v_.n_ranks(); ++r) {
      const size_t all = v_.total * v_.element, begin = std::min(r * block_, all);
      work(static_cast<int>(r), begin, std::min(block_, all - begin));
    }
  }

  void OnRelayed() {
    if (v_.way.is_whole) {
      SumBlocks(v_.out);
    } else if (!is_summed_) {
      SumBlocks(relay_.BlockFrom(v_.rank()));
      is_summed_ = true;
      relay_.Gather(Relay::kGatherRadix);
      if (relay_.is_complete()) OnRelayed();  // one rank
    } else {
      ForBlocks([&](int r, size_t begin, size_t bytes) {
        if (bytes > 0) std::memcpy(v_.out + begin, relay_.BlockFrom(r), bytes);
      });
    }
  }

  // As in segments: the bits must not depend on the size of a vector.
  void SumBlocks(char* to) {
    const size_t n_sums = v_.hosts.is_two_level() ? static_cast<size_t>(v_.hosts.n_hosts()) : 0;
    BufferPool::Buffer sums = v_.channel.buffers->Get(block_ * n_sums);
    std::vector<const char*> sources;
    for (int host = 0; host < v_.hosts.n_hosts(); ++host) {
      std::vector<const char*> rows;
      for (int r : v_.hosts.RanksOf(host)) rows.push_back(relay_.BlockFrom(r));
      if (n_sums > 0) {
        char* sum = sums.get() + static_cast<size_t>(host) * block_;
        v_.Add(rows, sum, block_, v_.host_scale);
        rows.assign(1, sum);
      }
      sources.insert(sources.end(), rows.begin(), rows.end());
    }
    v_.Add(sources, to, block_, v_.end_scale);
  }

  const ReducedVector& v_;
  const size_t block_;  // bytes
  Relay relay_;
  bool is_summed_ = false;  // the blocks of the relay are sums
};

}  // namespace

std::unique_ptr<ReductionAlgorithm> MakeRelayedReduction(const ReducedVector& vector) {
  return std::make_unique<RelayedReduction>(vector);
}

}  // namespace tfscale
