#include "comm/sparse_code.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#include "comm/half.h"
#include "comm/types.h"

namespace tfscale {
namespace {

constexpr uint32_t kTooLarge = 0x7f000000u;  // bits of 2^127; NaN and infinity are above
constexpr uint32_t kSmallest = 0x0d800000u;  // bits of 2^-100
constexpr size_t kHeader = 4;                // bytes of the two levels
constexpr int kSign = 1, kHigh = 2;          // bits of a value's level

size_t PositionBytes(size_t kept) { return (3 * kept + 1) / 2; }

// Two positions share three bytes.
void PutPosition(char* bytes, size_t i, uint32_t position) {
  unsigned char* at = reinterpret_cast<unsigned char*>(bytes) + i / 2 * 3;
  if (i % 2 == 0) {
    at[0] = static_cast<unsigned char>(position & 0xffu);
    at[1] = static_cast<unsigned char>(position >> 8);
  } else {
    at[1] = static_cast<unsigned char>(at[1] | ((position & 0xfu) << 4));
    at[2] = static_cast<unsigned char>(position >> 4);
  }
}

uint32_t PositionAt(const char* bytes, size_t i) {
  const unsigned char* at = reinterpret_cast<const unsigned char*>(bytes) + i / 2 * 3;
  if (i % 2 == 0) return at[0] | ((at[1] & 0xfu) << 8);
  return static_cast<uint32_t>(at[1] >> 4) | (static_cast<uint32_t>(at[2]) << 4);
}

struct Levels {
  uint16_t low, high;  // bfloat16
  double mean;         // of all magnitudes: above it a value has the high level
};

// Those of values at `positions`; low is 0 if all are too small.
Levels LevelsOf(const float* v, const uint32_t* positions, size_t kept) {
  const auto magnitude = [&](size_t i) { return static_cast<double>(std::fabs(v[positions[i]])); };
  const double smallest = FromBits(kSmallest);
  double total = 0, of_high = 0;
  size_t n = 0, n_high = 0;
  for (size_t i = 0; i < kept; ++i) {
    if (magnitude(i) < smallest) continue;
    total += magnitude(i);
    ++n;
  }
  if (n == 0) return {0, 0, 0};
  const double mean = total / static_cast<double>(n);
  for (size_t i = 0; i < kept; ++i) {
    if (magnitude(i) <= mean) continue;
    of_high += magnitude(i);
    ++n_high;
  }
  const double low = (total - of_high) / static_cast<double>(n - n_high);
  const double high = n_high == 0 ? low : of_high / static_cast<double>(n_high);
  return {ToBfloat(static_cast<float>(low)), ToBfloat(static_cast<float>(high)), mean};
}

}  // namespace

SparseCode::SparseCode(double share, size_t chunk) : share_(share), chunk_(chunk) {
  if (share > 0 && share <= 1 && chunk > 0 && chunk <= kLargestChunk) return;
  throw CommError("share must be in (0, 1] and chunk 1 to 4096. Received: share=" +
                  std::to_string(share) + " and chunk=" + std::to_string(chunk));
}

size_t SparseCode::Kept(size_t count) const {
  return static_cast<size_t>(std::ceil(share_ * static_cast<double>(count)));
}

size_t SparseCode::ChunkBytes(size_t count) const {
  if (count == 0) return 0;
  const size_t kept = Kept(count);
  return kHeader + PositionBytes(kept) + (kept + 3) / 4;
}

size_t SparseCode::Bytes(size_t count) const {
  return count / chunk_ * ChunkBytes(chunk_) + ChunkBytes(count % chunk_);
}

void SparseCode::Encode(const float* in, float factor, const float* error, float decay,
                        size_t count, char* out, float* new_error) const {
  float v[kLargestChunk];
  for (size_t begin = 0; begin < count; begin += chunk_) {
    const size_t n = std::min(chunk_, count - begin);
    for (size_t i = 0; i < n; ++i) v[i] = factor * in[begin + i] + decay * error[begin + i];
    EncodeChunk(v, error + begin, n, out, new_error + begin);
    out += ChunkBytes(n);
  }
}

void SparseCode::EncodeChunk(const float* v, const float* error, size_t count, char* out,
                             float* new_error) const {
  std::memset(out, 0, ChunkBytes(count));
  uint32_t magnitudes[kLargestChunk];
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    magnitudes[i] = Bits(v[i]) & kMagnitude;
    largest = std::max(largest, magnitudes[i]);
  }
  if (largest >= kTooLarge) {
    std::memcpy(out, &kBfloatNan, 2);
    std::memmove(new_error, error, count * sizeof(float));
    return;
  }
  std::memmove(new_error, v, count * sizeof(float));
  if (largest < kSmallest) return;
  const size_t kept = Kept(count);
  uint32_t positions[kLargestChunk];
  uint32_t threshold = 0;
  size_t n_ties = kept;  // values of that magnitude that are sent
  {
    uint32_t ordered[kLargestChunk];
    std::memcpy(ordered, magnitudes, count * sizeof(uint32_t));
    std::nth_element(ordered, ordered + (kept - 1), ordered + count, std::greater<uint32_t>());
    threshold = ordered[kept - 1];
    for (size_t i = 0; i < kept; ++i) n_ties -= ordered[i] > threshold ? 1 : 0;
  }
  size_t n = 0;
  for (size_t i = 0; i < count && n < kept; ++i) {
    if (magnitudes[i] < threshold) continue;
    if (magnitudes[i] == threshold) {
      if (n_ties == 0) continue;
      --n_ties;
    }
    positions[n++] = static_cast<uint32_t>(i);
  }
  const Levels levels = LevelsOf(v, positions, kept);
  std::memcpy(out, &levels.low, 2);
  std::memcpy(out + 2, &levels.high, 2);
  char* codes = out + kHeader + PositionBytes(kept);
  size_t n_sent = 0;
  for (size_t i = 0; i < kept; ++i) {
    const uint32_t position = positions[i];
    const float value = v[position], size = std::fabs(value);
    const bool is_high = static_cast<double>(size) > levels.mean;
    const float level = FromBfloat(is_high ? levels.high : levels.low);
    if (magnitudes[position] < kSmallest || size < 0.5f * level) continue;
    const bool is_negative = value < 0;
    new_error[position] = value - (is_negative ? -level : level);
    PutPosition(out + kHeader, n_sent, position);
    const int code = (is_negative ? kSign : 0) | (is_high ? kHigh : 0);
    codes[n_sent / 4] = static_cast<char>(codes[n_sent / 4] | (code << (2 * (n_sent % 4))));
    ++n_sent;
  }
  // Positions ascend; the first that does not is the end.
  for (size_t i = n_sent; i < kept && n_sent > 0; ++i) {
    PutPosition(out + kHeader, i, PositionAt(out + kHeader, n_sent - 1));
  }
  if (n_sent == 0) std::memset(out, 0, kHeader);
}

