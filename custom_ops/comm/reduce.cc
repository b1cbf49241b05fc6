#include "comm/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "comm/half.h"

namespace tfscale {
namespace {

// Elements reduced at a time: small enough to stay in the first-level cache.
constexpr size_t kBlock = 2048;

template <typename T>
void Combine(T* acc, const T* in, size_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      for (size_t i = 0; i < count; ++i) acc[i] += in[i];
      return;
    case ReduceOp::kProduct:
      for (size_t i = 0; i < count; ++i) acc[i] *= in[i];
      return;
    // Written so that a NaN on any rank stays a NaN on all of them.
    case ReduceOp::kMin:
      for (size_t i = 0; i < count; ++i)
        acc[i] = (in[i] < acc[i] || in[i] != in[i]) ? in[i] : acc[i];
      return;
    case ReduceOp::kMax:
      for (size_t i = 0; i < count; ++i)
        acc[i] = (in[i] > acc[i] || in[i] != in[i]) ? in[i] : acc[i];
      return;
  }
}

// Overflow of integer sums wraps, as in NumPy and MPI.
template <>
void Combine<int32_t>(int32_t* acc, const int32_t* in, size_t count, ReduceOp op) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t a = static_cast<uint32_t>(acc[i]), b = static_cast<uint32_t>(in[i]);
    if (op == ReduceOp::kSum) acc[i] = static_cast<int32_t>(a + b);
    if (op == ReduceOp::kProduct) acc[i] = static_cast<int32_t>(a * b);
    if (op == ReduceOp::kMin) acc[i] = std::min(acc[i], in[i]);
    if (op == ReduceOp::kMax) acc[i] = std::max(acc[i], in[i]);
  }
}

template <>
void Combine<int64_t>(int64_t* acc, const int64_t* in, size_t count, ReduceOp op) {
  for (size_t i = 0; i < count; ++i) {
    const uint64_t a = static_cast<uint64_t>(acc[i]), b = static_cast<uint64_t>(in[i]);
    if (op == ReduceOp::kSum) acc[i] = static_cast<int64_t>(a + b);
    if (op == ReduceOp::kProduct) acc[i] = static_cast<int64_t>(a * b);
    if (op == ReduceOp::kMin) acc[i] = std::min(acc[i], in[i]);
    if (op == ReduceOp::kMax) acc[i] = std::max(acc[i], in[i]);
  }
}

// A number that no T holds becomes the nearest: converting it is undefined.
template <typename T>
T Clamped(double value) {
  using Limits = std::numeric_limits<T>;
  if (!std::is_integral<T>::value) return static_cast<T>(value);
  if (value != value) return T{0};
  // The largest int64 is no double: what rounds up to it is out of range.
  if (value >= static_cast<double>(Limits::max())) return Limits::max();
  if (value <= static_cast<double>(Limits::lowest())) return Limits::lowest();
  return static_cast<T>(value);
}

template <typename T>
void ScaleInPlace(T* data, size_t count, double scale) {
  if (scale == 1.0) return;
  // The mean of integers is a division: 49 * (1.0 / 49) is a little less than 1.
  const double divisor = std::round(1.0 / scale);
  // Not by -1: the least integer divided by it ends the process.
  const bool is_mean =
      std::abs(divisor * scale - 1.0) < 1e-12 && std::abs(divisor) > 1 && std::abs(divisor) < 1e9;
  if (std::is_integral<T>::value && is_mean) {
    for (size_t i = 0; i < count; ++i) data[i] /= static_cast<T>(divisor);
    return;
  }
  for (size_t i = 0; i < count; ++i) data[i] = Clamped<T>(data[i] * scale);
}

// A float32 is scaled in float32: one rounding, as TensorFlow's own multiply.
template <>
void ScaleInPlace<float>(float* data, size_t count, double scale) {
  if (scale == 1.0) return;
  const float factor = static_cast<float>(scale);
  for (size_t i = 0; i < count; ++i) data[i] *= factor;
}

