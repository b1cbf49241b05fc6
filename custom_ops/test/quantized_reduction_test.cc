// Quantised sums on the engine, against a computation in one process with all ranks' data.
#include <algorithm>
#include <string>
#include <vector>

#include "comm/host_layout.h"
#include "comm/quantize.h"
#include "comm/reduce.h"
#include "test/job.h"

namespace tfscale {
namespace testing {
namespace {

using Floats = std::vector<float>;
using Tensors = std::vector<Floats>;

struct Case {
  int bits = 8;
  size_t block = 256;
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
  // Whole blocks for each rank.
  std::vector<size_t> Cuts(size_t count) const {
    const size_t n = static_cast<size_t>(n_ranks), n_blocks = (count + block - 1) / block;
    std::vector<size_t> cuts;
    for (size_t r = 0; r <= n; ++r) cuts.push_back(std::min(count, n_blocks * r / n * block));
    return cuts;
  }
  Tensors Zeros() const {
    Tensors tensors;
    for (size_t count : counts) tensors.emplace_back(count, 0.0f);
    return tensors;
  }
  Tensors Gradients(int rank, int step) const {
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

// All ranks in one process: errors of each host and of the owners, as whole tensors.
class Reference {
 public:
  explicit Reference(const Case& c) : case_(c), hosts_(c.Hosts()), code_(c.bits, c.block) {
    owner_errors_ = c.Zeros();
    host_errors_.assign(static_cast<size_t>(hosts_.n_hosts()), c.Zeros());
    means_ = sums_ = c.Zeros();
  }

  void Step(int step) {
    std::vector<Tensors> all;
    for (int r = 0; r < case_.n_ranks; ++r) all.push_back(case_.Gradients(r, step));
    for (size_t i = 0; i < case_.counts.size(); ++i) {
      const std::vector<size_t> cuts = case_.Cuts(case_.counts[i]);
      for (size_t o = 0; o + 1 < cuts.size(); ++o) StepPart(all, i, cuts[o], cuts[o + 1] - cuts[o]);
    }
  }

  const Tensors& means() const { return means_; }
  const Tensors& sums() const { return sums_; }  // before they are encoded again
  const Tensors& owner_errors() const { return owner_errors_; }
  const Tensors& host_errors(int host) const { return host_errors_[static_cast<size_t>(host)]; }

 private:
  void StepPart(const std::vector<Tensors>& all, size_t i, size_t begin, size_t count) {
    std::vector<std::vector<char>> codes;
    for (int host = 0; host < hosts_.n_hosts(); ++host) {
      Tensors values;
      std::vector<const void*> sources;
      for (int r : hosts_.RanksOf(host)) {
        const float* own = all[static_cast<size_t>(r)][i].data() + begin;
        values.emplace_back(own, own + count);
        for (float& v : values.back()) v *= static_cast<float>(case_.prescale);
      }
      for (const Floats& v : values) sources.push_back(v.data());
      Floats sum(count);
      Reduce(sources, sum.data(), count, DType::kFloat32, ReduceOp::kSum, 1.0);
      float* error = host_errors_[static_cast<size_t>(host)][i].data() + begin;
      codes.emplace_back(code_.Bytes(count));
      Floats kept(count);
      code_.Encode(sum.data(), 1, error, count, codes.back().data(), kept.data());
      std::copy(kept.begin(), kept.end(), error);
    }
    std::vector<const char*> sources;
    for (const auto& code : codes) sources.push_back(code.data());
    std::vector<char> result(code_.Bytes(count));
    float* error = owner_errors_[i].data() + begin;
    Floats kept(count);
    code_.DecodeSum(sources, case_.postscale, count, sums_[i].data() + begin);
    code_.EncodeSum(sources, case_.postscale, error, count, result.data(), kept.data());
    std::copy(kept.begin(), kept.end(), error);
    code_.Decode(result.data(), count, means_[i].data() + begin);
  }

  const Case case_;
  const HostLayout hosts_;
  const BlockCode code_;
  std::vector<Tensors> host_errors_;
  Tensors owner_errors_;
  Tensors means_;
  Tensors sums_;
};

// What one rank gives and gets.
struct Sides {
  Tensors in, errors, new_errors, out, owner_errors, new_owner_errors;
  Floats segment;
};

QuantizedArgs Args(const Case& c, Sides& s, bool keeps_errors, bool is_scatter, int rank) {
  QuantizedArgs args;
  args.bits = c.bits;
  args.block = c.block;
  args.prescale = c.prescale;
  args.postscale = c.postscale;
  args.counts = c.counts;
  s.out = s.new_errors = c.Zeros();
  s.new_owner_errors = s.owner_errors;
  size_t n_own = 0;
  for (size_t i = 0; i < c.counts.size(); ++i) {
    args.cuts.push_back(c.Cuts(c.counts[i]));
    const size_t r = static_cast<size_t>(rank);
    n_own += args.cuts[i][r + 1] - args.cuts[i][r];
    args.inputs.push_back(s.in[i].data());
    if (!is_scatter) args.outputs.push_back(s.out[i].data());
    if (!keeps_errors) continue;
    args.errors.push_back(s.errors[i].data());
    args.new_errors.push_back(s.new_errors[i].data());
    if (is_scatter) continue;
    args.owner_errors.push_back(s.owner_errors[i].data());
    args.new_owner_errors.push_back(s.new_owner_errors[i].data());
  }
  s.segment.assign(n_own, 0);
  if (is_scatter) args.segment = s.segment.data();
  return args;
}

Floats Part(const Floats& whole, const std::vector<size_t>& cuts, int rank) {
  const auto at = [&](size_t r) { return whole.begin() + static_cast<long>(cuts[r]); };
  return {at(static_cast<size_t>(rank)), at(static_cast<size_t>(rank) + 1)};
}

// Three steps, each with what the one before has kept.
void CheckSteps(const Job& job, Case c, bool is_scatter = false) {
  c.n_ranks = job.size();
  Reference reference(c);
  const HostLayout hosts = c.Hosts();
  auto s = std::make_shared<Sides>();
  s->errors = c.Zeros();
  for (size_t count : c.counts)
    s->owner_errors.push_back(Part(Floats(count), c.Cuts(count), job.rank()));
  std::vector<int> owners = hosts.Remote(job.rank());
  owners.push_back(job.rank());
  for (int step = 0; step < 3; ++step) {
    s->in = c.Gradients(job.rank(), step);
    CHECK_OK(Post(MakeQuantizedReduction(Args(c, *s, true, is_scatter, job.rank())), {}, s));
    reference.Step(step);
    Floats segment;
    for (size_t i = 0; i < c.counts.size(); ++i) {
      const std::vector<size_t> cuts = c.Cuts(c.counts[i]);
      const Floats own = Part(reference.sums()[i], cuts, job.rank());
      segment.insert(segment.end(), own.begin(), own.end());
      // This rank keeps the errors of the parts that it encodes for its host.
      const Tensors& expected = reference.host_errors(hosts.HostOf(job.rank()));
      for (int r = 0; r < job.size(); ++r) {
        const bool is_kept = std::find(owners.begin(), owners.end(), r) != owners.end();
        Floats part = Part(expected[i], cuts, r);
        if (!is_kept) std::fill(part.begin(), part.end(), 0.0f);
        CHECK_TRUE(Part(s->new_errors[i], cuts, r) == part);
      }
      if (is_scatter) continue;
      CHECK_TRUE(s->out[i] == reference.means()[i]);
      CHECK_TRUE(s->new_owner_errors[i] == Part(reference.owner_errors()[i], cuts, job.rank()));
    }
    if (is_scatter) CHECK_TRUE(s->segment == segment);
    s->errors = s->new_errors;
    s->owner_errors = s->new_owner_errors;
  }
}

}  // namespace

// The reference knows neither chunks nor which tensors are sent together.
TEST(EqualToOneProcessOnAllLayoutsOfHosts) {
  for (const Layout& layout : kLayouts) {
    for (int64_t chunk_bytes : {100, 3000, 1 << 20}) {
      EngineOptions options = OptionsWith(layout);
      options.chunk_bytes = chunk_bytes;
      options.max_message_bytes = chunk_bytes == 3000 ? 70 : 100000;
      Job job(options);
      for (const auto& [bits, block] : {std::pair<int, size_t>{8, 256}, {4, 64}, {16, 64}}) {
        Case c{bits, block, {1024, 5000, 0, 70, 30011}, 0.5, 1.0 / job.size()};
        c.ranks_per_host = layout.ranks_per_host;
        CheckSteps(job, c);
        CheckSteps(job, c, /*is_scatter=*/true);
        c.counts = {64};  // fewer blocks than ranks
        CheckSteps(job, c);
      }
    }
  }
}

TEST(WithoutErrorsNothingIsKept) {
  Job job;
  Case c{8, 256, {3000, 2000}, 1.0, 1.0 / job.size()};
  c.n_ranks = job.size();
  Reference reference(c);
  reference.Step(0);
  auto s = std::make_shared<Sides>();
  s->in = c.Gradients(job.rank(), 0);
  CHECK_OK(Post(MakeQuantizedReduction(Args(c, *s, false, false, job.rank())), {}, s));
  CHECK_TRUE(s->out == reference.means());
}

TEST(BytesAreThoseOfTheCodes) {
  Job job;
  for (const auto& [bits, block, most] :
       {std::tuple<int, size_t, double>{8, 256, 0.26}, {4, 64, 0.14}}) {
    Case c{bits, block, {100000, 4096}};
    c.n_ranks = job.size();
    auto s = std::make_shared<Sides>();
    s->in = c.Gradients(job.rank(), 0);
    const Place place{"counted", 0, -1, 0};
    CHECK_OK(Post(MakeQuantizedReduction(Args(c, *s, false, false, job.rank())), place, s));
    std::vector<Event> events(16);
    events.resize(job.engine().events().Take(events.data(), events.size()));
    CHECK_TRUE(static_cast<double>(events.back().bytes) <= most * 4 * 104096);
  }
}

TEST(TheSameOrderOfPartsIsNeeded) {
  Job job;
  Case c{8, 256, {1000}};
  c.n_ranks = job.size() + 1;  // one cut too many
  auto s = std::make_shared<Sides>();
  s->in = c.Gradients(job.rank(), 0);
  const Status status = Post(MakeQuantizedReduction(Args(c, *s, false, false, 0)), {}, s).get();
  CHECK_CONTAINS(status.message, "a part for each of the");
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
