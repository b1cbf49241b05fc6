// What sums that are sent as codes have in common.
#ifndef TFSCALE_COMM_CODED_REDUCTION_H_
#define TFSCALE_COMM_CODED_REDUCTION_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/collectives.h"
#include "comm/lanes.h"
#include "comm/reduce.h"
#include "comm/spread.h"

namespace tfscale {

// The base of sums of float32 tensors that each host sends as codes of its own sum, with the
// errors of encoding kept for the next one. `Args` are CodedArgs.
//
// Each rank encodes segments for its host: it receives them in float32 from the other ranks
// (Lanes), and sums them in their order. Each part of a tensor has codes of its own, so the bits
// do not depend on which tensors are sent together.
template <typename Args, typename Code>
class CodedReduction : public Operation {
 public:
  CodedReduction(Args args, Code code) : args_(std::move(args)), code_(code) {}
  // As sent: what an uncompressed vector has four bytes for.
  size_t bytes() const override {
    size_t total = 0;
    for (size_t count : args_.counts) total += code_.Bytes(count);
    return total;
  }

 protected:
  // Whole blocks or chunks of the code. Positions are in the tensor, and in the segment.
  struct Run {
    size_t tensor;
    size_t begin;
    size_t count;
    size_t value;
    size_t byte;
  };
  struct Segment : Lanes::Segment {
    std::vector<std::vector<Run>> runs;  // by chunk
  };

  bool has_computed() const override { return has_computed_; }

  bool keeps_errors() const { return !args_.errors.empty(); }
  const std::vector<int>& Local() const { return hosts().RanksOf(hosts().HostOf(rank())); }
  const Segment& SegmentOf(int rank) const { return segments_[static_cast<size_t>(rank)]; }
  char* CodesOf(int rank) const { return codes_.get() + cuts_[static_cast<size_t>(rank)]; }

  void RequireParts() const {
    const size_t n = static_cast<size_t>(size());
    for (const std::vector<size_t>& cuts : args_.cuts) {
      if (cuts.size() == n + 1) continue;
      throw CommError("cuts must give a part for each of the " + std::to_string(n) +
                      " ranks. Received: " + std::to_string(cuts.size()) + " cuts.");
    }
  }

  static void AppendChunk(Segment* segment) {
    segment->chunks.push_back({segment->row_bytes, 0, segment->sum_bytes, 0});
    segment->runs.emplace_back();
  }
  void AppendRun(Segment* segment, size_t tensor, size_t begin, size_t count) const {
    const size_t value = segment->row_bytes / sizeof(float);
    segment->runs.back().push_back({tensor, begin, count, value, segment->sum_bytes});
    segment->chunks.back().row_bytes += count * sizeof(float);
    segment->chunks.back().sum_bytes += code_.Bytes(count);
    segment->row_bytes += count * sizeof(float);
    segment->sum_bytes += code_.Bytes(count);
  }

  // Has plan(rank) for each rank. Segments with chunks have lanes, which receive their rows.
  template <typename Plan>
  void OpenLanes(Plan plan) {
    segments_.reserve(static_cast<size_t>(size()));
    for (int r = 0; r < size(); ++r) segments_.push_back(plan(r));
    size_t n_bytes = 0;
    cuts_.assign(1, 0);
    for (Segment& segment : segments_) {
      cuts_.push_back(cuts_.back() + segment.sum_bytes);
      segment.begin = n_bytes;
      if (!segment.chunks.empty()) n_bytes += segment.row_bytes;
    }
    lanes_.emplace(channel_, *transfers_, hosts(),
                   std::vector<Lanes::Segment>(segments_.begin(), segments_.end()));
    if (Local().size() > 1) Pack(n_bytes);
    lanes_->ReceiveRows();
  }

  // The codes of all segments are spread.
  void OpenSpread(size_t chunk_bytes) {
    codes_ = channel_.buffers->Get(cuts_.back());
    spread_.emplace(*transfers_, hosts(), rank(), channel_.tag + Lanes::kTags, chunk_bytes,
                    lanes_->n_keys());
    spread_->Receive(codes_.get(), cuts_);
  }

  void Count(const std::vector<int>& completed) {
    for (int key : completed) {
      if (!spread_ || !spread_->OnCompleted(key)) lanes_->OnCompleted(key);
    }
  }

  // A run's input and factor for Code::Encode: its sum over the host, which the next one replaces.
  std::pair<const float*, float> HostSum(size_t lane, const Run& run) {
    if (Local().size() == 1) {
      return {args_.inputs[run.tensor] + run.begin, static_cast<float>(args_.prescale)};
    }
    const auto rows = lanes_->Rows(lane, packed_.get(), run.value * sizeof(float));
    Reduce({rows.begin(), rows.end()}, host_sum_.get(), run.count, DType::kFloat32, ReduceOp::kSum,
           1.0);
    return {reinterpret_cast<const float*>(host_sum_.get()), 1.0f};
  }

  Args args_;
  const Code code_;
  std::vector<Segment> segments_;           // by rank
  std::vector<size_t> cuts_;                // of the codes of all segments, in bytes
  BufferPool::Buffer packed_{nullptr, {}};  // the own values, segment by segment
  std::optional<Lanes> lanes_;
  BufferPool::Buffer codes_{nullptr, {}};  // of all segments
  std::optional<Spread> spread_;
  bool has_computed_ = false;

 private:
  // The own values, scaled, for the ranks of the host that encode them.
  void Pack(size_t n_bytes) {
    packed_ = channel_.buffers->Get(n_bytes);
    size_t longest = 0;
    for (const Segment& segment : segments_) {
      for (size_t c = 0; c < segment.chunks.size(); ++c) {
        for (const Run& run : segment.runs[c]) {
          longest = std::max(longest, run.count);
          ScaledCopy(args_.inputs[run.tensor] + run.begin,
                     packed_.get() + segment.begin + run.value * sizeof(float), run.count,
                     DType::kFloat32, args_.prescale);
        }
      }
    }
    host_sum_ = channel_.buffers->Get(longest * sizeof(float));
    // Other ranks of the host keep the errors of what they encode.
    for (size_t i = 0; keeps_errors() && i < args_.counts.size(); ++i) {
      const size_t count = args_.counts[i];
      if (count > 0) std::memset(args_.new_errors[i], 0, count * sizeof(float));
    }
  }

  BufferPool::Buffer host_sum_{nullptr, {}};  // of one run
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_CODED_REDUCTION_H_
