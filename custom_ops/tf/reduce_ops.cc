// TfscaleAllreduce, TfscalePostAllreduce, TfscaleReducescatter and TfscaleScatterReduce.
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/variables.h"

namespace tfscale {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfscaleAllreduce")
    .Input("tensors: n_tensors * T")
    .TFSCALE_COLLECTIVE_ATTRS.Output("sums: n_tensors * T")
    .Attr("n_tensors: int >= 1")
    .Attr("T: {float, double, half, bfloat16, int32, int64, int8, uint8}")
    .Attr("reduce_op: int")
    .Attr("prescale: string")
    .Attr("postscale: string")
    .SetShapeFn([](InferenceContext* c) {
      int n = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("n_tensors", &n));
      for (int i = 0; i < n; ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc("Reduces each tensor over the ranks of a group; together they are one message.");

REGISTER_OP("TfscalePostAllreduce")
    .Input("tensors: n_tensors * T")
    .TFSCALE_COLLECTIVE_ATTRS.Attr("n_tensors: int >= 1")
    .Attr("T: {float, double, half, bfloat16}")
    .Attr("reduce_op: int")
    .Attr("prescale: string")
    .Attr("postscale: string")
    .Doc(
        "Begins to reduce each tensor over the ranks of a group into one of the variables `after`, "
        "of its type and shape, and does not wait: TfscaleAwait does.");

REGISTER_OP("TfscaleReducescatter")
    .Input("tensor: T")
    .TFSCALE_COLLECTIVE_ATTRS.Output("part: T")
    .Attr("T: {float, double, half, bfloat16, int32, int64, int8, uint8}")
    .Attr("reduce_op: int")
    .Attr("prescale: string")
    .Attr("postscale: string")
    .Attr("group_rank: int")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &shape));
      TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
      c->set_output(0, shape);
      return absl::OkStatus();
    })
    .Doc(
        "Reduces a tensor over the ranks of a group; rank r receives the r-th part of the rows. "
        "The first ranks receive one row more when the rows cannot be shared equally.");

