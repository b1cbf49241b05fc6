#include "comm/host_vectors.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "comm/reduce.h"

namespace tfscale {
namespace {

// What a thread reads of a vector at a time: those of a host fit into its cache.
constexpr size_t kReadBytes = 128 * 1024;

size_t Append(const Pieces& pieces, Pieces::Places* table) {
  const Pieces::Places places = pieces.Slice(0, pieces.size());
  table->insert(table->end(), places.begin(), places.end());
  return places.size();
}

// Returns where the bytes are, copied to `row` unless they lie in one place.
const char* Joined(const Pieces::Places& places, char* row) {
  if (places.size() == 1) return static_cast<const char*>(places[0].iov_base);
  char* next = row;
  for (const iovec& place : places) {
    std::memcpy(next, place.iov_base, place.iov_len);
    next += place.iov_len;
  }
  return row;
}

void CopyTo(const Pieces::Places& places, const char* from) {
  for (const iovec& place : places) {
    std::memcpy(place.iov_base, from, place.iov_len);
    from += place.iov_len;
  }
}

}  // namespace

HostVectors::HostVectors(const Channel& channel, Transfers& transfers,
                         const std::vector<int>& ranks)
    : channel_(channel), transfers_(transfers), ranks_(ranks), vectors_(ranks.size()) {
  while (ranks_[own_] != channel_.comm->rank()) ++own_;
}

void HostVectors::Share(Pieces input, Pieces output, size_t bytes, int tag) {
  table_.resize(2);  // how many places follow
  table_[0].iov_len = Append(input, &table_);
  table_[1].iov_len = Append(output, &table_);
  vectors_[own_].input = std::move(input);
  vectors_[own_].output = std::move(output);
  n_missing_ = ranks_.size() - 1;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (i != own_) transfers_.Expect(&vectors_[i].table, bytes, ranks_[i], tag, kKey);
  }
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (i != own_) transfers_.Offer(table_.data(), bytes, ranks_[i], tag);
  }
}

void HostVectors::OnCompleted() {
  if (--n_missing_ > 0) return;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (i != own_ && !ReadTable(i)) n_missing_ = ranks_.size();  // for ever
  }
}

bool HostVectors::ReadTable(size_t i) {
  const MemoryRange& range = vectors_[i].table;
  Pieces::Places table(2);
  const auto read = [&](size_t first) {
    const int error = transfers_.Read(ranks_[i], range, first * sizeof(iovec),
                                      reinterpret_cast<char*>(table.data() + first),
                                      (table.size() - first) * sizeof(iovec));
    if (error != 0) transfers_.OnUnread(ranks_[i], error);
    return error == 0;
  };
  if (!read(0)) return false;
  const size_t n_inputs = table[0].iov_len;
  table.resize(2 + n_inputs + table[1].iov_len);
  if (!read(2)) return false;
  for (size_t p = 2; p < table.size(); ++p) {
    Pieces& pieces = p < 2 + n_inputs ? vectors_[i].input : vectors_[i].output;
    pieces.Add(table[p].iov_base, table[p].iov_len);
  }
  return true;
}

bool HostVectors::Reduce(const ReductionArgs& args, size_t begin, size_t count, double scale,
                         char* out) {
  const size_t element = SizeOf(args.dtype);
  const size_t block = kReadBytes / element;
  std::atomic<int> unread{-1};  // a rank
  std::atomic<int> why{0};
  channel_.workers->For(count, block, [&](size_t first, size_t end) {
    BufferPool::Buffer rows = channel_.buffers->Get(kReadBytes * ranks_.size());
    std::vector<const void*> sources(ranks_.size());
    for (size_t next = first; next < end; next += block) {
      const size_t n = std::min(block, end - next);
      const size_t offset = (begin + next) * element;
      for (size_t i = 0; i < ranks_.size(); ++i) {
        char* row = rows.get() + i * kReadBytes;
        Pieces::Places places = vectors_[i].input.Slice(offset, n * element);
        sources[i] = i == own_ ? Joined(places, row) : row;
        if (i == own_) continue;
        const int error =
            transfers_.Read(ranks_[i], vectors_[i].table, std::move(places), {{row, n * element}});
        if (error == 0) continue;
        unread = ranks_[i];
        why = error;
        return;
      }
      if (out != nullptr) {
        tfscale::Reduce(sources, out + next * element, n, args.dtype, args.op, scale);
        continue;
      }
      const Pieces::Places places = vectors_[own_].output.Slice(offset, n * element);
      const bool is_one = places.size() == 1;
      void* to = is_one ? places[0].iov_base : rows.get() + own_ * kReadBytes;
      tfscale::Reduce(sources, to, n, args.dtype, args.op, scale);
      if (!is_one) CopyTo(places, static_cast<const char*>(to));
    }
  });
  if (unread >= 0) transfers_.OnUnread(unread, why);
  return unread < 0;
}

bool HostVectors::Fetch(int rank, size_t begin, size_t bytes) {
  const size_t i =
      static_cast<size_t>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
  const int error = transfers_.Read(rank, vectors_[i].table, vectors_[i].output.Slice(begin, bytes),
                                    vectors_[own_].output.Slice(begin, bytes));
  if (error != 0) transfers_.OnUnread(rank, error);
  return error == 0;
}

}  // namespace tfscale
