// Plans as tracing builds them, and what a difference between ranks is called.
#include "comm/plan.h"

#include <string>
#include <vector>

#include "comm/types.h"
#include "test/check.h"

namespace tfscale {

TEST(SlotsAreNumberedPerPlanAndTagsPerGroup) {
  PlanTable table;
  const int train = table.Create(0, "train");
  const int test = table.Create(0, "test");
  const int other = table.Create(3, "train");
  CHECK_EQ(table.AddSlot(train, "a"), 0);
  CHECK_EQ(table.AddSlot(test, "b"), 0);
  CHECK_EQ(table.AddSlot(train, "c"), 1);
  CHECK_EQ(table.AddSlot(other, "d"), 0);
  const PlanSpec first = table.Freeze(train);
  const PlanSpec second = table.Freeze(test);
  const PlanSpec third = table.Freeze(other);
  CHECK_TRUE((first.tag_slots == std::vector<int>{0, 2}));
  CHECK_TRUE((second.tag_slots == std::vector<int>{1}));
  CHECK_TRUE((third.tag_slots == std::vector<int>{0}));
  CHECK_EQ(first.index, 0);
  CHECK_EQ(second.index, 1);
  CHECK_EQ(third.index, 0);
  CHECK_EQ(third.group, 3);
  CHECK_EQ(first.Describe(), std::string("function train\n#0 a\n#2 c\n"));
}

TEST(FrozenPlansDoNotChange) {
  PlanTable table;
  const int plan = table.Create(0, "train");
  table.AddSlot(plan, "a");
  CHECK_EQ(table.Freeze(plan).slots.size(), size_t{1});
  CHECK_THROWS(table.AddSlot(plan, "late"), "'late' for plan 'train'");
  CHECK_EQ(table.Freeze(plan).slots.size(), size_t{1});
}

TEST(UnknownPlansAreNamed) {
  PlanTable table;
  CHECK_THROWS(table.Freeze(0), "plan 0, of 0 plans here");
  CHECK_THROWS(table.AddSlot(-1, "a"), "plan -1");
  CHECK_THROWS(table.Create(-1, "a"), "-1");
}

// A function that was traced in an earlier job is recognised, whatever is traced in this one.
TEST(PlansOfAnEarlierJobAreUnknown) {
  int earlier = 0;
  {
    PlanTable table;
    earlier = table.Create(0, "train");
    table.AddSlot(earlier, "a");
  }
  PlanTable table;
  const int plan = table.Create(0, "train");
  table.AddSlot(plan, "b");
  CHECK_TRUE(plan != earlier);
  CHECK_THROWS(table.Freeze(earlier), "Trace the function again.");
  CHECK_EQ(table.Freeze(plan).slots[0], std::string("b"));
}

TEST(SignaturesAreComparedAndNamesAreShown) {
  PlanTable table;
  const int plan = table.Create(0, "train");
  table.AddSlot(plan, "all gradients", "kernel float32(3,)\n  bias float32(2,)\n  sum");
  table.AddSlot(plan, "loss");
  const PlanSpec spec = table.Freeze(plan);
  CHECK_EQ(spec.slots[0], std::string("all gradients"));
  CHECK_EQ(spec.Describe(), std::string("function train\n#0 kernel float32(3,)\n"
                                        "  bias float32(2,)\n  sum\n#1 loss\n"));
}

TEST(FirstDifferenceNamesTheTensorOfItsSlot) {
  const std::string text = FirstDifference(
      {"f\n#0 a\n#1 w\n  b (2,)\n  sum\n", "f\n#0 a\n#1 w\n  b (3,)\n  sum\n"}, {0, 1});
  CHECK_CONTAINS(text, "at slot 1, rank 0 has 'b (2,)' and rank 1 has 'b (3,)'");
  const std::string fewer = FirstDifference({"f\n#0 w\n  b\n#1 c\n", "f\n#0 w\n#1 c\n"}, {0, 1});
  CHECK_CONTAINS(fewer, "at slot 0, rank 0 has 'b' and rank 1 has '#1 c'");
}

TEST(EqualPlansHaveNoDifference) {
  CHECK_EQ(FirstDifference({"a\nb\n"}, {0}), std::string());
  CHECK_EQ(FirstDifference({"a\nb\n", "a\nb\n", "a\nb\n"}, {0, 1, 2}), std::string());
}

TEST(FirstDifferenceNamesSlotAndRanks) {
  const std::string text = FirstDifference(
      {"function f\n#0 w1\n#1 w2\n", "function f\n#0 w1\n#1 w2\n", "function f\n#0 w1\n#1 w3\n"},
      {1, 4, 6});
  CHECK_CONTAINS(text, "ranks run different collectives.");
  CHECK_CONTAINS(text, "at slot 1, rank 1 has '#1 w2' and rank 6 has '#1 w3'");
}

TEST(DifferenceOfNamesAndLengths) {
  CHECK_CONTAINS(FirstDifference({"function f\n", "function g\n"}, {0, 1}),
                 "rank 0 has 'function f' and rank 1 has 'function g'");
  CHECK_CONTAINS(FirstDifference({"f\n#0 a\n", "f\n"}, {0, 1}),
                 "at slot 0, rank 0 has '#0 a' and rank 1 has 'nothing more'");
  CHECK_CONTAINS(FirstDifference({"f\n", "f\n#0 a\n"}, {0, 1}),
                 "rank 0 has 'nothing more' and rank 1 has '#0 a'");
}

}  // namespace tfscale

int main() { return tfscale::testing::RunTests(); }