REGISTER_OP("TfscaleScatterReduce")
    .Input("tensors: n_tensors * T")
    .TFSCALE_COLLECTIVE_ATTRS.Output("segment: T")
    .Attr("n_tensors: int >= 1")
    .Attr("T: {float, double, half, bfloat16, int32, int64, int8, uint8}")
    .Attr("reduce_op: int")
    .Attr("prescale: string")
    .Attr("postscale: string")
    .Attr("group_rank: int")
    .Attr("counts: list(int) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> counts;
      int rank = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("counts", &counts));
      TF_RETURN_IF_ERROR(c->GetAttr("group_rank", &rank));
      const bool is_known = rank >= 0 && static_cast<size_t>(rank) < counts.size();
      c->set_output(
          0, c->Vector(is_known ? c->MakeDim(counts[static_cast<size_t>(rank)]) : c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(
        "Reduces the elements of all tensors, one tensor after another, over the ranks of a group; "
        "rank r receives the r-th part of them, counts[r] elements, as a vector.");

template <typename Kernel>
class ReduceKernel : public Kernel {
 public:
  explicit ReduceKernel(OpKernelConstruction* context) : Kernel(context) {
    int op = 0;
    OP_REQUIRES_OK(context, context->GetAttr("reduce_op", &op));
    args_.op = static_cast<ReduceOp>(op);
    OP_REQUIRES_OK(context, GetFactor(context, "prescale", &args_.prescale));
    OP_REQUIRES_OK(context, GetFactor(context, "postscale", &args_.postscale));
  }

 protected:
  ReductionArgs args_;
};

class AllreduceOp : public ReduceKernel<CollectiveKernel> {
 public:
  using ReduceKernel::ReduceKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    OpInputList inputs;
    OP_REQUIRES_OK_ASYNC(context, context->input_list("tensors", &inputs), done);
    ReductionArgs args = args_;
    args.dtype = ToDType(inputs[0].dtype());
    auto tensors = std::make_shared<TensorList>();
    for (int i = 0; i < inputs.size(); ++i) {
      Tensor* output = nullptr;
      OP_REQUIRES_OK_ASYNC(context, context->allocate_output(i, inputs[i].shape(), &output), done);
      args.inputs.push_back(inputs[i].data());
      args.outputs.push_back(output->data());
      args.counts.push_back(static_cast<size_t>(inputs[i].NumElements()));
      tensors->push_back(inputs[i]);
      tensors->push_back(*output);
    }
    Submit(context, std::move(done), MakeReduction(std::move(args)), std::move(tensors));
  }
};

class PostAllreduceOp : public ReduceKernel<PostKernel> {
 public:
  using ReduceKernel::ReduceKernel;

 protected:
  absl::StatusOr<OperationHandle> Prepare(OpKernelContext* context, Delivery* delivery,
                                          TensorList* memory) override {
    OpInputList inputs;
    TF_RETURN_IF_ERROR(context->input_list("tensors", &inputs));
    if (static_cast<size_t>(inputs.size()) != delivery->variables.size()) {
      return absl::InvalidArgumentError("variables must be as many as tensors. Received: " +
                                        std::to_string(delivery->variables.size()) + " for " +
                                        std::to_string(inputs.size()) + " tensors.");
    }
    ReductionArgs args = args_;
    args.dtype = ToDType(inputs[0].dtype());
    for (int i = 0; i < inputs.size(); ++i) {
      const Tensor& input = inputs[i];
      tensorflow::Var* variable = delivery->variables[static_cast<size_t>(i)].get();
      Tensor output;
      TF_RETURN_IF_ERROR(TakeBuffer(context, variable, input.dtype(), input.shape(), &output));
      args.inputs.push_back(input.data());
      args.outputs.push_back(output.data());
      args.counts.push_back(static_cast<size_t>(input.NumElements()));
      delivery->shapes.push_back(input.shape());
      delivery->values.push_back(output);
      memory->push_back(input);
      memory->push_back(std::move(output));
    }
    return MakeReduction(std::move(args));
  }
};

class ReducescatterOp : public ReduceKernel<CollectiveKernel> {
 public:
  explicit ReducescatterOp(OpKernelConstruction* context) : ReduceKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("group_rank", &group_rank_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    OP_REQUIRES_ASYNC(context, input.dims() >= 1,
                      absl::InvalidArgumentError("reducescatter needs a tensor of rank 1 or more. "
                                                 "Received: a scalar."),
                      done);
    ReductionArgs args = args_;
    args.dtype = ToDType(input.dtype());
    const int64_t rows = input.dim_size(0);
    const int64_t n_ranks = group_size();
    const size_t row_elements =
        rows > 0 ? static_cast<size_t>(input.NumElements() / rows) : size_t{0};
    int64_t own_rows = 0;
    for (int64_t r = 0; r < n_ranks; ++r) {
      const int64_t part = rows / n_ranks + (r < rows % n_ranks ? 1 : 0);
      args.scatter_counts.push_back(static_cast<size_t>(part) * row_elements);
      if (r == group_rank_) own_rows = part;
    }
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(
        context, context->allocate_output(0, WithRows(input.shape(), own_rows), &output), done);
    args.inputs = {input.data()};
    args.outputs = {output->data()};
    args.counts = {static_cast<size_t>(input.NumElements())};
    auto tensors = std::make_shared<TensorList>(TensorList{input, *output});
    Submit(context, std::move(done), MakeReduction(std::move(args)), std::move(tensors));
  }

 private:
  int group_rank_ = 0;
};

class ScatterReduceOp : public ReduceKernel<CollectiveKernel> {
 public:
  explicit ScatterReduceOp(OpKernelConstruction* context) : ReduceKernel(context) {
    std::vector<int64_t> counts;
    int rank = 0;
    OP_REQUIRES_OK(context, context->GetAttr("counts", &counts));
    OP_REQUIRES_OK(context, context->GetAttr("group_rank", &rank));
    const bool has_rank = rank >= 0 && static_cast<size_t>(rank) < counts.size();
    OP_REQUIRES(
        context, has_rank && static_cast<int>(counts.size()) == group_size(),
        absl::InvalidArgumentError("scatter_reduce needs a number of elements for each of the " +
                                   std::to_string(group_size()) +
                                   " ranks. Received: " + std::to_string(counts.size()) +
                                   " numbers on rank " + std::to_string(rank)));
    args_.scatter_counts.assign(counts.begin(), counts.end());
    own_count_ = counts[static_cast<size_t>(rank)];
    for (int64_t count : counts) total_ += count;
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    OpInputList inputs;
    OP_REQUIRES_OK_ASYNC(context, context->input_list("tensors", &inputs), done);
    ReductionArgs args = args_;
    args.dtype = ToDType(inputs[0].dtype());
    auto tensors = std::make_shared<TensorList>();
    int64_t total = 0;
    for (const Tensor& input : inputs) {
      args.inputs.push_back(input.data());
      args.counts.push_back(static_cast<size_t>(input.NumElements()));
      total += input.NumElements();
      tensors->push_back(input);
    }
    OP_REQUIRES_ASYNC(context, total == total_,
                      absl::InvalidArgumentError(
                          "counts must add up to the elements of all tensors. Received: " +
                          std::to_string(total_) + " for " + std::to_string(total) + " elements."),
                      done);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(
        context, context->allocate_output(0, tensorflow::TensorShape({own_count_}), &output), done);
    args.outputs = {output->data()};
    tensors->push_back(*output);
    Submit(context, std::move(done), MakeReduction(std::move(args)), std::move(tensors));
  }

 private:
  int64_t own_count_ = 0;
  int64_t total_ = 0;
};

TFSCALE_REGISTER_KERNEL("TfscaleScatterReduce", ScatterReduceOp,
                        .HostMemory("tensors").HostMemory("segment"));
TFSCALE_REGISTER_KERNEL("TfscaleAllreduce", AllreduceOp, .HostMemory("tensors").HostMemory("sums"));
// As for TfscalePostGather: variables refer to memory of the host.
REGISTER_KERNEL_BUILDER(Name("TfscalePostAllreduce").Device(tensorflow::DEVICE_CPU),
                        PostAllreduceOp);
TFSCALE_REGISTER_KERNEL("TfscaleReducescatter", ReducescatterOp,
                        .HostMemory("tensor").HostMemory("part"));

}  // namespace
}  // namespace tfscale
