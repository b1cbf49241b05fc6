// TfscaleQuantizedAllreduce, TfscaleQuantizedScatter, TfscalePostQuantizedAllreduce and
// TfscalePostSparseAllreduce.
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
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

// `cuts` has group_size + 1 numbers for each tensor, see CodedArgs.
#define TFSCALE_CODED_ATTRS         \
  Attr("n_tensors: int >= 1")       \
      .Attr("cuts: list(int) >= 2") \
      .Attr("prescale: string")     \
      .Attr("postscale: string")

// `bits` is an input, so that a training can begin with 16 and change to fewer. `errors` and
// `new_errors` have the tensors' shapes, those of the owner are flat.
#define TFSCALE_QUANTIZED_ATTRS \
  TFSCALE_CODED_ATTRS.Attr("n_errors: int >= 0").Attr("block: int").Attr("group_rank: int")

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

// `after` are the variables that receive values: first a vector for the sums, one after
// another; then the errors of each tensor, which are read before; then those of the owner.
REGISTER_OP("TfscalePostQuantizedAllreduce")
    .Input("tensors: n_tensors * float")
    .Input("bits: int32")
    .TFSCALE_COLLECTIVE_ATTRS.TFSCALE_CODED_ATTRS.Attr("block: int")
    .Doc(
        "Begins to sum float32 tensors over the ranks of a group with few bits per value, and does "
        "not wait: TfscaleAwait does.");

REGISTER_OP("TfscalePostSparseAllreduce")
    .Input("tensors: n_tensors * float")
    .TFSCALE_COLLECTIVE_ATTRS.TFSCALE_CODED_ATTRS.Attr("share: string")
    .Attr("chunk: int")
    .Attr("decay: string")
    .Doc(
        "Begins to sum float32 tensors over the ranks of a group, of which each sends its largest "
        "values, and does not wait: TfscaleAwait does.");

absl::Status Wrong(const std::string& what, size_t received) {
  return absl::InvalidArgumentError(what + " Received: " + std::to_string(received) + ".");
}

// The attributes and inputs of a sum that is sent as codes.
template <typename Args, typename Kernel>
class CodedKernel : public Kernel {
 public:
  explicit CodedKernel(OpKernelConstruction* context) : Kernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("cuts", &cuts_));
    OP_REQUIRES_OK(context, GetFactor(context, "prescale", &args_.prescale));
    OP_REQUIRES_OK(context, GetFactor(context, "postscale", &args_.postscale));
  }

 protected:
  // Adds the tensors and their cuts.
  absl::Status FillInputs(OpKernelContext* context, CodedArgs* args, TensorList* tensors) const {
    OpInputList inputs;
    TF_RETURN_IF_ERROR(context->input_list("tensors", &inputs));
    const size_t n_cuts = static_cast<size_t>(this->group_size()) + 1;
    if (cuts_.size() != n_cuts * static_cast<size_t>(inputs.size())) {
      return Wrong("cuts must be given for each rank and tensor.", cuts_.size());
    }
    for (int i = 0; i < inputs.size(); ++i) {
      const auto begin = cuts_.begin() + static_cast<int64_t>(n_cuts) * i;
      args->cuts.emplace_back(begin, begin + static_cast<int64_t>(n_cuts));
      args->counts.push_back(static_cast<size_t>(inputs[i].NumElements()));
      args->inputs.push_back(inputs[i].flat<float>().data());
      tensors->push_back(inputs[i]);
      if (args->cuts.back().front() != 0 || args->cuts.back().back() != args->counts.back()) {
        return Wrong("The cuts of a sum must span its tensor.", args->cuts.back().back());
      }
    }
    return absl::OkStatus();
  }

  Args args_;  // of the attributes

 private:
  std::vector<int64_t> cuts_;
};

template <typename Kernel>
class QuantizedKernel : public CodedKernel<QuantizedArgs, Kernel> {
 public:
  explicit QuantizedKernel(OpKernelConstruction* context)
      : CodedKernel<QuantizedArgs, Kernel>(context) {
    int block = 0;
    OP_REQUIRES_OK(context, context->GetAttr("block", &block));
    this->args_.block = static_cast<size_t>(block);
  }

 protected:
  absl::Status FillQuantized(OpKernelContext* context, QuantizedArgs* args,
                             TensorList* tensors) const {
    const Tensor* bits = nullptr;
    TF_RETURN_IF_ERROR(context->input("bits", &bits));
    *args = this->args_;
    args->bits = bits->scalar<int32_t>()();
    return this->FillInputs(context, args, tensors);
  }
};

