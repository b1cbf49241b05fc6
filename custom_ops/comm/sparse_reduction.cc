// Allreduce of float32 of which each host sends a small share.
#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/coded_reduction.h"
#include "comm/sparse_code.h"

namespace tfscale {
namespace {

// Chunks that are computed before MPI is asked for progress again.
constexpr size_t kChunksAtOnce = 64;

// postscale times the sum over the hosts of what their codes decode to (SparseCode). A host's
// vector is the sum of prescale * in over its ranks.
//
// The chunks of a host are divided among its ranks. Each encodes the sum of these once, with its
// error, and spreads the codes (Spread). Every rank, the one that has encoded them included, adds
// up what the codes decode to, in the order of hosts: so all ranks hold the same bits. Sums of few
// values are no longer sparse, so they are not encoded again.
class SparseReduction : public CodedReduction<SparseArgs, SparseCode> {
 public:
  using CodedReduction::CodedReduction;

 protected:
  void Begin() override {
    RequireParts();
    OpenLanes([this](int encoder) { return PlanSegment(encoder); });
    for (int host = 0; host < hosts().n_hosts(); ++host) {
      for (int r : hosts().RanksOf(host)) {
        for (const Run& run : SegmentOf(r).runs[0]) to_decode_.emplace_back(r, &run);
      }
    }
    // Small messages show that a slow link makes progress, see Scheduler::CheckStalls.
    message_bytes_ = std::max<size_t>(64, channel_.chunk_bytes / 16);
    OpenSpread(message_bytes_);
    lanes_->SendRows(packed_.get());
  }

  void Advance(const std::vector<int>& completed) override {
    Count(completed);
    const Lanes::Lane& own = (*lanes_)[lanes_->size() - 1];
    has_computed_ = own.n_missing[0] == 0 && n_encoded_ < runs().size();
    if (!has_computed_) return;
    // One run at a time: MPI must be asked for progress in between.
    Encode(runs()[n_encoded_++]);
    SendEncoded();
  }

  void Finish() override {
    if (n_encoded_ < runs().size()) return;
    has_computed_ = true;
    if (n_cleared_ < args_.counts.size()) {
      const size_t count = args_.counts[n_cleared_];
      if (count > 0) std::memset(args_.outputs[n_cleared_], 0, count * sizeof(float));
      ++n_cleared_;
    } else if (n_decoded_ < to_decode_.size()) {
      const auto [owner, run] = to_decode_[n_decoded_++];
      Decode(*run, CodesOf(owner) + run->byte);
    } else {
      SetDone();
    }
  }

 private:
  // What this rank encodes.
  const std::vector<Run>& runs() const { return SegmentOf(rank()).runs[0]; }

  // What one rank encodes for its host: its own parts, and those of the ranks of other hosts that
  // have it as partner. Only ranks of this host need rows of them.
  Segment PlanSegment(int encoder) const {
    Segment segment;
    AppendChunk(&segment);
    std::vector<int> owners = hosts().Remote(encoder);
    owners.push_back(encoder);
    for (int owner : owners) {
      for (size_t i = 0; i < args_.counts.size(); ++i) {
        const size_t end = args_.cuts[i][static_cast<size_t>(owner) + 1];
        for (size_t begin = args_.cuts[i][static_cast<size_t>(owner)]; begin < end;) {
          const size_t count = std::min(end - begin, kChunksAtOnce * code_.chunk());
          AppendRun(&segment, i, begin, count);
          begin += count;
        }
      }
    }
    if (hosts().HostOf(encoder) != hosts().HostOf(rank())) segment.chunks.clear();
    return segment;
  }

  void Encode(const Run& run) {
    const std::pair<const float*, float> sum = HostSum(lanes_->size() - 1, run);
    char* out = CodesOf(rank()) + run.byte;
    const float* error = args_.errors[run.tensor] + run.begin;
    float* new_error = args_.new_errors[run.tensor] + run.begin;
    channel_.workers->For(run.count, 4 * code_.chunk(), [&](size_t begin, size_t end) {
      code_.Encode(sum.first + begin, sum.second, error + begin, static_cast<float>(args_.decay),
                   end - begin, out + code_.Bytes(begin), new_error + begin);
    });
  }

  void SendEncoded() {
    const bool is_last = n_encoded_ == runs().size();
    const size_t n_bytes = SegmentOf(rank()).sum_bytes;
    const size_t n_ready = is_last ? n_bytes : runs()[n_encoded_].byte;
    while (n_sent_ + message_bytes_ <= n_ready || (is_last && n_sent_ < n_ready)) {
      const size_t n = std::min(message_bytes_, n_bytes - n_sent_);
      spread_->SendChunk(CodesOf(rank()) + n_sent_, n);
      n_sent_ += n;
    }
  }

  void Decode(const Run& run, const char* codes) {
    float* to = args_.outputs[run.tensor] + run.begin;
    channel_.workers->For(run.count, 4 * code_.chunk(), [&](size_t begin, size_t end) {
      code_.DecodeOnto(codes + code_.Bytes(begin), static_cast<float>(args_.postscale), end - begin,
                       to + begin);
    });
  }

  size_t message_bytes_ = 0;                           // of codes
  std::vector<std::pair<int, const Run*>> to_decode_;  // with who has encoded them
  size_t n_encoded_ = 0;                               // runs of the own segment
  size_t n_sent_ = 0;                                  // bytes of it
  size_t n_cleared_ = 0;                               // outputs
  size_t n_decoded_ = 0;
};

}  // namespace

OperationHandle MakeSparseReduction(SparseArgs args) {
  const SparseCode code(args.share, args.chunk);
  return HandleOf(new SparseReduction(std::move(args), code));
}

}  // namespace tfscale
