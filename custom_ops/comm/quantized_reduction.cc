// Allreduce and reduce-scatter of float32 with 8 or 4 bits per value.
#include <algorithm>
#include <utility>

#include "comm/coded_reduction.h"
#include "comm/quantize.h"

namespace tfscale {
namespace {

constexpr size_t kGrain = 16 * 1024;  // values, a multiple of every block

// The sum over the ranks of prescale * in, rounded on its way (see BlockCode).
//
// Every rank owns a part of each tensor; the parts of one owner, one after another, are its
// segment. The owner's partner on each host adds its error to the host's sum, encodes it and sends
// it to the owner. The owner encodes its own host's sum, too, so that the result does not depend on
// who owns what. It adds up what the hosts' codes decode to, in the order of hosts, multiplies by
// postscale, adds its own error, encodes again and spreads the codes (Spread); every rank, the
// owner included, takes what they decode to. A reduce-scatter ends before that, with the exact sum
// of what the codes decode to. Encoding one chunk overlaps the transfer of those before it.
class QuantizedReduction : public CodedReduction<QuantizedArgs, BlockCode> {
 public:
  using CodedReduction::CodedReduction;

 protected:
  void Begin() override {
    RequireParts();
    // As many chunks as float32 would have.
    chunk_bytes_ =
        std::max<size_t>(64, channel_.chunk_bytes * static_cast<size_t>(args_.bits) / 32);
    OpenLanes([this](int owner) { return PlanSegment(static_cast<size_t>(owner)); });
    // The first chunks of all lanes, then the second: all links are in use from the start.
    size_t n_chunks = 0;
    for (const Segment& segment : segments_) n_chunks = std::max(n_chunks, segment.chunks.size());
    for (size_t c = 0; c < n_chunks; ++c) {
      for (size_t l = 0; l < lanes_->size(); ++l) {
        if (c < (*lanes_)[l].n_missing.size()) to_encode_.emplace_back(l, c);
      }
    }
    lanes_->PlaceSums(nullptr);
    lanes_->ReceiveSums();
    if (is_allreduce()) OpenSpread(chunk_bytes_);
    lanes_->SendRows(packed_.get());
  }

  void Advance(const std::vector<int>& completed) override {
    Count(completed);
    // One chunk of each kind at a time: MPI must be asked for progress in between.
    const bool has_encoded = EncodeNext();
    has_computed_ = ReduceNext() || has_encoded;
  }

  void Finish() override {
    const Segment& own = SegmentOf(rank());
    if (n_encoded_ < to_encode_.size() || n_reduced_ < own.chunks.size()) return;
    for (; is_allreduce() && next_decoded_ < size(); ++next_decoded_) {
      const Segment& segment = SegmentOf(next_decoded_);
      if (n_decoded_ < segment.chunks.size()) {
        const char* codes = CodesOf(next_decoded_);
        for (const Run& run : segment.runs[n_decoded_++]) DecodeRun(codes, run);
        has_computed_ = true;
        return;
      }
      n_decoded_ = 0;
    }
    SetDone();
  }

 private:
  bool is_allreduce() const { return !args_.outputs.empty(); }

  // A run is in the chunk in which its blocks begin.
  Segment PlanSegment(size_t owner) const {
    const size_t block_bytes = code_.Bytes(code_.block());
    Segment segment;
    for (size_t i = 0; i < args_.counts.size(); ++i) {
      const size_t end = args_.cuts[i][owner + 1];
      for (size_t begin = args_.cuts[i][owner]; begin < end;) {
        const size_t chunk = segment.sum_bytes / chunk_bytes_;
        while (segment.chunks.size() <= chunk) AppendChunk(&segment);
        const size_t left = (chunk + 1) * chunk_bytes_ - segment.sum_bytes;
        const size_t n_blocks = (left + block_bytes - 1) / block_bytes;
        const size_t count = std::min(end - begin, n_blocks * code_.block());
        AppendRun(&segment, i, begin, count);
        begin += count;
      }
    }
    // Chunk c of the result is complete when chunk c of the blocks is: the last bytes
    // may belong to a block that begins in the chunk before, and leave none for the last.
    const size_t n_chunks = (segment.sum_bytes + chunk_bytes_ - 1) / chunk_bytes_;
    while (segment.chunks.size() < n_chunks) AppendChunk(&segment);
    return segment;
  }

