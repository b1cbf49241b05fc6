// TfscaleAllgather and TfscaleAlltoall.
#include <algorithm>
#include <utility>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/glue.h"

namespace tfscale {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status UnknownRows(InferenceContext* c) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &shape));
  TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

REGISTER_OP("TfscaleAllgather")
    .Input("tensor: T")
    .TFSCALE_COLLECTIVE_ATTRS.Output("gathered: T")
    .Output("rows: int64")
    .Attr("T: {numbertype, bool}")
    .SetShapeFn([](InferenceContext* c) {
      int n = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("group_size", &n));
      c->set_output(1, c->Vector(n));
      return UnknownRows(c);
    })
    .Doc(
        "Puts the tensors of all ranks of a group one after another along dimension 0, which may "
        "differ between ranks. `rows` tells how many rows came from each rank.");

REGISTER_OP("TfscaleAlltoall")
    .Input("tensor: T")
    .Input("splits: int64")
    .TFSCALE_COLLECTIVE_ATTRS.Output("received: T")
    .Output("rows: int64")
    .Attr("T: {numbertype, bool}")
    .SetShapeFn([](InferenceContext* c) {
      int n = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("group_size", &n));
      c->set_output(1, c->Vector(n));
      return UnknownRows(c);
    })
    .Doc(
        "Sends splits[r] rows to rank r, the first rows to rank 0, and puts what it receives one "
        "after another in rank order. `rows` tells how many rows came from each rank.");

// Rows of no width are sent as one byte each, so that their number arrives.
int64_t ExchangedBytes(const Tensor& tensor) { return std::max<int64_t>(1, RowBytes(tensor)); }

// What is sent of `input`.
Tensor Payload(const Tensor& input) {
  if (RowBytes(input) > 0) return input;
  Tensor bytes(tensorflow::DT_UINT8, {input.dim_size(0)});
  bytes.flat<uint8_t>().setZero();
  return bytes;
}

// The output of an exchange is allocated when its size is known, on the
// communication thread.
AllocateOutput Allocator(OpKernelContext* context, const Tensor& like,
                         std::shared_ptr<TensorList> tensors) {
  return [context, like, tensors](const std::vector<int64_t>& bytes) {
    const int64_t row_bytes = ExchangedBytes(like);
    Tensor* rows = nullptr;
    Tensor* output = nullptr;
    const tensorflow::TensorShape rows_shape({static_cast<int64_t>(bytes.size())});
    absl::Status status = context->allocate_output(1, rows_shape, &rows);
    if (!status.ok()) throw CommError(std::string(status.message()));
    int64_t total = 0;
    for (size_t r = 0; r < bytes.size(); ++r) {
      const int64_t n_rows = bytes[r] / row_bytes;
      if (n_rows * row_bytes != bytes[r]) {
        throw CommError("tensors must be alike in all dimensions but the first. Received: " +
                        std::to_string(bytes[r]) + " bytes from rank " + std::to_string(r) +
                        " of the group, with rows of " + std::to_string(row_bytes) +
                        " bytes on this rank.");
      }
      rows->vec<int64_t>()(static_cast<int64_t>(r)) = n_rows;
      total += n_rows;
    }
    status = context->allocate_output(0, WithRows(like.shape(), total), &output);
    if (!status.ok()) throw CommError(std::string(status.message()));
    const bool has_width = RowBytes(like) > 0;
    tensors->push_back(has_width ? *output : Tensor(tensorflow::DT_UINT8, {total}));
    return static_cast<void*>(tensors->back().data());
  };
}

absl::Status RequireRows(const Tensor& tensor, const char* what) {
  if (tensor.dims() >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(std::string(what) +
                                    " needs a tensor of rank 1 or more. Received: a scalar.");
}

class AllgatherOp : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    OP_REQUIRES_OK_ASYNC(context, RequireRows(input, "allgather"), done);
    auto tensors = std::make_shared<TensorList>(TensorList{Payload(input)});
    const size_t bytes = static_cast<size_t>(input.dim_size(0) * ExchangedBytes(input));
    auto operation =
        MakeAllgather(tensors->front().data(), bytes, Allocator(context, input, tensors));
    Submit(context, std::move(done), std::move(operation), tensors);
  }
};

class AlltoallOp : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    const Tensor& splits = context->input(1);
    OP_REQUIRES_OK_ASYNC(context, RequireRows(input, "alltoall"), done);
    OP_REQUIRES_OK_ASYNC(context, CheckSplits(input, splits), done);
    std::vector<int64_t> bytes;
    for (int64_t r = 0; r < splits.NumElements(); ++r) {
      bytes.push_back(splits.flat<int64_t>()(r) * ExchangedBytes(input));
    }
    auto tensors = std::make_shared<TensorList>(TensorList{Payload(input)});
    auto operation =
        MakeAlltoall(tensors->front().data(), std::move(bytes), Allocator(context, input, tensors));
    Submit(context, std::move(done), std::move(operation), tensors);
  }

 private:
  absl::Status CheckSplits(const Tensor& input, const Tensor& splits) const {
    int64_t total = 0;
    bool is_valid = splits.NumElements() == group_size();
    for (int64_t r = 0; is_valid && r < splits.NumElements(); ++r) {
      is_valid = splits.flat<int64_t>()(r) >= 0;
      total += splits.flat<int64_t>()(r);
    }
    if (is_valid && total == input.dim_size(0)) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "splits must hold one number of rows (0 or more) for each of the " +
        std::to_string(group_size()) + " ranks and add up to the tensor's " +
        std::to_string(input.dim_size(0)) + " rows. Received: splits=" + splits.SummarizeValue(16));
  }
};

TFSCALE_REGISTER_KERNEL("TfscaleAllgather", AllgatherOp,
                        .HostMemory("tensor").HostMemory("gathered").HostMemory("rows"));
TFSCALE_REGISTER_KERNEL(
    "TfscaleAlltoall", AlltoallOp,
    .HostMemory("tensor").HostMemory("splits").HostMemory("received").HostMemory("rows"));

}  // namespace
}  // namespace tfscale
