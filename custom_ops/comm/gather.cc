#include "comm/gather.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

namespace tfscale {
void Exchange::Begin() {
  const size_t n = static_cast<size_t>(size());
  sizes_in_.assign(n, 0);
  sizes_out_.assign(n, 0);
  n_sizes_missing_ = size() - 1;
  for (int i = 1; i < size(); ++i) {
    const size_t sender = static_cast<size_t>((rank() - i + size()) % size());
    transfers_->Receive(&sizes_in_[sender], sizeof(int64_t), static_cast<int>(sender),
                        channel_.tag + kSizes, kSizeKey);
  }
  for (int i = 1; i < size(); ++i) {
    const int peer = (rank() + i) % size();
    sizes_out_[static_cast<size_t>(peer)] = BytesFor(peer);
    transfers_->Send(&sizes_out_[static_cast<size_t>(peer)], sizeof(int64_t), peer,
                     channel_.tag + kSizes);
  }
  SendData();
}

void Exchange::Advance(const std::vector<int>& completed) {
  for (int key : completed) {
    if (key == kSizeKey) {
      --n_sizes_missing_;
    } else {
      OnData(key);
    }
  }
  if (n_sizes_missing_ > 0 || is_posted_) return;
  is_posted_ = true;
  sizes_in_[static_cast<size_t>(rank())] = BytesFor(rank());
  char* out = static_cast<char*>(allocate_(sizes_in_));
  std::vector<size_t> cuts(1, 0);
  for (int64_t bytes : sizes_in_) cuts.push_back(cuts.back() + static_cast<size_t>(bytes));
  ReceiveData(out, cuts);
}

void Exchange::Finish() {
  if (is_posted_) SetDone();
}

Allgather::Allgather(const void* input, size_t bytes, AllocateOutput allocate)
    : Exchange(std::move(allocate)), input_(static_cast<const char*>(input)), bytes_(bytes) {}

void Allgather::SendData() {
  spread_.emplace(*transfers_, hosts(), rank(), channel_.tag + kData, PieceBytes(), kFirstDataKey);
  spread_->SendAll(input_, bytes_);
}

void Allgather::ReceiveData(char* out, const std::vector<size_t>& cuts) {
  if (bytes_ > 0) std::memcpy(out + cuts[static_cast<size_t>(rank())], input_, bytes_);
  spread_->Receive(out, cuts);
}

namespace {
void RequireCuts(size_t n_cuts, int size) {
  if (n_cuts == static_cast<size_t>(size) + 1) return;
  throw CommError("cuts must give a segment for each of the " + std::to_string(size) +
                  " ranks. Received: " + std::to_string(n_cuts) +
                  " cuts. Lay the buffer out for the ranks of the group.");
}
}  // namespace

void SegmentGather::Begin() {
  RequireCuts(cuts_.size(), size());
  // Small pieces on links, where others may need them soon.
  chunk_bytes_ =
      hosts().n_hosts() > 1 ? std::max<size_t>(channel_.chunk_bytes / 8, 64) : PieceBytes();
  spread_.emplace(*transfers_, hosts(), rank(), channel_.tag, chunk_bytes_, 0);
  spread_->Receive(buffer_, cuts_);
  next_ = cuts_[static_cast<size_t>(rank())];
  SendMore();
}

bool SegmentGather::MaySend() const {
  if (pace_ == Pace::kHeld || next_ == end()) return false;
  const size_t n_sent = (next_ - cuts_[static_cast<size_t>(rank())]) / chunk_bytes_;
  return pace_ == Pace::kFree || n_sent < kAhead || spread_->HasArrived(n_sent - kAhead + 1);
}

void SegmentGather::SendMore() {
  while (MaySend()) {
    const size_t bytes = std::min(chunk_bytes_, end() - next_);
    spread_->SendChunk(buffer_ + next_, bytes);
    next_ += bytes;
  }
}

void SegmentGather::SetPace(Pace pace) {
  pace_ = pace;
  if (spread_) SendMore();
}

void SegmentGather::Advance(const std::vector<int>& completed) {
  for (int key : completed) spread_->OnCompleted(key);
  SendMore();
}

void SegmentGather::Finish() {
  if (next_ == end()) SetDone();
}

ChangeGather::ChangeGather(ChangesArgs args)
    : args_(std::move(args)), code_(args_.bits, args_.block) {
  for (size_t r = 0; r + 1 < args_.cuts.size(); ++r) {
    size_t byte = cuts_.back();
    runs_.emplace_back();
    for (const ChangesArgs::Vector& vector : args_.vectors) {
      const size_t begin = std::max(vector.begin, args_.cuts[r]);
      const size_t end = std::min(vector.begin + vector.count, args_.cuts[r + 1]);
      if (begin >= end) continue;
      const float* old = vector.old == nullptr ? nullptr : vector.old + (begin - vector.begin);
      runs_.back().push_back({begin, end - begin, old, byte});
      byte += old == nullptr ? (end - begin) * sizeof(float) : code_.Bytes(end - begin);
    }
    cuts_.push_back(byte);
  }
}

void ChangeGather::Begin() {
  RequireCuts(cuts_.size(), size());
  codes_ = channel_.buffers->Get(cuts_.back());
  spread_.emplace(*transfers_, hosts(), rank(), channel_.tag, PieceBytes(), 0);
  spread_->Receive(codes_.get(), cuts_);
  const size_t own = static_cast<size_t>(rank());
  for (const Run& run : runs_[own]) Encode(run);
  spread_->SendAll(codes_.get() + cuts_[own], cuts_[own + 1] - cuts_[own]);
}

void ChangeGather::Encode(const Run& run) {
  char* code = codes_.get() + run.byte;
  const float* values = args_.buffer + run.begin;
  if (run.old == nullptr) {
    std::memcpy(code, values, run.count * sizeof(float));
    return;
  }
  ForBlocks(run, [&](size_t begin, size_t end) {
    code_.Encode(run.old + begin, -1.0f, values + begin, end - begin, code + code_.Bytes(begin),
                 nullptr);
  });
}

void ChangeGather::Advance(const std::vector<int>& completed) {
  has_computed_ = false;
  for (int key : completed) spread_->OnCompleted(key);
}

void ChangeGather::Decode(const Run& run, bool is_own) {
  const char* code = codes_.get() + run.byte;
  float* values = args_.buffer + run.begin;
  if (run.old == nullptr) {
    if (!is_own) std::memcpy(values, code, run.count * sizeof(float));
    return;
  }
  ForBlocks(run, [&](size_t begin, size_t end) {
    code_.DecodeOnto(code + code_.Bytes(begin), run.old + begin, end - begin, values + begin);
  });
}

// One segment at a time: MPI must be asked for progress in between.
void ChangeGather::Finish() {
  for (const Run& run : runs_[n_decoded_]) {
    Decode(run, n_decoded_ == static_cast<size_t>(rank()));
  }
  has_computed_ = true;
  if (++n_decoded_ == runs_.size()) SetDone();
}

Alltoall::Alltoall(const void* input, std::vector<int64_t> bytes, AllocateOutput allocate)
    : Exchange(std::move(allocate)),
      input_(static_cast<const char*>(input)),
      bytes_(std::move(bytes)),
      offsets_(1, 0) {
  for (int64_t part : bytes_) offsets_.push_back(offsets_.back() + part);
}

// No two ranks get the same, so all send to each other directly.
void Alltoall::SendData() {
  for (int i = 1; i < size(); ++i) {
    const int peer = (rank() + i) % size();
    transfers_->Send(input_ + offsets_[static_cast<size_t>(peer)],
                     static_cast<size_t>(BytesFor(peer)), peer, channel_.tag + kData);
  }
}

void Alltoall::ReceiveData(char* out, const std::vector<size_t>& cuts) {
  for (int sender = 0; sender < size(); ++sender) {
    const size_t begin = cuts[static_cast<size_t>(sender)];
    const size_t bytes = cuts[static_cast<size_t>(sender) + 1] - begin;
    if (sender != rank()) {
      transfers_->Receive(out + begin, bytes, sender, channel_.tag + kData);
    } else if (bytes > 0) {
      std::memcpy(out + begin, input_ + offsets_[static_cast<size_t>(rank())], bytes);
    }
  }
}

std::unique_ptr<Operation> Texts::Gather() {
  const auto allocate = [this](const std::vector<int64_t>& bytes) {
    lengths = bytes;
    every.resize(static_cast<size_t>(std::accumulate(bytes.begin(), bytes.end(), int64_t{0})));
    return static_cast<void*>(every.data());
  };
  return std::make_unique<Allgather>(own.data(), own.size(), allocate);
}

std::vector<std::string> Texts::Split() const {
  std::vector<std::string> texts;
  size_t begin = 0;
  for (int64_t length : lengths) {
    texts.push_back(every.substr(begin, static_cast<size_t>(length)));
    begin += static_cast<size_t>(length);
  }
  return texts;
}

}  // namespace tfscale
