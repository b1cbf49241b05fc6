#include "comm/relay.h"

#include <algorithm>
#include <cstring>

namespace tfscale {

Relay::Load Relay::GatherLoad(size_t n_ranks, size_t radix) {
  return {AlltoallLoad(n_ranks, radix).n_messages, n_ranks - 1};
}

Relay::Load Relay::AlltoallLoad(size_t n_ranks, size_t radix) {
  Load load{0, 0};
  for (size_t stride = 1; stride < n_ranks; stride *= radix) {
    load.n_messages += std::min(radix - 1, (n_ranks - 1) / stride);
    const size_t period = stride * radix;  // of the digit, which is zero at its beginning
    const size_t n_zeros = n_ranks / period * stride + std::min(n_ranks % period, stride);
    load.n_blocks += n_ranks - n_zeros;
  }
  return load;
}

Relay::Relay(const Channel& channel, Transfers& transfers, int tag, size_t block_bytes)
    : channel_(channel),
      transfers_(transfers),
      tag_(tag),
      block_bytes_(block_bytes),
      rank_(channel.comm->rank()),
      n_ranks_(static_cast<size_t>(channel.comm->size())),
      blocks_(channel.buffers->Get(n_ranks_ * block_bytes)) {}

void Relay::Start(bool is_gather, size_t radix) {
  is_gather_ = is_gather;
  radix_ = radix;
  stride_ = 1;
  PostRound();
}

template <typename Copy>
void Relay::ForRuns(size_t step, Copy copy) const {
  for (size_t row = step; row < n_ranks_; row += radix_ * stride_) {
    copy(Row(row), std::min(stride_, n_ranks_ - row) * block_bytes_);
  }
}

// Row i of a gather is the block of the rank i after this one; after a round with all strides
// below s, the first s of them are here. Row i of an alltoall is a block that comes from, or goes
// to, a rank i ranks away: it moves by each digit of i once.
void Relay::PostRound() {
  for (size_t step = stride_; step < n_ranks_ && step < radix_ * stride_; step += stride_) {
    const int source = static_cast<int>((static_cast<size_t>(rank_) + step) % n_ranks_);
    const int target = static_cast<int>((static_cast<size_t>(rank_) + n_ranks_ - step) % n_ranks_);
    const int key = static_cast<int>(messages_.size());
    messages_.push_back({step, {nullptr, {}}, {nullptr, {}}});
    Message& message = messages_.back();
    size_t bytes = 0;
    char* from = Row(0);
    char* to = Row(step);
    if (is_gather_) {
      bytes = std::min(stride_, n_ranks_ - step) * block_bytes_;
    } else {
      ForRuns(step, [&](char*, size_t n) { bytes += n; });
      message.sent = channel_.buffers->Get(bytes);
      message.received = channel_.buffers->Get(bytes);
      from = message.sent.get();
      to = message.received.get();
      char* next = from;
      ForRuns(step, [&](const char* rows, size_t n) {
        std::memcpy(next, rows, n);
        next += n;
      });
    }
    ++n_missing_;
    transfers_.ReceiveMessage(to, bytes, source, tag_, key);
    transfers_.SendMessage(from, bytes, target, tag_);
  }
}

void Relay::OnCompleted(int key) {
  const Message& message = messages_[static_cast<size_t>(key)];
  if (!is_gather_) {
    const char* next = message.received.get();
    ForRuns(message.step, [&](char* rows, size_t n) {
      std::memcpy(rows, next, n);
      next += n;
    });
  }
  if (--n_missing_ > 0) return;
  stride_ *= radix_;
  PostRound();
}

}  // namespace tfscale
