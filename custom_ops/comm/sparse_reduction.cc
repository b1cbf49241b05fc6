#include "comm/sparse_reduction.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "comm/reduce.h"

namespace tfscale {
namespace {
// Tag offsets. Inside of a host values, between hosts their codes.
constexpr int kContribution = 0;
constexpr int kCodes = 1;  // and one more: see Spread
// Chunks that are computed before MPI is asked for progress again.
constexpr size_t kChunksAtOnce = 64;
}  // namespace

SparseReduction::SparseReduction(SparseArgs args)
    : args_(std::move(args)), code_(args_.share, args_.chunk) {}

size_t SparseReduction::bytes() const {
  size_t total = 0;
  for (size_t count : args_.counts) total += code_.Bytes(count);
  return total;
}

void SparseReduction::Begin() {
  const size_t n = static_cast<size_t>(size());
  for (const std::vector<size_t>& cuts : args_.cuts) {
    if (cuts.size() == n + 1) continue;
    throw CommError("cuts must give a part for each of the " + std::to_string(n) +
                    " ranks. Received: " + std::to_string(cuts.size()) + " cuts.");
  }
  layout_ = &hosts();
  cuts_.assign(1, 0);
  for (int r = 0; r < size(); ++r) {
    segments_.push_back(PlanSegment(r));
    cuts_.push_back(cuts_.back() + segments_.back().n_bytes);
  }
  codes_ = channel_.buffers->Get(cuts_.back());
  first_key_ = static_cast<int>(Local().size()) - 1;
  // Small messages show that a slow link makes progress, see Scheduler::CheckStalls.
  message_bytes_ = std::max<size_t>(64, channel_.chunk_bytes / 16);
  spread_.emplace(*transfers_, *layout_, rank(), channel_.tag + kCodes, message_bytes_, first_key_);
  spread_->Receive(codes_.get(), cuts_);
  if (Local().size() > 1) ExchangeOnHost();
}

SparseReduction::Segment SparseReduction::PlanSegment(int rank) const {
  Segment segment;
  // For its host a rank also encodes the parts of the ranks of other hosts that have it as partner.
  std::vector<int> owners = layout_->Remote(rank);
  owners.push_back(rank);
  for (int owner : owners) {
    for (size_t i = 0; i < args_.counts.size(); ++i) {
      const size_t end = args_.cuts[i][static_cast<size_t>(owner) + 1];
      for (size_t begin = args_.cuts[i][static_cast<size_t>(owner)]; begin < end;) {
        const size_t count = std::min(end - begin, kChunksAtOnce * code_.chunk());
        segment.runs.push_back({i, begin, count, segment.n_values, segment.n_bytes});
        segment.n_values += count;
        segment.n_bytes += code_.Bytes(count);
        begin += count;
      }
    }
  }
  return segment;
}

void SparseReduction::ExchangeOnHost() {
  size_t n_values = 0;
  for (int peer : Local()) n_values += SegmentOf(peer).n_values;
  packed_ = channel_.buffers->Get(n_values * sizeof(float));
  const Segment& own = SegmentOf(rank());
  received_ = channel_.buffers->Get(own.n_values * sizeof(float) * (Local().size() - 1));
  host_sum_ = channel_.buffers->Get(kChunksAtOnce * code_.chunk() * sizeof(float));
  // Other ranks of the host keep the errors of what they encode.
  for (size_t i = 0; i < args_.counts.size(); ++i) {
    if (args_.counts[i] > 0) {
      std::memset(args_.new_errors[i], 0, args_.counts[i] * sizeof(float));
    }
  }
  float* packed = reinterpret_cast<float*>(packed_.get());
  char* row = received_.get();
  for (int peer : Local()) {
    const Segment& segment = SegmentOf(peer);
    for (const Run& run : segment.runs) {
      ScaledCopy(args_.inputs[run.tensor] + run.begin, packed + run.value, run.count,
                 DType::kFloat32, args_.prescale);
    }
    if (peer == rank()) {
      sources_.push_back(reinterpret_cast<const char*>(packed));
    } else {
      transfers_->Send(packed, segment.n_values * sizeof(float), peer,
                       channel_.tag + kContribution);
      transfers_->Receive(row, own.n_values * sizeof(float), peer, channel_.tag + kContribution,
                          static_cast<int>(n_missing_++));
      sources_.push_back(row);
      row += own.n_values * sizeof(float);
    }
    packed += segment.n_values;
  }
}

void SparseReduction::Advance(const std::vector<int>& completed) {
  for (int key : completed) {
    if (!spread_->OnCompleted(key)) --n_missing_;
  }
  const Segment& own = SegmentOf(rank());
  has_computed_ = n_missing_ == 0 && n_encoded_ < own.runs.size();
  if (!has_computed_) return;
  // One run at a time: MPI must be asked for progress in between.
  Encode(own.runs[n_encoded_++]);
  SendEncoded();
}

void SparseReduction::Encode(const Run& run) {
  const float* in = args_.inputs[run.tensor] + run.begin;
  float factor = static_cast<float>(args_.prescale);
  if (!sources_.empty()) {
    std::vector<const void*> parts;
    parts.reserve(sources_.size());
    for (const char* source : sources_) parts.push_back(source + run.value * sizeof(float));
    Reduce(parts, host_sum_.get(), run.count, DType::kFloat32, ReduceOp::kSum, 1.0);
    in = reinterpret_cast<const float*>(host_sum_.get());
    factor = 1.0f;
  }
  char* out = codes_.get() + cuts_[static_cast<size_t>(rank())] + run.byte;
  const float* error = args_.errors[run.tensor] + run.begin;
  float* new_error = args_.new_errors[run.tensor] + run.begin;
  ForChunks(run, [&](size_t begin, size_t end) {
    code_.Encode(in + begin, factor, error + begin, static_cast<float>(args_.decay), end - begin,
                 out + code_.Bytes(begin), new_error + begin);
  });
}

void SparseReduction::SendEncoded() {
  const Segment& own = SegmentOf(rank());
  const bool is_last = n_encoded_ == own.runs.size();
  const size_t n_ready = is_last ? own.n_bytes : own.runs[n_encoded_].byte;
  const char* codes = codes_.get() + cuts_[static_cast<size_t>(rank())];
  while (n_sent_ + message_bytes_ <= n_ready || (is_last && n_sent_ < n_ready)) {
    const size_t n_bytes = std::min(message_bytes_, own.n_bytes - n_sent_);
    spread_->SendChunk(codes + n_sent_, n_bytes);
    n_sent_ += n_bytes;
  }
}

void SparseReduction::Decode(const Run& run, const char* codes) {
  ForChunks(run, [&](size_t begin, size_t end) {
    code_.DecodeOnto(codes + run.byte + code_.Bytes(begin), static_cast<float>(args_.postscale),
                     end - begin, args_.outputs[run.tensor] + run.begin + begin);
  });
}

void SparseReduction::Finish() {
  if (n_encoded_ < SegmentOf(rank()).runs.size()) return;
  has_computed_ = true;
  if (n_cleared_ < args_.counts.size()) {
    const size_t count = args_.counts[n_cleared_];
    if (count > 0) std::memset(args_.outputs[n_cleared_], 0, count * sizeof(float));
    ++n_cleared_;
    return;
  }
  while (next_host_ < layout_->n_hosts()) {
    const std::vector<int>& ranks = layout_->RanksOf(next_host_);
    if (next_local_ == ranks.size()) {
      next_local_ = 0;
      ++next_host_;
      continue;
    }
    const Segment& segment = SegmentOf(ranks[next_local_]);
    if (next_run_ == segment.runs.size()) {
      next_run_ = 0;
      ++next_local_;
      continue;
    }
    const size_t begin = cuts_[static_cast<size_t>(ranks[next_local_])];
    Decode(segment.runs[next_run_++], codes_.get() + begin);
    return;
  }
  SetDone();
}

}  // namespace tfscale
