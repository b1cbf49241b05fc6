// Bytes that cross between hosts with several ranks: each host gets what it has not, once.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "comm/quantize.h"
#include "test/job.h"

namespace {

std::vector<int> host_of;             // by rank of the communicator that a test uses
int own_host = 0;                     // of this rank
std::atomic<long> sent_to_others{0};  // bytes, to ranks of other hosts

}  // namespace

// In the place of the library's function.
extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int peer, int tag,
                         MPI_Comm comm, MPI_Request* request) {
  if (host_of[static_cast<size_t>(peer)] != own_host) sent_to_others += count;
  return PMPI_Isend(data, count, type, peer, tag, comm, request);
}

namespace tfscale {
namespace testing {
namespace {

constexpr int kPerHost = 2;
constexpr size_t kCount = 120000;  // of floats, divisible by the numbers of ranks

EngineOptions Options() {
  EngineOptions options = OptionsWith({kPerHost, 100});
  options.chunk_bytes = 1 << 16;
  options.max_message_bytes = 1 << 20;
  return options;
}

// Ranks of the world in a group, in its order, and the group's number.
struct Members {
  std::vector<int> ranks;
  int group = 0;

  size_t size() const { return ranks.size(); }
  int n_hosts() const { return (static_cast<int>(size()) + kPerHost - 1) / kPerHost; }
  std::vector<size_t> Cuts(size_t length) const {
    std::vector<size_t> cuts;
    for (size_t r = 0; r <= size(); ++r) cuts.push_back(length * r / size());
    return cuts;
  }
  // This rank's number in the group.
  size_t Place(int rank) const {
    return static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }
};

// Runs an operation and requires how many bytes all ranks together send to other hosts: no more
// than a twentieth above what each other host needs of `bytes`, which all ranks have together.
void CheckBytes(const Members& members, OperationHandle operation, double bytes) {
  sent_to_others = 0;
  CHECK_OK(Post(std::move(operation), {"counted", members.group}));
  long own = sent_to_others, all = 0;
  MPI_Allreduce(&own, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
  const double expected = bytes * (members.n_hosts() - 1);
  CHECK_TRUE(static_cast<double>(all) >= expected);
  CHECK_TRUE(static_cast<double>(all) <= 1.05 * expected + 2000);
}

void CheckSegments(const Job& job, const Members& members) {
  const std::vector<size_t> cuts = members.Cuts(kCount);
  std::vector<char> buffer(kCount, 'x'), whole(kCount);
  for (size_t r = 0; r + 1 < cuts.size(); ++r) {
    std::fill(&whole[cuts[r]], &whole[cuts[r]] + (cuts[r + 1] - cuts[r]), static_cast<char>(r));
  }
  const size_t own = members.Place(job.rank());
  for (size_t i = cuts[own]; i < cuts[own + 1]; ++i) buffer[i] = whole[i];
  CheckBytes(members, MakeSegmentGather(buffer.data(), cuts), kCount);
  CHECK_TRUE(buffer == whole);
}

void CheckChanges(const Job& job, const Members& members) {
  const std::vector<size_t> cuts = members.Cuts(kCount);
  std::vector<float> old(kCount, 0.0F), buffer(kCount, 0.0F);
  const size_t own = members.Place(job.rank());
  for (size_t i = cuts[own]; i < cuts[own + 1]; ++i) buffer[i] = 1.0F;
  ChangesArgs args;
  args.bits = 8;
  args.block = 256;
  args.buffer = buffer.data();
  args.cuts = cuts;
  args.vectors.push_back({0, kCount, old.data()});
  const double bytes = static_cast<double>(BlockCode(8, 256).Bytes(kCount));
  CheckBytes(members, MakeChangeGather(std::move(args)), bytes);
  for (float value : buffer) CHECK_TRUE(std::abs(value - 1.0F) < 0.01F);
}

void CheckQuantizedSum(const Members& members) {
  constexpr size_t kBlock = 256;
  const std::vector<float> in(kCount, 1.0F);
  std::vector<float> out(kCount);
  QuantizedArgs args;
  args.bits = 8;
  args.block = kBlock;
  args.counts = {kCount};
  std::vector<size_t> cuts = members.Cuts(kCount / kBlock);
  for (size_t& cut : cuts) cut *= kBlock;
  cuts.back() = kCount;
  args.cuts.push_back(cuts);
  args.inputs.push_back(in.data());
  args.outputs.push_back(out.data());
  const double bytes = 2 * static_cast<double>(BlockCode(8, kBlock).Bytes(kCount));
  CheckBytes(members, MakeQuantizedReduction(std::move(args)), bytes);
  const float sum = static_cast<float>(members.size());
  for (float value : out) CHECK_TRUE(std::abs(value - sum) < 0.02F * sum);
}

void CheckSum(const Members& members) {
  const std::vector<float> in(kCount, 1.0F);
  std::vector<float> out(kCount);
  ReductionArgs args;
  args.inputs = {in.data()};
  args.outputs = {out.data()};
  args.counts = {kCount};
  CheckBytes(members, MakeReduction(std::move(args)), 2.0 * kCount * sizeof(float));
  CHECK_TRUE(out == std::vector<float>(kCount, static_cast<float>(members.size())));
}

void CheckBroadcast(const Job& job, const Members& members) {
  const std::vector<float> in(kCount, 3.0F);
  std::vector<float> out(kCount);
  const bool is_root = members.Place(job.rank()) == 0;
  CheckBytes(members, MakeBroadcast(is_root ? in.data() : nullptr, out.data(), kCount * 4, 0),
             kCount * 4.0);
  CHECK_TRUE(is_root || out == in);
}

void CheckAll(const Job& job, const Members& members) {
  CheckSegments(job, members);
  CheckChanges(job, members);
  CheckQuantizedSum(members);
  CheckSum(members);
  CheckBroadcast(job, members);
}

// The ranks of the world; `host_of` must be known before the engine's first message, and stay.
std::vector<int> World() {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  own_host = rank / kPerHost;
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(r);
  return ranks;
}

void SetHosts(const std::vector<int>& ranks) {
  host_of.clear();
  for (int rank : ranks) host_of.push_back(rank / kPerHost);
}

}  // namespace

TEST(EachHostGetsWhatItHasNotOnce) {
  const std::vector<int> all = World();
  SetHosts(all);
  const Job job(Options());
  CheckAll(job, {all});
}

// Ranks of a host do not follow each other.
TEST(GroupsWhoseRanksTakeTurnsOverHosts) {
  const std::vector<int> by_turns = {0, 2, 1, 3};
  if (World().size() != by_turns.size()) return;
  SetHosts(by_turns);
  const Job job(Options());
  CheckAll(job, {by_turns, job.engine().AddGroup(by_turns)});
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
