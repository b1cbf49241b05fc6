// Allreduce and reduce-scatter on the engine, with every rank's data known to all.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "comm/half.h"
#include "comm/reduce.h"
#include "test/job.h"

namespace tfscale {
namespace testing {
namespace {

// All vectors at every rank, directly or relayed, and segments likewise.
constexpr Way kWays[] = {{true, 100}, {true, 2}, {false, 0}, {false, 2}};

struct Case {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::vector<size_t> counts;
  double prescale = 1.0;
  double postscale = 1.0;
  std::optional<Way> way = std::nullopt;
  int ranks_per_host = 0;  // as in EngineOptions

  size_t total() const {
    size_t n = 0;
    for (size_t count : counts) n += count;
    return n;
  }
};

Bytes Reduced(const Case& c, const std::vector<Bytes>& vectors, double scale) {
  std::vector<const void*> sources;
  for (const Bytes& vector : vectors) sources.push_back(vector.data());
  Bytes out(c.total() * SizeOf(c.dtype));
  Reduce(sources, out.data(), c.total(), c.dtype, c.op, scale);
  return out;
}

// What the ranks' vectors reduce to, in rank order, host by host, by the kernels alone.
Bytes Expected(const Case& c, int n_ranks) {
  const bool is_byte = SizeOf(c.dtype) == 1;
  const int per_host = is_byte || c.ranks_per_host == 0 ? n_ranks : c.ranks_per_host;
  const bool is_half = SizeOf(c.dtype) == 2 && c.op == ReduceOp::kSum;
  const bool is_two_level = per_host > 1 && per_host < n_ranks;
  const double early = is_two_level && is_half ? c.postscale : 1.0;
  std::vector<Bytes> sums;
  for (int first = 0; first < n_ranks; first += per_host) {
    std::vector<Bytes> vectors;
    for (int r = first; r < std::min(first + per_host, n_ranks); ++r) {
      vectors.push_back(MakeData(c.dtype, c.total(), r));
      ScaledCopy(vectors.back().data(), vectors.back().data(), c.total(), c.dtype, c.prescale);
    }
    if (per_host == n_ranks) return Reduced(c, vectors, c.postscale);
    sums.push_back(Reduced(c, vectors, early));
  }
  return Reduced(c, sums, early == 1.0 ? c.postscale : 1.0);
}

// Inputs in pieces of their own, as gradients are.
struct Pieces {
  std::vector<Bytes> inputs;
  std::vector<Bytes> outputs;
};

ReductionArgs Args(const Case& c, const std::shared_ptr<Pieces>& pieces, int rank) {
  ReductionArgs args;
  args.dtype = c.dtype;
  args.op = c.op;
  args.prescale = c.prescale;
  args.postscale = c.postscale;
  args.way = c.way;
  args.counts = c.counts;
  const Bytes data = MakeData(c.dtype, c.total(), rank);
  const char* next = data.data();
  for (size_t count : c.counts) {
    const size_t bytes = count * SizeOf(c.dtype);
    pieces->inputs.emplace_back(next, next + bytes);
    pieces->outputs.emplace_back(bytes, 'x');
    next += bytes;
  }
  for (Bytes& input : pieces->inputs) args.inputs.push_back(input.data());
  for (Bytes& output : pieces->outputs) args.outputs.push_back(output.data());
  return args;
}

void CheckAllreduce(const Job& job, const Case& c) {
  auto pieces = std::make_shared<Pieces>();
  CHECK_OK(Post(MakeReduction(Args(c, pieces, job.rank()))));
  Bytes result;
  for (const Bytes& part : pieces->outputs) result.insert(result.end(), part.begin(), part.end());
  CHECK_TRUE(result == Expected(c, job.size()));
}

}  // namespace

TEST(EveryTypeAndReduction) {
  Job job;
  for (DType dtype : kAllTypes) {
    for (ReduceOp op : kAllOps) {
      for (size_t count : {0, 1, 7, 1000}) {
        for (const Way& way : kWays) {
          Case c{dtype, op, {count}};
          c.way = way;
          CheckAllreduce(job, c);
        }
      }
    }
  }
}

TEST(SeveralPieces) {
  Job job;
  for (DType dtype : kAllTypes) {
    for (const Way& way : kWays) {
      Case c{dtype, ReduceOp::kSum, std::vector<size_t>(600, 2)};
      c.way = way;
      CheckAllreduce(job, c);
      c.counts = {3, 0, 1000, 1, 257};
      CheckAllreduce(job, c);
      c.prescale = 0.5;
      c.postscale = 1.0 / job.size();
      CheckAllreduce(job, c);
    }
  }
}

TEST(LongVectors) {
  EngineOptions options = SmallOptions();
  options.max_message_bytes = 5000;
  options.chunk_bytes = 12000;
  Job job(options);
  for (DType dtype : kAllTypes) CheckAllreduce(job, {dtype, ReduceOp::kSum, {100003}});
}

// The last chunk is short and overtakes long ones on the way.
TEST(ShortLastChunks) {
  EngineOptions options = SmallOptions();
  options.max_message_bytes = 1 << 30;
  options.chunk_bytes = 512 * 1024;
  Job job(options);
  for (size_t extra = 1; extra <= 8; ++extra) {
    const size_t n = static_cast<size_t>(job.size());
    const size_t per_rank = (512 * 1024 / 4) + 64 * extra;
    CheckAllreduce(job, {DType::kInt32, ReduceOp::kSum, {n * per_rank}});
  }
}

// The same bits however a vector is sent, and with any number of threads.
TEST(CutsDoNotChangeTheResult) {
  Case c{DType::kFloat16, ReduceOp::kSum, {1000, 9001}, 0.3, 0.7};
  for (int64_t chunk_bytes : {100, 1000, 16384, 1 << 20}) {
    EngineOptions options = SmallOptions();
    options.chunk_bytes = chunk_bytes;
    options.max_message_bytes = chunk_bytes == 1000 ? 70 : 100000;
    options.reduce_threads = chunk_bytes == 1 << 20 ? 3 : 1;
    Job job(options);
    for (const Way& way : kWays) {
      c.way = way;
      CheckAllreduce(job, c);
    }
  }
}

// Two levels, of hosts with equal and with different numbers of ranks.
TEST(SeveralRanksPerHost) {
  for (const Layout& layout : kLayouts) {
    Job job(OptionsWith(layout));
    for (DType dtype : kAllTypes) {
      for (ReduceOp op : kAllOps) {
        for (size_t count : {0, 1, 7, 1000, 10007}) {
          for (const Way& way : kWays) {
            Case c{dtype, op, {count, 3}};
            c.way = way;
            c.ranks_per_host = layout.ranks_per_host;
            CheckAllreduce(job, c);
          }
        }
      }
      Case c{dtype, ReduceOp::kSum, {5000, 0, 1}, 0.5, 1.0 / job.size()};
      c.ranks_per_host = layout.ranks_per_host;
      CheckAllreduce(job, c);
    }
  }
}

// 60000 of two ranks exceed the largest number of this type; their mean does not.
TEST(MeansOfLargeHalfNumbersOnSeveralHosts) {
  Job job(OptionsWith({2, 100}));
  const float large = 60000;
  uint16_t half = 0;
  FloatToHalf(&large, &half, 1);
  auto values = std::make_shared<std::vector<uint16_t>>(20000, half);
  auto means = std::make_shared<std::vector<uint16_t>>(20000, uint16_t{0});
  ReductionArgs args;
  args.dtype = DType::kFloat16;
  args.postscale = 1.0 / job.size();
  args.inputs = {values->data()};
  args.outputs = {means->data()};
  args.counts = {values->size()};
  CHECK_OK(Post(MakeReduction(std::move(args))));
  for (uint16_t mean : *means) {
    float value = 0;
    HalfToFloat(&mean, &value, 1);
    CHECK_TRUE(std::abs(value - large) <= 64);  // neighbours are 32 apart
  }
}

TEST(ManyAtOnce) {
  Job job;
  const Case c{DType::kFloat32, ReduceOp::kSum, {3000}};
  const Bytes expected = Expected(c, job.size());
  std::vector<std::shared_ptr<Pieces>> all;
  std::vector<std::future<Status>> results;
  for (int i = 0; i < 50; ++i) {
    all.push_back(std::make_shared<Pieces>());
    results.push_back(Post(MakeReduction(Args(c, all.back(), job.rank()))));
  }
  for (auto& result : results) CHECK_OK(std::move(result));
  for (const auto& pieces : all) CHECK_TRUE(pieces->outputs[0] == expected);
}

void CheckReduceScatter(const Layout& layout) {
  Job job(OptionsWith(layout));
  const size_t n = static_cast<size_t>(job.size());
  // Even; nothing for some ranks; all for one; nothing at all.
  std::vector<std::vector<size_t>> shares(4, std::vector<size_t>(n, 0));
  for (size_t r = 0; r < n; ++r) shares[0][r] = 500;
  for (size_t r = 0; r < n; ++r) shares[1][r] = r % 2 == 0 ? 0 : 333 * r;
  shares[2][n - 1] = 1001;
  for (const std::vector<size_t>& counts : shares) {
    for (DType dtype : kAllTypes) {
      size_t total = 0;
      for (size_t count : counts) total += count;
      // Borders between inputs and between ranks have nothing to do with each other.
      Case c{dtype, ReduceOp::kSum, {total}, 0.5, 0.25};
      if (dtype != DType::kFloat32) c.counts = {total / 3, 0, total - total / 3};
      c.ranks_per_host = layout.ranks_per_host;
      auto pieces = std::make_shared<Pieces>();
      ReductionArgs args = Args(c, pieces, job.rank());
      const size_t own = counts[static_cast<size_t>(job.rank())] * SizeOf(dtype);
      Bytes part(own, 'x');
      args.outputs = {part.data()};
      args.scatter_counts = counts;
      CHECK_OK(Post(MakeReduction(std::move(args))));
      const Bytes expected = Expected(c, job.size());
      size_t begin = 0;
      for (int r = 0; r < job.rank(); ++r) begin += counts[static_cast<size_t>(r)] * SizeOf(dtype);
      CHECK_TRUE(std::equal(part.begin(), part.end(), expected.begin() + static_cast<long>(begin)));
    }
  }
}

TEST(ReduceScatter) {
  for (const Layout& layout : kLayouts) CheckReduceScatter(layout);
}

TEST(ShapesThatDifferFail) {
  auto job = std::make_unique<Job>();
  if (job->size() == 1) return;
  Case c{DType::kFloat32, ReduceOp::kSum, {static_cast<size_t>(job->rank() == 0 ? 40 : 50)}};
  auto pieces = std::make_shared<Pieces>();
  const Status status = Post(MakeReduction(Args(c, pieces, job->rank())), {}, pieces).get();
  CHECK_TRUE(status.code == StatusCode::kFailed);
  CHECK_CONTAINS(status.message, "ranks have tensors of different");
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
