// Collectives on known integers, whose results are known.
#ifndef TFSCALE_TEST_SIM_WORK_H_
#define TFSCALE_TEST_SIM_WORK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "test/sim/world.h"

namespace sim {

enum class Kind {
  kSum,
  kScatter,
  kQuantized,
  kQuantizedScatter,
  kAllgather,
  kAlltoall,
  kBroadcast,
  kGather,  // posted, as the next
  kChange
};
const char* NameOf(Kind kind);

// A slot of a plan, alike on all ranks.
struct SlotSpec {
  Kind kind = Kind::kSum;
  tfscale::DType dtype = tfscale::DType::kFloat32;
  tfscale::ReduceOp op = tfscale::ReduceOp::kSum;
  double postscale = 1.0;
  int unit = 1;                // of all values
  std::vector<size_t> counts;  // of each tensor, in elements
  std::vector<size_t> cuts;    // of all of them, one more than members
  int bits = 8;
  bool keeps_errors = false;
  int root = 0;
  std::optional<tfscale::Way> way;
  int after = -1;  // the slot that a posted gather follows
  bool is_awaited_later = false;
  bool is_compared = false;  // the shapes, first

  size_t total() const;
  bool is_posted() const { return kind == Kind::kGather || kind == Kind::kChange; }
  // No member ends it before all have begun it.
  bool is_coupled() const { return !is_posted() && kind != Kind::kBroadcast; }
};

// The bytes that all members send in one execution, by messages alone; nothing where the layout of
// hosts or the rounding of values decides.
std::optional<int64_t> BytesSent(const SlotSpec& spec, int n_members, bool is_one_level,
                                 uint64_t seed);

// The longest message of an execution, which is sent in chunks; nothing where ranks choose its way.
std::optional<int64_t> LongestMessage(const SlotSpec& spec, size_t n_hosts, int64_t chunk_bytes);

// Where so many elements are cut into parts, some of which may be empty.
std::vector<size_t> DrawCuts(Random& random, int n_members, size_t total);
SlotSpec DrawSlot(Random& random, int n_members, size_t most_elements);

// One execution on one rank. `seed` is that of the execution, equal on all.
class Work {
 public:
  Work(const SlotSpec& spec, int n_members, int member, uint64_t seed);
  // What the operation reads and writes is this object's.
  tfscale::OperationHandle Operation();
  uint64_t seed() const { return seed_; }
  // "" if the results are right.
  std::string Check() const;
  // Of results that are equal bit for bit on all ranks; 0 for others.
  uint64_t Digest() const;
  std::string Shapes() const;
  // Takes what the execution before has left.
  void Follow(const Work& earlier) { errors_ = earlier.new_errors_; }

  template <typename Visit>
  void ForEachBuffer(Visit visit) const {
    for (const auto& tensor : inputs_) visit(tensor.data(), tensor.size());
    for (const auto& tensor : outputs_) visit(tensor.data(), tensor.size());
    for (const auto& tensor : old_) visit(tensor.data(), tensor.size());
  }

 private:
  // Of element i of all tensors, of a member.
  int ValueOf(int member, size_t i) const {
    return spec_.unit *
           static_cast<int>((static_cast<uint64_t>(member) * 3 + i * 5 + (seed_ >> (i % 8 * 2))) &
                            3);
  }
  std::vector<char> Tensor(int member, size_t begin, size_t count) const;
  double Expected(size_t i) const;
  std::string CheckElements(const std::vector<char>& out, size_t begin, size_t count,
                            double tolerance) const;
  double Tolerance() const;

  const SlotSpec spec_;
  const int n_members_;
  const int member_;
  const uint64_t seed_;
  std::vector<std::vector<char>> inputs_, outputs_, old_;
  std::vector<int64_t> received_;  // bytes, by member
  std::vector<std::vector<float>> errors_, new_errors_, owner_errors_, new_owner_errors_;
};

}  // namespace sim

#endif  // TFSCALE_TEST_SIM_WORK_H_
