// Allreduces whose blocks pass other ranks, on few and on many ranks.
#include "comm/relay.h"

#include <algorithm>
#include <string>
#include <vector>

#include "comm/reduce.h"
#include "comm/reduction.h"
#include "test/plans_job.h"

namespace tfscale {
namespace testing {
namespace {

bool IsWay(const Way& way, bool is_whole, size_t radix) {
  return way.is_whole == is_whole && way.radix == radix;
}

// A sum of several tensors under way. Its operation may outlive it.
class Relayed {
 public:
  Relayed(const Job& job, DType dtype, size_t count, const Way& way, int seed = 0)
      : vectors_(std::make_shared<Vectors>()) {
    ReductionArgs args;
    args.dtype = dtype;
    args.way = way;
    args.postscale = 0.5;
    args.counts = {count / 3, 0, count - count / 3};
    const size_t cut = count / 3 * SizeOf(dtype), bytes = count * SizeOf(dtype);
    vectors_->input = MakeData(dtype, count, job.rank(), seed);
    vectors_->output.assign(bytes, 'x');
    char* in = vectors_->input.data();
    char* out = vectors_->output.data();
    args.inputs = {in, in + cut, in + cut};
    args.outputs = {out, out + cut, out + cut};
    std::vector<Bytes> all;
    std::vector<const void*> sources;
    for (int r = 0; r < job.size(); ++r) all.push_back(MakeData(dtype, count, r, seed));
    for (const Bytes& one : all) sources.push_back(one.data());
    expected_.assign(bytes, 'x');
    Reduce(sources, expected_.data(), count, dtype, ReduceOp::kSum, 0.5);
    result_ = Post(MakeReduction(std::move(args)), {"relayed"}, vectors_);
  }

  Status Wait() { return result_.get(); }
  void Check() {
    CHECK_OK(std::move(result_));
    CHECK_TRUE(vectors_->output == expected_);
  }

