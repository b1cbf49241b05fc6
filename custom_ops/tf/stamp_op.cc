// TfscaleStamp.
#include "comm/collectives.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfscale {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

REGISTER_OP("TfscaleStamp")
    .Input("after: n_after * resource")
    .Attr("n_after: int >= 0")
    .Attr("plan: int")
    .Attr("slot: int")
    .SetIsStateful()
    .Doc("Records the time at which the variables `after` have been updated. `slot` is negative.");

class StampOp : public OpKernel {
 public:
  explicit StampOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("plan", &plan_));
    OP_REQUIRES_OK(context, context->GetAttr("slot", &slot_));
  }

  void Compute(OpKernelContext*) override { Stamp(plan_, slot_); }
  bool IsExpensive() override { return false; }

 private:
  int plan_ = 0;
  int slot_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("TfscaleStamp").Device(tensorflow::DEVICE_CPU), StampOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleStamp").Device(tensorflow::DEVICE_GPU).HostMemory("after"),
                        StampOp);

}  // namespace
}  // namespace tfscale
