// TfscaleBroadcast.
#include <utility>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/glue.h"

namespace tfscale {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TfscaleBroadcast")
    .Input("tensor: T")
    .TFSCALE_COLLECTIVE_ATTRS.Output("result: T")
    .Attr("T: {numbertype, bool}")
    .Attr("root: int")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    })
    .Doc("The tensor of the group's rank `root`. Shapes must be equal on all ranks.");

class BroadcastOp : public CollectiveKernel {
 public:
  explicit BroadcastOp(OpKernelConstruction* context) : CollectiveKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("root", &root_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, input.shape(), &output), done);
    const size_t bytes =
        static_cast<size_t>(input.NumElements() * tensorflow::DataTypeSize(input.dtype()));
    auto tensors = std::make_shared<TensorList>(TensorList{input, *output});
    auto operation = MakeBroadcast(input.data(), output->data(), bytes, root_);
    Submit(context, std::move(done), std::move(operation), std::move(tensors));
  }

 private:
  int root_ = 0;
};

TFSCALE_REGISTER_KERNEL("TfscaleBroadcast", BroadcastOp,
                        .HostMemory("tensor").HostMemory("result"));

}  // namespace
}  // namespace tfscale
