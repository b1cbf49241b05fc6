// The way of every rank's segment of a vector to all ranks.
#ifndef TFSCALE_COMM_SPREAD_H_
#define TFSCALE_COMM_SPREAD_H_

#include <cstddef>
#include <vector>

#include "comm/communicator.h"
#include "comm/host_layout.h"

namespace tfscale {

// An owner sends its segment to the other ranks of its host, and to its partner
// on every other host, which passes it on there. So each link between hosts
// carries it once per host. Segments are sent in chunks, so that passing on
// overlaps with receiving. Part of an operation, which it shares the transfers with.
class Spread {
 public:
  // Uses the tags `tag` and `tag` + 1, and keys from `first_key` on for what is passed on.
  Spread(Transfers& transfers, const HostLayout& hosts, int rank, int tag, size_t chunk_bytes,
         int first_key);

  // The next chunk of the own segment: `bytes` of them, less only at its end.
  void SendChunk(const char* data, size_t bytes);
  // All of the own segment at once.
  void SendAll(const char* data, size_t bytes);
  // The segments of others will arrive in `vector`; rank r's are the bytes
  // [cuts[r], cuts[r + 1]) of it.
  void Receive(char* vector, const std::vector<size_t>& cuts);
  // Whether the first `n_chunks` chunks of every segment from other hosts are here, as far as they
  // have so many.
  bool HasArrived(size_t n_chunks) const;
  // Returns whether a completed key is one of the spread's, and passes on what arrived.
  bool OnCompleted(int key);

 private:
  struct Chunk {
    size_t number;  // in its segment
    int owner;
    char* data;
    size_t bytes;
    bool has_arrived;
  };

  // The chunks that `rank` passes on to its host, in the order in which it sends
  // them: the first of all segments, then the second of all, and so on.
  std::vector<Chunk> PassedOnBy(int rank, char* vector, const std::vector<size_t>& cuts) const;

  Transfers& transfers_;
  const HostLayout& hosts_;
  const int rank_;
  const int tag_;
  const size_t chunk_bytes_;
  const int first_key_;
  std::vector<Chunk> passed_on_;  // by this rank
  size_t n_passed_on_ = 0;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_SPREAD_H_
