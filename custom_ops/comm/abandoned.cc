#include "comm/abandoned.h"

#include <utility>
#include <vector>

#include "comm/mpi_env.h"

namespace tfscale {
namespace {

// They take memory until they have arrived.
constexpr size_t kDiscardedAtOnce = 16;
constexpr size_t kDiscardedBytes = size_t{1} << 26;

// Receives a message to discard it.
class Unwanted : public Operation {
 public:
  Unwanted(int source, int bytes) : source_(source), data_(static_cast<size_t>(bytes)) {}
  size_t bytes() const override { return data_.size(); }

 protected:
  void Begin() override {
    transfers_->ReceiveMessage(data_.data(), data_.size(), source_, channel_.tag);
  }
  void Advance(const std::vector<int>&) override {}  // what has arrived is not looked at
  void Finish() override { SetDone(); }

 private:
  int source_;
  std::vector<char> data_;
};

bool IsQuiet(const std::unique_ptr<Operation>& operation) { return operation->IsQuiet(); }

}  // namespace

void Abandoned::Add(std::unique_ptr<Operation> operation) {
  operations_.push_back(std::move(operation));
  operations_.back()->Cancel();
}

void Abandoned::Step() {
  operations_.remove_if(IsQuiet);
  discarded_.remove_if(IsQuiet);
}

void Abandoned::Discard(const Communicator& comm, int kept_tag) {
  size_t n_bytes = 0;
  for (const auto& operation : discarded_) n_bytes += operation->bytes();
  while (discarded_.size() < kDiscardedAtOnce && n_bytes < kDiscardedBytes) {
    int is_there = 0;
    MPI_Status status;
    Check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm.get(), &is_there, &status), "MPI_Iprobe");
    if (!is_there || status.MPI_TAG == kept_tag) return;
    int bytes = 0;
    Check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    Channel channel{};
    channel.comm = &comm;
    channel.tag = status.MPI_TAG;
    channel.max_message_bytes = size_t{1} << 31;  // as one message, however it was cut
    discarded_.push_back(std::make_unique<Unwanted>(status.MPI_SOURCE, bytes));
    discarded_.back()->Start(channel);
    n_bytes += static_cast<size_t>(bytes);
  }
}

}  // namespace tfscale
