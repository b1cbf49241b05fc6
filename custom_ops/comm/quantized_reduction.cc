#include "comm/quantized_reduction.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "comm/reduce.h"

namespace tfscale {
namespace {
// Tag offsets. Inside of a host values, between hosts their codes.
constexpr int kContribution = 0;
constexpr int kResult = 1;  // and one more: see Spread
}  // namespace

QuantizedReduction::QuantizedReduction(QuantizedArgs args)
    : args_(std::move(args)), code_(args_.bits, args_.block) {}

size_t QuantizedReduction::bytes() const {
  size_t total = 0;
  for (size_t count : args_.counts) total += code_.Bytes(count);
  return total;
}

std::vector<int> QuantizedReduction::OwnersAt(int rank) const {
  std::vector<int> owners = layout_->Remote(rank);
  owners.push_back(rank);
  return owners;
}

void QuantizedReduction::Begin() {
  const size_t n = static_cast<size_t>(size());
  for (const std::vector<size_t>& cuts : args_.cuts) {
    if (cuts.size() == n + 1) continue;
    throw CommError("cuts must give a part for each of the " + std::to_string(n) +
                    " ranks. Received: " + std::to_string(cuts.size()) + " cuts.");
  }
  layout_ = &hosts();
  // As many chunks as float32 would have.
  chunk_bytes_ = std::max<size_t>(64, channel_.chunk_bytes * static_cast<size_t>(args_.bits) / 32);
  cuts_.assign(1, 0);
  packed_at_.assign(1, 0);
  for (size_t owner = 0; owner < n; ++owner) {
    segments_.push_back(PlanSegment(owner));
    cuts_.push_back(cuts_.back() + segments_.back().n_bytes);
    packed_at_.push_back(packed_at_.back() + segments_.back().n_values);
  }
  const bool is_shared = Local().size() > 1;
  if (is_shared) Pack();
  OpenLanes();
  if (is_allreduce()) {
    result_ = channel_.buffers->Get(cuts_.back());
    spread_.emplace(*transfers_, *layout_, rank(), channel_.tag + kResult, chunk_bytes_,
                    static_cast<int>(arrivals_.size()));
    spread_->Receive(result_.get(), cuts_);
  }
  if (is_shared) SendToHost();
}

QuantizedReduction::Segment QuantizedReduction::PlanSegment(size_t owner) const {
  Segment segment{{}, 0, 0};
  for (size_t i = 0; i < args_.counts.size(); ++i) {
    const size_t begin = args_.cuts[i][owner];
    const size_t count = args_.cuts[i][owner + 1] - begin;
    if (count > 0) AppendRun(segment, {i, begin, count, segment.n_values, segment.n_bytes});
  }
  // Chunk c of the result is complete when chunk c of the blocks is: the last bytes
  // may belong to a block that begins in the chunk before, and leave none for the last.
  const size_t n_chunks = (segment.n_bytes + chunk_bytes_ - 1) / chunk_bytes_;
  while (segment.chunks.size() < n_chunks) {
    segment.chunks.push_back({{}, segment.n_values, 0, segment.n_bytes, 0});
  }
  return segment;
}

// Adds a run to the chunks in which its blocks begin.
void QuantizedReduction::AppendRun(Segment& segment, Run run) const {
  const size_t block_bytes = code_.Bytes(code_.block());
  while (run.count > 0) {
    const size_t chunk = run.byte / chunk_bytes_;
    while (segment.chunks.size() <= chunk) {
      segment.chunks.push_back({{}, run.value, 0, run.byte, 0});
    }
    const size_t left = (chunk + 1) * chunk_bytes_ - run.byte;
    const size_t n_blocks = (left + block_bytes - 1) / block_bytes;
    Run part = run;
    part.count = std::min(run.count, n_blocks * code_.block());
    const size_t n_bytes = code_.Bytes(part.count);
    segment.chunks[chunk].runs.push_back(part);
    segment.chunks[chunk].n_values += part.count;
    segment.chunks[chunk].n_bytes += n_bytes;
    segment.n_values += part.count;
    segment.n_bytes += n_bytes;
    run.begin += part.count;
    run.value += part.count;
    run.byte += n_bytes;
    run.count -= part.count;
  }
}

void QuantizedReduction::Pack() {
  packed_ = channel_.buffers->Get(packed_at_.back() * sizeof(float));
  float* packed = reinterpret_cast<float*>(packed_.get());
  size_t longest = 0;
  for (size_t owner = 0; owner < segments_.size(); ++owner) {
    for (const Chunk& chunk : segments_[owner].chunks) {
      longest = std::max(longest, chunk.n_values);
      for (const Run& run : chunk.runs) {
        ScaledCopy(args_.inputs[run.tensor] + run.begin, packed + packed_at_[owner] + run.value,
                   run.count, DType::kFloat32, args_.prescale);
      }
    }
  }
  host_sum_ = channel_.buffers->Get(longest * sizeof(float));
  if (!keeps_errors()) return;
  // Other ranks of the host keep the errors of what they encode.
  for (size_t i = 0; i < args_.counts.size(); ++i) {
    if (args_.counts[i] > 0) {
      std::memset(args_.new_errors[i], 0, args_.counts[i] * sizeof(float));
    }
  }
}

void QuantizedReduction::OpenLanes() {
  const size_t n_others = Local().size() - 1;
  for (int owner : OwnersAt(rank())) {
    const Segment& segment = SegmentOf(owner);
    n_chunks_ = std::max(n_chunks_, segment.chunks.size());
    lanes_.push_back({owner, channel_.buffers->Get(segment.n_values * sizeof(float) * n_others),
                      channel_.buffers->Get(segment.n_bytes),
                      std::vector<int>(segment.chunks.size(), static_cast<int>(n_others))});
    char* row = lanes_.back().received.get();
    for (int peer : Local()) {
      if (peer == rank()) continue;
      for (size_t c = 0; c < segment.chunks.size(); ++c) {
        const Chunk& chunk = segment.chunks[c];
        const int key = static_cast<int>(arrivals_.size());
        arrivals_.push_back({lanes_.size() - 1, c});
        transfers_->Receive(row + chunk.value * sizeof(float), chunk.n_values * sizeof(float), peer,
                            channel_.tag + kContribution, key);
      }
      row += segment.n_values * sizeof(float);
    }
  }
  const Segment& own = SegmentOf(rank());
  const size_t n_hosts = static_cast<size_t>(layout_->n_hosts());
  received_ = channel_.buffers->Get(own.n_bytes * n_hosts);
  n_hosts_missing_.assign(own.chunks.size(), layout_->n_hosts());
  for (int host = 0; host < layout_->n_hosts(); ++host) {
    if (host == layout_->HostOf(rank())) continue;
    char* row = received_.get() + static_cast<size_t>(host) * own.n_bytes;
    for (size_t c = 0; c < own.chunks.size(); ++c) {
      const int key = static_cast<int>(arrivals_.size());
      arrivals_.push_back({lanes_.size(), c});
      transfers_->Receive(row + own.chunks[c].byte, own.chunks[c].n_bytes,
                          layout_->Partner(host, rank()), channel_.tag + kContribution, key);
    }
  }
}

void QuantizedReduction::SendToHost() {
  const char* packed = packed_.get();
  for (int peer : Local()) {
    if (peer == rank()) continue;
    for (int owner : OwnersAt(peer)) {
      const char* values = packed + packed_at_[static_cast<size_t>(owner)] * sizeof(float);
      for (const Chunk& chunk : SegmentOf(owner).chunks) {
        transfers_->Send(values + chunk.value * sizeof(float), chunk.n_values * sizeof(float), peer,
                         channel_.tag + kContribution);
      }
    }
  }
}

bool QuantizedReduction::EncodeNext() {
  // The first chunks of all lanes, then the second: all links are in use from the start.
  while (next_chunk_ < n_chunks_) {
    Lane& lane = lanes_[next_lane_];
    const bool is_there = next_chunk_ < lane.n_missing.size();
    if (is_there && lane.n_missing[next_chunk_] > 0) return false;
    const size_t c = next_chunk_;
    if (++next_lane_ == lanes_.size()) {
      next_lane_ = 0;
      ++next_chunk_;
    }
    if (!is_there) continue;
    const Chunk& chunk = SegmentOf(lane.owner).chunks[c];
    EncodeChunk(lane, chunk);
    if (lane.owner == rank()) {
      --n_hosts_missing_[c];
    } else {
      transfers_->Send(lane.codes.get() + chunk.byte, chunk.n_bytes, lane.owner,
                       channel_.tag + kContribution);
    }
    return true;
  }
  return false;
}

void QuantizedReduction::EncodeChunk(Lane& lane, const Chunk& chunk) {
  const bool is_summed = Local().size() > 1;
  const float* sum = reinterpret_cast<const float*>(host_sum_.get());
  if (is_summed) {
    const size_t n_values = SegmentOf(lane.owner).n_values;
    const char* row = lane.received.get();
    std::vector<const void*> sources;
    for (int r : Local()) {
      if (r == rank()) {
        const size_t begin = packed_at_[static_cast<size_t>(lane.owner)] + chunk.value;
        sources.push_back(packed_.get() + begin * sizeof(float));
      } else {
        sources.push_back(row + chunk.value * sizeof(float));
        row += n_values * sizeof(float);
      }
    }
    Reduce(sources, host_sum_.get(), chunk.n_values, DType::kFloat32, ReduceOp::kSum, 1.0);
  }
  for (const Run& run : chunk.runs) {
    const float* in =
        is_summed ? sum + (run.value - chunk.value) : args_.inputs[run.tensor] + run.begin;
    const float factor = is_summed ? 1.0f : static_cast<float>(args_.prescale);
    ForBlocks(run, [&](size_t begin, size_t end) {
      const size_t at = run.begin + begin;
      code_.Encode(in + begin, factor, keeps_errors() ? args_.errors[run.tensor] + at : nullptr,
                   end - begin, lane.codes.get() + run.byte + code_.Bytes(begin),
                   keeps_errors() ? args_.new_errors[run.tensor] + at : nullptr);
    });
  }
}

bool QuantizedReduction::ReduceNext() {
  const Segment& own = SegmentOf(rank());
  if (n_reduced_ == own.chunks.size() || n_hosts_missing_[n_reduced_] > 0) return false;
  ReduceChunk(own.chunks[n_reduced_]);
  if (is_allreduce()) {
    const size_t begin = n_reduced_ * chunk_bytes_;
    const size_t offset = cuts_[static_cast<size_t>(rank())] + begin;
    spread_->SendChunk(result_.get() + offset, std::min(chunk_bytes_, own.n_bytes - begin));
  }
  ++n_reduced_;
  return true;
}

void QuantizedReduction::ReduceChunk(const Chunk& chunk) {
  const size_t own_bytes = SegmentOf(rank()).n_bytes;
  char* result = is_allreduce() ? result_.get() + cuts_[static_cast<size_t>(rank())] : nullptr;
  for (const Run& run : chunk.runs) {
    const size_t part = args_.cuts[run.tensor][static_cast<size_t>(rank())];
    ForBlocks(run, [&](size_t begin, size_t end) {
      const size_t byte = run.byte + code_.Bytes(begin);
      std::vector<const char*> sources;
      for (int host = 0; host < layout_->n_hosts(); ++host) {
        const char* row = host == layout_->HostOf(rank())
                              ? lanes_.back().codes.get()
                              : received_.get() + static_cast<size_t>(host) * own_bytes;
        sources.push_back(row + byte);
      }
      if (!is_allreduce()) {
        code_.DecodeSum(sources, args_.postscale, end - begin, args_.segment + run.value + begin);
        return;
      }
      const size_t at = run.begin + begin - part;
      code_.EncodeSum(sources, args_.postscale,
                      keeps_errors() ? args_.owner_errors[run.tensor] + at : nullptr, end - begin,
                      result + byte,
                      keeps_errors() ? args_.new_owner_errors[run.tensor] + at : nullptr);
    });
  }
}

void QuantizedReduction::Advance(const std::vector<int>& completed) {
  for (int key : completed) {
    if (spread_ && spread_->OnCompleted(key)) continue;
    const Arrival& arrival = arrivals_[static_cast<size_t>(key)];
    if (arrival.lane < lanes_.size()) {
      --lanes_[arrival.lane].n_missing[arrival.chunk];
    } else {
      --n_hosts_missing_[arrival.chunk];
    }
  }
  // One chunk of each kind at a time: MPI must be asked for progress in between.
  const bool has_encoded = EncodeNext();
  has_computed_ = ReduceNext() || has_encoded;
}

void QuantizedReduction::DecodeChunk(const char* codes, const Chunk& chunk) {
  for (const Run& run : chunk.runs) {
    ForBlocks(run, [&](size_t begin, size_t end) {
      code_.Decode(codes + run.byte + code_.Bytes(begin), end - begin,
                   args_.outputs[run.tensor] + run.begin + begin);
    });
  }
}

void QuantizedReduction::Finish() {
  if (next_chunk_ < n_chunks_ || n_reduced_ < n_hosts_missing_.size()) return;
  for (; is_allreduce() && next_decoded_ < segments_.size(); ++next_decoded_) {
    const Segment& segment = segments_[next_decoded_];
    if (n_decoded_ == segment.chunks.size()) {
      n_decoded_ = 0;
      continue;
    }
    DecodeChunk(result_.get() + cuts_[next_decoded_], segment.chunks[n_decoded_++]);
    has_computed_ = true;
    return;
  }
  SetDone();
}

}  // namespace tfscale