// Those that a step waits for, whose errors are inputs and outputs.
class WaitingKernel : public QuantizedKernel<CollectiveKernel> {
 public:
  explicit WaitingKernel(OpKernelConstruction* context) : QuantizedKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("group_rank", &group_rank_));
  }

 protected:
  // The arguments with inputs, cuts, errors, and outputs for these, which begin at
  // number `first_error` of the op's outputs.
  absl::Status Fill(OpKernelContext* context, int first_error, QuantizedArgs* args,
                    TensorList* tensors) const {
    TF_RETURN_IF_ERROR(FillQuantized(context, args, tensors));
    OpInputList errors;
    TF_RETURN_IF_ERROR(context->input_list("errors", &errors));
    const size_t n_errors = static_cast<size_t>(errors.size());
    if (group_rank_ < 0 || group_rank_ >= group_size()) {
      return Wrong("group_rank must be a member's.", static_cast<size_t>(group_rank_));
    }
    if (n_errors > 0 && n_errors != args->inputs.size()) {
      return Wrong("errors must be given for each tensor.", n_errors);
    }
    for (int i = 0; i < errors.size(); ++i) {
      if (static_cast<size_t>(errors[i].NumElements()) != args->counts[static_cast<size_t>(i)]) {
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
};

class QuantizedAllreduceOp : public WaitingKernel {
 public:
  using WaitingKernel::WaitingKernel;

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

class QuantizedScatterOp : public WaitingKernel {
 public:
  using WaitingKernel::WaitingKernel;

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

// Adds the vector of the sums, one after another, which the first variable receives.
absl::Status AddSums(OpKernelContext* context, CodedArgs* args, Delivery* delivery,
                     TensorList* memory) {
  if (delivery->variables.empty()) return Wrong("after must have a vector for the sums.", 0);
  int64_t total = 0;
  for (size_t count : args->counts) total += static_cast<int64_t>(count);
  const TensorShape shape({total});
  Tensor sums;
  TF_RETURN_IF_ERROR(
      TakeBuffer(context, delivery->variables[0].get(), tensorflow::DT_FLOAT, shape, &sums));
  float* output = sums.flat<float>().data();
  for (size_t count : args->counts) {
    args->outputs.push_back(output);
    output += count;
  }
  delivery->values.push_back(sums);
  delivery->shapes.push_back(shape);
  memory->push_back(std::move(sums));
  return absl::OkStatus();
}

// Reads `n` variables from number `first` on, and gives them new memory to be written.
absl::Status Renew(OpKernelContext* context, size_t first, size_t n, std::vector<const float*>* old,
                   std::vector<float*>* fresh, Delivery* delivery, TensorList* memory) {
  for (size_t i = first; i < first + n; ++i) {
    Tensor now;
    {
      tensorflow::tf_shared_lock lock(*delivery->variables[i]->mu());
      now = *delivery->variables[i]->tensor();
    }
    Tensor next;
    TF_RETURN_IF_ERROR(context->allocate_temp(now.dtype(), now.shape(), &next));
    old->push_back(now.flat<float>().data());
    fresh->push_back(next.flat<float>().data());
    delivery->values.push_back(next);
    delivery->shapes.push_back(now.shape());
    // While the old value is kept, no step writes into it: it stays if the sum fails.
    memory->push_back(std::move(now));
    memory->push_back(std::move(next));
  }
  return absl::OkStatus();
}

class PostQuantizedAllreduceOp : public QuantizedKernel<PostKernel> {
 public:
  using QuantizedKernel::QuantizedKernel;

 protected:
  absl::StatusOr<OperationHandle> Prepare(OpKernelContext* context, Delivery* delivery,
                                          TensorList* memory) override {
    QuantizedArgs args;
    TF_RETURN_IF_ERROR(FillQuantized(context, &args, memory));
    TF_RETURN_IF_ERROR(AddSums(context, &args, delivery, memory));
    const size_t n = args.inputs.size(), n_errors = delivery->variables.size() - 1;
    if (n_errors != 0 && n_errors != 2 * n) {  // none where they are not kept
      return Wrong("after must have two errors for each tensor.", n_errors);
    }
    const size_t n_kept = n_errors / 2;
    TF_RETURN_IF_ERROR(Renew(context, 1, n_kept, &args.errors, &args.new_errors, delivery, memory));
    TF_RETURN_IF_ERROR(Renew(context, 1 + n, n_kept, &args.owner_errors, &args.new_owner_errors,
                             delivery, memory));
    return MakeQuantizedReduction(std::move(args));
  }
};

class PostSparseAllreduceOp : public CodedKernel<SparseArgs, PostKernel> {
 public:
  explicit PostSparseAllreduceOp(OpKernelConstruction* context) : CodedKernel(context) {
    int chunk = 0;
    OP_REQUIRES_OK(context, context->GetAttr("chunk", &chunk));
    args_.chunk = static_cast<size_t>(chunk);
    OP_REQUIRES_OK(context, GetFactor(context, "share", &args_.share));
    OP_REQUIRES_OK(context, GetFactor(context, "decay", &args_.decay));
  }

 protected:
  absl::StatusOr<OperationHandle> Prepare(OpKernelContext* context, Delivery* delivery,
                                          TensorList* memory) override {
    SparseArgs args = args_;
    TF_RETURN_IF_ERROR(FillInputs(context, &args, memory));
    TF_RETURN_IF_ERROR(AddSums(context, &args, delivery, memory));
    const size_t n = args.inputs.size(), n_errors = delivery->variables.size() - 1;
    if (n_errors != n) return Wrong("after must have an error for each tensor.", n_errors);
    TF_RETURN_IF_ERROR(Renew(context, 1, n, &args.errors, &args.new_errors, delivery, memory));
    return MakeSparseReduction(std::move(args));
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

// As for TfscalePostGather: variables refer to memory of the host.
REGISTER_KERNEL_BUILDER(Name("TfscalePostQuantizedAllreduce").Device(tensorflow::DEVICE_CPU),
                        PostQuantizedAllreduceOp);
REGISTER_KERNEL_BUILDER(Name("TfscalePostSparseAllreduce").Device(tensorflow::DEVICE_CPU),
                        PostSparseAllreduceOp);

}  // namespace
}  // namespace tfscale
