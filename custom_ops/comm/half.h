// Conversion of 16-bit floats to float32 and back, rounding to nearest even.
#ifndef TFSCALE_COMM_HALF_H_
#define TFSCALE_COMM_HALF_H_

#include <cstddef>
#include <cstdint>

namespace tfscale {

void HalfToFloat(const uint16_t* in, float* out, size_t count);
void FloatToHalf(const float* in, uint16_t* out, size_t count);
void BfloatToFloat(const uint16_t* in, float* out, size_t count);
void FloatToBfloat(const float* in, uint16_t* out, size_t count);

}  // namespace tfscale

#endif  // TFSCALE_COMM_HALF_H_
