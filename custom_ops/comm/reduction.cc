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
constexpr int kContribution = 0;  // tag offset: data to be reduced
constexpr int kResult = 1;        // tag offset: reduced data
}  // namespace

Reduction::Reduction(ReductionArgs args) : args_(std::move(args)), element_(SizeOf(args_.dtype)) {
  for (size_t count : args_.counts) total_ += count;
}

void Reduction::Begin() {
  PackInputs();
  PlanSegments();
  const size_t n = static_cast<size_t>(size());
  if (is_allreduce() && total_ * element_ * n <= args_.direct_bytes) {
    ExchangeWhole();
  } else {
    ExchangeSegments();
  }
}

void Reduction::PackInputs() {
  const bool is_single = args_.inputs.size() == 1;
  if (is_single && args_.prescale == 1.0) {
    in_ = static_cast<const char*>(args_.inputs[0]);
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
  if (is_single || !is_allreduce()) {
    out_ = static_cast<char*>(args_.outputs[0]);
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
}

size_t Reduction::n_chunks(const Segment& segment) const {
  const size_t per_chunk = std::max<size_t>(1, channel_.chunk_bytes / element_);
  return (segment.count + per_chunk - 1) / per_chunk;
}

Reduction::Segment Reduction::Chunk(const Segment& segment, size_t chunk) const {
  const size_t per_chunk = std::max<size_t>(1, channel_.chunk_bytes / element_);
  const size_t begin = chunk * per_chunk;
  return {segment.begin + begin, std::min(per_chunk, segment.count - begin)};
}

char* Reduction::Received(int sender) const {
  const size_t row = static_cast<size_t>(sender < rank() ? sender : sender - 1);
  return received_.get() + row * own_.count * element_;
}

// Small vectors: one round, every rank adds up everything.
void Reduction::ExchangeWhole() {
  is_whole_ = true;
  own_ = {0, total_};
  received_ = channel_.buffers->Get(total_ * element_ * static_cast<size_t>(size() - 1));
  n_missing_.assign(1, size() - 1);
  for (int i = 1; i < size(); ++i) {
    const int sender = (rank() - i + size()) % size();
    transfers_->Receive(Received(sender), total_ * element_, sender, channel_.tag + kContribution,
                        0);
  }
  for (int i = 1; i < size(); ++i) {
    transfers_->Send(in_, total_ * element_, (rank() + i) % size(), channel_.tag + kContribution);
  }
}

void Reduction::ExchangeSegments() {
  const size_t n_own = n_chunks(own_);
  received_ = channel_.buffers->Get(own_.count * element_ * static_cast<size_t>(size() - 1));
  n_missing_.assign(n_own, size() - 1);
  for (size_t c = 0; c < n_own; ++c) {
    const Segment part = Chunk(own_, c);
    for (int i = 1; i < size(); ++i) {
      const int sender = (rank() - i + size()) % size();
      transfers_->Receive(Received(sender) + (part.begin - own_.begin) * element_,
                          part.count * element_, sender, channel_.tag + kContribution,
                          static_cast<int>(c));
    }
  }
  for (int i = 1; i < size(); ++i) {
    const int peer = (rank() + i) % size();
    const Segment& theirs = segments_[static_cast<size_t>(peer)];
    for (size_t c = 0; c < n_chunks(theirs); ++c) {
      const Segment part = Chunk(theirs, c);
      transfers_->Send(in_ + part.begin * element_, part.count * element_, peer,
                       channel_.tag + kContribution);
      if (is_allreduce()) {
        transfers_->Receive(out_ + part.begin * element_, part.count * element_, peer,
                            channel_.tag + kResult);
      }
    }
  }
}

void Reduction::ReduceRange(size_t begin, size_t count) {
  char* result = out_ + (is_allreduce() ? own_.begin : 0) * element_;
  channel_.workers->For(count, kGrain, [&](size_t part_begin, size_t part_end) {
    std::vector<const void*> sources;
    for (int r = 0; r < size(); ++r) {
      const char* source = r == rank() ? in_ + own_.begin * element_ : Received(r);
      sources.push_back(source + (begin + part_begin) * element_);
    }
    Reduce(sources, result + (begin + part_begin) * element_, part_end - part_begin, args_.dtype,
           args_.op, args_.postscale);
  });
}

void Reduction::ReduceChunk(size_t chunk) {
  const Segment part = Chunk(own_, chunk);
  ReduceRange(part.begin - own_.begin, part.count);
}

void Reduction::SendResults() {
  for (; n_results_sent_ < n_missing_.size(); ++n_results_sent_) {
    if (n_missing_[n_results_sent_] > 0) return;
    const Segment part = Chunk(own_, n_results_sent_);
    for (int i = 1; i < size(); ++i) {
      transfers_->Send(out_ + part.begin * element_, part.count * element_, (rank() + i) % size(),
                       channel_.tag + kResult);
    }
  }
}

void Reduction::Advance(const std::vector<int>& completed) {
  for (int key : completed) {
    const size_t chunk = static_cast<size_t>(key);
    if (--n_missing_[chunk] > 0) continue;
    if (is_whole_) {
      ReduceRange(0, total_);
    } else {
      ReduceChunk(chunk);
    }
  }
  if (is_allreduce() && !is_whole_ && size() > 1) SendResults();
}

void Reduction::Finish() {
  if (size() == 1) ReduceRange(0, total_);
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
