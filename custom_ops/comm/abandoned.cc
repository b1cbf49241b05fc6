#include "comm/abandoned.h"

#include <utility>
#include <vector>

#include "comm/mpi_env.h"

namespace tfscale {

void Abandoned::Add(std::unique_ptr<Operation> operation) {
  operations_.push_back(std::move(operation));
  operations_.back()->Cancel();
}

void Abandoned::Step() {
  operations_.remove_if([](const auto& operation) { return operation->IsQuiet(); });
}

void DiscardMessages(const Communicator& comm, int kept_tag) {
  while (true) {
    int is_there = 0;
    MPI_Status status;
    Check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm.get(), &is_there, &status), "MPI_Iprobe");
    if (!is_there || status.MPI_TAG == kept_tag) return;
    int bytes = 0;
    Check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    std::vector<char> data(static_cast<size_t>(bytes));
    Check(MPI_Recv(data.data(), bytes, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, comm.get(),
                   MPI_STATUS_IGNORE),
          "MPI_Recv");
  }
}

}  // namespace tfscale