template <typename T>
void ReduceTyped(const std::vector<const void*>& sources, void* out, size_t count, ReduceOp op,
                 double scale) {
  T block[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    std::memcpy(block, static_cast<const T*>(sources[0]) + begin, n * sizeof(T));
    for (size_t s = 1; s < sources.size(); ++s) {
      Combine(block, static_cast<const T*>(sources[s]) + begin, n, op);
    }
    ScaleInPlace(block, n, scale);
    std::memcpy(static_cast<T*>(out) + begin, block, n * sizeof(T));
  }
}

using ToFloat = void (*)(const uint16_t*, float*, size_t);
using FromFloat = void (*)(const float*, uint16_t*, size_t);

template <ToFloat to_float, FromFloat from_float>
void ReduceHalf(const std::vector<const void*>& sources, void* out, size_t count, ReduceOp op,
                double scale) {
  float acc[kBlock];
  float next[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    to_float(static_cast<const uint16_t*>(sources[0]) + begin, acc, n);
    for (size_t s = 1; s < sources.size(); ++s) {
      to_float(static_cast<const uint16_t*>(sources[s]) + begin, next, n);
      Combine(acc, next, n, op);
    }
    ScaleInPlace(acc, n, scale);
    from_float(acc, static_cast<uint16_t*>(out) + begin, n);
  }
}

// Sums of 8 bits are kept in 32, so that averages do not overflow. An unscaled sum
// wraps, as those of the larger integers; a scaled one is clamped, as theirs.
template <typename T>
void ReduceByte(const std::vector<const void*>& sources, void* out, size_t count, ReduceOp op,
                double scale) {
  using Limits = std::numeric_limits<T>;
  int32_t acc[kBlock];
  int32_t next[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    std::copy_n(static_cast<const T*>(sources[0]) + begin, n, acc);
    for (size_t s = 1; s < sources.size(); ++s) {
      std::copy_n(static_cast<const T*>(sources[s]) + begin, n, next);
      Combine(acc, next, n, op);
    }
    T* to = static_cast<T*>(out) + begin;
    ScaleInPlace(acc, n, scale);
    for (size_t i = 0; i < n; ++i) {
      const int32_t value =
          scale == 1.0 ? acc[i] : std::clamp<int32_t>(acc[i], Limits::min(), Limits::max());
      to[i] = static_cast<T>(value);
    }
  }
}

}  // namespace

void Reduce(const std::vector<const void*>& sources, void* out, size_t count, DType dtype,
            ReduceOp op, double scale) {
  switch (dtype) {
    case DType::kFloat32:
      return ReduceTyped<float>(sources, out, count, op, scale);
    case DType::kFloat64:
      return ReduceTyped<double>(sources, out, count, op, scale);
    case DType::kInt32:
      return ReduceTyped<int32_t>(sources, out, count, op, scale);
    case DType::kInt64:
      return ReduceTyped<int64_t>(sources, out, count, op, scale);
    case DType::kInt8:
      return ReduceByte<int8_t>(sources, out, count, op, scale);
    case DType::kUint8:
      return ReduceByte<uint8_t>(sources, out, count, op, scale);
    case DType::kFloat16:
      return ReduceHalf<HalfToFloat, FloatToHalf>(sources, out, count, op, scale);
    case DType::kBfloat16:
      return ReduceHalf<BfloatToFloat, FloatToBfloat>(sources, out, count, op, scale);
  }
}

void ScaledCopy(const void* in, void* out, size_t count, DType dtype, double scale) {
  if (count == 0) return;  // pointers may then be null
  if (scale == 1.0) {
    if (in != out) std::memcpy(out, in, count * SizeOf(dtype));
    return;
  }
  Reduce({in}, out, count, dtype, ReduceOp::kSum, scale);
}

}  // namespace tfscale
