// Places of ranks, and how those of a host share its cores.
#include "comm/host_place.h"

#include <vector>

#include "test/check.h"

namespace tfscale {

TEST(BoundRanksKeepTheirCores) {
  CHECK_EQ(CoresOfRank({1, 1, 0, 0}, {1, 1, 1, 1}), 2);
  CHECK_EQ(CoresOfRank({0, 0, 0, 1}, {1, 1, 1, 1}), 1);
}

TEST(OthersShare) {
  CHECK_EQ(CoresOfRank({1, 1, 1, 1}, {2, 2, 2, 2}), 2);
  CHECK_EQ(CoresOfRank({1, 1, 1, 1, 1, 1, 1, 1}, {3, 3, 3, 3, 3, 3, 3, 3}), 2);
  // Three thirds of a core are one, whatever rounding makes of them.
  CHECK_EQ(CoresOfRank(std::vector<int>(6, 1), std::vector<int>(6, 3)), 2);
  // One rank is bound to the first core, which the other one may use as well.
  CHECK_EQ(CoresOfRank({1, 1, 1, 1}, {2, 1, 1, 1}), 3);
  CHECK_EQ(CoresOfRank({1, 0, 0, 0}, {2, 1, 1, 1}), 1);
}

TEST(EveryRankHasACore) {
  CHECK_EQ(CoresOfRank({1, 1}, {4, 4}), 1);
  CHECK_EQ(CoresOfRank({}, {}), 1);
}

}  // namespace tfscale

int main() { return tfscale::testing::RunTests(); }
