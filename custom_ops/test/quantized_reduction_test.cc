// Quantised sums on the engine, against a computation in one process with all ranks' data.
#include <algorithm>
#include <utility>
#include <vector>

#include "comm/quantize.h"
#include "test/coded.h"

namespace tfscale {
namespace testing {
namespace {

struct Case : CodedCase {
  int bits;

  Case(int n_bits, size_t block, std::vector<size_t> n_elements, double before = 1.0,
       double after = 1.0)
      : CodedCase{std::move(n_elements), block, before, after}, bits(n_bits) {}
};

// All ranks in one process: errors of each host and of the owners, as whole tensors.
class Reference {
 public:
  explicit Reference(const Case& c) : case_(c), hosts_(c.Hosts()), code_(c.bits, c.unit) {
    owner_errors_ = c.Zeros();
    host_errors_.assign(static_cast<size_t>(hosts_.n_hosts()), c.Zeros());
    means_ = sums_ = c.Zeros();
  }

  void Step(int step) {
    const std::vector<Tensors> all = case_.AllInputs(step);
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
      const Floats sum = case_.HostSum(all, host, i, begin, count);
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

QuantizedArgs Args(const Case& c, Sides& s, bool keeps_errors, bool is_scatter, int rank) {
  QuantizedArgs args;
  FillArgs(c, &s, &args);
  args.bits = c.bits;
  args.block = c.unit;
  if (!keeps_errors) args.errors.clear();
  if (is_scatter) args.outputs.clear();
  s.new_owner_errors = s.owner_errors;
  size_t n_own = 0;
  for (size_t i = 0; i < c.counts.size(); ++i) {
    const size_t r = static_cast<size_t>(rank);
    n_own += args.cuts[i][r + 1] - args.cuts[i][r];
    if (!keeps_errors || is_scatter) continue;
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
  for (int step = 0; step < 3; ++step) {
    s->in = c.Inputs(job.rank(), step);
    CHECK_OK(Post(MakeQuantizedReduction(Args(c, *s, true, is_scatter, job.rank())), {}, s));
    reference.Step(step);
    Floats segment;
    for (size_t i = 0; i < c.counts.size(); ++i) {
      const std::vector<size_t> cuts = c.Cuts(c.counts[i]);
      const Floats own = Part(reference.sums()[i], cuts, job.rank());
      segment.insert(segment.end(), own.begin(), own.end());
      // This rank keeps the errors of the parts that it encodes for its host.
      const Tensors& expected = reference.host_errors(hosts.HostOf(job.rank()));
      CHECK_TRUE(s->new_errors[i] == c.KeptBy(job.rank(), expected[i]));
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
  ForLayoutsAndChunks([](const Job& job, const Layout& layout) {
    for (const auto& [bits, block] : {std::pair<int, size_t>{8, 256}, {4, 64}, {16, 64}}) {
      Case c{bits, block, {1024, 5000, 0, 70, 30011}, 0.5, 1.0 / job.size()};
      c.ranks_per_host = layout.ranks_per_host;
      CheckSteps(job, c);
      CheckSteps(job, c, /*is_scatter=*/true);
      c.counts = {64};  // fewer blocks than ranks
      CheckSteps(job, c);
    }
  });
}

TEST(WithoutErrorsNothingIsKept) {
  Job job;
  Case c{8, 256, {3000, 2000}, 1.0, 1.0 / job.size()};
  c.n_ranks = job.size();
  Reference reference(c);
  reference.Step(0);
  auto s = std::make_shared<Sides>();
  s->in = c.Inputs(job.rank(), 0);
  s->errors = c.Zeros();
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
    s->in = c.Inputs(job.rank(), 0);
    s->errors = c.Zeros();
    const Place place{"counted", 0, -1, 0};
    CHECK_OK(Post(MakeQuantizedReduction(Args(c, *s, false, false, job.rank())), place, s));
    std::vector<Event> events(16);
    events.resize(job.engine().events().Take(events.data(), events.size()));
    CHECK_TRUE(static_cast<double>(events.back().bytes) <= most * 4 * 104096);
  }
}

TEST(TheSameOrderOfPartsIsNeeded) {
  CheckPartsAreRequired([](const CodedCase& c, Sides* s) {
    QuantizedArgs args;
    FillArgs(c, s, &args);
    return MakeQuantizedReduction(std::move(args));
  });
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
