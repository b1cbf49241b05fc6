// The code of the largest values, value by value.
#include "comm/sparse_code.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "test/check.h"

namespace tfscale {
namespace testing {
namespace {

using Floats = std::vector<float>;

struct Coded {
  Floats decoded, error;
};

Coded CodeOf(const SparseCode& code, const Floats& v, const Floats& before = {},
             float decay = 1.0f) {
  const Floats error = before.empty() ? Floats(v.size()) : before;
  std::vector<char> bytes(code.Bytes(v.size()));
  Coded coded{Floats(v.size()), Floats(v.size(), -1.0f)};
  code.Encode(v.data(), 1.0f, error.data(), decay, v.size(), bytes.data(), coded.error.data());
  code.DecodeOnto(bytes.data(), 1.0f, v.size(), coded.decoded.data());
  return coded;
}

size_t NonZero(const Floats& values) {
  size_t n = 0;
  for (float value : values) n += value != 0 ? 1 : 0;
  return n;
}

bool IsSame(const Floats& a, const Floats& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

Floats Random(size_t count, int kind, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& value : values) {
    value = normal(random);
    if (kind == 1) value *= std::exp(8 * normal(random));   // many magnitudes
    if (kind == 2) value = std::round(value);               // ties and zeros
    if (kind == 3) value *= 1e-38f;                         // denormal
    if (kind == 4 && random() % 100 != 0) value *= 1e-12f;  // few that are large
  }
  return values;
}

}  // namespace

TEST(WhatIsSentAndTheErrorAddUpToTheValue) {
  unsigned seed = 0;
  for (double share : {1.0 / 64, 0.01, 0.3, 1.0}) {
    for (size_t chunk : {size_t{4096}, size_t{256}, size_t{7}}) {
      const SparseCode code(share, chunk);
      for (size_t count : {size_t{1}, size_t{7}, size_t{4095}, size_t{4096}, size_t{9000}}) {
        for (int kind = 0; kind < 5; ++kind) {
          const Floats v = Random(count, kind, ++seed);
          const Coded coded = CodeOf(code, v);
          for (size_t i = 0; i < count; ++i) {
            CHECK_TRUE(coded.decoded[i] + coded.error[i] == v[i]);
            CHECK_TRUE(std::fabs(coded.error[i]) <= std::fabs(v[i]));
            // In float64, where the difference is exact: no bit is lost.
            CHECK_TRUE(static_cast<double>(coded.decoded[i]) + coded.error[i] == v[i]);
            if (v[i] == 0) CHECK_TRUE(coded.decoded[i] == 0 && coded.error[i] == 0);
          }
        }
      }
    }
  }
}

TEST(TheLargestValuesAreSentAtTwoLevels) {
  const SparseCode code(0.5, 8);
  const Coded coded = CodeOf(code, {1, -2, 0.5f, 6, -6, 0.25f, 2, 0});
  CHECK_TRUE((coded.decoded == Floats{0, -2, 0, 6, -6, 0, 2, 0}));
  CHECK_TRUE((coded.error == Floats{1, 0, 0.5f, 0, 0, 0.25f, 0, 0}));
  // 2, 3 and 7: their mean is 4, so the levels are 2.5 and 7.
  const Coded uneven = CodeOf(SparseCode(3.0 / 8, 8), {1, 0, 2, 0, -3, 0, 7, 1});
  CHECK_TRUE((uneven.decoded == Floats{0, 0, 2.5f, 0, -2.5f, 0, 7, 0}));
  CHECK_TRUE((uneven.error == Floats{1, 0, -0.5f, 0, -0.5f, 0, 0, 1}));
}

TEST(OfEqualMagnitudesTheFirstAreSent) {
  const Coded coded = CodeOf(SparseCode(0.25, 8), {1, 3, -3, 3, -3, 1, 3, 0});
  CHECK_TRUE((coded.decoded == Floats{0, 3, -3, 0, 0, 0, 0, 0}));
  CHECK_TRUE(NonZero(CodeOf(SparseCode(1.0 / 64, 4096), Floats(4096, 1.0f)).decoded) == 64);
}

TEST(AValueBelowHalfOfItsLevelIsNotSent) {
  const Coded coded = CodeOf(SparseCode(0.5, 8), {1, 8, 4, 0, 0, 0, 0, 16});
  // 1, 8, 4 and 16 have the mean 7.25: the levels are 2.5 and 12.
  CHECK_TRUE((coded.decoded == Floats{0, 12, 2.5f, 0, 0, 0, 0, 12}));
  CHECK_TRUE((coded.error == Floats{1, -4, 1.5f, 0, 0, 0, 0, 4}));
}

TEST(ZerosStayZero) {
  const SparseCode code(1.0 / 64, 4096);
  const Coded zeros = CodeOf(code, Floats(5000));
  CHECK_TRUE(NonZero(zeros.decoded) == 0 && NonZero(zeros.error) == 0);
  Floats one(4096);
  one[17] = -0.5f;  // of the 64 that may be sent all others are zeros
  CHECK_TRUE(CodeOf(code, one).decoded == one);
  Floats tiny(4096, std::ldexp(1.0f, -101));
  const Coded kept = CodeOf(code, tiny);
  CHECK_TRUE(NonZero(kept.decoded) == 0 && kept.error == tiny);
}

TEST(AChunkThatIsNotFiniteIsNanAndKeepsItsError) {
  const SparseCode code(1.0 / 64, 256);
  for (float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -2e38f}) {
    Floats v = Random(700, 0, 5);
    const Floats before = Random(700, 0, 6);
    v[300] = bad;
    const Coded coded = CodeOf(code, v, before);
    for (size_t i = 0; i < v.size(); ++i) {
      const bool is_bad = i >= 256 && i < 512;
      CHECK_TRUE(std::isnan(coded.decoded[i]) == is_bad);
      if (is_bad) CHECK_TRUE(coded.error[i] == before[i]);
      if (!is_bad) CHECK_TRUE(coded.decoded[i] + coded.error[i] == v[i] + before[i]);
    }
  }
}

TEST(ErrorsDecayBeforeTheyAreAdded) {
  const SparseCode code(1.0 / 64, 4096);
  const Floats zeros(4096);
  Floats error = Random(4096, 0, 9);
  const Coded coded = CodeOf(code, zeros, error, 0.5f);
  for (size_t i = 0; i < error.size(); ++i) {
    CHECK_TRUE(coded.decoded[i] + coded.error[i] == 0.5f * error[i]);
  }
}

TEST(BytesAreTheFormula) {
  const SparseCode code(1.0 / 64, 4096);
  CHECK_TRUE(code.Kept(4096) == 64 && code.Kept(1) == 1 && code.Kept(65) == 2);
  CHECK_TRUE(code.Bytes(4096) == 4 + 64 * 14 / 8);
  // A short chunk sends its share, rounded up: 2 values have 3 bytes of positions, one of levels.
  CHECK_TRUE(code.Bytes(4096 + 100) == 4 + 64 * 14 / 8 + 4 + 3 + 1);
  // ResNet-50.
  const double share = static_cast<double>(code.Bytes(25557032)) / 0.71e6;
  CHECK_TRUE(share > 0.97 && share < 1.03);
}

TEST(APartOfAVectorHasTheSameBytes) {
  const SparseCode code(0.1, 64);
  const Floats v = Random(1000, 0, 3), zeros(1000);
  Floats error(1000), part_error(1000);
  std::vector<char> whole(code.Bytes(1000)), part(code.Bytes(1000 - 640));
  code.Encode(v.data(), 1, zeros.data(), 1, 1000, whole.data(), error.data());
  code.Encode(v.data() + 640, 1, zeros.data(), 1, 360, part.data(), part_error.data());
  CHECK_TRUE(std::memcmp(whole.data() + code.Bytes(640), part.data(), part.size()) == 0);
  CHECK_TRUE(!IsSame(error, part_error));
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunTests(); }
