#include "test/sim/work.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "comm/half.h"

namespace sim {
namespace {

using tfscale::DType;
using tfscale::ReduceOp;

template <typename T>
void PutAs(void* data, size_t i, double value) {
  static_cast<T*>(data)[i] = static_cast<T>(value);
}
template <typename T>
double GetAs(const void* data, size_t i) {
  return static_cast<double>(static_cast<const T*>(data)[i]);
}

void Put(DType dtype, void* data, size_t i, double value) {
  const float single = static_cast<float>(value);
  uint16_t* halves = static_cast<uint16_t*>(data);
  switch (dtype) {
    case DType::kFloat32:
      return PutAs<float>(data, i, value);
    case DType::kFloat64:
      return PutAs<double>(data, i, value);
    case DType::kInt32:
      return PutAs<int32_t>(data, i, value);
    case DType::kInt64:
      return PutAs<int64_t>(data, i, value);
    case DType::kInt8:
      return PutAs<int8_t>(data, i, value);
    case DType::kUint8:
      return PutAs<uint8_t>(data, i, value);
    case DType::kFloat16:
      return tfscale::FloatToHalf(&single, halves + i, 1);
    case DType::kBfloat16:
      return tfscale::FloatToBfloat(&single, halves + i, 1);
  }
}

double Get(DType dtype, const void* data, size_t i) {
  float single = 0;
  const uint16_t* halves = static_cast<const uint16_t*>(data);
  switch (dtype) {
    case DType::kFloat32:
      return GetAs<float>(data, i);
    case DType::kFloat64:
      return GetAs<double>(data, i);
    case DType::kInt32:
      return GetAs<int32_t>(data, i);
    case DType::kInt64:
      return GetAs<int64_t>(data, i);
    case DType::kInt8:
      return GetAs<int8_t>(data, i);
    case DType::kUint8:
      return GetAs<uint8_t>(data, i);
    case DType::kFloat16:
      tfscale::HalfToFloat(halves + i, &single, 1);
      return single;
    case DType::kBfloat16:
      tfscale::BfloatToFloat(halves + i, &single, 1);
      return single;
  }
  return 0;
}

bool IsFloat(DType dtype) {
  return dtype != DType::kInt32 && dtype != DType::kInt64 && dtype != DType::kInt8 &&
         dtype != DType::kUint8;
}

float* Floats(std::vector<char>& data) { return reinterpret_cast<float*>(data.data()); }

// Of an allgather (`to` is -1) and an alltoall.
size_t BytesFrom(const SlotSpec& spec, uint64_t seed, int member, int to) {
  return static_cast<size_t>(
      (static_cast<uint64_t>(member) * 7 + seed * 3 + static_cast<uint64_t>(to + 1) * 5) %
      (spec.total() + 1));
}

// How often a block moves that has so far to go.
int64_t NumDigits(size_t distance, size_t radix) {
  int64_t n = 0;
  for (; distance > 0; distance /= radix) n += distance % radix > 0;
  return n;
}

}  // namespace

const char* NameOf(Kind kind) {
  const char* names[] = {"sum",      "scatter",   "quantized", "quantized scatter", "allgather",
                         "alltoall", "broadcast", "gather",    "change gather"};
  return names[static_cast<size_t>(kind)];
}

size_t SlotSpec::total() const { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

std::optional<int64_t> BytesSent(const SlotSpec& spec, int n_members, bool is_one_level,
                                 uint64_t seed) {
  const int64_t n = n_members;
  const int64_t element = static_cast<int64_t>(SizeOf(spec.dtype));
  const int64_t total = static_cast<int64_t>(spec.total()) * element;
  const int64_t compared = spec.is_compared ? n * (n - 1) * 1024 : 0;
  const bool is_direct = is_one_level || element == 1;
  switch (spec.kind) {
    case Kind::kSum: {
      if (!spec.way || (spec.way->radix == 0 && !is_direct)) return std::nullopt;
      if (spec.way->radix == 0) return compared + 2 * (n - 1) * total;
      if (spec.way->is_whole) return compared + n * (n - 1) * total;
      const int64_t block = (total / element + n - 1) / n * element;
      int64_t n_moves = n - 1;  // of the gather
      for (int64_t way = 1; way < n; ++way) {
        n_moves += NumDigits(static_cast<size_t>(way), spec.way->radix);
      }
      return compared + n * n_moves * block;
    }
    case Kind::kScatter:
      if (!is_direct) return std::nullopt;
      return compared + (n - 1) * total;
    case Kind::kBroadcast:
    case Kind::kGather:
      return compared + (n - 1) * total;
    case Kind::kAllgather:
    case Kind::kAlltoall: {
      int64_t bytes = compared + n * (n - 1) * 8;  // of the sizes
      for (int from = 0; from < n_members; ++from) {
        for (int to = 0; to < n_members; ++to) {
          const int which = spec.kind == Kind::kAlltoall ? to : -1;
          if (from != to) bytes += static_cast<int64_t>(BytesFrom(spec, seed, from, which));
        }
      }
      return bytes;
    }
    default:
      return std::nullopt;
  }
}

std::optional<int64_t> LongestMessage(const SlotSpec& spec, size_t n_hosts, int64_t chunk_bytes) {
  const int64_t compared = spec.is_compared ? 1024 : 0;
  const bool is_direct =
      spec.kind == Kind::kScatter || (spec.kind == Kind::kSum && spec.way && spec.way->radix == 0);
  if (is_direct) return std::max({static_cast<int64_t>(SizeOf(spec.dtype)), chunk_bytes, compared});
  // Small pieces, where others may need the link soon.
  if (spec.kind == Kind::kGather && n_hosts > 1) return std::max<int64_t>(chunk_bytes / 8, 64);
  return std::nullopt;
}

std::vector<size_t> DrawCuts(Random& random, int n_members, size_t total) {
  std::vector<size_t> cuts = {0, total};
  for (int i = 1; i < n_members; ++i) {
    cuts.push_back(static_cast<size_t>(random.Below(static_cast<int64_t>(total) + 1)));
  }
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

SlotSpec DrawSlot(Random& random, int n_members, size_t most_elements) {
  SlotSpec spec;
  spec.kind = random.Of(std::vector<Kind>{Kind::kSum, Kind::kSum, Kind::kSum, Kind::kScatter,
                                          Kind::kScatter, Kind::kQuantized, Kind::kQuantizedScatter,
                                          Kind::kAllgather, Kind::kAlltoall, Kind::kBroadcast});
  const bool is_quantized = spec.kind == Kind::kQuantized || spec.kind == Kind::kQuantizedScatter;
  const int64_t n_tensors = random.Chance(0.7) ? 1 : random.Between(1, 4);
  for (int64_t i = 0; i < n_tensors; ++i) {
    spec.counts.push_back(
        static_cast<size_t>(random.Scale(0, static_cast<int64_t>(most_elements))));
  }
  if (spec.kind == Kind::kSum || spec.kind == Kind::kScatter) {
    spec.dtype = random.Chance(0.5) ? DType::kFloat32 : static_cast<DType>(random.Below(8));
    spec.op = random.Chance(0.8) ? ReduceOp::kSum : static_cast<ReduceOp>(random.Between(1, 2));
    if (IsFloat(spec.dtype) && random.Chance(0.3)) spec.postscale = 0.5;
    const bool is_half = spec.dtype == DType::kFloat16 || spec.dtype == DType::kBfloat16;
    if (is_half && spec.op == ReduceOp::kSum && random.Chance(0.5)) {
      // The sum is too large for float16, and the result is not.
      spec.unit = 1 << 14;
      for (spec.postscale = 1.0; spec.postscale * n_members > 1;) spec.postscale /= 2;
    }
  }
  if (spec.kind == Kind::kSum && random.Chance(0.6)) {
    const size_t radix = random.Of(std::vector<size_t>{0, 0, 2, 3, 4, 64});
    spec.way = tfscale::Way{radix > 0 && random.Chance(0.5), radix};
  }
  spec.cuts = DrawCuts(random, n_members, spec.total());
  spec.bits = random.Of(std::vector<int>{16, 8, 4});
  spec.keeps_errors = is_quantized && random.Chance(0.5);
  spec.root = static_cast<int>(random.Below(n_members));
  spec.is_compared = random.Chance(0.1);
  spec.is_awaited_later = random.Chance(0.1);
  return spec;
}

Work::Work(const SlotSpec& spec, int n_members, int member, uint64_t seed)
    : spec_(spec), n_members_(n_members), member_(member), seed_(seed) {}

std::vector<char> Work::Tensor(int member, size_t begin, size_t count) const {
  std::vector<char> tensor(count * SizeOf(spec_.dtype));
  for (size_t i = 0; i < count; ++i) {
    Put(spec_.dtype, tensor.data(), i, ValueOf(member, begin + i));
  }
  return tensor;
}

tfscale::OperationHandle Work::Operation() {
  const size_t n = static_cast<size_t>(n_members_);
  const size_t own = static_cast<size_t>(member_);
  const size_t element = SizeOf(spec_.dtype);
  const auto allocate = [this](const std::vector<int64_t>& bytes) {
    received_ = bytes;
    const int64_t total = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
    outputs_.assign(1, std::vector<char>(static_cast<size_t>(total), 'x'));
    return static_cast<void*>(outputs_[0].data());
  };
  size_t begin = 0;
  switch (spec_.kind) {
    case Kind::kSum:
    case Kind::kScatter: {
      tfscale::ReductionArgs args;
      args.dtype = spec_.dtype;
      args.op = spec_.op;
      args.postscale = spec_.postscale;
      args.counts = spec_.counts;
      args.way = spec_.way;
      for (size_t count : spec_.counts) {
        inputs_.push_back(Tensor(member_, begin, count));
        args.inputs.push_back(inputs_.back().data());
        begin += count;
        if (spec_.kind == Kind::kScatter) continue;
        outputs_.emplace_back(count * element, 'x');
        args.outputs.push_back(outputs_.back().data());
      }
      if (spec_.kind == Kind::kScatter) {
        for (size_t r = 0; r < n; ++r) {
          args.scatter_counts.push_back(spec_.cuts[r + 1] - spec_.cuts[r]);
        }
        outputs_.emplace_back(args.scatter_counts[own] * element, 'x');
        args.outputs.push_back(outputs_[0].data());
      }
      return tfscale::MakeReduction(std::move(args));
    }
    case Kind::kQuantized:
    case Kind::kQuantizedScatter: {
      tfscale::QuantizedArgs args;
      args.bits = spec_.bits;
      args.block = 64;
      args.counts = spec_.counts;
      const bool is_scatter = spec_.kind == Kind::kQuantizedScatter;
      errors_.resize(spec_.counts.size());
      size_t n_own = 0;
      for (size_t i = 0; i < spec_.counts.size(); ++i) {
        const size_t count = spec_.counts[i];
        inputs_.push_back(Tensor(member_, begin, count));
        std::vector<size_t> cuts;
        for (size_t cut : spec_.cuts) cuts.push_back(std::clamp(cut, begin, begin + count) - begin);
        begin += count;
        const size_t n_of_part = cuts[own + 1] - cuts[own];
        n_own += n_of_part;
        args.cuts.push_back(std::move(cuts));
        if (!is_scatter) outputs_.emplace_back(count * sizeof(float), 'x');
        errors_[i].resize(count, 0.0f);
        new_errors_.emplace_back(count, 0.0f);
        owner_errors_.emplace_back(n_of_part, 0.0f);
        new_owner_errors_.emplace_back(n_of_part, 0.0f);
      }
      if (is_scatter) outputs_.emplace_back(n_own * sizeof(float), 'x');
      for (size_t i = 0; i < spec_.counts.size(); ++i) {
        args.inputs.push_back(Floats(inputs_[i]));
        if (!is_scatter) args.outputs.push_back(Floats(outputs_[i]));
        if (!spec_.keeps_errors) continue;
        args.errors.push_back(errors_[i].data());
        args.new_errors.push_back(new_errors_[i].data());
        if (is_scatter) continue;
        args.owner_errors.push_back(owner_errors_[i].data());
        args.new_owner_errors.push_back(new_owner_errors_[i].data());
      }
      if (is_scatter) args.segment = Floats(outputs_[0]);
      return tfscale::MakeQuantizedReduction(std::move(args));
    }
    case Kind::kAllgather: {
      const size_t bytes = BytesFrom(spec_, seed_, member_, -1);
      inputs_.emplace_back(bytes, static_cast<char>(seed_ + own));
      return tfscale::MakeAllgather(inputs_[0].data(), bytes, allocate);
    }
    case Kind::kAlltoall: {
      std::vector<int64_t> bytes;
      inputs_.emplace_back();
      for (int to = 0; to < n_members_; ++to) {
        const size_t part = BytesFrom(spec_, seed_, member_, to);
        bytes.push_back(static_cast<int64_t>(part));
        inputs_[0].insert(inputs_[0].end(), part,
                          static_cast<char>(seed_ + own * 16 + static_cast<uint64_t>(to)));
      }
      return tfscale::MakeAlltoall(inputs_[0].data(), std::move(bytes), allocate);
    }
    case Kind::kBroadcast:
      inputs_.push_back(Tensor(member_, 0, spec_.total()));
      outputs_.emplace_back(inputs_[0].size(), 'x');
      return tfscale::MakeBroadcast(inputs_[0].data(), outputs_[0].data(), outputs_[0].size(),
                                    spec_.root);
    case Kind::kGather: {
      // This rank's segment has its values, the others have none.
      outputs_.emplace_back(spec_.total() * sizeof(float), 'x');
      for (size_t i = spec_.cuts[own]; i < spec_.cuts[own + 1]; ++i) {
        Floats(outputs_[0])[i] = static_cast<float>(ValueOf(0, i));
      }
      std::vector<size_t> cuts;
      for (size_t cut : spec_.cuts) cuts.push_back(cut * sizeof(float));
      return tfscale::MakeSegmentGather(outputs_[0].data(), std::move(cuts));
    }
    case Kind::kChange: {
      tfscale::ChangesArgs args;
      args.bits = spec_.bits;
      args.block = 64;
      outputs_.emplace_back(spec_.total() * sizeof(float), 'x');
      for (size_t i = spec_.cuts[own]; i < spec_.cuts[own + 1]; ++i) {
        Floats(outputs_[0])[i] = static_cast<float>(ValueOf(0, i));
      }
      args.buffer = Floats(outputs_[0]);
      args.cuts = spec_.cuts;
      for (size_t count : spec_.counts) {
        old_.emplace_back(count * sizeof(float));
        for (size_t i = 0; i < count; ++i) {
          Floats(old_.back())[i] = static_cast<float>(ValueOf(1, begin + i));
        }
        args.vectors.push_back({begin, count, nullptr});
        begin += count;
      }
      // The first may be sent as it is.
      for (size_t i = seed_ % 2; i < old_.size(); ++i) args.vectors[i].old = Floats(old_[i]);
      return tfscale::MakeChangeGather(std::move(args));
    }
  }
  return {nullptr, [](tfscale::Operation*) {}};
}

double Work::Expected(size_t i) const {
  double value = ValueOf(0, i);
  for (int r = 1; r < n_members_; ++r) {
    const double next = ValueOf(r, i);
    value = spec_.op == ReduceOp::kMin   ? std::min(value, next)
            : spec_.op == ReduceOp::kMax ? std::max(value, next)
                                         : value + next;
  }
  return value * spec_.postscale;
}

std::string Work::CheckElements(const std::vector<char>& out, size_t begin, size_t count,
                                double tolerance) const {
  const bool is_own = spec_.is_posted();
  for (size_t i = 0; i < count; ++i) {
    const double value = Get(spec_.dtype, out.data(), i);
    const double expected = is_own ? ValueOf(0, begin + i) : Expected(begin + i);
    if (std::abs(value - expected) <= tolerance) continue;
    return "element " + std::to_string(begin + i) + " is " + std::to_string(value) + " and not " +
           std::to_string(expected);
  }
  return "";
}

// Values are at most 3. Of each host's sum, and of the sum of them, half a step is rounded off, and
// as much may be left of the vectors before.
double Work::Tolerance() const {
  const double step = spec_.bits == 16 ? 1.0 / 128 : spec_.bits == 8 ? 1.0 / 120 : 1.0 / 6.9;
  return 3.0 * n_members_ * step * (spec_.keeps_errors ? 2.5 : 1.25) + 1e-5;
}

std::string Work::Check() const {
  const size_t own = static_cast<size_t>(member_);
  size_t begin = 0;
  switch (spec_.kind) {
    case Kind::kScatter:
    case Kind::kQuantizedScatter:
      return CheckElements(outputs_[0], spec_.cuts[own], spec_.cuts[own + 1] - spec_.cuts[own],
                           spec_.kind == Kind::kScatter ? 0.0 : Tolerance());
    case Kind::kSum:
    case Kind::kQuantized:
      for (size_t i = 0; i < spec_.counts.size(); ++i) {
        const double tolerance = spec_.kind == Kind::kSum ? 0.0 : Tolerance();
        std::string text = CheckElements(outputs_[i], begin, spec_.counts[i], tolerance);
        if (!text.empty()) return text;
        begin += spec_.counts[i];
      }
      return "";
    case Kind::kGather:
      return CheckElements(outputs_[0], 0, spec_.total(), 0.0);
    case Kind::kChange:
      return CheckElements(outputs_[0], 0, spec_.total(), spec_.bits == 16 ? 0.0 : 1.0);
    case Kind::kBroadcast:
      return outputs_[0] == Tensor(spec_.root, 0, spec_.total()) ? "" : "not what the root has";
    case Kind::kAllgather:
    case Kind::kAlltoall: {
      const bool is_alltoall = spec_.kind == Kind::kAlltoall;
      std::vector<char> expected;
      for (int r = 0; r < n_members_; ++r) {
        const uint64_t from = static_cast<uint64_t>(r);
        const uint64_t value = is_alltoall ? from * 16 + own : from;
        expected.insert(expected.end(), BytesFrom(spec_, seed_, r, is_alltoall ? member_ : -1),
                        static_cast<char>(seed_ + value));
      }
      return outputs_.size() == 1 && outputs_[0] == expected ? "" : "not what others sent";
    }
  }
  return "";
}

uint64_t Work::Digest() const {
  if (spec_.kind == Kind::kScatter || spec_.kind == Kind::kQuantizedScatter ||
      spec_.kind == Kind::kAlltoall) {
    return 0;
  }
  uint64_t digest = 1;
  for (const std::vector<char>& out : outputs_) {
    for (char byte : out) digest = (digest ^ static_cast<unsigned char>(byte)) * 0x100000001B3ULL;
  }
  return digest;
}

std::string Work::Shapes() const {
  if (!spec_.is_compared) return "";
  std::string text;
  for (size_t count : spec_.counts) text += "[" + std::to_string(count) + "]";
  return text;
}

}  // namespace sim
