// The kernels of local reductions against one-element-at-a-time references.
#include "comm/reduce.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "test/job.h"

namespace tfscale {
namespace testing {
namespace {

// Integers wrap as unsigned numbers do: signed overflow would be undefined.
template <typename T, bool is_integer = std::is_integral<T>::value>
struct Wide {
  using Type = T;
};
template <typename T>
struct Wide<T, true> {
  using Type = typename std::make_unsigned<T>::type;
};

template <typename T>
T CombineOne(T a, T b, ReduceOp op) {
  using Type = typename Wide<T>::Type;
  if (a != a || b != b) return std::numeric_limits<T>::quiet_NaN();
  switch (op) {
    case ReduceOp::kSum:
      return static_cast<T>(static_cast<Type>(a) + static_cast<Type>(b));
    case ReduceOp::kProduct:
      return static_cast<T>(static_cast<Type>(a) * static_cast<Type>(b));
    case ReduceOp::kMin:
      return b < a ? b : a;
    default:
      return b > a ? b : a;
  }
}

template <typename T>
T At(const Bytes& bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

std::vector<const void*> Pointers(const std::vector<Bytes>& buffers) {
  std::vector<const void*> pointers;
  for (const Bytes& buffer : buffers) pointers.push_back(buffer.data());
  return pointers;
}

std::vector<Bytes> Sources(DType dtype, size_t count, int n_sources) {
  std::vector<Bytes> sources;
  for (int s = 0; s < n_sources; ++s) sources.push_back(MakeData(dtype, count, s));
  return sources;
}

// Compute is the type in which values are added up: T itself, or float.
template <typename T, typename Compute, typename Load, typename Round>
void CheckType(DType dtype, Load load, Round round) {
  for (size_t count : {0, 1, 7, 1000, 5000}) {
    for (int n_sources : {1, 2, 5}) {
      const std::vector<Bytes> sources = Sources(dtype, count, n_sources);
      for (ReduceOp op : kAllOps) {
        Bytes out(count * sizeof(T));
        Reduce(Pointers(sources), out.data(), count, dtype, op, 1.0);
        for (size_t i = 0; i < count; ++i) {
          Compute expected = load(At<T>(sources[0], i));
          for (int s = 1; s < n_sources; ++s) {
            expected = CombineOne(expected, load(At<T>(sources[static_cast<size_t>(s)], i)), op);
          }
          CHECK_EQ(At<T>(out, i), round(expected));
        }
      }
    }
  }
}

template <typename T>
T Same(T value) {
  return value;
}

float FromHalf(uint16_t half) {
  float value;
  HalfToFloat(&half, &value, 1);
  return value;
}
uint16_t ToHalf(float value) {
  uint16_t half;
  FloatToHalf(&value, &half, 1);
  return half;
}
float FromBfloat(uint16_t half) {
  float value;
  BfloatToFloat(&half, &value, 1);
  return value;
}
uint16_t ToBfloat(float value) {
  uint16_t half;
  FloatToBfloat(&value, &half, 1);
  return half;
}

template <typename T>
std::vector<T> ReduceVectors(const std::vector<std::vector<T>>& sources, DType dtype, ReduceOp op,
                             double scale = 1.0) {
  std::vector<const void*> pointers;
  for (const auto& source : sources) pointers.push_back(source.data());
  std::vector<T> out(sources[0].size());
  Reduce(pointers, out.data(), out.size(), dtype, op, scale);
  return out;
}

template <typename T>
void CheckWrapping(DType dtype) {
  const T max = std::numeric_limits<T>::max();
  const T min = std::numeric_limits<T>::min();
  const std::vector<std::vector<T>> sources = {{max, min, max}, {1, -1, max}};
  const std::vector<T> sum = ReduceVectors(sources, dtype, ReduceOp::kSum);
  CHECK_EQ(sum[0], min);
  CHECK_EQ(sum[1], max);
  CHECK_EQ(sum[2], T{-2});
  const std::vector<T> product = ReduceVectors(sources, dtype, ReduceOp::kProduct);
  CHECK_EQ(product[1], min);
  CHECK_EQ(product[2], T{1});
  CHECK_EQ(ReduceVectors(sources, dtype, ReduceOp::kMax)[1], T{-1});
  CHECK_EQ(ReduceVectors(sources, dtype, ReduceOp::kMin)[1], min);
}

}  // namespace

TEST(Float32) { CheckType<float, float>(DType::kFloat32, Same<float>, Same<float>); }
TEST(Float64) { CheckType<double, double>(DType::kFloat64, Same<double>, Same<double>); }
TEST(Float16IsAddedUpInFloat32AndRoundedOnce) {
  CheckType<uint16_t, float>(DType::kFloat16, FromHalf, ToHalf);
}
TEST(Bfloat16IsAddedUpInFloat32AndRoundedOnce) {
  CheckType<uint16_t, float>(DType::kBfloat16, FromBfloat, ToBfloat);
}
TEST(Int32) { CheckType<int32_t, int32_t>(DType::kInt32, Same<int32_t>, Same<int32_t>); }
TEST(Int64) { CheckType<int64_t, int64_t>(DType::kInt64, Same<int64_t>, Same<int64_t>); }

TEST(Int8) {
  CheckType<int8_t, int32_t>(
      DType::kInt8, [](int8_t value) { return int32_t{value}; },
      [](int32_t sum) { return static_cast<int8_t>(sum); });
}
TEST(Uint8) {
  CheckType<uint8_t, int32_t>(
      DType::kUint8, [](uint8_t value) { return int32_t{value}; },
      [](int32_t sum) { return static_cast<uint8_t>(sum); });
}

TEST(MeansOfBytesDoNotOverflow) {
  const auto mean =
      ReduceVectors<int8_t>({{100, -100, 127}, {101, -90, 127}}, DType::kInt8, ReduceOp::kSum, 0.5);
  CHECK_EQ(mean[0], int8_t{100});
  CHECK_EQ(mean[1], int8_t{-95});
  CHECK_EQ(mean[2], int8_t{127});
  const auto clamped = ReduceVectors<uint8_t>({{200}, {100}}, DType::kUint8, ReduceOp::kSum, 3.0);
  CHECK_EQ(clamped[0], uint8_t{255});
}

TEST(IntegersWrap) {
  CheckWrapping<int8_t>(DType::kInt8);
  CheckWrapping<int32_t>(DType::kInt32);
  CheckWrapping<int64_t>(DType::kInt64);
}

TEST(NanOfAnySourceIsNanInTheResult) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (ReduceOp op : kAllOps) {
    const std::vector<std::vector<float>> floats = {{nan, 1, 1, 1}, {1, nan, 1, 2}, {1, 1, nan, 3}};
    const std::vector<float> out = ReduceVectors(floats, DType::kFloat32, op);
    for (size_t i = 0; i < 4; ++i) CHECK_EQ(std::isnan(out[i]), i < 3);
    std::vector<std::vector<uint16_t>> halves;
    for (const auto& source : floats) {
      halves.emplace_back();
      for (float value : source) halves.back().push_back(ToHalf(value));
    }
    const std::vector<uint16_t> half = ReduceVectors(halves, DType::kFloat16, op);
    for (size_t i = 0; i < 4; ++i) CHECK_EQ(std::isnan(FromHalf(half[i])), i < 3);
  }
}

TEST(InfinityAndOverflow) {
  const float inf = std::numeric_limits<float>::infinity();
  const float max = std::numeric_limits<float>::max();
  const auto sum =
      ReduceVectors<float>({{inf, inf, max}, {1, -inf, max}}, DType::kFloat32, ReduceOp::kSum);
  CHECK_EQ(sum[0], inf);
  CHECK_TRUE(std::isnan(sum[1]));
  CHECK_EQ(sum[2], inf);
  // In float16 the sum of two large values overflows, their mean does not.
  const auto mean = ReduceVectors<uint16_t>({{ToHalf(60000)}, {ToHalf(60000)}}, DType::kFloat16,
                                            ReduceOp::kSum, 0.5);
  CHECK_EQ(FromHalf(mean[0]), FromHalf(ToHalf(60000)));
  const auto total =
      ReduceVectors<uint16_t>({{ToHalf(60000)}, {ToHalf(60000)}}, DType::kFloat16, ReduceOp::kSum);
  CHECK_EQ(FromHalf(total[0]), inf);
}

TEST(Scales) {
  const auto floats =
      ReduceVectors<float>({{1.1f, 2.2f}, {3.3f, 4.4f}}, DType::kFloat32, ReduceOp::kSum, 0.5);
  CHECK_EQ(floats[0], (1.1f + 3.3f) * 0.5f);
  const auto doubles = ReduceVectors<double>({{1.1}, {3.3}}, DType::kFloat64, ReduceOp::kSum, 1e-3);
  CHECK_EQ(doubles[0], (1.1 + 3.3) * 1e-3);
  // Integers are truncated towards zero, as TensorFlow's cast does.
  const auto ints = ReduceVectors<int32_t>({{3, -3}, {4, -4}}, DType::kInt32, ReduceOp::kSum, 0.5);
  CHECK_EQ(ints[0], 3);
  CHECK_EQ(ints[1], -3);
  // A scale of one leaves integers exact that have no float64.
  const int64_t large = (int64_t{1} << 62) + 1;
  CHECK_EQ(ReduceVectors<int64_t>({{large}, {0}}, DType::kInt64, ReduceOp::kSum)[0], large);
}

TEST(OutputMayBeASource) {
  for (DType dtype : kAllTypes) {
    std::vector<Bytes> sources = Sources(dtype, 5000, 3);
    Bytes expected(5000 * SizeOf(dtype));
    Reduce(Pointers(sources), expected.data(), 5000, dtype, ReduceOp::kSum, 1.0);
    for (size_t s = 0; s < 3; ++s) {
      std::vector<Bytes> copies = sources;
      Reduce(Pointers(copies), copies[s].data(), 5000, dtype, ReduceOp::kSum, 1.0);
      CHECK_TRUE(copies[s] == expected);
    }
  }
}

// 49 * (1.0 / 49) is less than 1: a mean of integers must be a division.
TEST(MeanOfIntegersIsExact) {
  for (int n = 1; n < 200; ++n) {
    int64_t value = 3 * n;
    ScaledCopy(&value, &value, 1, DType::kInt64, 1.0 / n);
    CHECK_EQ(value, 3);
  }
}

TEST(ScalesOfIntegersAreExactOrClamped) {
  int32_t values[] = {std::numeric_limits<int32_t>::min(), 49};
  ScaledCopy(values, values, 2, DType::kInt32, -1.0);
  CHECK_EQ(values[0], std::numeric_limits<int32_t>::max());
  ScaledCopy(values, values, 2, DType::kInt32, -1.0 / 49);
  CHECK_EQ(values[1], 1);
}

TEST(ScaledCopyCopiesOrScales) {
  for (DType dtype : kAllTypes) {
    const Bytes in = MakeData(dtype, 5000, 0);
    Bytes out(in.size()), expected(in.size());
    ScaledCopy(in.data(), out.data(), 5000, dtype, 1.0);
    CHECK_TRUE(out == in);
    Reduce({in.data()}, expected.data(), 5000, dtype, ReduceOp::kSum, 0.25);
    ScaledCopy(in.data(), out.data(), 5000, dtype, 0.25);
    CHECK_TRUE(out == expected);
    Bytes in_place = in;
    ScaledCopy(in_place.data(), in_place.data(), 5000, dtype, 0.25);
    CHECK_TRUE(in_place == expected);
  }
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunTests(); }
