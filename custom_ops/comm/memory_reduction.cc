// Reductions on one host whose ranks read each other's memory.
#include <deque>

#include "comm/host_vectors.h"
#include "comm/reduction.h"

namespace tfscale {
namespace {

constexpr int kSignals = 1;  // tag offset
constexpr char kSignal = 1;  // a chunk is finished

// Each rank reads its segment of all vectors and sums it. In an allreduce it then reads the
// results of the others, chunk by chunk, from where these need them.
class MemoryReduction : public ReductionAlgorithm {
 public:
  explicit MemoryReduction(const ReducedVector& vector)
      : v_(vector),
        segments_(v_.Segments()),
        own_(SegmentOf(v_.rank())),
        vectors_(v_.channel, v_.transfers, v_.Local()) {}

  void Begin() override {
    vectors_.Share(v_.in_places, v_.out_places, v_.total * v_.element, v_.channel.tag);
    for (int peer : v_.Local()) {
      if (peer == v_.rank() || !v_.is_allreduce()) continue;
      for (const Lanes::Chunk& chunk : SegmentOf(peer).chunks) {
        const int key = static_cast<int>(results_.size());
        results_.push_back({peer, SegmentOf(peer).begin + chunk.sum, chunk.sum_bytes, 0});
        v_.transfers.ReceiveMessage(&results_.back().signal, 1, peer, v_.channel.tag + kSignals,
                                    key);
      }
    }
  }

  // One chunk at a time: MPI must be asked for progress in between.
  bool Advance(const std::vector<int>& completed) override {
    for (int key : completed) {
      if (key == HostVectors::kKey) {
        vectors_.OnCompleted();
      } else {
        finished_.push_back(&results_[static_cast<size_t>(key)]);
      }
    }
    if (!vectors_.is_complete()) return false;
    if (n_begun_ < own_.chunks.size()) {
      SumChunk(n_begun_++);
    } else if (!finished_.empty()) {
      const Result& next = *finished_.front();
      finished_.pop_front();
      vectors_.Fetch(next.owner, next.begin, next.bytes);
    } else {
      return false;
    }
    return true;
  }

  bool is_complete() const override { return n_begun_ == own_.chunks.size() && finished_.empty(); }

 private:
  // A chunk of another rank's segment.
  struct Result {
    int owner;
    size_t begin, bytes;
    char signal;
  };

  const Lanes::Segment& SegmentOf(int rank) const { return segments_[static_cast<size_t>(rank)]; }

  void SumChunk(size_t c) {
    const Lanes::Chunk& chunk = own_.chunks[c];
    char* to = v_.is_allreduce() ? nullptr : v_.out + chunk.sum;
    const size_t begin = (own_.begin + chunk.row) / v_.element;
    if (!vectors_.Reduce(v_.args, begin, chunk.row_bytes / v_.element, v_.end_scale, to)) return;
    for (int peer : v_.Local()) {
      if (peer != v_.rank() && v_.is_allreduce()) {
        v_.transfers.SendMessage(&kSignal, 1, peer, v_.channel.tag + kSignals);
      }
    }
  }

  const ReducedVector& v_;
  const std::vector<Lanes::Segment> segments_;
  const Lanes::Segment& own_;
  HostVectors vectors_;
  size_t n_begun_ = 0;          // chunks of the own segment
  std::deque<Result> results_;  // by key
  std::deque<const Result*> finished_;
};

}  // namespace

std::unique_ptr<ReductionAlgorithm> MakeMemoryReduction(const ReducedVector& vector) {
  return std::make_unique<MemoryReduction>(vector);
}

}  // namespace tfscale
