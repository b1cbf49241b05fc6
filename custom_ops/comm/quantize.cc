#include "comm/quantize.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "comm/half.h"
#include "comm/types.h"

namespace tfscale {
namespace {

// The kernels are compiled twice, for any CPU and for AVX2: they must be inlined
// into a function of each kind, and their loops have lengths the compiler knows.

constexpr int32_t kTooLarge = 0x7f000000;  // bits of 2^127; NaN and infinity are above
// Scales below it are 0: errors, multiples of scale * 2^-24, are then never denormal.
constexpr float kSmallestScale = 7.8886090522101181e-31f;  // 2^-100
// Adding it rounds to an integer, and leaves that integer in the low bits.
constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23

// The input of one block: v = factor * in + error.
template <size_t kBlock>
TFSCALE_INLINE void Load(const float* in, float factor, const float* error, float* v) {
  if (error != nullptr) {
    for (size_t i = 0; i < kBlock; ++i) v[i] = in[i] * factor + error[i];
  } else {
    for (size_t i = 0; i < kBlock; ++i) v[i] = in[i] * factor;
  }
}

// The bfloat16 scale of a block whose largest magnitude has these bits.
template <int kBits>
TFSCALE_INLINE uint16_t ScaleOf(int32_t largest) {
  constexpr float kLargestQ = kBits == 8 ? 127.0f : 7.0f;
  if (largest >= kTooLarge) return kBfloatNan;
  const float scale = FromBits(static_cast<uint32_t>(largest)) / kLargestQ;
  if (scale < kSmallestScale) return 0;
  return static_cast<uint16_t>((Bits(scale) + 0xffffu) >> 16);  // rounded up
}

template <int kBits, size_t kBlock>
struct Code {
  static constexpr size_t kBytes = 2 + kBlock * kBits / 8;  // of a whole block

  // Value i shares its byte with value i + kBlock / 2 where both have 4 bits.
  static size_t Bytes(size_t count) {
    return count == 0 ? 0 : 2 + (kBits == 8 ? count : std::min(count, kBlock / 2));
  }

  static TFSCALE_INLINE void Encode(const float* v, const float* error, char* out,
                                    float* new_error) {
    int32_t largest = 0;
    for (size_t i = 0; i < kBlock; ++i) {
      largest = std::max(largest, static_cast<int32_t>(Bits(v[i]) & kMagnitude));
    }
    const uint16_t half = ScaleOf<kBits>(largest);
    std::memcpy(out, &half, 2);
    if (half == 0 || half == kBfloatNan) {
      std::memset(out + 2, 0, kBytes - 2);
      const float* kept = half == 0 ? v : error;
      if (kept != nullptr) {
        std::memcpy(new_error, kept, kBlock * sizeof(float));
      } else {
        std::memset(new_error, 0, kBlock * sizeof(float));
      }
      return;
    }
    const float scale = FromBfloat(half);
    alignas(64) int8_t q[kBlock];
    for (size_t i = 0; i < kBlock; ++i) {
      const float shifted = v[i] / scale + kRounding;
      q[i] = static_cast<int8_t>(Bits(shifted));
      new_error[i] = v[i] - (shifted - kRounding) * scale;
    }
    if (kBits == 8) {
      std::memcpy(out + 2, q, kBlock);
    } else {
      for (size_t i = 0; i < kBlock / 2; ++i) {
        out[2 + i] = static_cast<char>((q[i] & 15) | (q[i + kBlock / 2] * 16));
      }
    }
  }

  // Assigns what a block decodes to, or adds it.
  template <bool kAdds>
  static TFSCALE_INLINE void Decode(const char* in, float* out) {
    uint16_t half;
    std::memcpy(&half, in, 2);
    const float scale = FromBfloat(half);
    constexpr size_t kLoaded = kBytes - 2;
    int8_t q[kLoaded];
    std::memcpy(q, in + 2, kLoaded);
    if (kBits == 8) {
      for (size_t i = 0; i < kLoaded; ++i) Put<kAdds>(static_cast<float>(q[i]) * scale, out + i);
    } else {
      for (size_t i = 0; i < kLoaded; ++i) {
        const int low = static_cast<int8_t>(q[i] * 16) >> 4;
        Put<kAdds>(static_cast<float>(low) * scale, out + i);
      }
      for (size_t i = 0; i < kLoaded; ++i) {
        Put<kAdds>(static_cast<float>(q[i] >> 4) * scale, out + kLoaded + i);
      }
    }
  }

