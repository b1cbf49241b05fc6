#include "comm/reduction.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/reduce.h"

namespace tfscale {
namespace {
// Segment borders and parallel parts fall on cache lines of any element type.
constexpr size_t kAlignElements = 64;
// Elements a thread should at least add up to be worth waking.
constexpr size_t kGrain = 16 * 1024;
// Tag offsets. Inside of a host contributions, between hosts their sums.
constexpr int kContribution = 0;
constexpr int kResult = 1;   // and one more: see Spread
constexpr char kSignal = 1;  // of a finished chunk
// Up to this total (bytes times ranks) few ranks send all of their vectors to each other.
constexpr size_t kDirectBytes = 32 * 1024;
constexpr size_t kDirectRanks = 8;
// With more ranks, some of which share hosts, vectors of up to so many bytes are relayed.
constexpr size_t kRelayedBytes = 4096;
// A message between hosts takes as long as so many of its bytes: 40 us on a link of 1 Gbit/s. On
// faster links it is more, and vectors longer than those that BestWay relays would gain, too.
constexpr size_t kMessageBytes = 5000;
// A segment of up to kFineSegment bytes that goes to another host is sent in about four chunks, so
// that sums and results are under way while the rest of it still comes. Longer ones do not gain.
constexpr size_t kFineSegment = 512 * 1024;
constexpr size_t kFineChunk = 16 * 1024;
// Of what is gathered, which takes no more bytes than with a larger one.
constexpr size_t kGatherRadix = 2;
// Of segments on their way to those who add them up. With 16 ranks a vector is sent 1.5 times in
// 6 messages, with a radix of 2 it would be 2 times in 4 messages and twice as many rounds.
constexpr size_t kSegmentRadix = 4;
// Of vectors that are read from memory; other keys are at least 0.
constexpr int kVectorKey = -2;

bool IsHalf(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }
}  // namespace

Way BestWay(size_t n_ranks, size_t n_hosts, size_t bytes) {
  const Way whole{true, kGatherRadix};
  const Way relayed{false, kSegmentRadix};
  const Way direct{false, 0};
  if (n_ranks <= kDirectRanks) return bytes * n_ranks <= kDirectBytes ? Way{true, n_ranks} : direct;
  if (n_hosts < n_ranks) return bytes <= kRelayedBytes ? whole : direct;
  const size_t segment = (bytes + n_ranks - 1) / n_ranks;
  const auto cost = [](const Relay::Load& load, size_t block) {
    return load.n_messages * kMessageBytes + load.n_blocks * block;
  };
  const Relay::Load gather = Relay::GatherLoad(n_ranks, kGatherRadix);
  const size_t of_whole = cost(gather, bytes);
  const size_t of_relayed =
      cost(Relay::AlltoallLoad(n_ranks, kSegmentRadix), segment) + cost(gather, segment);
  const size_t of_direct = 2 * cost({n_ranks - 1, n_ranks - 1}, segment);
  if (of_whole <= std::min(of_relayed, of_direct)) return whole;
  return of_relayed <= of_direct ? relayed : direct;
}

size_t ChunkBytes(size_t n_hosts, size_t segment, size_t usual) {
  // Of many hosts, messages of several arrive at a time anyway.
  if (n_hosts == 1 || n_hosts > kDirectRanks || segment >= kFineSegment) return usual;
  return std::min(usual, std::max(kFineChunk, segment / 4));
}

Reduction::Reduction(ReductionArgs args) : args_(std::move(args)), element_(SizeOf(args_.dtype)) {
  for (size_t count : args_.counts) total_ += count;
}

void Reduction::Begin() {
  layout_ = &hosts();
  if (element_ == 1) layout_ = &flat_.emplace(HostLayout::Flat(size()));  // see Reduce
  // A sum of several ranks in 16 bits may be too large where their mean is not.
  const bool is_early =
      layout_->is_two_level() && IsHalf(args_.dtype) && args_.op == ReduceOp::kSum;
  (is_early ? host_scale_ : end_scale_) = args_.postscale;
  if (is_allreduce()) {
    const size_t n_hosts = static_cast<size_t>(layout_->n_hosts());
    way_ = args_.way.value_or(BestWay(static_cast<size_t>(size()), n_hosts, bytes()));
  }
  const int neighbour = Local()[Local()[0] == rank() && Local().size() > 1 ? 1 : 0];
  is_by_memory_ = way_.radix == 0 && transfers_->IsByMemory(neighbour, total_ * element_);
  is_fetched_ = is_by_memory_ && is_allreduce() && layout_->n_hosts() == 1;
  PackInputs();
  PlanSegments();
  if (way_.radix > 0) {
    ExchangeByRelay();
  } else {
    ExchangeSegments();
  }
}

// Tensors stay where they are if only ranks of this host need them.
void Reduction::PackInputs() {
  const auto can_stay = [](const auto& tensors) {
    return tensors.size() <= Pieces::kMost && IsReadable(tensors[0]);
  };
  const bool is_single = args_.inputs.size() == 1;
  const bool stay_in = is_by_memory_ ? can_stay(args_.inputs) : is_single;
  const bool stay_out = is_fetched_ ? can_stay(args_.outputs) : is_single || !is_allreduce();
  if (stay_in && args_.prescale == 1.0) {
    if (is_single) in_ = static_cast<const char*>(args_.inputs[0]);
  } else {
    packed_in_ = channel_.buffers->Get(total_ * element_);
    size_t offset = 0;
    for (size_t i = 0; i < args_.inputs.size(); ++i) {
      ScaledCopy(args_.inputs[i], packed_in_.get() + offset, args_.counts[i], args_.dtype,
                 args_.prescale);
      offset += args_.counts[i] * element_;
    }
    in_ = packed_in_.get();
  }
  if (stay_out) {
    if (args_.outputs.size() == 1) out_ = static_cast<char*>(args_.outputs[0]);
  } else {
    packed_out_ = channel_.buffers->Get(total_ * element_);
    out_ = packed_out_.get();
  }
}

void Reduction::PlanSegments() {
  const size_t n = static_cast<size_t>(size());
  size_t begin = 0;
  const size_t even = (total_ + n - 1) / n;
  const size_t aligned = (even + kAlignElements - 1) / kAlignElements * kAlignElements;
  for (size_t r = 0; r < n; ++r) {
    const size_t wanted = is_allreduce() ? aligned : args_.scatter_counts[r];
    const size_t count = std::min(wanted, total_ - begin);
    segments_.push_back({begin, count});
    begin += count;
  }
  own_ = segments_[static_cast<size_t>(rank())];
  // Of the even segment: ranks must agree, and their own ones may be of different lengths.
  const size_t n_hosts = static_cast<size_t>(layout_->n_hosts());
  const size_t chunk = ChunkBytes(n_hosts, even * element_, channel_.chunk_bytes);
  chunk_elements_ = std::max<size_t>(1, chunk / element_);
}

size_t Reduction::n_chunks(const Segment& segment) const {
  return (segment.count + chunk_elements_ - 1) / chunk_elements_;
}

Reduction::Segment Reduction::Chunk(const Segment& segment, size_t chunk) const {
  const size_t begin = chunk * chunk_elements_;
  return {segment.begin + begin, std::min(chunk_elements_, segment.count - begin)};
}

size_t Reduction::Row(const std::vector<int>& ranks, int rank, int own) {
  size_t row = 0;
  for (int other : ranks) {
    if (other == rank) break;
    if (other != own) ++row;
  }
  return row;
}

void Reduction::Add(const std::vector<const void*>& sources, char* out, size_t count,
                    double scale) {
  channel_.workers->For(count, kGrain, [&](size_t begin, size_t end) {
    std::vector<const void*> parts;
    parts.reserve(sources.size());
    for (const void* source : sources) {
      parts.push_back(static_cast<const char*>(source) + begin * element_);
    }
    Reduce(parts, out + begin * element_, end - begin, args_.dtype, args_.op, scale);
  });
}

// Blocks are segments that are equally long, filled up with zeros, or whole vectors.
void Reduction::ExchangeByRelay() {
  const size_t n = static_cast<size_t>(size());
  block_ = way_.is_whole ? total_ : (total_ + n - 1) / n;
  relay_.emplace(channel_, *transfers_, channel_.tag + kContribution, block_ * element_);
  if (way_.is_whole) {
    if (total_ > 0) std::memcpy(relay_->BlockFrom(rank()), in_, total_ * element_);
    relay_->Gather(way_.radix);
  } else {
    for (int r = 0; r < size(); ++r) {
      const size_t begin = std::min(static_cast<size_t>(r) * block_, total_);
      const size_t bytes = std::min(block_, total_ - begin) * element_;
      if (bytes > 0) std::memcpy(relay_->BlockFor(r), in_ + begin * element_, bytes);
      std::memset(relay_->BlockFor(r) + bytes, 0, block_ * element_ - bytes);
    }
    relay_->Alltoall(way_.radix);
  }
  if (relay_->is_complete()) OnRelayed();  // one rank
}

void Reduction::OnRelayed() {
  if (way_.is_whole) {
    ReduceBlocks(out_);
  } else if (!is_summed_) {
    ReduceBlocks(relay_->BlockFrom(rank()));
    is_summed_ = true;
    relay_->Gather(kGatherRadix);
    if (relay_->is_complete()) OnRelayed();  // one rank
  } else {
    for (size_t begin = 0, r = 0; begin < total_; begin += block_, ++r) {
      std::memcpy(out_ + begin * element_, relay_->BlockFrom(static_cast<int>(r)),
                  std::min(block_, total_ - begin) * element_);
    }
  }
}

// As in segments: the bits must not depend on the size of a vector.
void Reduction::ReduceBlocks(char* out) {
  std::vector<const void*> sources;
  BufferPool::Buffer sums{nullptr, {}};
  if (!layout_->is_two_level()) {
    for (int r = 0; r < size(); ++r) sources.push_back(relay_->BlockFrom(r));
  } else {
    sums = channel_.buffers->Get(block_ * element_ * static_cast<size_t>(layout_->n_hosts()));
    for (int host = 0; host < layout_->n_hosts(); ++host) {
      std::vector<const void*> local;
      for (int r : layout_->RanksOf(host)) local.push_back(relay_->BlockFrom(r));
      char* sum = sums.get() + static_cast<size_t>(host) * block_ * element_;
      Add(local, sum, block_, host_scale_);
      sources.push_back(sum);
    }
  }
  Add(sources, out, block_, end_scale_);
}

std::vector<int> Reduction::OwnersAt(int rank) const {
  std::vector<int> owners = layout_->Remote(rank);
  owners.push_back(rank);
  return owners;
}

void Reduction::OpenLane(int owner) {
  const Segment& segment = segments_[static_cast<size_t>(owner)];
  const size_t n_others = Local().size() - 1;
  const size_t bytes = segment.count * element_;
  const int n_missing = is_by_memory_ ? 1 : static_cast<int>(Local().size());
  lanes_.push_back({owner,
                    segment,
                    channel_.buffers->Get(is_by_memory_ ? 0 : bytes * n_others),
                    {nullptr, {}},
                    nullptr,
                    std::vector<int>(n_chunks(segment), n_missing),
                    0});
  Lane& lane = lanes_.back();
  const bool is_final = layout_->n_hosts() == 1;  // the sum over the host is the result
  if (n_others == 0 && host_scale_ == 1.0) {
    lane.sum = in_ + segment.begin * element_;
  } else if (!is_final) {
    lane.sum_buffer = channel_.buffers->Get(bytes);
    lane.sum = lane.sum_buffer.get();
  }
  for (size_t c = 0; c < n_chunks(segment) && !is_by_memory_; ++c) {
    const Segment part = Chunk(segment, c);
    const int key = static_cast<int>(arrivals_.size());
    arrivals_.push_back({&lane, c, -1});
    for (int peer : Local()) {
      if (peer == rank()) continue;
      char* row = lane.received.get() + Row(Local(), peer, rank()) * bytes;
      transfers_->Receive(row + (part.begin - segment.begin) * element_, part.count * element_,
                          peer, channel_.tag + kContribution, key);
    }
  }
}

void Reduction::ExchangeSegments() {
  const std::vector<int> owners = OwnersAt(rank());
  lanes_.reserve(owners.size());  // arrivals point to them
  for (int owner : owners) OpenLane(owner);
  const int own_host = layout_->HostOf(rank());
  const size_t n_rows = layout_->n_hosts() > 1 ? static_cast<size_t>(layout_->n_hosts()) : 0;
  received_ = channel_.buffers->Get(own_.count * element_ * n_rows);
  n_hosts_missing_.assign(n_chunks(own_), layout_->n_hosts());
  for (size_t c = 0; c < n_chunks(own_); ++c) {
    const Segment part = Chunk(own_, c);
    const int key = static_cast<int>(arrivals_.size());
    arrivals_.push_back({nullptr, c, -1});
    for (int host = 0; host < layout_->n_hosts(); ++host) {
      if (host == own_host) continue;
      char* row = received_.get() + static_cast<size_t>(host) * own_.count * element_;
      transfers_->Receive(row + (part.begin - own_.begin) * element_, part.count * element_,
                          layout_->Partner(host, rank()), channel_.tag + kContribution, key);
    }
  }
  if (is_allreduce() && !is_fetched_) {
    std::vector<size_t> cuts;
    cuts.reserve(segments_.size() + 1);
    for (const Segment& segment : segments_) cuts.push_back(segment.begin * element_);
    cuts.push_back(total_ * element_);
    spread_.emplace(*transfers_, *layout_, rank(), channel_.tag + kResult,
                    chunk_elements_ * element_, static_cast<int>(arrivals_.size()));
    spread_->Receive(out_, cuts);
  }
  if (is_by_memory_) {
    ShareVectors();
    return;
  }
  for (int peer : Local()) {
    if (peer == rank()) continue;
    for (int owner : OwnersAt(peer)) {
      const Segment& theirs = segments_[static_cast<size_t>(owner)];
      for (size_t c = 0; c < n_chunks(theirs); ++c) {
        const Segment part = Chunk(theirs, c);
        transfers_->Send(in_ + part.begin * element_, part.count * element_, peer,
                         channel_.tag + kContribution);
      }
    }
  }
  for (Lane& lane : lanes_) {
    for (size_t c = 0; c < lane.n_missing.size(); ++c) OnContribution(lane, c);  // its own
  }
}

void Reduction::ShareVectors() {
  for (size_t l = lanes_.size(); l-- > 0;) {
    for (size_t c = lanes_[l].n_missing.size(); c-- > 0;) left_.emplace_back(l, c);
  }
  Pieces input, output;
  if (in_ != nullptr) {
    input.Add(in_, total_ * element_);
  } else {
    for (size_t i = 0; i < args_.inputs.size(); ++i) {
      input.Add(args_.inputs[i], args_.counts[i] * element_);
    }
  }
  if (out_ != nullptr) {
    output.Add(out_, total_ * element_);
  } else {
    for (size_t i = 0; i < args_.outputs.size(); ++i) {
      output.Add(args_.outputs[i], args_.counts[i] * element_);
    }
  }
  vectors_.emplace(channel_, *transfers_, Local());
  vectors_->Share(std::move(input), is_fetched_ ? std::move(output) : Pieces(), total_ * element_,
                  channel_.tag + kContribution, kVectorKey);
  for (int peer : Local()) {
    const size_t n = n_chunks(segments_[static_cast<size_t>(peer)]);
    for (size_t c = 0; c < n && is_fetched_ && peer != rank(); ++c) {
      const int key = static_cast<int>(arrivals_.size());
      arrivals_.push_back({nullptr, c, peer});
      signals_.push_back(0);
      transfers_->ReceiveMessage(&signals_.back(), 1, peer, channel_.tag + kResult, key);
    }
  }
}

bool Reduction::DoNextChunk() {
  if (!vectors_ || !vectors_->is_complete()) return false;
  if (!left_.empty()) {
    const auto [lane, chunk] = left_.back();
    left_.pop_back();
    OnContribution(lanes_[lane], chunk);
  } else if (!fetches_.empty()) {
    const Arrival next = fetches_.front();
    fetches_.pop_front();
    const Segment part = Chunk(segments_[static_cast<size_t>(next.owner)], next.chunk);
    vectors_->Fetch(next.owner, part.begin * element_, part.count * element_);
  } else {
    return false;
  }
  return true;
}

std::vector<const void*> Reduction::RowsOf(const Lane& lane, size_t offset) const {
  std::vector<const void*> rows;
  for (int r : Local()) {
    const char* row =
        r == rank() ? in_ + lane.segment.begin * element_
                    : lane.received.get() + Row(Local(), r, rank()) * lane.segment.count * element_;
    rows.push_back(row + offset);
  }
  return rows;
}

void Reduction::OnContribution(Lane& lane, size_t chunk) {
  if (--lane.n_missing[chunk] > 0) return;
  const Segment part = Chunk(lane.segment, chunk);
  const size_t offset = (part.begin - lane.segment.begin) * element_;
  const bool is_own = lane.owner == rank();
  const bool is_final = layout_->n_hosts() == 1;
  if (lane.sum_buffer || is_final) {
    const double scale = is_final ? end_scale_ : host_scale_;
    char* to = nullptr;
    if (!is_final) {
      to = lane.sum_buffer.get() + offset;
    } else if (out_ != nullptr) {
      to = out_ + (is_allreduce() ? own_.begin * element_ : 0) + offset;
    }
    if (is_by_memory_) {
      if (!vectors_->Reduce(args_, part.begin, part.count, scale, to)) return;
    } else {
      Add(RowsOf(lane, offset), to, part.count, scale);
    }
  }
  if (!is_own) {
    SendSums(lane);
  } else if (is_final) {
    n_hosts_missing_[chunk] = 0;
  } else {
    OnHostSum(chunk);
  }
}

void Reduction::SendSums(Lane& lane) {
  for (; lane.n_sent < lane.n_missing.size(); ++lane.n_sent) {
    if (lane.n_missing[lane.n_sent] > 0) return;
    const Segment part = Chunk(lane.segment, lane.n_sent);
    transfers_->Send(lane.sum + (part.begin - lane.segment.begin) * element_, part.count * element_,
                     lane.owner, channel_.tag + kContribution);
  }
}

void Reduction::OnHostSum(size_t chunk) {
  if (--n_hosts_missing_[chunk] > 0) return;
  const Segment part = Chunk(own_, chunk);
  const size_t offset = (part.begin - own_.begin) * element_;
  std::vector<const void*> sources;
  for (int host = 0; host < layout_->n_hosts(); ++host) {
    const char* row = host == layout_->HostOf(rank())
                          ? lanes_.back().sum
                          : received_.get() + static_cast<size_t>(host) * own_.count * element_;
    sources.push_back(row + offset);
  }
  Add(sources, out_ + (is_allreduce() ? own_.begin * element_ : 0) + offset, part.count,
      end_scale_);
}

void Reduction::SendResults() {
  for (; n_results_sent_ < n_hosts_missing_.size(); ++n_results_sent_) {
    if (n_hosts_missing_[n_results_sent_] > 0) return;
    const Segment part = Chunk(own_, n_results_sent_);
    if (spread_) spread_->SendChunk(out_ + part.begin * element_, part.count * element_);
    for (int peer : Local()) {
      if (!is_fetched_ || peer == rank()) continue;
      transfers_->SendMessage(&kSignal, 1, peer, channel_.tag + kResult);
    }
  }
}

void Reduction::Advance(const std::vector<int>& completed) {
  for (int key : completed) {
    if (key == kVectorKey) {
      vectors_->OnCompleted();
    } else if (relay_) {
      relay_->OnCompleted(key);
      if (relay_->is_complete()) OnRelayed();
    } else if (!spread_ || !spread_->OnCompleted(key)) {
      const Arrival& arrival = arrivals_[static_cast<size_t>(key)];
      if (arrival.owner >= 0) {
        fetches_.push_back(arrival);
      } else if (arrival.lane == nullptr) {
        OnHostSum(arrival.chunk);
      } else {
        OnContribution(*arrival.lane, arrival.chunk);
      }
    }
  }
  has_computed_ = DoNextChunk();
  if (is_allreduce()) SendResults();
}

void Reduction::Finish() {
  if (!left_.empty() || !fetches_.empty()) return;
  if (packed_out_) {
    size_t offset = 0;
    for (size_t i = 0; i < args_.outputs.size(); ++i) {
      if (args_.counts[i] == 0) continue;  // its pointer may be null
      std::memcpy(args_.outputs[i], packed_out_.get() + offset, args_.counts[i] * element_);
      offset += args_.counts[i] * element_;
    }
  }
  SetDone();
}

}  // namespace tfscale
