// Gathers and alltoall of any element type: bytes are moved, not computed with.
#ifndef TFSCALE_COMM_GATHER_H_
#define TFSCALE_COMM_GATHER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/arguments.h"
#include "comm/operation.h"
#include "comm/quantize.h"
#include "comm/spread.h"

namespace tfscale {

// Base of allgather and alltoall: every rank sends every other the number of
// bytes, and then the bytes without waiting for an answer.
class Exchange : public Operation {
 protected:
  explicit Exchange(AllocateOutput allocate) : allocate_(std::move(allocate)) {}

  void Begin() override;
  void Advance(const std::vector<int>& completed) override;
  void Finish() override;
  // How many bytes this rank has for `peer`, itself included.
  virtual int64_t BytesFor(int peer) const = 0;
  // Sends what this rank has for others.
  virtual void SendData() = 0;
  // Rank r's data are to be the bytes [cuts[r], cuts[r + 1]) of `out`.
  virtual void ReceiveData(char* out, const std::vector<size_t>& cuts) = 0;
  virtual void OnData(int key) { static_cast<void>(key); }

  static constexpr int kSizes = 0;  // tag offsets
  static constexpr int kData = 1;   // and one more
  static constexpr int kSizeKey = 0;
  static constexpr int kFirstDataKey = 1;

 private:
  AllocateOutput allocate_;
  std::vector<int64_t> sizes_in_;
  std::vector<int64_t> sizes_out_;
  int n_sizes_missing_ = 0;
  bool is_posted_ = false;
};

// Every rank receives the inputs of all ranks, in rank order. Lengths may differ.
class Allgather : public Exchange {
 public:
  Allgather(const void* input, size_t bytes, AllocateOutput allocate);
  size_t bytes() const override { return bytes_; }

 protected:
  int64_t BytesFor(int) const override { return static_cast<int64_t>(bytes_); }
  void SendData() override;
  void ReceiveData(char* out, const std::vector<size_t>& cuts) override;
  void OnData(int key) override { spread_->OnCompleted(key); }

 private:
  const char* input_;
  const size_t bytes_;
  std::optional<Spread> spread_;
};

// Each rank has one segment of a buffer; afterwards all ranks have all of it.
// The cuts are known everywhere, so that one round without sizes is enough and
// everything arrives in its place.
class SegmentGather : public Operation {
 public:
  // Rank r's segment are the bytes [cuts[r], cuts[r + 1]); it may be empty.
  SegmentGather(void* buffer, std::vector<size_t> cuts)
      : buffer_(static_cast<char*>(buffer)), cuts_(std::move(cuts)) {}
  // Of the buffer: no rank's share alone says how long the gather takes.
  size_t bytes() const override { return cuts_.back(); }
  void SetPace(Pace pace) override;

 protected:
  void Begin() override;
  void Advance(const std::vector<int>& completed) override;
  void Finish() override;

 private:
  // Chunks that a gentle gather is ahead of what it has received. What MPI has sent may still be
  // in a socket's buffer, before any later message; what has arrived from others is not.
  static constexpr size_t kAhead = 2;

  size_t end() const { return cuts_[static_cast<size_t>(rank()) + 1]; }
  void SendMore();
  bool MaySend() const;

  char* buffer_;
  const std::vector<size_t> cuts_;
  std::optional<Spread> spread_;
  size_t chunk_bytes_ = 0;
  size_t next_ = 0;  // the first byte of the own segment that has not been sent
  Pace pace_ = Pace::kFree;
};

// A SegmentGather with few bits per value, of vectors of which all ranks have an old
// value. An owner encodes what its part of the new value differs by from the old one
// (BlockCode, blocks are counted from the beginning of the part), and every rank, the
// owner included, adds what the codes decode to to the old value. So ranks stay equal bit
// by bit, and what is rounded off is part of the next difference as long as the owner
// keeps the new value.
class ChangeGather : public Operation {
 public:
  explicit ChangeGather(ChangesArgs args);
  // Of all codes: see SegmentGather.
  size_t bytes() const override { return cuts_.back(); }

 protected:
  void Begin() override;
  void Advance(const std::vector<int>& completed) override;
  void Finish() override;
  bool has_computed() const override { return has_computed_; }

 private:
  // One owner's part of a vector; positions in values, and of its code in bytes.
  struct Run {
    size_t begin;
    size_t count;
    const float* old;
    size_t byte;
  };
  // Calls work(begin, end) for parts of a run, in parallel; parts begin with blocks.
  template <typename Work>
  void ForBlocks(const Run& run, Work work) {
    constexpr size_t kGrain = 16 * 1024;  // values, a multiple of every block
    channel_.workers->For(run.count, kGrain, work);
  }
  void Encode(const Run& run);
  void Decode(const Run& run, bool is_own);

  const ChangesArgs args_;
  const BlockCode code_;
  std::vector<std::vector<Run>> runs_;  // by owner
  std::vector<size_t> cuts_{0};         // of the codes, in bytes
  BufferPool::Buffer codes_{nullptr, {}};
  std::optional<Spread> spread_;
  size_t n_decoded_ = 0;       // segments
  bool has_computed_ = false;  // in the last step
};

// Rank r receives part r of the input of every rank, in rank order.
class Alltoall : public Exchange {
 public:
  // `bytes[r]` of `input` go to rank r, one part after another.
  Alltoall(const void* input, std::vector<int64_t> bytes, AllocateOutput allocate);
  size_t bytes() const override { return static_cast<size_t>(offsets_.back()); }

 protected:
  int64_t BytesFor(int peer) const override { return bytes_[static_cast<size_t>(peer)]; }
  void SendData() override;
  void ReceiveData(char* out, const std::vector<size_t>& cuts) override;

 private:
  const char* input_;
  const std::vector<int64_t> bytes_;
  std::vector<int64_t> offsets_;  // one more than ranks
};

// Texts of all ranks. It must outlive the operation that gathers them.
struct Texts {
  std::string own;
  std::string every = {};  // one after another
  std::vector<int64_t> lengths = {};

  std::unique_ptr<Operation> Gather();
  std::vector<std::string> Split() const;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_GATHER_H_
