// Conversion of 16-bit floats to float32 and back, rounding to nearest even; the bits of float32.
#ifndef TFSCALE_COMM_HALF_H_
#define TFSCALE_COMM_HALF_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

// For functions that are inlined into kernels, which may be compiled for several kinds of CPUs.
#define TFSCALE_INLINE inline __attribute__((always_inline))

namespace tfscale {

constexpr uint32_t kMagnitude = 0x7fffffffu;  // all bits but the sign
constexpr uint16_t kBfloatNan = 0x7fc0;

TFSCALE_INLINE uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TFSCALE_INLINE float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

TFSCALE_INLINE float FromBfloat(uint16_t half) {
  return FromBits(static_cast<uint32_t>(half) << 16);
}

// The nearest bfloat16, as TensorFlow rounds.
TFSCALE_INLINE uint16_t ToBfloat(float value) {
  const uint32_t bits = Bits(value);
  const bool is_nan = (bits & kMagnitude) > 0x7f800000u;
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>((is_nan ? (bits | 0x400000u) : rounded) >> 16);
}

void HalfToFloat(const uint16_t* in, float* out, size_t count);
void FloatToHalf(const float* in, uint16_t* out, size_t count);
void BfloatToFloat(const uint16_t* in, float* out, size_t count);
void FloatToBfloat(const float* in, uint16_t* out, size_t count);

}  // namespace tfscale

#endif  // TFSCALE_COMM_HALF_H_
