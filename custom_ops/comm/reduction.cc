#include "comm/reduction.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/collectives.h"
#include "comm/reduce.h"
#include "comm/relay.h"

namespace tfscale {
namespace {
// Segment borders and parallel parts fall on cache lines of any element type.
constexpr size_t kAlignElements = 64;
// Elements a thread should at least add up to be worth waking.
constexpr size_t kGrain = 16 * 1024;
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
// Of segments on their way to those who add them up. With 16 ranks a vector is sent 1.5 times in
// 6 messages, with a radix of 2 it would be 2 times in 4 messages and twice as many rounds.
constexpr size_t kSegmentRadix = 4;

bool IsHalf(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }
}  // namespace

Way BestWay(size_t n_ranks, size_t n_hosts, size_t bytes) {
  const Way whole{true, Relay::kGatherRadix};
  const Way relayed{false, kSegmentRadix};
  const Way direct{false, 0};
  if (n_ranks <= kDirectRanks) return bytes * n_ranks <= kDirectBytes ? Way{true, n_ranks} : direct;
  if (n_hosts < n_ranks) return bytes <= kRelayedBytes ? whole : direct;
  const size_t segment = (bytes + n_ranks - 1) / n_ranks;
  const auto cost = [](const Relay::Load& load, size_t block) {
    return load.n_messages * kMessageBytes + load.n_blocks * block;
  };
  const Relay::Load gather = Relay::GatherLoad(n_ranks, Relay::kGatherRadix);
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

size_t ReducedVector::even_count() const { return (total + n_ranks() - 1) / n_ranks(); }

// Of the even segment: ranks must agree, and their own ones may be of different lengths.
size_t ReducedVector::chunk_bytes() const {
  const size_t n_hosts = static_cast<size_t>(hosts.n_hosts());
  const size_t chunk = ChunkBytes(n_hosts, even_count() * element, channel.chunk_bytes);
  return std::max<size_t>(1, chunk / element) * element;
}

std::vector<Lanes::Segment> ReducedVector::Segments() const {
  const size_t aligned = (even_count() + kAlignElements - 1) / kAlignElements * kAlignElements;
  std::vector<Lanes::Segment> segments;
  size_t begin = 0;
  for (size_t r = 0; r < n_ranks(); ++r) {
    const size_t wanted = is_allreduce() ? aligned : args.scatter_counts[r];
    const size_t bytes = std::min(wanted, total - begin / element) * element;
    segments.push_back({begin, bytes, bytes, {}});
    for (size_t at = 0; at < bytes; at += chunk_bytes()) {
      const size_t n = std::min(chunk_bytes(), bytes - at);
      segments.back().chunks.push_back({at, n, at, n});
    }
    begin += bytes;
  }
  return segments;
}

void ReducedVector::Add(const std::vector<const char*>& sources, char* to, size_t bytes,
                        double scale) const {
  channel.workers->For(bytes / element, kGrain, [&](size_t begin, size_t end) {
    std::vector<const void*> parts;
    parts.reserve(sources.size());
    for (const char* source : sources) parts.push_back(source + begin * element);
    Reduce(parts, to + begin * element, end - begin, args.dtype, args.op, scale);
  });
}

Reduction::Reduction(ReductionArgs args) : args_(std::move(args)), element_(SizeOf(args_.dtype)) {
  for (size_t count : args_.counts) total_ += count;
}

void Reduction::Begin() {
  const HostLayout* layout = &hosts();
  if (element_ == 1) layout = &flat_.emplace(HostLayout::Flat(size()));  // see Reduce
  // A sum of several ranks in 16 bits may be too large where their mean is not.
  const bool is_early = layout->is_two_level() && IsHalf(args_.dtype) && args_.op == ReduceOp::kSum;
  const double host_scale = is_early ? args_.postscale : 1.0;
  const double end_scale = is_early ? 1.0 : args_.postscale;
  const bool is_allreduce = args_.scatter_counts.empty();
  Way way{false, 0};
  if (is_allreduce) {
    const size_t n_hosts = static_cast<size_t>(layout->n_hosts());
    way = args_.way.value_or(BestWay(static_cast<size_t>(size()), n_hosts, bytes()));
  }
  vector_.emplace(ReducedVector{args_,
                                channel_,
                                *transfers_,
                                *layout,
                                way,
                                element_,
                                total_,
                                host_scale,
                                end_scale,
                                nullptr,
                                nullptr,
                                {},
                                {}});
  const std::vector<int>& local = vector_->Local();
  const int neighbour = local[local[0] == rank() && local.size() > 1 ? 1 : 0];
  const bool is_by_memory = way.radix == 0 && transfers_->IsByMemory(neighbour, bytes());
  const bool is_one_host = layout->n_hosts() == 1;
  Pack(is_by_memory, is_by_memory && is_one_host && is_allreduce);
  if (way.radix > 0) {
    algorithm_ = MakeRelayedReduction(*vector_);
  } else if (is_by_memory && is_one_host) {
    algorithm_ = MakeMemoryReduction(*vector_);
  } else {
    algorithm_ = MakeSegmentReduction(*vector_, is_by_memory);
  }
  algorithm_->Begin();
}

void Reduction::Pack(bool are_inputs_read, bool are_outputs_read) {
  const auto can_stay = [](const auto& tensors) {
    return tensors.size() <= Pieces::kMost && IsReadable(tensors[0]);
  };
  const bool is_single = args_.inputs.size() == 1;
  const bool stay_in = are_inputs_read ? can_stay(args_.inputs) : is_single;
  if (stay_in && args_.prescale == 1.0) {
    if (is_single) vector_->in = static_cast<const char*>(args_.inputs[0]);
  } else {
    packed_in_ = channel_.buffers->Get(bytes());
    size_t offset = 0;
    for (size_t i = 0; i < args_.inputs.size(); ++i) {
      ScaledCopy(args_.inputs[i], packed_in_.get() + offset, args_.counts[i], args_.dtype,
                 args_.prescale);
      offset += args_.counts[i] * element_;
    }
    vector_->in = packed_in_.get();
  }
  const bool stay_out =
      are_outputs_read ? can_stay(args_.outputs) : is_single || !vector_->is_allreduce();
  if (!stay_out) packed_out_ = channel_.buffers->Get(bytes());
  if (!stay_out || args_.outputs.size() == 1) {
    vector_->out = stay_out ? static_cast<char*>(args_.outputs[0]) : packed_out_.get();
  }
  const auto add = [this](const auto* whole, const auto& tensors, Pieces* places) {
    if (whole != nullptr) return places->Add(whole, bytes());
    for (size_t i = 0; i < tensors.size(); ++i) {
      places->Add(tensors[i], args_.counts[i] * element_);
    }
  };
  if (are_inputs_read) add(vector_->in, args_.inputs, &vector_->in_places);
  if (are_outputs_read) add(vector_->out, args_.outputs, &vector_->out_places);
}

void Reduction::Advance(const std::vector<int>& completed) {
  has_computed_ = algorithm_->Advance(completed);
}

void Reduction::Finish() {
  if (!algorithm_->is_complete()) return;
  for (size_t i = 0, offset = 0; packed_out_ && i < args_.outputs.size(); ++i) {
    if (args_.counts[i] == 0) continue;  // its pointer may be null
    std::memcpy(args_.outputs[i], packed_out_.get() + offset, args_.counts[i] * element_);
    offset += args_.counts[i] * element_;
  }
  SetDone();
}

OperationHandle MakeReduction(ReductionArgs args) {
  return HandleOf(new Reduction(std::move(args)));
}

}  // namespace tfscale
