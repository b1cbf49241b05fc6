// Vectors of any element type that every rank can make for every other.
#ifndef TFSCALE_TEST_DATA_H_
#define TFSCALE_TEST_DATA_H_

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "comm/half.h"
#include "comm/types.h"

namespace tfscale {
namespace testing {

using Bytes = std::vector<char>;

template <typename T>
void Store(Bytes& bytes, size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
}

// Numbers whose sums depend on the order of addition where the type allows it.
inline Bytes MakeData(DType dtype, size_t count, int rank, int seed = 0) {
  Bytes bytes(count * SizeOf(dtype));
  std::mt19937 random(static_cast<unsigned>(1000003 * seed + 7919 * rank + 17));
  for (size_t i = 0; i < count; ++i) {
    const double value = (static_cast<double>(random()) / 4294967296.0 - 0.4) * 3;
    const float as_float = static_cast<float>(value);
    uint16_t half = 0;
    switch (dtype) {
      case DType::kFloat32:
        Store(bytes, i, as_float);
        break;
      case DType::kFloat64:
        Store(bytes, i, value);
        break;
      case DType::kFloat16:
        FloatToHalf(&as_float, &half, 1);
        Store(bytes, i, half);
        break;
      case DType::kBfloat16:
        FloatToBfloat(&as_float, &half, 1);
        Store(bytes, i, half);
        break;
      case DType::kInt32:
        Store(bytes, i, static_cast<int32_t>(value * 1e9));
        break;
      case DType::kInt64:
        Store(bytes, i, static_cast<int64_t>(value * 3e18));
        break;
      case DType::kInt8:
        Store(bytes, i, static_cast<int8_t>(value * 40));
        break;
      case DType::kUint8:
        Store(bytes, i, static_cast<uint8_t>(std::abs(value) * 40));
        break;
    }
  }
  return bytes;
}

constexpr DType kAllTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBfloat16,
                               DType::kInt32,   DType::kInt64,   DType::kInt8,    DType::kUint8};
constexpr ReduceOp kAllOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

}  // namespace testing
}  // namespace tfscale

#endif  // TFSCALE_TEST_DATA_H_
