// TfscalePostQuantizedAllreduce and TfscalePostSparseAllreduce.
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tf/variables.h"

namespace tfscale {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// `after` are the variables that receive values: first a vector for the sums, one after
// another; then the errors of each tensor, which are read before; then those of the owner.
// `cuts` has group_size + 1 numbers for each tensor, see QuantizedArgs.
#define TFSCALE_POST_CODED_ATTRS    \
  Attr("n_tensors: int >= 1")       \
      .Attr("cuts: list(int) >= 2") \
      .Attr("prescale: string")     \
      .Attr("postscale: string")

REGISTER_OP("TfscalePostQuantizedAllreduce")
    .Input("tensors: n_tensors * float")
    .Input("bits: int32")
    .TFSCALE_COLLECTIVE_ATTRS.TFSCALE_POST_CODED_ATTRS.Attr("block: int")
    .Doc(
        "Begins to sum float32 tensors over the ranks of a group with few bits per value, and does "
        "not wait: TfscaleAwait does.");

REGISTER_OP("TfscalePostSparseAllreduce")
    .Input("tensors: n_tensors * float")
    .TFSCALE_COLLECTIVE_ATTRS.TFSCALE_POST_CODED_ATTRS.Attr("share: string")
    .Attr("chunk: int")
    .Attr("decay: string")
    .Doc(
        "Begins to sum float32 tensors over the ranks of a group, of which each sends its largest "
        "values, and does not wait: TfscaleAwait does.");

absl::Status Wrong(const std::string& what, size_t received) {
  return absl::InvalidArgumentError(what + " Received: " + std::to_string(received) + ".");
}

template <typename Args>
class PostCodedOp : public CollectiveKernel {
 public:
  explicit PostCodedOp(OpKernelConstruction* context) : CollectiveKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("cuts", &cuts_));
    OP_REQUIRES_OK(context, GetFactor(context, "prescale", &args_.prescale));
    OP_REQUIRES_OK(context, GetFactor(context, "postscale", &args_.postscale));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto delivery = std::make_shared<Delivery>();
    OP_REQUIRES_OK_ASYNC(context, FindVariables(context, "after", &delivery->variables), done);
    const auto keys = KeysOf(delivery->variables);
    // Wait for pending values first; it no longer matters whether they arrive.
    PendingVariables::Get().Await(keys, [this, context, done, delivery](const Status&) {
      OP_REQUIRES_OK_ASYNC(context, Begin(context, delivery), done);
      done();
    });
  }

 protected:
  virtual OperationHandle Make(OpKernelContext* context, Args args) const = 0;
  // Adds the errors that are read and written after the first `n` of the variables.
  virtual absl::Status AddErrors(OpKernelContext* context, size_t n, Args* args, Delivery* delivery,
                                 TensorList* tensors) const = 0;

  // Reads `n` variables from number `first` on, and gives them new memory to be written.
  static absl::Status Renew(OpKernelContext* context, size_t first, size_t n,
                            std::vector<const float*>* old, std::vector<float*>* fresh,
                            Delivery* delivery, TensorList* tensors) {
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
      tensors->push_back(std::move(now));
      tensors->push_back(std::move(next));
    }
    return absl::OkStatus();
  }

  Args args_;

 private:
  absl::Status Begin(OpKernelContext* context, const std::shared_ptr<Delivery>& delivery) {
    OpInputList inputs;
    TF_RETURN_IF_ERROR(context->input_list("tensors", &inputs));
    const size_t n = static_cast<size_t>(inputs.size());
    const size_t n_cuts = static_cast<size_t>(group_size()) + 1;
    if (cuts_.size() != n * n_cuts) {
      return Wrong("cuts must be given for each rank and tensor.", cuts_.size());
    }
    if (delivery->variables.empty()) return Wrong("after must have a vector for the sums.", 0);
    Args args = args_;
    auto tensors = std::make_shared<TensorList>();
    int64_t total = 0;
    for (size_t i = 0; i < n; ++i) {
      const Tensor& input = inputs[static_cast<int>(i)];
      const auto begin = cuts_.begin() + static_cast<int64_t>(n_cuts * i);
      args.cuts.emplace_back(begin, begin + static_cast<int64_t>(n_cuts));
      args.counts.push_back(static_cast<size_t>(input.NumElements()));
      args.inputs.push_back(input.flat<float>().data());
      if (args.cuts.back().front() != 0 || args.cuts.back().back() != args.counts.back()) {
        return Wrong("The cuts of a sum must span its tensor.", args.cuts.back().back());
      }
      total += input.NumElements();
      tensors->push_back(input);
    }
    Tensor sums;
    const TensorShape shape({total});
    TF_RETURN_IF_ERROR(TakeBuffer(context, delivery->variables[0].get(), shape, &sums));
    float* output = sums.flat<float>().data();
    for (size_t count : args.counts) {
      args.outputs.push_back(output);
      output += count;
    }
    delivery->values.push_back(sums);
    delivery->shapes.push_back(shape);
    tensors->push_back(std::move(sums));
    TF_RETURN_IF_ERROR(AddErrors(context, n, &args, delivery.get(), tensors.get()));
    OperationHandle operation = Make(context, std::move(args));
    delivery->Begin();
    Call call = MakeCall();
    call.memory = std::move(tensors);
    call.is_awaited_later = true;
    call.done = [delivery](const Status& status) { delivery->End(status); };
    tfscale::Submit(std::move(operation), std::move(call));
    return absl::OkStatus();
  }

  // The variable's own memory where nothing else refers to it: fresh memory would
  // cost a page fault per 4 KiB.
  static absl::Status TakeBuffer(OpKernelContext* context, tensorflow::Var* variable,
                                 const TensorShape& shape, Tensor* output) {
    tensorflow::mutex_lock lock(*variable->mu());
    const Tensor& own = *variable->tensor();
    if (own.dtype() != tensorflow::DT_FLOAT || own.shape() != shape) {
      return Wrong("The vector must have the elements of all tensors.",
                   static_cast<size_t>(own.NumElements()));
    }
    if (own.RefCountIsOne()) {
      *output = own;
      return absl::OkStatus();
    }
    return context->allocate_temp(own.dtype(), shape, output);
  }

  std::vector<int64_t> cuts_;
};

