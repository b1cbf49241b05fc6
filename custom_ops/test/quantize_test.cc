// Codes of blocks: what is sent and what is kept add up to what was given, bit by bit.
#include "comm/quantize.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <string>

#include "comm/types.h"
#include "test/check.h"

namespace tfscale {
namespace testing {
namespace {

using Floats = std::vector<float>;

struct Kind {
  int bits;
  size_t block;
};
constexpr Kind kKinds[] = {{8, 256}, {4, 64}, {16, 256}, {16, 64}, {8, 64}, {4, 256}};

// Vectors of many distributions: each has magnitudes over several orders.
Floats Draw(int distribution, size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(-1, 1);
  Floats values(count);
  for (float& v : values) {
    switch (distribution) {
      case 0:
        v = normal(random);
        break;
      case 1:  // long tails
        v = std::exp(4 * normal(random)) * (random() % 2 == 0 ? 1.0f : -1.0f);
        break;
      case 2:  // mostly zeros
        v = random() % 10 == 0 ? normal(random) : 0.0f;
        break;
      case 3:  // from denormal to large
        v = std::ldexp(uniform(random), static_cast<int>(random() % 240) - 140);
        break;
      case 4:  // denormal
        v = std::ldexp(uniform(random), -130);
        break;
      case 5:  // ties
        v = static_cast<float>(static_cast<int>(random() % 255) - 127) / 2;
        break;
      default:
        v = 0;
    }
  }
  return values;
}

uint32_t BitsOf(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  return bits;
}

}  // namespace

TEST(SentAndKeptAddUpBitByBit) {
  for (const Kind& kind : kKinds) {
    const BlockCode code(kind.bits, kind.block);
    const float largest_q = kind.bits == 8 ? 127.0f : 7.0f;
    for (int distribution = 0; distribution <= 6; ++distribution) {
      for (size_t count : {0, 1, 31, 33, 63, 64, 255, 256, 257, 1000, 20011}) {
        const Floats in = Draw(distribution, count, 1);
        Floats error = Draw(distribution, count, 2);
        Floats kept(count), out(count), sum(count);
        std::vector<char> codes(code.Bytes(count) + 1, 'x');
        code.Encode(in.data(), 0.5f, error.data(), count, codes.data(), kept.data());
        CHECK_EQ(codes.back(), 'x');
        code.Decode(codes.data(), count, out.data());
        for (size_t i = 0; i < count; ++i) {
          const float v = in[i] * 0.5f + error[i];
          CHECK_EQ(BitsOf(out[i] + kept[i] + 0.0f), BitsOf(v + 0.0f));
        }
        for (size_t begin = 0; begin < count; begin += kind.block) {
          const size_t end = std::min(count, begin + kind.block);
          float largest = 0;
          for (size_t i = begin; i < end; ++i)
            largest = std::max(largest, std::abs(in[i] * 0.5f + error[i]));
          for (size_t i = begin; i < end && kind.bits < 16; ++i) {
            // Half of a scale, which was rounded up by 1/128 at most; or all of what is tiny.
            const float bound = largest / largest_q * 0.5f * (1 + 1.0f / 64);
            CHECK_TRUE(std::abs(kept[i]) <= std::max(bound, 1.1e-28f));
          }
        }
        code.DecodeOnto(codes.data(), error.data(), count, sum.data());
        for (size_t i = 0; i < count; ++i) CHECK_EQ(BitsOf(sum[i]), BitsOf(error[i] + out[i]));
        // Cut between blocks, it is the same code.
        const size_t half = count / 2 / kind.block * kind.block;
        Floats kept_again(count);
        std::vector<char> again(codes.size(), 'x');
        code.Encode(in.data(), 0.5f, error.data(), half, again.data(), kept_again.data());
        code.Encode(in.data() + half, 0.5f, error.data() + half, count - half,
                    again.data() + code.Bytes(half), kept_again.data() + half);
        CHECK_TRUE(again == codes && kept_again == kept);
        // Without an error that is kept.
        Floats zeros(count, -0.0f);  // adding 0.0 would change -0.0
        code.Encode(in.data(), 1.0f, zeros.data(), count, codes.data(), kept.data());
        code.Encode(in.data(), 1.0f, nullptr, count, again.data(), nullptr);
        CHECK_TRUE(again == codes);
      }
    }
  }
}

TEST(SumsAreEncodedAsVectorsAre) {
  for (const Kind& kind : kKinds) {
    const BlockCode code(kind.bits, kind.block);
    const size_t count = 5000 + kind.block / 2 + 1;
    std::vector<std::vector<char>> vectors;
    std::vector<const char*> sources;
    Floats expected(count, 0.0f), out(count), kept(count), sum(count);
    for (unsigned r = 0; r < 3; ++r) {
      vectors.emplace_back(code.Bytes(count));
      code.Encode(Draw(0, count, r).data(), 1, nullptr, count, vectors.back().data(), nullptr);
      code.Decode(vectors.back().data(), count, out.data());
      for (size_t i = 0; i < count; ++i) expected[i] = r == 0 ? out[i] : expected[i] + out[i];
    }
    for (const auto& vector : vectors) sources.push_back(vector.data());
    for (float& v : expected) v = static_cast<float>(v * (1.0 / 3));
    code.DecodeSum(sources, 1.0 / 3, count, sum.data());
    CHECK_TRUE(sum == expected);
    const Floats error = Draw(1, count, 7);
    std::vector<char> codes(code.Bytes(count)), by_hand(codes.size());
    Floats kept_by_hand(count);
    code.EncodeSum(sources, 1.0 / 3, error.data(), count, codes.data(), kept.data());
    code.Encode(expected.data(), 1, error.data(), count, by_hand.data(), kept_by_hand.data());
    CHECK_TRUE(codes == by_hand && kept == kept_by_hand);
  }
}

TEST(BlocksThatAreNotFiniteBecomeNanAndKeepTheirErrors) {
  for (const Kind& kind : kKinds) {
    if (kind.bits == 16) continue;  // values by themselves, below
    const BlockCode code(kind.bits, kind.block);
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                            -std::numeric_limits<float>::infinity(), 3e38f}) {
      const size_t count = 3 * kind.block;
      Floats in = Draw(0, count, 3), error = Draw(0, count, 4), kept(count), out(count);
      in[kind.block + 5] = bad;
      std::vector<char> codes(code.Bytes(count));
      code.Encode(in.data(), 1, error.data(), count, codes.data(), kept.data());
      code.EncodeSum({codes.data(), codes.data()}, 0.5, nullptr, count, codes.data(), nullptr);
      code.Decode(codes.data(), count, out.data());
      for (size_t i = 0; i < count; ++i) {
        const bool is_bad = i / kind.block == 1;
        CHECK_EQ(std::isnan(out[i]), is_bad);
        if (is_bad) CHECK_EQ(kept[i], error[i]);
      }
    }
  }
  const BlockCode bfloat(16, 256);
  const Floats in = {std::numeric_limits<float>::infinity(), 1.01f, 3.4e38f};
  const Floats error = {0.25f, 0.0f, 0.5f};
  Floats kept(3), out(3);
  std::vector<char> codes(bfloat.Bytes(3));
  bfloat.Encode(in.data(), 1, error.data(), 3, codes.data(), kept.data());
  bfloat.Decode(codes.data(), 3, out.data());
  CHECK_TRUE(std::isinf(out[0]) && std::isinf(out[2]) && kept[0] == 0.25f && kept[2] == 0.5f);
  CHECK_EQ(out[1] + kept[1], 1.01f);
}

