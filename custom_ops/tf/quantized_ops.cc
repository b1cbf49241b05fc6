// TfscaleQuantizedAllreduce and TfscaleQuantizedScatter.
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/glue.h"

namespace tfscale {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

// `cuts` has group_size + 1 numbers for each tensor, see QuantizedArgs. `bits` is an
// input, so that a training can begin with 16 and change to fewer. `errors` and
// `new_errors` have the tensors' shapes, those of the owner are flat.
#define TFSCALE_QUANTIZED_ATTRS     \
  Attr("n_tensors: int >= 1")       \
      .Attr("n_errors: int >= 0")   \
      .Attr("block: int")           \
      .Attr("cuts: list(int) >= 2") \
      .Attr("prescale: string")     \
      .Attr("postscale: string")    \
      .Attr("group_rank: int")

REGISTER_OP("TfscaleQuantizedAllreduce")
    .Input("tensors: n_tensors * float")
    .Input("errors: n_errors * float")
    .Input("owner_errors: n_errors * float")
    .Input("bits: int32")
    .TFSCALE_COLLECTIVE_ATTRS.Output("sums: n_tensors * float")
    .Output("new_errors: n_errors * float")
    .Output("new_owner_errors: n_errors * float")
    .TFSCALE_QUANTIZED_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      int n = 0;
      int n_errors = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("n_tensors", &n));
      TF_RETURN_IF_ERROR(c->GetAttr("n_errors", &n_errors));
      for (int i = 0; i < n + 2 * n_errors; ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    })
    .Doc(
        "Sums float32 tensors over the ranks of a group with few bits per value; what is rounded "
        "off is returned, to be added to the next tensors.");

REGISTER_OP("TfscaleQuantizedScatter")
    .Input("tensors: n_tensors * float")
    .Input("errors: n_errors * float")
    .Input("bits: int32")
    .TFSCALE_COLLECTIVE_ATTRS.Output("segment: float")
    .Output("new_errors: n_errors * float")
    .TFSCALE_QUANTIZED_ATTRS
    .SetShapeFn([](InferenceContext* c) {
      int n = 0;
      int n_errors = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("n_tensors", &n));
      TF_RETURN_IF_ERROR(c->GetAttr("n_errors", &n_errors));
      std::vector<int64_t> cuts;
      int n_ranks = 0;
      int rank = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("cuts", &cuts));
      TF_RETURN_IF_ERROR(c->GetAttr("group_size", &n_ranks));
      TF_RETURN_IF_ERROR(c->GetAttr("group_rank", &rank));
      int64_t owned = 0;
      for (size_t begin = 0; begin + static_cast<size_t>(n_ranks) < cuts.size();
           begin += static_cast<size_t>(n_ranks) + 1) {
        const size_t at = begin + static_cast<size_t>(rank);
        if (rank >= 0 && rank < n_ranks) owned += cuts[at + 1] - cuts[at];
      }
      c->set_output(0, c->Vector(owned));
      for (int i = 0; i < n_errors; ++i) c->set_output(1 + i, c->input(n + i));
      return absl::OkStatus();
    })
    .Doc(
        "Sums float32 tensors over the ranks of a group with few bits per value; each rank "
        "receives its own parts of the sums, one after another.");

class QuantizedKernel : public CollectiveKernel {
 public:
  explicit QuantizedKernel(OpKernelConstruction* context) : CollectiveKernel(context) {
    int block = 0;
    OP_REQUIRES_OK(context, context->GetAttr("block", &block));
    args_.block = static_cast<size_t>(block);
    OP_REQUIRES_OK(context, context->GetAttr("cuts", &cuts_));
    OP_REQUIRES_OK(context, context->GetAttr("group_rank", &group_rank_));
    OP_REQUIRES_OK(context, GetFactor(context, "prescale", &args_.prescale));
    OP_REQUIRES_OK(context, GetFactor(context, "postscale", &args_.postscale));
  }

 protected:
  // The arguments with inputs, cuts, errors, and outputs for these, which begin at
  // number `first_error` of the op's outputs.
  absl::Status Fill(OpKernelContext* context, int first_error, QuantizedArgs* args,
                    TensorList* tensors) const {
    OpInputList inputs;
    OpInputList errors;
    TF_RETURN_IF_ERROR(context->input_list("tensors", &inputs));
    TF_RETURN_IF_ERROR(context->input_list("errors", &errors));
    const Tensor* bits = nullptr;
    TF_RETURN_IF_ERROR(context->input("bits", &bits));
    *args = args_;
    args->bits = bits->scalar<int32_t>()();
    const size_t n_cuts = static_cast<size_t>(group_size()) + 1;
    if (group_rank_ < 0 || group_rank_ >= group_size() ||
        cuts_.size() != n_cuts * static_cast<size_t>(inputs.size()) ||
        (errors.size() > 0 && errors.size() != inputs.size())) {
      return absl::InvalidArgumentError(
          "cuts and errors must be given for each tensor. Received: " +
          std::to_string(cuts_.size()) + " cuts, " + std::to_string(errors.size()) + " errors, " +
          std::to_string(inputs.size()) + " tensors.");
    }
    for (int i = 0; i < inputs.size(); ++i) {
      const auto begin = cuts_.begin() + static_cast<int64_t>(n_cuts) * i;
      args->cuts.emplace_back(begin, begin + static_cast<int64_t>(n_cuts));
      args->counts.push_back(static_cast<size_t>(inputs[i].NumElements()));
      args->inputs.push_back(inputs[i].flat<float>().data());
      tensors->push_back(inputs[i]);
      if (args->cuts.back().front() != 0 || args->cuts.back().back() != args->counts.back()) {
        return absl::InvalidArgumentError("The cuts of a quantised sum must span its tensor.");
      }
    }
    for (int i = 0; i < errors.size(); ++i) {
      if (errors[i].NumElements() != inputs[i].NumElements()) {
        return absl::InvalidArgumentError("An error must have the size of its tensor.");
      }
      args->errors.push_back(Keep(errors[i], tensors));
      TF_RETURN_IF_ERROR(
          Allocate(context, first_error + i, errors[i].shape(), &args->new_errors, tensors));
    }
    return absl::OkStatus();
  }

