// Plans for the tests of the engine, and runs of them whose results are known.
#ifndef TFSCALE_TEST_PLANS_JOB_H_
#define TFSCALE_TEST_PLANS_JOB_H_

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "test/job.h"

namespace tfscale {
namespace testing {

// Waiting is reported, and given up, within a test.
inline EngineOptions ShortLimits() {
  EngineOptions options = SmallOptions();
  options.stall_warning_s = 0.1;
  options.stall_shutdown_s = 0.5;
  return options;
}

// Small integers: the sum over any ranks is exact, so its bits are known.
inline float ValueOf(int rank, size_t i, int seed) {
  return static_cast<float>((rank + 1) * 3 + static_cast<int>(i % 11) + seed % 13);
}

// An allreduce under way over `ranks`; Check waits for it and compares.
class Sum {
 public:
  Sum(const std::vector<int>& ranks, int rank, size_t count, int seed, const Place& place)
      : ranks_(ranks), seed_(seed), vectors_(std::make_shared<Vectors>()) {
    for (size_t i = 0; i < count; ++i) vectors_->input.push_back(ValueOf(rank, i, seed));
    vectors_->output.assign(count, -1);
    ReductionArgs args;
    args.inputs = {vectors_->input.data()};
    args.outputs = {vectors_->output.data()};
    args.counts = {count};
    if (seed % 2 == 0) args.way = Way{false, 0};
    result_ = Post(MakeReduction(std::move(args)), place, vectors_);
  }

  bool is_ready() const { return IsReady(result_); }
  Status Wait() { return result_.get(); }
  void Check() {
    CHECK_OK(std::move(result_));
    for (size_t i = 0; i < vectors_->output.size(); ++i) {
      float expected = 0;
      for (int rank : ranks_) expected += ValueOf(rank, i, seed_);
      CHECK_EQ(vectors_->output[i], expected);
    }
  }

 private:
  // Kept by the operation: it may outlive this object when it is given up.
  struct Vectors {
    std::vector<float> input, output;
  };
  std::vector<int> ranks_;
  int seed_;
  std::shared_ptr<Vectors> vectors_;
  std::future<Status> result_;
};

// A plan of sums of different lengths over a group of ranks.
class SumPlan {
 public:
  SumPlan(const Job& job, const std::string& name, int n_slots, int group = 0,
          std::vector<int> ranks = {}, bool may_overtake = false, bool is_patient = false)
      : job_(job),
        n_slots_(n_slots),
        group_(group),
        ranks_(std::move(ranks)),
        may_overtake_(may_overtake) {
    if (ranks_.empty()) ranks_ = job.Ranks([](int) { return true; });
    id_ = job.engine().plans().Create(group, name, is_patient);
    for (int slot = 0; slot < n_slots; ++slot) {
      job.engine().plans().AddSlot(id_, "sum" + std::to_string(slot));
    }
  }

  int id() const { return id_; }
  int n_slots() const { return n_slots_; }
  Sum Post(int slot, int step, bool is_cancellable = false) const {
    const size_t counts[] = {1, 1000, 7, 0, 5003, 64};
    const int seed = 31 * (id_ % 1000) + 7 * slot + step;
    const Place place{
        "sum" + std::to_string(slot), group_, id_, slot, may_overtake_, is_cancellable};
    return {ranks_, job_.rank(), counts[static_cast<size_t>(slot) % 6], seed, place};
  }
  // One step, as a traced function does it: slots arrive in any order.
  std::vector<Sum> PostAll(int step, std::mt19937* random = nullptr) const {
    std::vector<int> order;
    for (int slot = 0; slot < n_slots_; ++slot) order.push_back(slot);
    if (random != nullptr) std::shuffle(order.begin(), order.end(), *random);
    std::vector<Sum> sums;
    for (int slot : order) {
      if (random != nullptr && (*random)() % 4 == 0) SleepMs(static_cast<int>((*random)() % 3));
      sums.push_back(Post(slot, step));
    }
    return sums;
  }
  // By ops that wait for the sums, as those of gradients: cancelled where their step fails.
  std::vector<Sum> PostCancellable(int step) const {
    std::vector<Sum> sums;
    for (int slot = 0; slot < n_slots_; ++slot) sums.push_back(Post(slot, step, true));
    return sums;
  }
  void Run(int step) const {
    for (Sum& sum : PostAll(step)) sum.Check();
  }

 private:
  const Job& job_;
  int n_slots_;
  int group_;
  std::vector<int> ranks_;
  bool may_overtake_;
  int id_ = 0;
};

// One that ranks may join at any time.
inline SumPlan Meeting(const Job& job) { return SumPlan(job, "save", 1, 0, {}, false, true); }

}  // namespace testing
}  // namespace tfscale

#endif  // TFSCALE_TEST_PLANS_JOB_H_
