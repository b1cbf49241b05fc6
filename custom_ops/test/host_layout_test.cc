// Ranks by host, and who deals with whose data.
#include "comm/host_layout.h"

#include <set>
#include <utility>
#include <vector>

#include "test/check.h"

namespace tfscale {

TEST(RanksAreOrderedByHost) {
  const HostLayout hosts({7, 3, 7, 3, 9});
  CHECK_EQ(hosts.n_hosts(), 3);
  CHECK_TRUE(hosts.RanksOf(0) == (std::vector<int>{0, 2}));
  CHECK_TRUE(hosts.RanksOf(1) == (std::vector<int>{1, 3}));
  CHECK_TRUE(hosts.RanksOf(2) == (std::vector<int>{4}));
  CHECK_EQ(hosts.HostOf(3), 1);
  CHECK_TRUE(hosts.is_two_level());
  CHECK_TRUE(!HostLayout({1, 1, 1}).is_two_level());
  CHECK_TRUE(!HostLayout::Flat(3).is_two_level());
}

// Each segment reaches each host once, by ranks that share the work.
TEST(EveryOwnerHasOnePartnerPerHost) {
  for (const std::vector<int>& host_of :
       {std::vector<int>{0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 1, 1}, {0, 1, 0, 2, 1, 0, 2}, {0, 0}}) {
    const HostLayout hosts(host_of);
    const int size = static_cast<int>(host_of.size());
    std::multiset<std::pair<int, int>> visits;  // owner, host
    for (int rank = 0; rank < size; ++rank) {
      for (int owner : hosts.Remote(rank)) {
        CHECK_TRUE(hosts.HostOf(owner) != hosts.HostOf(rank));
        CHECK_EQ(hosts.Partner(hosts.HostOf(rank), owner), rank);
        visits.insert({owner, hosts.HostOf(rank)});
      }
    }
    CHECK_EQ(visits.size(), static_cast<size_t>(size * (hosts.n_hosts() - 1)));
    const std::set<std::pair<int, int>> once(visits.begin(), visits.end());
    CHECK_EQ(once.size(), visits.size());
  }
  const HostLayout two({0, 0, 0, 1, 1, 1});
  for (int rank = 0; rank < 6; ++rank) CHECK_EQ(two.Remote(rank).size(), size_t{1});
}

}  // namespace tfscale

int main() { return tfscale::testing::RunTests(); }