  bool EncodeNext() {
    if (n_encoded_ == to_encode_.size()) return false;
    const auto [l, c] = to_encode_[n_encoded_];
    const Lanes::Lane& lane = (*lanes_)[l];
    if (lane.n_missing[c] > 0) return false;
    ++n_encoded_;
    for (const Run& run : SegmentOf(lane.owner).runs[c]) EncodeRun(l, run);
    lanes_->OnSum(l, c);
    return true;
  }

  void EncodeRun(size_t lane, const Run& run) {
    const std::pair<const float*, float> sum = HostSum(lane, run);
    char* codes = (*lanes_)[lane].sum.get() + run.byte;
    const float* error = keeps_errors() ? args_.errors[run.tensor] + run.begin : nullptr;
    float* new_error = keeps_errors() ? args_.new_errors[run.tensor] + run.begin : nullptr;
    channel_.workers->For(run.count, kGrain, [&](size_t begin, size_t end) {
      code_.Encode(sum.first + begin, sum.second, error ? error + begin : nullptr, end - begin,
                   codes + code_.Bytes(begin), new_error ? new_error + begin : nullptr);
    });
  }

  bool ReduceNext() {
    const Segment& own = SegmentOf(rank());
    if (n_reduced_ == own.chunks.size() || !lanes_->HasSums(n_reduced_)) return false;
    for (const Run& run : own.runs[n_reduced_]) ReduceRun(run);
    if (is_allreduce()) {
      const size_t begin = n_reduced_ * chunk_bytes_;
      spread_->SendChunk(CodesOf(rank()) + begin, std::min(chunk_bytes_, own.sum_bytes - begin));
    }
    ++n_reduced_;
    return true;
  }

  void ReduceRun(const Run& run) {
    const size_t at = run.begin - args_.cuts[run.tensor][static_cast<size_t>(rank())];
    const bool keeps = is_allreduce() && keeps_errors();
    const float* error = keeps ? args_.owner_errors[run.tensor] + at : nullptr;
    float* new_error = keeps ? args_.new_owner_errors[run.tensor] + at : nullptr;
    channel_.workers->For(run.count, kGrain, [&](size_t begin, size_t end) {
      const size_t byte = run.byte + code_.Bytes(begin);
      const std::vector<const char*> sums = lanes_->Sums(byte);
      if (is_allreduce()) {
        code_.EncodeSum(sums, args_.postscale, error ? error + begin : nullptr, end - begin,
                        CodesOf(rank()) + byte, new_error ? new_error + begin : nullptr);
      } else {
        float* to = args_.segment + run.value + begin;
        code_.DecodeSum(sums, args_.postscale, end - begin, to);
      }
    });
  }

  void DecodeRun(const char* codes, const Run& run) {
    float* to = args_.outputs[run.tensor] + run.begin;
    channel_.workers->For(run.count, kGrain, [&](size_t begin, size_t end) {
      code_.Decode(codes + run.byte + code_.Bytes(begin), end - begin, to + begin);
    });
  }

  size_t chunk_bytes_ = 0;                            // of codes
  std::vector<std::pair<size_t, size_t>> to_encode_;  // lanes and chunks
  size_t n_encoded_ = 0;
  size_t n_reduced_ = 0;  // chunks of the own segment
  int next_decoded_ = 0;  // the segment
  size_t n_decoded_ = 0;  // chunks of it
};

}  // namespace

OperationHandle MakeQuantizedReduction(QuantizedArgs args) {
  const BlockCode code(args.bits, args.block);
  return HandleOf(new QuantizedReduction(std::move(args), code));
}

}  // namespace tfscale
