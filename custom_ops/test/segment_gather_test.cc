// Gathers of segments and of their changes, and what becomes of the variables whose values they
// bring.
#include <algorithm>
#include <cmath>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "comm/c_api.h"
#include "comm/gather.h"
#include "comm/pending.h"
#include "comm/quantize.h"
#include "test/job.h"

namespace tfscale {
namespace testing {
namespace {

// Stands for a variable: only its address counts.
const char variable = 0;

PendingVariables& Pending() { return PendingVariables::Get(); }

// How the last gather failed; "" if it did not.
std::string Failure() {
  std::string message;
  Pending().WaitForAll();
  Pending().Await({&variable}, [&](const Status& status) { message = status.message; });
  return message;
}

// A buffer cut among the ranks; every byte identifies its owner.
struct Parts {
  std::shared_ptr<Bytes> buffer;
  std::vector<size_t> cuts;
  int step;

  Parts(std::vector<size_t> ends, int rank, int step_)
      : buffer(std::make_shared<Bytes>(ends.back(), 'x')), cuts(std::move(ends)), step(step_) {
    for (size_t i = Begin(rank); i < cuts[static_cast<size_t>(rank) + 1]; ++i) {
      (*buffer)[i] = ValueOf(rank, i);
    }
  }
  size_t Begin(int rank) const { return cuts[static_cast<size_t>(rank)]; }
  char ValueOf(int rank, size_t i) const {
    return static_cast<char>((static_cast<size_t>(rank + step) * 31 + i) % 127);
  }
  OperationHandle Gather() const { return MakeSegmentGather(buffer->data(), cuts); }
  void Check() const {
    for (size_t r = 0; r + 1 < cuts.size(); ++r) {
      for (size_t i = cuts[r]; i < cuts[r + 1]; ++i) {
        CHECK_EQ((*buffer)[i], ValueOf(static_cast<int>(r), i));
      }
    }
  }
};

// Tells when it begins: in its turn or early.
class ToldGather : public SegmentGather {
 public:
  ToldGather(const Parts& parts, std::promise<void>* begun)
      : SegmentGather(parts.buffer->data(), parts.cuts), begun_(begun) {}

 protected:
  void Begin() override {
    SegmentGather::Begin();
    begun_->set_value();
  }

