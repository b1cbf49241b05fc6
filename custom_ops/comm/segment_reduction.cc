// Allreduce and reduce-scatter of vectors whose segments are sent to their owners.
#include <optional>

#include "comm/host_vectors.h"
#include "comm/reduction.h"
#include "comm/spread.h"

namespace tfscale {
namespace {

// [T] chapter 4 applied to whole gradients: rank r owns segment r. Lanes bring it the sums of all
// hosts, which it sums and spreads (Spread). A partner receives the rows of its host or, by
// memory, reads them (HostVectors). With one rank per host, or one host, that is one round each
// way. Over the link of a host 2 * (hosts-1)/hosts * bytes are sent, as by the best allreduce
// algorithms.
class SegmentReduction : public ReductionAlgorithm {
 public:
  SegmentReduction(const ReducedVector& vector, bool is_by_memory)
      : v_(vector), lanes_(v_.channel, v_.transfers, v_.hosts, v_.Segments()) {
    if (is_by_memory) vectors_.emplace(v_.channel, v_.transfers, v_.Local());
    for (size_t l = 0; is_by_memory && l < lanes_.size(); ++l) n_unread_ += NumChunks(l);
  }

  void Begin() override {
    const bool is_alone = v_.Local().size() == 1;
    if (!vectors_) lanes_.ReceiveRows();
    if (!is_one_host()) lanes_.PlaceSums(is_alone && v_.host_scale == 1.0 ? v_.in : nullptr);
    lanes_.ReceiveSums();
    if (v_.is_allreduce()) ReceiveResults();
    if (vectors_) {
      vectors_->Share(v_.in_places, {}, v_.total * v_.element, v_.channel.tag);
      return;
    }
    lanes_.SendRows(v_.in);
    for (size_t l = 0; is_alone && l < lanes_.size(); ++l) {
      for (size_t c = 0; c < NumChunks(l); ++c) SumRows(l, c);
    }
  }

  bool Advance(const std::vector<int>& completed) override {
    for (int key : completed) {
      if (key == HostVectors::kKey) {
        vectors_->OnCompleted();
      } else if (!spread_ || !spread_->OnCompleted(key)) {
        const Lanes::Arrival arrival = lanes_.OnCompleted(key);
        if (!arrival.is_complete) continue;
        if (arrival.lane < lanes_.size()) {
          SumRows(arrival.lane, arrival.chunk);
        } else {
          SumHosts(arrival.chunk);
        }
      }
    }
    const bool has_read = vectors_ && vectors_->is_complete() && ReadNextRows();
    if (spread_) SendResults();
    return has_read;
  }

  bool is_complete() const override { return n_unread_ == 0; }

 private:
  bool is_one_host() const { return v_.hosts.n_hosts() == 1; }
  size_t NumChunks(size_t lane) const { return lanes_[lane].n_missing.size(); }
  // Of the own segment.
  char* Result() const { return v_.out + (v_.is_allreduce() ? lanes_.own().begin : 0); }

  void ReceiveResults() {
    std::vector<size_t> cuts(1, 0);
    for (size_t r = 0; r < v_.n_ranks(); ++r) {
      cuts.push_back(cuts.back() + lanes_.SegmentOf(static_cast<int>(r)).row_bytes);
    }
    spread_.emplace(v_.transfers, v_.hosts, v_.rank(), v_.channel.tag + Lanes::kTags,
                    v_.chunk_bytes(), lanes_.n_keys());
    spread_->Receive(v_.out, cuts);
  }

  // By memory, the next chunk of a lane: MPI must be asked for progress in between.
  bool ReadNextRows() {
    if (n_unread_ == 0) return false;
    --n_unread_;
    for (; next_chunk_ == NumChunks(next_lane_); ++next_lane_) next_chunk_ = 0;
    SumRows(next_lane_, next_chunk_++);
    return true;
  }

  // All rows of a chunk are here, or can be read. On one host their sum is the result.
  void SumRows(size_t lane, size_t chunk) {
    const Lanes::Segment& segment = lanes_.SegmentOf(lanes_[lane].owner);
    const Lanes::Chunk& part = segment.chunks[chunk];
    char* to = is_one_host() ? Result() : lanes_[lane].sum.get();
    const double scale = is_one_host() ? v_.end_scale : v_.host_scale;
    if (vectors_) {
      const size_t begin = (segment.begin + part.row) / v_.element;
      const size_t count = part.row_bytes / v_.element;
      if (!vectors_->Reduce(v_.args, begin, count, scale, to + part.sum)) return;
    } else if (to != nullptr) {
      v_.Add(lanes_.Rows(lane, v_.in, part.row), to + part.sum, part.row_bytes, scale);
    }
    if (lanes_.OnSum(lane, chunk) && !is_one_host()) SumHosts(chunk);
  }

  void SumHosts(size_t chunk) {
    const Lanes::Chunk& part = lanes_.own().chunks[chunk];
    v_.Add(lanes_.Sums(part.sum), Result() + part.sum, part.sum_bytes, v_.end_scale);
  }

  void SendResults() {
    const std::vector<Lanes::Chunk>& chunks = lanes_.own().chunks;
    for (; n_sent_ < chunks.size() && lanes_.HasSums(n_sent_); ++n_sent_) {
      spread_->SendChunk(Result() + chunks[n_sent_].sum, chunks[n_sent_].sum_bytes);
    }
  }

  const ReducedVector& v_;
  Lanes lanes_;
  std::optional<Spread> spread_;
  size_t n_sent_ = 0;  // chunks of the result
  std::optional<HostVectors> vectors_;
  size_t n_unread_ = 0;  // chunks of all lanes, if rows are read from memory
  size_t next_lane_ = 0;
  size_t next_chunk_ = 0;
};

}  // namespace

std::unique_ptr<ReductionAlgorithm> MakeSegmentReduction(const ReducedVector& vector,
                                                         bool is_by_memory) {
  return std::make_unique<SegmentReduction>(vector, is_by_memory);
}

}  // namespace tfscale
