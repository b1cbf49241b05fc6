// 16-bit floats against a reference that is written from their definition.
#include "comm/half.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "test/check.h"

namespace {

// A format with `n_exponent` bits of exponent and `n_mantissa` of mantissa.
struct Format {
  int n_exponent;
  int n_mantissa;
  int bias() const { return (1 << (n_exponent - 1)) - 1; }
  uint16_t infinity() const { return static_cast<uint16_t>(((1 << n_exponent) - 1) << n_mantissa); }
};

constexpr Format kHalf{5, 10};
constexpr Format kBfloat{8, 7};

double Decode(uint16_t bits, const Format& format) {
  const int exponent = (bits >> format.n_mantissa) & ((1 << format.n_exponent) - 1);
  const int mantissa = bits & ((1 << format.n_mantissa) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << format.n_exponent) - 1) {
    return mantissa ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - format.bias() - format.n_mantissa);
  return sign * std::ldexp(mantissa + (1 << format.n_mantissa),
                           exponent - format.bias() - format.n_mantissa);
}

// Rounds to nearest even by arithmetic on real numbers; no bits of float32.
uint16_t Encode(float value, const Format& format) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - format.bias());
  // nearbyint rounds to nearest even; in units of the last place.
  const double units = std::nearbyint(std::ldexp(magnitude, format.n_mantissa - exponent));
  const int field = exponent + format.bias() - 1;
  const int64_t bits = (static_cast<int64_t>(field) << format.n_mantissa) + std::llrint(units);
  return sign | static_cast<uint16_t>(std::min<int64_t>(bits, format.infinity()));
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

using ToFloat = void (*)(const uint16_t*, float*, size_t);
using FromFloat = void (*)(const float*, uint16_t*, size_t);

void CheckAllValues(const Format& format, ToFloat to_float, FromFloat from_float) {
  std::vector<uint16_t> in(65536);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(in.size());
  to_float(in.data(), wide.data(), in.size());
  std::vector<uint16_t> back(in.size());
  from_float(wide.data(), back.data(), in.size());
  for (size_t i = 0; i < in.size(); ++i) {
    const double expected = Decode(in[i], format);
    if (std::isnan(expected)) {
      CHECK_TRUE(std::isnan(wide[i]));
      CHECK_TRUE(std::isnan(Decode(back[i], format)));
      continue;
    }
    CHECK_EQ(static_cast<double>(wide[i]), expected);
    CHECK_EQ(std::signbit(wide[i]), std::signbit(expected));
    CHECK_EQ(back[i], in[i]);
  }
}

// Every border between two neighbours, and the float32 beside it on each side.
void CheckRounding(const Format& format, FromFloat from_float) {
  std::vector<float> values = {0.0f,
                               -0.0f,
                               FromBits(1),
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity()};
  for (uint16_t bits = 0; bits < format.infinity(); ++bits) {
    // In float64 the middle is exact; it is a float32 as both have bits to spare.
    const double above = bits + 1 == format.infinity()
                             ? 2 * Decode(bits, format) - Decode(bits - 1, format)
                             : Decode(bits + 1, format);
    const float middle = static_cast<float>((Decode(bits, format) + above) / 2);
    for (int offset = -1; offset <= 1; ++offset) {
      const float value = FromBits(ToBits(middle) + static_cast<uint32_t>(offset));
      values.push_back(value);
      values.push_back(-value);
    }
  }
  // Many others: a step that meets all exponents and bit patterns.
  for (uint64_t bits = 0; bits < 0x7f800000u; bits += 9973) {
    values.push_back(FromBits(static_cast<uint32_t>(bits)));
  }
  std::vector<uint16_t> converted(values.size());
  from_float(values.data(), converted.data(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t expected =
        std::isinf(values[i])
            ? static_cast<uint16_t>(format.infinity() | (values[i] < 0 ? 0x8000 : 0))
            : Encode(values[i], format);
    CHECK_EQ(converted[i], expected);
  }
}

// What is converted eight at a time and what is left over agree bit by bit, so
// that no result depends on how a vector is cut. NaN payloads included.
void CheckCutting(ToFloat to_float, FromFloat from_float) {
  for (uint32_t first = 0; first < 65536; first += 8) {
    uint16_t in[8];
    for (uint32_t i = 0; i < 8; ++i) in[i] = static_cast<uint16_t>(first + i);
    float together[8], alone[8];
    uint16_t back_together[8], back_alone[8];
    to_float(in, together, 8);
    for (int i = 0; i < 8; ++i) to_float(in + i, alone + i, 1);
    CHECK_TRUE(std::memcmp(together, alone, sizeof(alone)) == 0);
    for (int i = 0; i < 8; ++i) together[i] = FromBits(ToBits(together[i]) + (i % 3));
    from_float(together, back_together, 8);
    for (int i = 0; i < 8; ++i) from_float(together + i, back_alone + i, 1);
    CHECK_TRUE(std::memcmp(back_together, back_alone, sizeof(back_alone)) == 0);
  }
}

}  // namespace

TEST(EveryHalfIsItsValueAndComesBack) {
  CheckAllValues(kHalf, tfscale::HalfToFloat, tfscale::FloatToHalf);
}
TEST(EveryBfloatIsItsValueAndComesBack) {
  CheckAllValues(kBfloat, tfscale::BfloatToFloat, tfscale::FloatToBfloat);
}
TEST(HalfRoundsToNearestEven) { CheckRounding(kHalf, tfscale::FloatToHalf); }
TEST(BfloatRoundsToNearestEven) { CheckRounding(kBfloat, tfscale::FloatToBfloat); }
TEST(HalfDoesNotDependOnTheCut) { CheckCutting(tfscale::HalfToFloat, tfscale::FloatToHalf); }
TEST(BfloatDoesNotDependOnTheCut) { CheckCutting(tfscale::BfloatToFloat, tfscale::FloatToBfloat); }

TEST(NanStaysNan) {
  const std::vector<float> nans = {FromBits(0x7f800001u), FromBits(0x7fc00000u),
                                   FromBits(0xff800001u), FromBits(0x7fffffffu)};
  std::vector<uint16_t> half(nans.size()), bfloat(nans.size());
  tfscale::FloatToHalf(nans.data(), half.data(), nans.size());
  tfscale::FloatToBfloat(nans.data(), bfloat.data(), nans.size());
  for (size_t i = 0; i < nans.size(); ++i) {
    CHECK_TRUE(std::isnan(Decode(half[i], kHalf)));
    CHECK_TRUE(std::isnan(Decode(bfloat[i], kBfloat)));
  }
}

int main() { return tfscale::testing::RunTests(); }