  template <bool kAdds>
  static TFSCALE_INLINE void Put(float value, float* out) {
    *out = kAdds ? *out + value : value;
  }
};

// bfloat16.
template <size_t kBlock>
struct Code<16, kBlock> {
  static constexpr size_t kBytes = 2 * kBlock;

  static size_t Bytes(size_t count) { return 2 * count; }

  static TFSCALE_INLINE void Encode(const float* v, const float* error, char* out,
                                    float* new_error) {
    alignas(64) uint16_t halves[kBlock];
    for (size_t i = 0; i < kBlock; ++i) halves[i] = ToBfloat(v[i]);
    std::memcpy(out, halves, kBytes);
    for (size_t i = 0; i < kBlock; ++i) {
      const bool is_finite = (halves[i] & 0x7f80u) != 0x7f80u;
      const float kept = error != nullptr ? error[i] : 0.0f;
      new_error[i] = is_finite ? v[i] - FromBfloat(halves[i]) : kept;
    }
  }

  template <bool kAdds>
  static TFSCALE_INLINE void Decode(const char* in, float* out) {
    alignas(64) uint16_t halves[kBlock];
    std::memcpy(halves, in, kBytes);
    for (size_t i = 0; i < kBlock; ++i) {
      const float value = FromBfloat(halves[i]);
      out[i] = kAdds ? out[i] + value : value;
    }
  }
};

struct Encoding {
  const float* in;
  float factor;
  const float* error;
  size_t count;
  char* out;
  float* new_error;
};

struct Sum {
  const char* const* sources;
  size_t n_sources;
  double factor;
  size_t count;
  const float* error;
  char* encoded;  // null: `out` receives the sum, with the error
  float* out;     // where encoded, the new error
};

template <int kBits, size_t kBlock>
TFSCALE_INLINE void EncodeAll(const Encoding& e) {
  using C = Code<kBits, kBlock>;
  alignas(64) float v[kBlock];
  alignas(64) float unused[kBlock];
  size_t begin = 0;
  char* out = e.out;
  for (; begin + kBlock <= e.count; begin += kBlock, out += C::kBytes) {
    const float* error = e.error != nullptr ? e.error + begin : nullptr;
    Load<kBlock>(e.in + begin, e.factor, error, v);
    C::Encode(v, error, out, e.new_error != nullptr ? e.new_error + begin : unused);
  }
  const size_t rest = e.count - begin;
  if (rest == 0) return;
  // The short block, in a whole one.
  alignas(64) float in[kBlock] = {};
  alignas(64) float error[kBlock] = {};
  char last[C::kBytes];
  std::memcpy(in, e.in + begin, rest * sizeof(float));
  if (e.error != nullptr) std::memcpy(error, e.error + begin, rest * sizeof(float));
  Load<kBlock>(in, e.factor, error, v);
  C::Encode(v, error, last, unused);
  std::memcpy(out, last, C::Bytes(rest));
  if (e.new_error != nullptr) {
    std::memcpy(e.new_error + begin, unused, rest * sizeof(float));
  }
}

template <int kBits, size_t kBlock>
TFSCALE_INLINE void SumAll(const Sum& s) {
  using C = Code<kBits, kBlock>;
  alignas(64) float sum[kBlock];
  alignas(64) float v[kBlock];
  alignas(64) float error[kBlock];
  alignas(64) float unused[kBlock];
  char source[C::kBytes];
  char last[C::kBytes];
  size_t offset = 0;
  for (size_t begin = 0; begin < s.count; begin += kBlock, offset += C::kBytes) {
    const size_t n = std::min(kBlock, s.count - begin);
    for (size_t k = 0; k < s.n_sources; ++k) {
      const char* in = s.sources[k] + offset;
      if (n < kBlock) {  // the short block, in a whole one
        std::memset(source, 0, C::kBytes);
        std::memcpy(source, in, C::Bytes(n));
        in = source;
      }
      if (k == 0) {
        C::template Decode<false>(in, sum);
      } else {
        C::template Decode<true>(in, sum);
      }
    }
    if (s.factor != 1.0) {
      // In double: the mean of equal values is that value, which sum * (1/3) may miss.
      for (size_t i = 0; i < kBlock; ++i) sum[i] = static_cast<float>(sum[i] * s.factor);
    }
    if (s.encoded == nullptr && s.error == nullptr) {
      std::memcpy(s.out + begin, sum, n * sizeof(float));
      continue;
    }
    if (s.encoded == nullptr) {
      for (size_t i = 0; i < n; ++i) s.out[begin + i] = s.error[begin + i] + sum[i];
      continue;
    }
    const float* old_error = nullptr;
    if (s.error != nullptr) {
      old_error = s.error + begin;
      if (n < kBlock) {
        std::memset(error, 0, sizeof(error));
        std::memcpy(error, old_error, n * sizeof(float));
        old_error = error;
      }
    }
    Load<kBlock>(sum, 1.0f, old_error, v);
    const bool is_whole = n == kBlock;
    float* new_error = is_whole && s.out != nullptr ? s.out + begin : unused;
    C::Encode(v, old_error, is_whole ? s.encoded + offset : last, new_error);
    if (is_whole) continue;
    std::memcpy(s.encoded + offset, last, C::Bytes(n));
    if (s.out != nullptr) std::memcpy(s.out + begin, unused, n * sizeof(float));
  }
}

template <int kBits, size_t kBlock>
void EncodeAnywhere(const Encoding& e) {
  EncodeAll<kBits, kBlock>(e);
}

template <int kBits, size_t kBlock>
void SumAnywhere(const Sum& s) {
  SumAll<kBits, kBlock>(s);
}

#if defined(__x86_64__)
template <int kBits, size_t kBlock>
__attribute__((target("avx2"))) void EncodeAvx2(const Encoding& e) {
  EncodeAll<kBits, kBlock>(e);
}

template <int kBits, size_t kBlock>
__attribute__((target("avx2"))) void SumAvx2(const Sum& s) {
  SumAll<kBits, kBlock>(s);
}

bool HasAvx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}
#endif

}  // namespace