 private:
  struct Vectors {
    Bytes input, output;
  };
  std::shared_ptr<Vectors> vectors_;
  Bytes expected_;
  std::future<Status> result_;
};

constexpr Way kRelays[] = {{true, 2}, {true, 3}, {false, 2}, {false, 3}, {false, 4}, {false, 100}};

}  // namespace

TEST(LoadsAreThoseOfDigits) {
  for (size_t n_ranks = 1; n_ranks < 130; ++n_ranks) {
    for (size_t radix : {2, 3, 4, 200}) {
      size_t n_blocks = 0;
      std::vector<size_t> offsets;  // of ranks that are sent to
      for (size_t i = 0; i < n_ranks; ++i) {
        for (size_t stride = 1; stride < n_ranks; stride *= radix) {
          const size_t digit = i / stride % radix;
          if (digit == 0) continue;
          ++n_blocks;
          offsets.push_back(digit * stride);
        }
      }
      std::sort(offsets.begin(), offsets.end());
      offsets.erase(std::unique(offsets.begin(), offsets.end()), offsets.end());
      const Relay::Load load = Relay::AlltoallLoad(n_ranks, radix);
      CHECK_EQ(load.n_blocks, n_blocks);
      CHECK_EQ(load.n_messages, offsets.size());
      CHECK_EQ(Relay::GatherLoad(n_ranks, radix).n_messages, offsets.size());
      CHECK_EQ(Relay::GatherLoad(n_ranks, radix).n_blocks, n_ranks - 1);
    }
  }
}

TEST(TheWayDependsOnBytesAndRanks) {
  // Few ranks do not relay.
  CHECK_TRUE(IsWay(BestWay(4, 4, 8192), true, 4));
  CHECK_TRUE(IsWay(BestWay(4, 4, 8193), false, 0));
  CHECK_TRUE(IsWay(BestWay(8, 8, 65536), false, 0));
  // By hand for 16: whole 4 * 5000 + 15 m, relayed 10 * 5000 + 39 / 16 m, direct 30 * (5000 + m /
  // 16).
  CHECK_TRUE(IsWay(BestWay(16, 16, 2384), true, 2));
  CHECK_TRUE(IsWay(BestWay(16, 16, 2400), false, 4));
  CHECK_TRUE(IsWay(BestWay(16, 16, 65536), false, 4));
  CHECK_TRUE(IsWay(BestWay(16, 16, 177760), false, 4));
  CHECK_TRUE(IsWay(BestWay(16, 16, 177792), false, 0));
  CHECK_TRUE(IsWay(BestWay(1024, 1024, 1 << 20), false, 4));
  // Ranks that share hosts combine their vectors there first.
  for (size_t n_hosts : {1, 4}) {
    CHECK_TRUE(IsWay(BestWay(16, n_hosts, 4096), true, 2));
    CHECK_TRUE(IsWay(BestWay(16, n_hosts, 4097), false, 0));
  }
}

TEST(MediumSegmentsBetweenFewHostsAreSentInFourChunks) {
  const size_t kib = 1024, usual = 1024 * kib;
  CHECK_EQ(ChunkBytes(4, 8 * kib, usual), 16 * kib);
  CHECK_EQ(ChunkBytes(4, 256 * kib, usual), 64 * kib);
  CHECK_EQ(ChunkBytes(8, 511 * kib, usual), 511 * kib / 4);
  CHECK_EQ(ChunkBytes(4, 512 * kib, usual), usual);
  CHECK_EQ(ChunkBytes(4, 256 * kib, 1000), size_t{1000});
  CHECK_EQ(ChunkBytes(1, 256 * kib, usual), usual);
  CHECK_EQ(ChunkBytes(9, 256 * kib, usual), usual);
}

// Fewer elements than ranks, and numbers that ranks do not divide.
TEST(EveryRelayAddsUpInTheOrderOfRanks) {
  Job job(OptionsWith({1, 100}));
  for (DType dtype : kAllTypes) {
    for (const Way& way : kRelays) {
      for (size_t count : {0, 1, 3, 17, 100, 3001}) Relayed(job, dtype, count, way).Check();
    }
  }
}

TEST(ManyRelaysAtOnce) {
  Job job;
  std::vector<Relayed> sums;
  for (int i = 0; i < 60; ++i) {
    const DType dtype = kAllTypes[static_cast<size_t>(i) % 8];
    sums.emplace_back(job, dtype, static_cast<size_t>(i) * 37, kRelays[i % 6], i);
  }
  for (Relayed& sum : sums) sum.Check();
}

// Ranks that have begun lack what the missing one should have passed on.
TEST(ARankThatIsMissingEndsRelays) {
  Job job(ShortLimits());
  if (job.size() == 1) return;
  if (job.rank() == job.size() - 1) {
    SleepMs(2500);
    return;
  }
  Relayed sum(job, DType::kFloat32, 5000, {false, 4});
  const Status status = sum.Wait();
  CHECK_TRUE(status.code == StatusCode::kFailed);
  CHECK_CONTAINS(status.message, "s in relayed: waiting for rank");
}

TEST(AFailureEndsRelaysUnderWay) {
  Job job;
  if (job.size() == 1) return;
  std::vector<Relayed> sums;
  for (const Way& way : kRelays) {
    // The others have begun.
    if (job.rank() > 0) sums.emplace_back(job, DType::kFloat64, 2000, way);
  }
  if (job.rank() == 0) {
    SleepMs(20);
    job.engine().Fail("the reason");
  }
  for (Relayed& sum : sums) {
    const Status status = sum.Wait();
    CHECK_TRUE(status.code == StatusCode::kFailed);
    CHECK_CONTAINS(status.message, "Communication failed on rank 0: the reason");
  }
}

TEST(RelaysUnderWayAtTheEnd) {
  for (int round = 0; round < 3; ++round) {
    std::vector<Relayed> sums;
    auto job = std::make_unique<Job>();
    for (int i = 0; i < 12 && job->rank() % 2 == 0; ++i) {
      sums.emplace_back(*job, DType::kFloat32, 3000, kRelays[i % 6], i);
    }
    job.reset();
    for (Relayed& sum : sums) sum.Wait();  // whatever became of it
  }
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