void SparseCode::DecodeOnto(const char* in, float factor, size_t count, float* out) const {
  for (size_t begin = 0; begin < count; begin += chunk_) {
    const size_t n = std::min(chunk_, count - begin);
    DecodeChunkOnto(in, factor, n, out + begin);
    in += ChunkBytes(n);
  }
}

void SparseCode::DecodeChunkOnto(const char* in, float factor, size_t count, float* out) const {
  uint16_t low, high;
  std::memcpy(&low, in, 2);
  std::memcpy(&high, in + 2, 2);
  if (low == 0) return;
  if (low == kBfloatNan) {
    for (size_t i = 0; i < count; ++i) out[i] = FromBfloat(kBfloatNan);
    return;
  }
  const size_t kept = Kept(count);
  const char* codes = in + kHeader + PositionBytes(kept);
  const float small = factor * FromBfloat(low), large = factor * FromBfloat(high);
  const float levels[4] = {small, -small, large, -large};
  int64_t last = -1;
  for (size_t i = 0; i < kept; ++i) {
    const int64_t position = PositionAt(in + kHeader, i);
    if (position <= last || position >= static_cast<int64_t>(count)) return;
    last = position;
    out[position] += levels[(codes[i / 4] >> (2 * (i % 4))) & 3];
  }
}

}  // namespace tfscale
