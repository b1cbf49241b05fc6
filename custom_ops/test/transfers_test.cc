// Messages between ranks on a communicator of our own, cut at a low limit.
#include <algorithm>
#include <numeric>
#include <vector>

#include "comm/communicator.h"
#include "test/job.h"

namespace tfscale {
namespace testing {
namespace {

constexpr int kTag = 11;

void WaitUntilEmpty(Transfers& transfers, std::vector<int>* keys = nullptr) {
  const auto take = [&] {
    for (int key : transfers.TakeCompleted()) {
      if (keys != nullptr) keys->push_back(key);
    }
  };
  take();
  while (!transfers.is_empty()) {
    transfers.Poll();
    take();
  }
}

// Sends vectors of these sizes around the ring of ranks and checks them.
void SendAround(const Communicator& comm, size_t max_message_bytes,
                const std::vector<size_t>& sizes) {
  Transfers transfers(comm, max_message_bytes);
  const int next = (comm.rank() + 1) % comm.size();
  const int previous = (comm.rank() + comm.size() - 1) % comm.size();
  std::vector<Bytes> sent, received;
  for (size_t i = 0; i < sizes.size(); ++i) {
    sent.push_back(MakeData(DType::kInt32, sizes[i] / 4 + 1, comm.rank(), static_cast<int>(i)));
    received.push_back(Bytes(sizes[i] + 1, 'x'));
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    transfers.Receive(received[i].data(), sizes[i], previous, kTag, static_cast<int>(i));
  }
  for (size_t i = 0; i < sizes.size(); ++i) transfers.Send(sent[i].data(), sizes[i], next, kTag);
  std::vector<int> keys;
  WaitUntilEmpty(transfers, &keys);
  transfers.Release(kTag);
  WaitUntilEmpty(transfers);
  std::sort(keys.begin(), keys.end());
  CHECK_EQ(keys.size(), sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    CHECK_EQ(keys[i], static_cast<int>(i));
    const Bytes expected = MakeData(DType::kInt32, sizes[i] / 4 + 1, previous, static_cast<int>(i));
    CHECK_TRUE(std::equal(received[i].begin(), received[i].end() - 1, expected.begin()));
    CHECK_EQ(received[i].back(), 'x');
  }
}

void SendAround(size_t max_message_bytes, const std::vector<size_t>& sizes,
                size_t least_read_bytes = 0) {
  SendAround(Communicator::Duplicate(MPI_COMM_WORLD, 0, least_read_bytes), max_message_bytes,
             sizes);
}

}  // namespace

TEST(MessagesArriveWhole) { SendAround(size_t{1} << 30, {0, 1, 7, 1000, 100003, 1 << 20, 5}); }
TEST(MessagesAreCut) { SendAround(1000, {0, 1, 999, 1000, 1001, 100003, 3}); }
TEST(MessagesOfOneByte) { SendAround(1, {0, 1, 7, 1000}); }
TEST(LongOnesAreReadFromMemory) {
  SendAround(1000, {0, 1, 999, 100003, 5 << 20, 3}, 500);
  SendAround(1, {1, 7, 1000}, 1);
}

TEST(CommunicatorsOfSomeRanks) {
  const Communicator world = Communicator::Duplicate(MPI_COMM_WORLD);
  CHECK_TRUE(world.max_tag() >= 32767);
  std::vector<int> even;
  for (int r = 0; r < world.size(); r += 2) even.push_back(r);
  if (world.rank() % 2 != 0) return;
  Communicator comm = Communicator::ForRanks(world, even, 5);
  CHECK_EQ(comm.rank(), world.rank() / 2);
  CHECK_EQ(comm.size(), static_cast<int>(even.size()));
  const Communicator moved = std::move(comm);
  CHECK_EQ(moved.rank(), world.rank() / 2);
  int total = 0;
  int one = 1;
  MPI_Allreduce(&one, &total, 1, MPI_INT, MPI_SUM, moved.get());
  CHECK_EQ(total, moved.size());
}

// Of hosts of two ranks all but the first: it is alone, others have their neighbour.
TEST(CommunicatorsOfRanksOfSeveralHosts) {
  const Communicator world = Communicator::Duplicate(MPI_COMM_WORLD, 2, 500);
  if (world.rank() == 0) return;
  std::vector<int> ranks(static_cast<size_t>(world.size()) - 1);
  std::iota(ranks.begin(), ranks.end(), 1);
  const Communicator comm = Communicator::ForRanks(world, ranks, 5);
  CHECK_EQ(comm.hosts().n_hosts(), world.hosts().n_hosts());
  for (int r = 0; r < comm.size(); ++r) {
    CHECK_EQ(comm.hosts().HostOf(r), world.hosts().HostOf(r + 1));
    const bool is_neighbour =
        r != comm.rank() && comm.hosts().HostOf(r) == comm.hosts().HostOf(comm.rank());
    CHECK_EQ(comm.ReadablePid(r) != 0, is_neighbour);
  }
  SendAround(comm, 1000, {0, 1, 999, 100003, 3});
}

// A message that is too short would leave part of the result as it was.
TEST(LengthsThatDifferAreErrors) {
  const Communicator comm = Communicator::Duplicate(MPI_COMM_WORLD);
  if (comm.size() < 2 || comm.rank() > 1) return;
  const int peer = 1 - comm.rank();
  for (const bool is_longer : {false, true}) {
    Transfers transfers(comm, 1000);
    Bytes sent(104, 'a'), received(100);
    const int tag = kTag + is_longer;
    // Only one of the two finds its message of another length.
    transfers.Receive(received.data(), 100, peer, tag);
    transfers.Send(sent.data(), comm.rank() == 0 ? 100 : is_longer ? 104 : 96, peer, tag);
    if (comm.rank() == 1) {
      WaitUntilEmpty(transfers);
    } else {
      CHECK_THROWS(WaitUntilEmpty(transfers), is_longer ? "Received: more than the 100 bytes"
                                                        : "Received: less than the 100 bytes");
    }
    MPI_Sendrecv(nullptr, 0, MPI_BYTE, peer, 1, nullptr, 0, MPI_BYTE, peer, 1, comm.get(),
                 MPI_STATUS_IGNORE);
  }
}

TEST(PendingPeersAreThoseThatWereSilent) {
  const Communicator comm = Communicator::Duplicate(MPI_COMM_WORLD);
  if (comm.size() < 3 || comm.rank() > 2) return;
  if (comm.rank() == 0) {
    Transfers transfers(comm, 1000);
    char from_one[2], from_two;
    transfers.Receive(&from_one[0], 1, 1, kTag);
    transfers.Receive(&from_one[1], 1, 1, kTag + 1);
    transfers.Receive(&from_two, 1, 2, kTag);
    CHECK_TRUE((transfers.PendingPeers() == std::vector<int>{1, 2}));
    char go = 1;
    MPI_Send(&go, 1, MPI_BYTE, 1, 1, comm.get());
    while (!transfers.Poll()) continue;
    // Rank 1 owes something too, but rank 2 has sent nothing at all.
    CHECK_TRUE((transfers.PendingPeers() == std::vector<int>{2}));
    MPI_Send(&go, 1, MPI_BYTE, 1, 1, comm.get());
    MPI_Send(&go, 1, MPI_BYTE, 2, 1, comm.get());
    WaitUntilEmpty(transfers);
  } else {
    for (int tag = kTag; tag < kTag + (comm.rank() == 1 ? 2 : 1); ++tag) {
      char go = 0;
      MPI_Recv(&go, 1, MPI_BYTE, 0, 1, comm.get(), MPI_STATUS_IGNORE);
      MPI_Send(&go, 1, MPI_BYTE, 0, tag, comm.get());
    }
  }
}

TEST(CancelledReceivesEnd) {
  const Communicator comm = Communicator::Duplicate(MPI_COMM_WORLD);
  Transfers transfers(comm, 1000);
  Bytes received(5000);
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer != comm.rank()) transfers.Receive(received.data(), 5000, peer, kTag);
  }
  transfers.Cancel();
  WaitUntilEmpty(transfers);
}

}  // namespace testing
}  // namespace tfscale

int main() { return tfscale::testing::RunJobTests(); }
