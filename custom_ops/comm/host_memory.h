// Memory of other ranks of a host, read directly: what messages would copy once more.
#ifndef TFSCALE_COMM_HOST_MEMORY_H_
#define TFSCALE_COMM_HOST_MEMORY_H_

#include <mpi.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/host_layout.h"

namespace tfscale {

// Returns the process ids of the ranks of `comm` whose memory this rank can read; 0
// for itself and for those that it exchanges messages with. The ranks of a host can all
// read each other or none can, which one of them reports. Collective; blocking; throws
// CommError.
std::vector<pid_t> FindReadable(MPI_Comm comm, const HostLayout& hosts, bool is_wanted);

// Memory of one process that another one may read, as it is told.
struct MemoryRange {
  const char* address;
  size_t bytes;
  const void* permit_address;
  uint64_t permit;
};

// The right of others to read ranges of this process. It can be taken back at any time:
// they look at it after the data, and never use what they have read without it. So memory
// that is freed or used again needs no answer from those that may still read it.
class Permit {
 public:
  ~Permit() { Revoke(); }
  void Grant();
  void Revoke();
  bool is_granted() const { return number_ != 0; }
  // The bytes must stay until all who were told of them have read them, or until Revoke.
  MemoryRange RangeOf(const void* data, size_t bytes) const;

 private:
  std::atomic<uint64_t> number_{0};  // of no other permit; 0: none
};

// A vector that lies in several places, one part after another.
class Pieces {
 public:
  using Places = std::vector<iovec>;
  void Add(const void* data, size_t bytes);
  size_t size() const { return ends_.empty() ? 0 : ends_.back(); }  // in bytes
  // Where the bytes [begin, begin + bytes) are.
  Places Slice(size_t begin, size_t bytes) const;

  static constexpr size_t kMost = 512;  // the system reads from 1024 places at a time

 private:
  std::vector<char*> data_;
  std::vector<size_t> ends_;  // beside data_, in the vector
};

// Copies what lies in `from`, as many bytes as are in `to`, out of the process `pid`.
// `range` has the permit for it. Returns 0, ESRCH if the owner has taken that back or
// its process has ended, or why the system forbids it (errno). Thread-safe.
int ReadPlaces(pid_t pid, const MemoryRange& range, Pieces::Places from, Pieces::Places to);
// As ReadPlaces, `bytes` from `offset` on of the range.
int ReadRange(pid_t pid, const MemoryRange& range, size_t offset, char* to, size_t bytes);

// Returns false for memory that belongs to a device, which no system call can read.
bool IsReadable(const void* data);

}  // namespace tfscale

#endif  // TFSCALE_COMM_HOST_MEMORY_H_