TEST(IntegersUpToTheLargestAreExact) {
  const BlockCode code(8, 256);
  Floats in(256), out(256);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 255) - 127;
  std::vector<char> codes(code.Bytes(256));
  code.Encode(in.data(), 1, nullptr, 256, codes.data(), nullptr);
  code.Decode(codes.data(), 256, out.data());
  CHECK_TRUE(out == in);
}

TEST(OtherCodesAreRefused) {
  CHECK_THROWS(BlockCode(2, 256), "Received: 2 bits, blocks of 256");
  CHECK_THROWS(BlockCode(8, 100), "Received: 8 bits, blocks of 100");
}

// Printed, and far below what any CPU of today reaches: that is a mistake, not a slow machine.
TEST(Speed) {
  const size_t count = 1 << 20;
  const Floats in = Draw(0, count, 5), error = Draw(0, count, 6);
  Floats kept(count), out(count);
  for (const Kind& kind : {Kind{8, 256}, Kind{4, 64}}) {
    const BlockCode code(kind.bits, kind.block);
    std::vector<char> codes(code.Bytes(count)), result(codes.size());
    const std::vector<const char*> sources(4, codes.data());
    const auto rate = [&](const auto& work) {
      double best = 0;
      for (int i = 0; i < 5; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        work();
        const std::chrono::duration<double> s = std::chrono::steady_clock::now() - begin;
        best = std::max(best, static_cast<double>(count) * 4 / 1e9 / s.count());
      }
      return best;
    };
    const double encode =
        rate([&] { code.Encode(in.data(), 1, error.data(), count, codes.data(), kept.data()); });
    const double sum = rate(
        [&] { code.EncodeSum(sources, 0.25, error.data(), count, result.data(), kept.data()); });
    const double decode = rate([&] { code.Decode(codes.data(), count, out.data()); });
    std::printf("%d bits, GB/s of float32: encode %.1f, sum of 4 and encode %.1f, decode %.1f\n",
                kind.bits, encode, sum, decode);
    CHECK_TRUE(std::min({encode, sum, decode}) > 0.01);
  }
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunTests(); }
