// TfscalePostGather.
#include <cstring>
#include <mutex>
#include <utility>

#include "tensorflow/core/framework/op.h"
#include "tf/variables.h"

namespace tfscale {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// `after` are the variables that receive new values.
REGISTER_OP("TfscalePostGather")
    .Input("pieces: piece_types")
    .Input("bits: int32")
    .TFSCALE_COLLECTIVE_ATTRS.Attr("piece_types: list(type) >= 0")
    .Attr("dtype: {numbertype, bool}")
    .Attr("piece_offsets: list(int) >= 0")
    .Attr("cuts: list(int) >= 2")
    .Attr("variable_offsets: list(int) >= 1")
    .Attr("shapes: list(shape) >= 1")
    .Attr("block: int")
    .Attr("is_coded: list(bool) >= 1")
    .Attr("group_rank: int")
    .Doc(
        "Begins to gather new values of variables, of which each rank of a group has pieces, and "
        "does not wait: TfscaleAwait does. The values lie in a buffer of cuts[-1] elements, rank "
        "r's pieces in [cuts[r], cuts[r + 1]). With 16, 8 or 4 bits, coded variables are sent as "
        "changes of their values until now, see ChangeGather; with 32 all are sent as they are.");

constexpr size_t kAlignment = 64;  // of every tensor, in bytes

// Positions in the buffer, in elements.
struct Layout {
  tensorflow::DataType dtype;
  std::vector<int64_t> piece_offsets;
  std::vector<int64_t> cuts;
  std::vector<int64_t> variable_offsets;
  std::vector<TensorShape> shapes;
  std::vector<bool> is_coded;  // variables
  int block = 0;
  int rank = 0;

  int64_t length() const { return cuts.back(); }
  size_t element() const { return static_cast<size_t>(tensorflow::DataTypeSize(dtype)); }
  absl::Status Check(int n_ranks) const;
};

absl::Status Wrong(const std::string& what) {
  return absl::InvalidArgumentError("The layout of a gather is wrong: " + what);
}

absl::Status Layout::Check(int n_ranks) const {
  if (static_cast<int>(cuts.size()) != n_ranks + 1) return Wrong("one cut more than ranks");
  if (rank < 0 || rank >= n_ranks) return Wrong("no member of the group");
  if (cuts[0] != 0) return Wrong("the first cut is at 0");
  for (size_t i = 1; i < cuts.size(); ++i) {
    if (cuts[i] < cuts[i - 1]) return Wrong("cuts ascend");
  }
  if (shapes.size() != variable_offsets.size()) return Wrong("a shape for each variable");
  if (shapes.size() != is_coded.size()) return Wrong("whether each variable is coded");
  for (size_t i = 0; i < shapes.size(); ++i) {
    const int64_t begin = variable_offsets[i];
    if (begin < 0 || begin + shapes[i].num_elements() > length()) {
      return Wrong("variables lie in the buffer");
    }
    if (static_cast<size_t>(begin) * element() % kAlignment != 0) {
      return Wrong("variables begin at multiples of 64 bytes");
    }
  }
  return absl::OkStatus();
}

// Buffers of one kernel. Fresh memory would cost a page fault per 4 KiB in each
// step; two are used in turn while readers hold no old values. Thread-safe.
class Buffers {
 public:
  absl::Status Take(OpKernelContext* context, const Layout& layout, Tensor* buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Tensor& kept : kept_) {
      if (!kept.RefCountIsOne()) continue;
      *buffer = kept;
      return absl::OkStatus();
    }
    TF_RETURN_IF_ERROR(
        context->allocate_temp(layout.dtype, TensorShape({layout.length()}), buffer));
    // Gaps between pieces are sent too.
    std::memset(buffer->data(), 0, static_cast<size_t>(layout.length()) * layout.element());
    if (kept_.size() < kMax) kept_.emplace_back();
    kept_[next_++ % kept_.size()] = *buffer;
    return absl::OkStatus();
  }

 private:
  static constexpr size_t kMax = 3;
  std::mutex mutex_;
  std::vector<Tensor> kept_;  // guarded by mutex_
  size_t next_ = 0;           // guarded by mutex_
};

