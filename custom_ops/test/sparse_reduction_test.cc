// Sparse sums on the engine, against a computation in one process with all ranks' data.
#include <utility>
#include <vector>

#include "comm/sparse_code.h"
#include "test/coded.h"

namespace tfscale {
namespace testing {
namespace {

struct Case : CodedCase {
  double share;
  double decay = 1.0;

  Case(double of_values, size_t chunk, std::vector<size_t> n_elements, double before = 1.0,
       double after = 1.0)
      : CodedCase{std::move(n_elements), chunk, before, after}, share(of_values) {}
};

// All ranks in one process: it knows neither parts of ranks nor messages.
class Reference {
 public:
  explicit Reference(const Case& c) : case_(c), hosts_(c.Hosts()), code_(c.share, c.unit) {
    errors_.assign(static_cast<size_t>(hosts_.n_hosts()), c.Zeros());
  }

  void Step(int step) {
    sums_ = case_.Zeros();
    const std::vector<Tensors> all = case_.AllInputs(step);
    for (int host = 0; host < hosts_.n_hosts(); ++host) {
      Tensors& errors = errors_[static_cast<size_t>(host)];
      for (size_t i = 0; i < case_.counts.size(); ++i) {
        const size_t count = case_.counts[i];
        const Floats sum = case_.HostSum(all, host, i, 0, count);
        Floats kept(count);
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

SparseArgs Args(const Case& c, Sides& s) {
  SparseArgs args;
  FillArgs(c, &s, &args);
  args.share = c.share;
  args.chunk = c.unit;
  args.decay = c.decay;
  return args;
}

// Three steps, each with what the one before has kept.
void CheckSteps(const Job& job, Case c) {
  c.n_ranks = job.size();
  Reference reference(c);
  const HostLayout hosts = c.Hosts();
  auto s = std::make_shared<Sides>();
  s->errors = c.Zeros();
  for (int step = 0; step < 3; ++step) {
    s->in = c.Inputs(job.rank(), step);
    CHECK_OK(Post(MakeSparseReduction(Args(c, *s)), {}, s));
    reference.Step(step);
    for (size_t i = 0; i < c.counts.size(); ++i) {
      CHECK_TRUE(s->out[i] == reference.sums()[i]);
      // This rank keeps the errors of the parts that it encodes for its host.
      const Tensors& expected = reference.errors(hosts.HostOf(job.rank()));
      CHECK_TRUE(s->new_errors[i] == c.KeptBy(job.rank(), expected[i]));
    }
    s->errors = s->new_errors;
  }
}

}  // namespace

TEST(EqualToOneProcessOnAllLayoutsOfHosts) {
  ForLayoutsAndChunks([](const Job& job, const Layout& layout) {
    for (const auto& [share, chunk] : {std::pair<double, size_t>{0.1, 256}, {1.0 / 64, 4096}}) {
      Case c{share, chunk, {1024, 5000, 0, 70, 30011}, 0.5, 1.0 / job.size()};
      c.ranks_per_host = layout.ranks_per_host;
      CheckSteps(job, c);
      c.decay = 0.95;
      CheckSteps(job, c);
      c.counts = {64};  // fewer chunks than ranks
      CheckSteps(job, c);
    }
  });
}

TEST(BytesAreThoseOfTheCodes) {
  Job job;
  Case c{1.0 / 64, 4096, {100000, 4096}};
  c.n_ranks = job.size();
  auto s = std::make_shared<Sides>();
  s->in = c.Inputs(job.rank(), 0);
  s->errors = c.Zeros();
  CHECK_OK(Post(MakeSparseReduction(Args(c, *s)), {"counted", 0, -1, 0}, s));
  std::vector<Event> events(16);
  events.resize(job.engine().events().Take(events.data(), events.size()));
  const SparseCode code(c.share, c.unit);
  CHECK_TRUE(static_cast<size_t>(events.back().bytes) == code.Bytes(100000) + code.Bytes(4096));
}

TEST(TheSameOrderOfPartsIsNeeded) {
  CheckPartsAreRequired([](const CodedCase& c, Sides* s) {
    SparseArgs args;
    FillArgs(c, s, &args);
    return MakeSparseReduction(std::move(args));
  });
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
