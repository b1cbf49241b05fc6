// Access to TensorFlow's variables by the list of pending ones.
#ifndef TFSCALE_TF_VARIABLES_H_
#define TFSCALE_TF_VARIABLES_H_

#include <memory>
#include <vector>

#include "comm/pending.h"
#include "comm/types.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tf/glue.h"

namespace tfscale {

// References: they keep the variables alive.
using VariableList = std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>>;

// The variables of the resource handles that an op's input `name` lists.
absl::Status FindVariables(tensorflow::OpKernelContext* context, const char* name,
                           VariableList* variables);
std::vector<PendingVariables::Key> KeysOf(const VariableList& variables);
// One per variable, for PendingVariables::End: while an anchor lives, deleting
// its variable makes the list forget it.
std::vector<std::shared_ptr<void>> AnchorsOf(const VariableList& variables);

// Gives a variable the elements of `slice`, which must start at a multiple of 64
// bytes. Nothing is copied: the variable refers to that memory, and readers of
// its old value keep what they have. A variable that is read sparsely gets a
// copy, as TensorFlow then allows no aliases.
absl::Status SetFromSlice(tensorflow::Var* variable, const tensorflow::Tensor& slice,
                          const tensorflow::TensorShape& shape);

// Memory for a new value of a variable: its own where nothing else refers to it, because fresh
// memory would cost a page fault per 4 KiB.
absl::Status TakeBuffer(tensorflow::OpKernelContext* context, tensorflow::Var* variable,
                        tensorflow::DataType dtype, const tensorflow::TensorShape& shape,
                        tensorflow::Tensor* output);

// New values of variables that an exchange brings while training continues:
// TfscaleAwait waits for them.
struct Delivery {
  VariableList variables;
  std::vector<tensorflow::Tensor> values;  // one per variable; see SetFromSlice
  std::vector<tensorflow::TensorShape> shapes;

  // The values are on their way; End follows exactly once.
  void Begin() const { PendingVariables::Get().Begin(KeysOf(variables)); }
  // Sets the variables where the exchange has succeeded, and lets readers continue. They get the
  // error where it has not.
  void End(Status status);
};

// The base of collectives that a step begins without waiting: they bring new values of the
// variables `after`. TfscaleAwait waits for these.
class PostKernel : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 protected:
  // Returns the operation that brings the values of `delivery`, which receives them and their
  // shapes here. What the operation reads and writes is added to `memory`.
  virtual absl::StatusOr<OperationHandle> Prepare(tensorflow::OpKernelContext* context,
                                                  Delivery* delivery, TensorList* memory) = 0;
  virtual void SetOrder(Call* call) const { call->is_awaited_later = true; }

 private:
  absl::Status Begin(tensorflow::OpKernelContext* context,
                     const std::shared_ptr<Delivery>& delivery);
};

}  // namespace tfscale

#endif  // TFSCALE_TF_VARIABLES_H_
