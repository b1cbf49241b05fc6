// Sums that are sent as codes: cases, and what a rank gives and gets.
#ifndef TFSCALE_TEST_CODED_H_
#define TFSCALE_TEST_CODED_H_

#include <algorithm>
#include <memory>
#include <vector>

#include "comm/arguments.h"
#include "comm/host_layout.h"
#include "comm/reduce.h"
#include "test/job.h"

namespace tfscale {
namespace testing {

using Floats = std::vector<float>;
using Tensors = std::vector<Floats>;

// Tensors whose parts are whole units: blocks or chunks of a code.
struct CodedCase {
  std::vector<size_t> counts;
  size_t unit = 256;
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
  std::vector<size_t> Cuts(size_t count) const {
    const size_t n = static_cast<size_t>(n_ranks), n_units = (count + unit - 1) / unit;
    std::vector<size_t> cuts;
    for (size_t r = 0; r <= n; ++r) cuts.push_back(std::min(count, n_units * r / n * unit));
    return cuts;
  }
  Tensors Zeros() const {
    Tensors tensors;
    for (size_t count : counts) tensors.emplace_back(count, 0.0f);
    return tensors;
  }
  Tensors Inputs(int rank, int step) const {
    Tensors tensors;
    for (size_t i = 0; i < counts.size(); ++i) {
      const Bytes bytes =
          MakeData(DType::kFloat32, counts[i], rank, 10 * step + static_cast<int>(i));
      tensors.emplace_back(counts[i]);
      std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(tensors.back().data()));
    }
    return tensors;
  }
  // By rank.
  std::vector<Tensors> AllInputs(int step) const {
    std::vector<Tensors> all;
    for (int r = 0; r < n_ranks; ++r) all.push_back(Inputs(r, step));
    return all;
  }
  // What a host encodes of elements of a tensor, before it adds its error.
  Floats HostSum(const std::vector<Tensors>& all, int host, size_t tensor, size_t begin,
                 size_t count) const {
    const HostLayout hosts = Hosts();
    Tensors values;
    std::vector<const void*> sources;
    for (int r : hosts.RanksOf(host)) {
      const float* own = all[static_cast<size_t>(r)][tensor].data() + begin;
      values.emplace_back(own, own + count);
      for (float& v : values.back()) v *= static_cast<float>(prescale);
    }
    for (const Floats& v : values) sources.push_back(v.data());
    Floats sum(count);
    Reduce(sources, sum.data(), count, DType::kFloat32, ReduceOp::kSum, 1.0);
    return sum;
  }
  // Of an error, what a rank of a host keeps: that of the parts that it encodes for its host.
  Floats KeptBy(int rank, Floats error) const {
    const HostLayout hosts = Hosts();
    std::vector<int> owners = hosts.Remote(rank);
    owners.push_back(rank);
    const std::vector<size_t> cuts = Cuts(error.size());
    for (int r = 0; r < n_ranks; ++r) {
      if (std::find(owners.begin(), owners.end(), r) != owners.end()) continue;
      std::fill(error.begin() + static_cast<long>(cuts[static_cast<size_t>(r)]),
                error.begin() + static_cast<long>(cuts[static_cast<size_t>(r) + 1]), 0.0f);
    }
    return error;
  }
};

struct Sides {
  Tensors in, errors, new_errors, out, owner_errors, new_owner_errors;
  Floats segment;
};

// The arguments that all codes have; the next step's inputs are in their places.
inline void FillArgs(const CodedCase& c, Sides* s, CodedArgs* args) {
  args->prescale = c.prescale;
  args->postscale = c.postscale;
  args->counts = c.counts;
  s->out = s->new_errors = c.Zeros();
  for (size_t i = 0; i < c.counts.size(); ++i) {
    args->cuts.push_back(c.Cuts(c.counts[i]));
    args->inputs.push_back(s->in[i].data());
    args->outputs.push_back(s->out[i].data());
    args->errors.push_back(s->errors[i].data());
    args->new_errors.push_back(s->new_errors[i].data());
  }
}

// Calls check(job, layout) for engines with all layouts of hosts and several sizes of chunks.
template <typename Check>
void ForLayoutsAndChunks(Check check) {
  for (const Layout& layout : kLayouts) {
    for (int64_t chunk_bytes : {100, 3000, 1 << 20}) {
      EngineOptions options = OptionsWith(layout);
      options.chunk_bytes = chunk_bytes;
      options.max_message_bytes = chunk_bytes == 3000 ? 70 : 100000;
      check(Job(options), layout);
    }
  }
}

// One cut too many.
template <typename Make>
void CheckPartsAreRequired(Make make) {
  Job job;
  CodedCase c{{1000}};
  c.n_ranks = job.size() + 1;
  auto s = std::make_shared<Sides>();
  s->in = c.Inputs(job.rank(), 0);
  s->errors = c.Zeros();
  const Status status = Post(make(c, s.get()), {}, s).get();
  CHECK_CONTAINS(status.message, "a part for each of the");
}

}  // namespace testing
}  // namespace tfscale

#endif  // TFSCALE_TEST_CODED_H_