  static const float* Keep(const Tensor& tensor, TensorList* tensors) {
    tensors->push_back(tensor);
    return tensor.flat<float>().data();
  }

  static absl::Status Allocate(OpKernelContext* context, int output, const TensorShape& shape,
                               std::vector<float*>* pointers, TensorList* tensors) {
    Tensor* tensor = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(output, shape, &tensor));
    pointers->push_back(tensor->flat<float>().data());
    tensors->push_back(*tensor);
    return absl::OkStatus();
  }

  // Elements that this rank owns of a tensor.
  static size_t OwnedOf(const std::vector<size_t>& cuts, int rank) {
    return cuts[static_cast<size_t>(rank) + 1] - cuts[static_cast<size_t>(rank)];
  }

  int group_rank_ = 0;

 private:
  QuantizedArgs args_;
  std::vector<int64_t> cuts_;
};

class QuantizedAllreduceOp : public QuantizedKernel {
 public:
  using QuantizedKernel::QuantizedKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    QuantizedArgs args;
    auto tensors = std::make_shared<TensorList>();
    OP_REQUIRES_OK_ASYNC(context, FillAll(context, &args, tensors.get()), done);
    Submit(context, std::move(done), MakeQuantizedReduction(std::move(args)), std::move(tensors));
  }

 private:
  absl::Status FillAll(OpKernelContext* context, QuantizedArgs* args, TensorList* tensors) const {
    OpInputList inputs;
    OpInputList owner_errors;
    TF_RETURN_IF_ERROR(context->input_list("tensors", &inputs));
    TF_RETURN_IF_ERROR(context->input_list("owner_errors", &owner_errors));
    TF_RETURN_IF_ERROR(Fill(context, inputs.size(), args, tensors));
    for (int i = 0; i < inputs.size(); ++i) {
      TF_RETURN_IF_ERROR(Allocate(context, i, inputs[i].shape(), &args->outputs, tensors));
    }
    for (int i = 0; i < owner_errors.size(); ++i) {
      const size_t owned = OwnedOf(args->cuts[static_cast<size_t>(i)], group_rank_);
      if (static_cast<size_t>(owner_errors[i].NumElements()) != owned) {
        return absl::InvalidArgumentError("An owner's error must have the size of its part.");
      }
      args->owner_errors.push_back(Keep(owner_errors[i], tensors));
      TF_RETURN_IF_ERROR(Allocate(context, inputs.size() + owner_errors.size() + i,
                                  owner_errors[i].shape(), &args->new_owner_errors, tensors));
    }
    return absl::OkStatus();
  }
};

class QuantizedScatterOp : public QuantizedKernel {
 public:
  using QuantizedKernel::QuantizedKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    QuantizedArgs args;
    auto tensors = std::make_shared<TensorList>();
    OP_REQUIRES_OK_ASYNC(context, Fill(context, 1, &args, tensors.get()), done);
    size_t owned = 0;
    for (const auto& cuts : args.cuts) owned += OwnedOf(cuts, group_rank_);
    std::vector<float*> segment;
    const TensorShape shape({static_cast<int64_t>(owned)});
    OP_REQUIRES_OK_ASYNC(context, Allocate(context, 0, shape, &segment, tensors.get()), done);
    args.segment = segment[0];
    Submit(context, std::move(done), MakeQuantizedReduction(std::move(args)), std::move(tensors));
  }
};

TFSCALE_REGISTER_KERNEL("TfscaleQuantizedAllreduce", QuantizedAllreduceOp,
                        .HostMemory("tensors")
                            .HostMemory("errors")
                            .HostMemory("owner_errors")
                            .HostMemory("bits")
                            .HostMemory("sums")
                            .HostMemory("new_errors")
                            .HostMemory("new_owner_errors"));
TFSCALE_REGISTER_KERNEL(
    "TfscaleQuantizedScatter", QuantizedScatterOp,
    .HostMemory("tensors").HostMemory("errors").HostMemory("bits").HostMemory("segment").HostMemory(
        "new_errors"));

}  // namespace
}  // namespace tfscale
