// Sparse sums on the engine, against a computation in one process with all ranks' data.
#include <algorithm>
#include <vector>

#include "comm/host_layout.h"
#include "comm/reduce.h"
#include "comm/sparse_code.h"
#include "test/job.h"

namespace tfscale {
namespace testing {
namespace {

using Floats = std::vector<float>;
using Tensors = std::vector<Floats>;

struct Case {
  double share = 0.1;
  size_t chunk = 256;
  double decay = 1.0;
  std::vector<size_t> counts;
  double prescale = 1.0;
  double postscale = 1.0;
  int n_ranks = 1;
  int ranks_per_host = 0;

  HostLayout Hosts() const {
    std::vector<int> host_of;
    for (int r = 0; r < n_ranks; ++r) {
      host_of.push_back(ranks_per_host == 0 ? 0 : r / ranks_per_host);
    }
    return HostLayout(host_of);
  }
  // Whole chunks for each rank.
  std::vector<size_t> Cuts(size_t count) const {
    const size_t n = static_cast<size_t>(n_ranks), n_chunks = (count + chunk - 1) / chunk;
    std::vector<size_t> cuts;
    for (size_t r = 0; r <= n; ++r) cuts.push_back(std::min(count, n_chunks * r / n * chunk));
    return cuts;
  }
  Tensors Zeros() const {
    Tensors tensors;
    for (size_t count : counts) tensors.emplace_back(count, 0.0f);
    return tensors;
  }
  Tensors Changes(int rank, int step) const {
    Tensors tensors;
    for (size_t i = 0; i < counts.size(); ++i) {
      const Bytes bytes =
          MakeData(DType::kFloat32, counts[i], rank, 10 * step + static_cast<int>(i));
      tensors.emplace_back(counts[i]);
      std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(tensors.back().data()));
    }
    return tensors;
  }
};

// All ranks in one process: it knows neither parts of ranks nor messages.
class Reference {
 public:
  explicit Reference(const Case& c) : case_(c), hosts_(c.Hosts()), code_(c.share, c.chunk) {
    errors_.assign(static_cast<size_t>(hosts_.n_hosts()), c.Zeros());
  }

  void Step(int step) {
    sums_ = case_.Zeros();
    for (int host = 0; host < hosts_.n_hosts(); ++host) {
      Tensors& errors = errors_[static_cast<size_t>(host)];
      for (size_t i = 0; i < case_.counts.size(); ++i) {
        const size_t count = case_.counts[i];
        Tensors values;
        std::vector<const void*> sources;
        for (int r : hosts_.RanksOf(host)) {
          values.push_back(case_.Changes(r, step)[i]);
          for (float& v : values.back()) v *= static_cast<float>(case_.prescale);
        }
        for (const Floats& v : values) sources.push_back(v.data());
        Floats sum(count), kept(count);
        Reduce(sources, sum.data(), count, DType::kFloat32, ReduceOp::kSum, 1.0);
        std::vector<char> codes(code_.Bytes(count));
        code_.Encode(sum.data(), 1, errors[i].data(), static_cast<float>(case_.decay), count,
                     codes.data(), kept.data());
        errors[i] = kept;
        code_.DecodeOnto(codes.data(), static_cast<float>(case_.postscale), count, sums_[i].data());
      }
    }
  }

  const Tensors& sums() const { return sums_; }
  const Tensors& errors(int host) const { return errors_[static_cast<size_t>(host)]; }

