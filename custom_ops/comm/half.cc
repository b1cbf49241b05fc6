#include "comm/half.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tfscale {
namespace {

float HalfToFloatOne(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  // A NaN becomes a quiet one and keeps its payload, as the instruction does it.
  const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
  if (exponent == 31) return FromBits(sign | 0x7f800000u | quiet | (mantissa << 13));
  if (exponent != 0) return FromBits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  // Subnormal: mantissa * 2^-24 is exact in float32.
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
  return FromBits(sign | Bits(magnitude));
}

uint16_t FloatToHalfOne(float value) {
  const uint32_t bits = Bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & kMagnitude;
  if (magnitude > 0x7f800000u) {
    return sign | 0x7e00u | static_cast<uint16_t>((magnitude >> 13) & 0x3ffu);  // NaN
  }
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (magnitude < 0x38800000u) {
    // Adding 0.5 leaves the subnormal's mantissa, rounded, in the low bits.
    const float shifted = FromBits(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(Bits(shifted) - 0x3f000000u);
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + odd) >> 13);
}

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) size_t HalfToFloatF16c(const uint16_t* in, float* out,
                                                           size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
  }
  return i;
}

__attribute__((target("avx,f16c"))) size_t FloatToHalfF16c(const float* in, uint16_t* out,
                                                           size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
  return i;
}

bool HasF16c() {
  // Older compilers refuse the name "f16c" in __builtin_cpu_supports, which for
  // "avx" asks the operating system, too.
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 29)) != 0 &&
           __builtin_cpu_supports("avx");
  }();
  return has;
}
#else
size_t HalfToFloatF16c(const uint16_t*, float*, size_t) { return 0; }
size_t FloatToHalfF16c(const float*, uint16_t*, size_t) { return 0; }
bool HasF16c() { return false; }
#endif

}  // namespace

void HalfToFloat(const uint16_t* in, float* out, size_t count) {
  size_t i = HasF16c() ? HalfToFloatF16c(in, out, count) : 0;
  for (; i < count; ++i) out[i] = HalfToFloatOne(in[i]);
}

void FloatToHalf(const float* in, uint16_t* out, size_t count) {
  size_t i = HasF16c() ? FloatToHalfF16c(in, out, count) : 0;
  for (; i < count; ++i) out[i] = FloatToHalfOne(in[i]);
}

void BfloatToFloat(const uint16_t* in, float* out, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = FromBfloat(in[i]);
}

void FloatToBfloat(const float* in, uint16_t* out, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = ToBfloat(in[i]);
}

}  // namespace tfscale
