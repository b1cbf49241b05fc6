// Broadcast from one rank to all others.
#ifndef TFSCALE_COMM_BROADCAST_H_
#define TFSCALE_COMM_BROADCAST_H_

#include <cstddef>
#include <vector>

#include "comm/operation.h"

namespace tfscale {

// A binomial tree over the hosts, and one over the ranks of each: log2 hops. Chunks
// are forwarded as they arrive, so a long message fills all links of the tree at once.
class Broadcast : public Operation {
 public:
  // `input` is read on the root only; `output` is written on all ranks, the
  // root included, and may equal `input`.
  Broadcast(const void* input, void* output, size_t bytes, int root);
  size_t bytes() const override { return bytes_; }

 protected:
  void Begin() override;
  void Advance(const std::vector<int>& completed) override;
  void Finish() override { SetDone(); }

 private:
  void SendChunk(size_t chunk);
  size_t ChunkBytes(size_t chunk) const;

  const void* input_;
  char* output_;
  const size_t bytes_;
  const int root_;
  std::vector<int> children_;
  std::vector<bool> has_chunk_;
  size_t n_sent_ = 0;  // chunks passed on, in order: the last may arrive first
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_BROADCAST_H_
