#include "comm/roster.h"

#include <algorithm>
#include <cstring>

#include "comm/mpi_env.h"
#include "comm/types.h"

namespace tfscale {
namespace {

constexpr size_t kLength = 512;  // of a rank's entry; longer texts are cut

// The text of every rank, cut to kLength - 1 characters.
std::vector<std::string> GatherTexts(const Communicator& world, const std::string& own) {
  std::vector<char> entry(kLength, '\0');
  std::memcpy(entry.data(), own.data(), std::min(own.size(), kLength - 1));
  std::vector<char> entries(kLength * static_cast<size_t>(world.size()));
  Check(MPI_Allgather(entry.data(), static_cast<int>(kLength), MPI_CHAR, entries.data(),
                      static_cast<int>(kLength), MPI_CHAR, world.get()),
        "MPI_Allgather");
  std::vector<std::string> texts;
  texts.reserve(static_cast<size_t>(world.size()));
  for (int r = 0; r < world.size(); ++r) {
    texts.emplace_back(&entries[kLength * static_cast<size_t>(r)]);
  }
  return texts;
}

}  // namespace

Roster::Roster(const Communicator& world, const std::string& identity) {
  char name[MPI_MAX_PROCESSOR_NAME];
  int length = 0;
  Check(MPI_Get_processor_name(name, &length), "MPI_Get_processor_name");
  hosts_ = GatherTexts(world, std::string(name, static_cast<size_t>(length)));
  const std::vector<std::string> identities = GatherTexts(world, identity);
  for (size_t r = 1; r < identities.size(); ++r) {
    if (identities[r] == identities[0]) continue;
    throw CommError(
        "ranks run different versions, or have different settings. Received: '" + identities[0] +
        "' on " + Name(0) + " and '" + identities[r] + "' on " + Name(static_cast<int>(r)) +
        ". Install the same packages on every host, and give settings to tfscale run --env.");
  }
}

std::string Roster::Name(int rank) const {
  return "rank " + std::to_string(rank) + " (host " + hosts_[static_cast<size_t>(rank)] + ")";
}

std::string Roster::Names(const std::vector<int>& ranks) const {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + Name(rank);
  return text;
}

}  // namespace tfscale