class PostQuantizedAllreduceOp : public PostCodedOp<QuantizedArgs> {
 public:
  explicit PostQuantizedAllreduceOp(OpKernelConstruction* context) : PostCodedOp(context) {
    int block = 0;
    OP_REQUIRES_OK(context, context->GetAttr("block", &block));
    args_.block = static_cast<size_t>(block);
  }

 protected:
  absl::Status AddErrors(OpKernelContext* context, size_t n, QuantizedArgs* args,
                         Delivery* delivery, TensorList* tensors) const override {
    const size_t n_errors = delivery->variables.size() - 1;
    if (n_errors == 0) return absl::OkStatus();  // they are not kept
    if (n_errors != 2 * n) return Wrong("after must have two errors for each tensor.", n_errors);
    TF_RETURN_IF_ERROR(Renew(context, 1, n, &args->errors, &args->new_errors, delivery, tensors));
    return Renew(context, 1 + n, n, &args->owner_errors, &args->new_owner_errors, delivery,
                 tensors);
  }

  OperationHandle Make(OpKernelContext* context, QuantizedArgs args) const override {
    args.bits = context->input(static_cast<int>(args.inputs.size())).scalar<int32_t>()();
    return MakeQuantizedReduction(std::move(args));
  }
};

class PostSparseAllreduceOp : public PostCodedOp<SparseArgs> {
 public:
  explicit PostSparseAllreduceOp(OpKernelConstruction* context) : PostCodedOp(context) {
    int chunk = 0;
    OP_REQUIRES_OK(context, context->GetAttr("chunk", &chunk));
    args_.chunk = static_cast<size_t>(chunk);
    OP_REQUIRES_OK(context, GetFactor(context, "share", &args_.share));
    OP_REQUIRES_OK(context, GetFactor(context, "decay", &args_.decay));
  }

 protected:
  absl::Status AddErrors(OpKernelContext* context, size_t n, SparseArgs* args, Delivery* delivery,
                         TensorList* tensors) const override {
    const size_t n_errors = delivery->variables.size() - 1;
    if (n_errors != n) return Wrong("after must have an error for each tensor.", n_errors);
    return Renew(context, 1, n, &args->errors, &args->new_errors, delivery, tensors);
  }

  OperationHandle Make(OpKernelContext*, SparseArgs args) const override {
    return MakeSparseReduction(std::move(args));
  }
};

// As for TfscalePostGather: variables refer to memory of the host.
REGISTER_KERNEL_BUILDER(Name("TfscalePostQuantizedAllreduce").Device(tensorflow::DEVICE_CPU),
                        PostQuantizedAllreduceOp);
REGISTER_KERNEL_BUILDER(Name("TfscalePostSparseAllreduce").Device(tensorflow::DEVICE_CPU),
                        PostSparseAllreduceOp);

}  // namespace
}  // namespace tfscale