struct BlockCode::Kernels {
  void (*encode)(const Encoding&);
  void (*sum)(const Sum&);
  size_t (*bytes)(size_t count);  // of less than a block
};

template <int kBits, size_t kBlock>
const BlockCode::Kernels* BlockCode::Find() {
  using C = Code<kBits, kBlock>;
#if defined(__x86_64__)
  static const Kernels avx2{EncodeAvx2<kBits, kBlock>, SumAvx2<kBits, kBlock>, C::Bytes};
  if (HasAvx2()) return &avx2;
#endif
  static const Kernels anywhere{EncodeAnywhere<kBits, kBlock>, SumAnywhere<kBits, kBlock>,
                                C::Bytes};
  return &anywhere;
}

BlockCode::BlockCode(int bits, size_t block) : bits_(bits), block_(block), kernels_(nullptr) {
  if (block == 256 && bits == 16) kernels_ = Find<16, 256>();
  if (block == 256 && bits == 8) kernels_ = Find<8, 256>();
  if (block == 256 && bits == 4) kernels_ = Find<4, 256>();
  if (block == 64 && bits == 16) kernels_ = Find<16, 64>();
  if (block == 64 && bits == 8) kernels_ = Find<8, 64>();
  if (block == 64 && bits == 4) kernels_ = Find<4, 64>();
  if (kernels_ == nullptr) {
    throw CommError("bits must be 16, 8 or 4, and blocks 256 or 64. Received: " +
                    std::to_string(bits) + " bits, blocks of " + std::to_string(block) + ".");
  }
}

size_t BlockCode::Bytes(size_t count) const {
  const size_t whole = bits_ == 16 ? 2 * block_ : 2 + block_ * static_cast<size_t>(bits_) / 8;
  return count / block_ * whole + kernels_->bytes(count % block_);
}

void BlockCode::Encode(const float* in, float factor, const float* error, size_t count, char* out,
                       float* new_error) const {
  kernels_->encode({in, factor, error, count, out, new_error});
}

void BlockCode::Decode(const char* in, size_t count, float* out) const {
  kernels_->sum({&in, 1, 1.0, count, nullptr, nullptr, out});
}

void BlockCode::DecodeOnto(const char* in, const float* base, size_t count, float* out) const {
  kernels_->sum({&in, 1, 1.0, count, base, nullptr, out});
}

void BlockCode::DecodeSum(const std::vector<const char*>& sources, double factor, size_t count,
                          float* out) const {
  kernels_->sum({sources.data(), sources.size(), factor, count, nullptr, nullptr, out});
}

void BlockCode::EncodeSum(const std::vector<const char*>& sources, double factor,
                          const float* error, size_t count, char* out, float* new_error) const {
  kernels_->sum({sources.data(), sources.size(), factor, count, error, out, new_error});
}

}  // namespace tfscale