 private:
  std::promise<void>* begun_;
};

// Posts a gather that brings the value of `variable`, as the op does.
void PostFor(const Parts& parts, const Place& place) {
  Pending().Begin({&variable});
  Call call;
  call.name = place.name;
  call.plan = place.plan;
  call.slot = place.slot;
  call.memory = parts.buffer;
  call.done = [](const Status& status) { Pending().End({&variable}, status); };
  Submit(parts.Gather(), std::move(call));
}

std::vector<size_t> EvenCuts(int size, size_t length) {
  std::vector<size_t> cuts;
  for (int r = 0; r <= size; ++r) cuts.push_back(length * static_cast<size_t>(r) / size);
  return cuts;
}

}  // namespace

TEST(SegmentsOfAnyLengths) {
  for (const Layout& layout : kLayouts) {
    Job job(OptionsWith(layout));
    const size_t n = static_cast<size_t>(job.size());
    std::vector<std::vector<size_t>> all = {EvenCuts(job.size(), 0), EvenCuts(job.size(), 7),
                                            EvenCuts(job.size(), 10007)};
    std::vector<size_t> one(n + 1, 0), uneven(n + 1, 0);
    one.back() = 12345;
    for (size_t r = 0; r < n; ++r) uneven[r + 1] = uneven[r] + (r % 2 == 0 ? 777 * r : 0) + 1;
    all.push_back(one);
    all.push_back(uneven);
    for (int step = 0; step < 3; ++step) {
      for (const std::vector<size_t>& cuts : all) {
        const Parts parts(cuts, job.rank(), step);
        CHECK_OK(Post(parts.Gather(), {}, parts.buffer));
        parts.Check();
      }
    }
  }
}

// Its readers come last: others send first what is needed sooner.
TEST(AGatherThatStartedEarlyIsHeldWhileOthersSend) {
  Job job(OptionsWith({1, 0}));
  const int plan = job.engine().plans().Create(0, "held");
  // Until all slots before its own have started, a gather is early.
  for (const char* name : {"sum", "last sum", "parameters"}) {
    job.engine().plans().AddSlot(plan, name);
  }
  const Parts parts(EvenCuts(job.size(), 200 * 640), job.rank(), 0);
  const Place of_gather{"parameters", 0, plan, 2, true};
  const std::vector<float> one(1, 1.0f);
  std::vector<float> totals(2);
  const auto post_sum = [&](int slot) {
    ReductionArgs args;
    args.inputs = {one.data()};
    args.outputs = {totals.data() + slot};
    args.counts = {1};
    return Post(MakeReduction(std::move(args)), Place{"sum", 0, plan, slot});
  };
  char word = 'x';
  const auto tell = [&] { return Post(MakeBroadcast(&word, &word, 1, 0), Place{"told"}); };
  // A plan starts nothing early before its first run.
  std::vector<std::future<Status>> calls;
  for (int slot = 0; slot < 2; ++slot) calls.push_back(post_sum(slot));
  calls.push_back(Post(parts.Gather(), of_gather, parts.buffer));
  for (std::future<Status>& call : calls) CHECK_OK(std::move(call));
  calls.clear();
  if (job.rank() == 0) {
    // It sends little, as nothing comes from others, and nothing from the sum on.
    std::promise<void> begun;
    OperationHandle gather(new ToldGather(parts, &begun), [](Operation* told) { delete told; });
    calls.push_back(Post(std::move(gather), of_gather, parts.buffer));
    begun.get_future().wait();
    calls.push_back(post_sum(0));
    CHECK_OK(tell());
  } else {
    CHECK_OK(tell());
    calls.push_back(Post(parts.Gather(), of_gather, parts.buffer));
    SleepMs(100);  // long enough for all of it, if it were not held
    CHECK_EQ(IsReady(calls.back()), false);
    calls.push_back(post_sum(0));
  }
  // Rank 0's gather is early until the others have looked.
  CHECK_OK(std::move(calls.back()));
  calls.back() = post_sum(1);
  for (std::future<Status>& call : calls) CHECK_OK(std::move(call));
  for (const float total : totals) CHECK_EQ(total, static_cast<float>(job.size()));
  parts.Check();
}

// Of three vectors, the second of which is sent as it is; cuts lie anywhere.
TEST(ChangesLeaveRanksEqualAndAreNotLost) {
  struct Vector {
    size_t begin, count;
    bool is_coded;
  };
  constexpr Vector kVectors[] = {{0, 1000, true}, {1008, 70, false}, {1088, 3001, true}};
  constexpr size_t kLength = 4096;
  for (const Layout& layout : kLayouts) {
    Job job(OptionsWith(layout));
    const std::vector<size_t> cuts = EvenCuts(job.size(), kLength);
    for (const int bits : {16, 8, 4}) {
      const size_t block = bits == 4 ? 64 : 256;
      const BlockCode code(bits, block);
      std::vector<float> old(kLength, 0.0f);
      auto buffer = std::make_shared<std::vector<float>>(kLength);
      float far = 0;
      for (int step = 0; step < 20; ++step) {
        // The new values of all ranks, of which this one writes its own.
        std::vector<float> values(kLength), expected(kLength);
        for (size_t i = 0; i < kLength; ++i) {
          values[i] = std::sin(0.37f * static_cast<float>(i)) * static_cast<float>(i % 97 + 1);
          values[i] *= static_cast<float>(std::min(step, 4));  // they stop to change
        }
        const size_t own = cuts[static_cast<size_t>(job.rank())];
        const size_t end = cuts[static_cast<size_t>(job.rank()) + 1];
        std::copy(values.begin() + static_cast<long>(own), values.begin() + static_cast<long>(end),
                  buffer->begin() + static_cast<long>(own));
        ChangesArgs args;
        args.bits = bits;
        args.block = block;
        args.buffer = buffer->data();
        args.cuts = cuts;
        for (const Vector& v : kVectors) {
          args.vectors.push_back({v.begin, v.count, v.is_coded ? old.data() + v.begin : nullptr});
        }
        CHECK_OK(Post(MakeChangeGather(std::move(args)), {}, buffer));
        far = 0;
        for (const Vector& v : kVectors) {
          for (size_t r = 0; r + 1 < cuts.size(); ++r) {
            const size_t begin = std::max(v.begin, cuts[r]);
            const size_t stop = std::min(v.begin + v.count, cuts[r + 1]);
            if (begin >= stop) continue;
            std::copy(values.begin() + static_cast<long>(begin),
                      values.begin() + static_cast<long>(stop),
                      expected.begin() + static_cast<long>(begin));
            if (!v.is_coded) continue;
            std::vector<float> change(stop - begin);
            for (size_t i = begin; i < stop; ++i) change[i - begin] = values[i] - old[i];
            std::vector<char> codes(code.Bytes(stop - begin));
            code.Encode(change.data(), 1, nullptr, stop - begin, codes.data(), nullptr);
            code.Decode(codes.data(), stop - begin, change.data());
            for (size_t i = begin; i < stop; ++i) expected[i] = old[i] + change[i - begin];
          }
          for (size_t i = v.begin; i < v.begin + v.count; ++i) {
            CHECK_EQ((*buffer)[i], expected[i]);
            far = std::max(far, std::abs(expected[i] - values[i]));
          }
        }
        old = *buffer;
      }
      CHECK_TRUE(far <= 1e-4f);  // of values up to 388
    }
  }
}

TEST(CutsForOtherRanksFail) {
  auto job = std::make_unique<Job>();
  const Parts parts(EvenCuts(job->size() + 1, 100), job->rank(), 0);
  const Status status = Post(parts.Gather(), {}, parts.buffer).get();
  CHECK_TRUE(status.code == StatusCode::kFailed);
  CHECK_CONTAINS(status.message, "a segment for each of the " + std::to_string(job->size()));
}

TEST(AGatherThatAPeerNeverPosts) {
  Job job;
  if (job.size() == 1) return;
  const int plan = job.engine().plans().Create(0, "train");
  job.engine().plans().AddSlot(plan, "gather");
  const Place place{"gather", 0, plan, 0};
  {
    const Parts parts(EvenCuts(job.size(), 5000), job.rank(), 0);
    PostFor(parts, place);
    CHECK_EQ(Failure(), std::string());
    parts.Check();
  }
  if (job.rank() > 0) {
    // The buffer goes while what was sent to rank 0 is still on its way.
    PostFor(Parts(EvenCuts(job.size(), 5000), job.rank(), 1), place);
    CHECK_CONTAINS(Failure(), "rank 0 stopped training after step 1");
    Pending().Forget(&variable);
  } else {
    SleepMs(30);
    job.engine().Mark(MarkKind::kStop);
  }
  CHECK_TRUE(Pending().is_empty());
}

// A step failed on rank 0 after its second gather and before the first.
TEST(AGatherAfterOneThatNeverComesEndsWithTheDrain) {
  Job job;
  if (job.size() == 1) return;
  const int plan = job.engine().plans().Create(0, "train");
  for (const char* name : {"first", "second"}) job.engine().plans().AddSlot(plan, name);
  const Parts parts(EvenCuts(job.size(), 5000), job.rank(), 0);
  PostFor(parts, {"second", 0, plan, 1});
  if (job.rank() != 0) {
    SleepMs(30);
    PostFor(parts, {"first", 0, plan, 0});
  } else {
    tfscale_drain();
    CHECK_CONTAINS(Failure(), "The step failed on this rank.");
    Pending().Forget(&variable);
    job.engine().Mark(MarkKind::kStop);
  }
  if (job.rank() != 0) CHECK_TRUE(!Failure().empty());
  Pending().Forget(&variable);
}

TEST(StoppingWaitsForWhatWasPosted) {
  const EngineOptions options = SmallOptions();
  for (const bool is_drained : {true, false}) {
    HostPlace place{};
    CHECK_EQ(tfscale_host_place(-1, &place), 0);
    CHECK_EQ(tfscale_start(-1, &options), 0);
    const int plan = tfscale_plan_create(0, "train", 0);
    CHECK_EQ(tfscale_plan_add_slot(plan, "gather", ""), 0);
    const Parts parts(EvenCuts(tfscale_size(), 100003), tfscale_rank(), 2);
    if (tfscale_rank() == 0) SleepMs(500);
    PostFor(parts, {"gather", 0, plan, 0});
    if (tfscale_rank() > 0) CHECK_EQ(tfscale_num_pending(), int64_t{1});
    if (is_drained) tfscale_drain();
    if (!is_drained) tfscale_stop();
    CHECK_EQ(tfscale_num_pending(), int64_t{0});
    CHECK_EQ(Failure(), std::string());
    parts.Check();
    tfscale_stop();
  }
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