class PostGatherOp : public PostKernel {
 public:
  explicit PostGatherOp(OpKernelConstruction* context) : PostKernel(context) {
    auto layout = std::make_shared<Layout>();
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &layout->dtype));
    OP_REQUIRES_OK(context, context->GetAttr("piece_offsets", &layout->piece_offsets));
    OP_REQUIRES_OK(context, context->GetAttr("cuts", &layout->cuts));
    OP_REQUIRES_OK(context, context->GetAttr("variable_offsets", &layout->variable_offsets));
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &layout->shapes));
    OP_REQUIRES_OK(context, context->GetAttr("block", &layout->block));
    OP_REQUIRES_OK(context, context->GetAttr("is_coded", &layout->is_coded));
    OP_REQUIRES_OK(context, context->GetAttr("group_rank", &layout->rank));
    OP_REQUIRES_OK(context, layout->Check(group_size()));
    layout_ = std::move(layout);
  }

 protected:
  absl::StatusOr<OperationHandle> Prepare(OpKernelContext* context, Delivery* delivery,
                                          TensorList* memory) override {
    TF_RETURN_IF_ERROR(CheckInputs(context, *delivery));
    delivery->shapes = layout_->shapes;
    Tensor buffer;
    TF_RETURN_IF_ERROR(buffers_.Take(context, *layout_, &buffer));
    OpInputList pieces;
    TF_RETURN_IF_ERROR(context->input_list("pieces", &pieces));
    char* data = static_cast<char*>(buffer.data());
    const size_t element = layout_->element();
    for (int i = 0; i < pieces.size(); ++i) {
      const Tensor& piece = pieces[i];
      if (piece.NumElements() == 0) continue;
      const size_t begin = static_cast<size_t>(layout_->piece_offsets[static_cast<size_t>(i)]);
      std::memcpy(data + begin * element, piece.data(), piece.TotalBytes());
    }
    for (size_t i = 0; i < layout_->shapes.size(); ++i) {
      const int64_t begin = layout_->variable_offsets[i];
      delivery->values.push_back(buffer.Slice(begin, begin + layout_->shapes[i].num_elements()));
    }
    const Tensor* bits = nullptr;
    TF_RETURN_IF_ERROR(context->input("bits", &bits));
    memory->push_back(std::move(buffer));
    return Make(data, bits->scalar<int32_t>()(), *delivery, memory);
  }

  // Values that come before they are read do no harm. The plan's order is that of the next
  // forward pass, whose first values are those that back-propagation makes last.
  void SetOrder(Call* call) const override { call->may_overtake = true; }

 private:
  absl::Status CheckInputs(OpKernelContext* context, const Delivery& delivery) const {
    OpInputList pieces;
    TF_RETURN_IF_ERROR(context->input_list("pieces", &pieces));
    if (static_cast<size_t>(pieces.size()) != layout_->piece_offsets.size()) {
      return Wrong("an offset for each piece");
    }
    if (delivery.variables.size() != layout_->shapes.size()) return Wrong("a shape per variable");
    const size_t rank = static_cast<size_t>(layout_->rank);
    for (int i = 0; i < pieces.size(); ++i) {
      const int64_t begin = layout_->piece_offsets[static_cast<size_t>(i)];
      const int64_t end = begin + pieces[i].NumElements();
      if (begin < layout_->cuts[rank] || end > layout_->cuts[rank + 1]) {
        return Wrong("pieces lie in their rank's segment");
      }
      if (pieces[i].dtype() != layout_->dtype) return Wrong("one type for all pieces");
    }
    return absl::OkStatus();
  }

  // The gather into the buffer at `data`; adds old values that it reads to `memory`.
  OperationHandle Make(char* data, int bits, const Delivery& delivery, TensorList* memory) const {
    const bool is_coded = bits < 32 && layout_->dtype == tensorflow::DT_FLOAT;
    const size_t element = is_coded ? 1 : layout_->element();
    std::vector<size_t> cuts;
    for (int64_t cut : layout_->cuts) cuts.push_back(static_cast<size_t>(cut) * element);
    if (!is_coded) return MakeSegmentGather(data, std::move(cuts));
    ChangesArgs args;
    args.bits = bits;
    args.block = static_cast<size_t>(layout_->block);
    args.buffer = reinterpret_cast<float*>(data);
    args.cuts = std::move(cuts);
    for (size_t i = 0; i < layout_->shapes.size(); ++i) {
      const float* old = nullptr;
      if (layout_->is_coded[i]) {
        tensorflow::tf_shared_lock lock(*delivery.variables[i]->mu());
        memory->push_back(*delivery.variables[i]->tensor());
        old = memory->back().flat<float>().data();
      }
      args.vectors.push_back({static_cast<size_t>(layout_->variable_offsets[i]),
                              static_cast<size_t>(layout_->shapes[i].num_elements()), old});
    }
    return MakeChangeGather(std::move(args));
  }

  std::shared_ptr<const Layout> layout_;
  Buffers buffers_;
};

// Variables in the memory of a GPU cannot refer to a buffer of the host: Python
// assigns to them instead.
REGISTER_KERNEL_BUILDER(Name("TfscalePostGather").Device(tensorflow::DEVICE_CPU), PostGatherOp);

}  // namespace
}  // namespace tfscale
