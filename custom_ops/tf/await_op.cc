// TfscaleAwait.
#include <utility>

#include "comm/pending.h"
#include "tensorflow/core/framework/op.h"
#include "tf/variables.h"

namespace tfscale {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

// Stateful with the variables' handles: TensorFlow orders all later users of
// them after it, and nothing else.
REGISTER_OP("TfscaleAwait")
    .Input("variables: n * resource")
    .Attr("n: int >= 1")
    .Attr("is_write: bool = false")
    .SetIsStateful()
    .Doc(
        "Ends when no new values of the variables are under way; with the error of the exchange "
        "that was to bring them, unless they are about to be written.");

class AwaitOp : public AsyncOpKernel {
 public:
  explicit AwaitOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("is_write", &is_write_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    PendingVariables& pending = PendingVariables::Get();
    if (pending.is_empty()) return done();
    VariableList variables;
    OP_REQUIRES_OK_ASYNC(context, FindVariables(context, "variables", &variables), done);
    std::vector<PendingVariables::Key> keys = KeysOf(variables);
    const bool is_write = is_write_;
    // No reference is held: the op that waits for a variable has its handle.
    pending.Await(keys, [context, done, keys, is_write](const Status& status) {
      if (is_write) {
        for (PendingVariables::Key key : keys) PendingVariables::Get().Forget(key);
      } else if (!status.ok()) {
        context->SetStatus(ToTensorFlow(status));
      }
      done();
    });
  }

  bool IsExpensive() override { return false; }

 private:
  bool is_write_ = false;
};

REGISTER_KERNEL_BUILDER(Name("TfscaleAwait").Device(tensorflow::DEVICE_CPU), AwaitOp);
REGISTER_KERNEL_BUILDER(Name("TfscaleAwait").Device(tensorflow::DEVICE_GPU).HostMemory("variables"),
                        AwaitOp);

}  // namespace
}  // namespace tfscale