 private:
  const Case case_;
  const HostLayout hosts_;
  const SparseCode code_;
  std::vector<Tensors> errors_;
  Tensors sums_;
};

// What one rank gives and gets.
struct Sides {
  Tensors in, errors, new_errors, out;
};

SparseArgs Args(const Case& c, Sides& s) {
  SparseArgs args;
  args.share = c.share;
  args.chunk = c.chunk;
  args.decay = c.decay;
  args.prescale = c.prescale;
  args.postscale = c.postscale;
  args.counts = c.counts;
  s.out = s.new_errors = c.Zeros();
  for (size_t i = 0; i < c.counts.size(); ++i) {
    args.cuts.push_back(c.Cuts(c.counts[i]));
    args.inputs.push_back(s.in[i].data());
    args.outputs.push_back(s.out[i].data());
    args.errors.push_back(s.errors[i].data());
    args.new_errors.push_back(s.new_errors[i].data());
  }
  return args;
}

// Three steps, each with what the one before has kept.
void CheckSteps(const Job& job, Case c) {
  c.n_ranks = job.size();
  Reference reference(c);
  const HostLayout hosts = c.Hosts();
  auto s = std::make_shared<Sides>();
  s->errors = c.Zeros();
  std::vector<int> owners = hosts.Remote(job.rank());
  owners.push_back(job.rank());
  for (int step = 0; step < 3; ++step) {
    s->in = c.Changes(job.rank(), step);
    CHECK_OK(Post(MakeSparseReduction(Args(c, *s)), {}, s));
    reference.Step(step);
    for (size_t i = 0; i < c.counts.size(); ++i) {
      CHECK_TRUE(s->out[i] == reference.sums()[i]);
      // This rank keeps the errors of the parts that it encodes for its host.
      Floats expected = reference.errors(hosts.HostOf(job.rank()))[i];
      const std::vector<size_t> cuts = c.Cuts(c.counts[i]);
      for (int r = 0; r < job.size(); ++r) {
        if (std::find(owners.begin(), owners.end(), r) != owners.end()) continue;
        std::fill(expected.begin() + static_cast<long>(cuts[static_cast<size_t>(r)]),
                  expected.begin() + static_cast<long>(cuts[static_cast<size_t>(r) + 1]), 0.0f);
      }
      CHECK_TRUE(s->new_errors[i] == expected);
    }
    s->errors = s->new_errors;
  }
}

}  // namespace

TEST(EqualToOneProcessOnAllLayoutsOfHosts) {
  for (const Layout& layout : kLayouts) {
    for (int64_t chunk_bytes : {100, 3000, 1 << 20}) {
      EngineOptions options = OptionsWith(layout);
      options.chunk_bytes = chunk_bytes;
      options.max_message_bytes = chunk_bytes == 3000 ? 70 : 100000;
      Job job(options);
      for (const auto& [share, chunk] : {std::pair<double, size_t>{0.1, 256}, {1.0 / 64, 4096}}) {
        Case c{share, chunk, 1.0, {1024, 5000, 0, 70, 30011}, 0.5, 1.0 / job.size()};
        c.ranks_per_host = layout.ranks_per_host;
        CheckSteps(job, c);
        c.decay = 0.95;
        CheckSteps(job, c);
        c.counts = {64};  // fewer chunks than ranks
        CheckSteps(job, c);
      }
    }
  }
}

TEST(BytesAreThoseOfTheCodes) {
  Job job;
  Case c{1.0 / 64, 4096, 1.0, {100000, 4096}};
  c.n_ranks = job.size();
  auto s = std::make_shared<Sides>();
  s->in = c.Changes(job.rank(), 0);
  s->errors = c.Zeros();
  CHECK_OK(Post(MakeSparseReduction(Args(c, *s)), {"counted", 0, -1, 0}, s));
  std::vector<Event> events(16);
  events.resize(job.engine().events().Take(events.data(), events.size()));
  const SparseCode code(c.share, c.chunk);
  CHECK_TRUE(static_cast<size_t>(events.back().bytes) == code.Bytes(100000) + code.Bytes(4096));
}

TEST(TheSameOrderOfPartsIsNeeded) {
  Job job;
  Case c{0.1, 256, 1.0, {1000}};
  c.n_ranks = job.size() + 1;  // one cut too many
  auto s = std::make_shared<Sides>();
  s->in = c.Changes(job.rank(), 0);
  s->errors = c.Zeros();
  const Status status = Post(MakeSparseReduction(Args(c, *s)), {}, s).get();
  CHECK_CONTAINS(status.message, "a part for each of the");
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
