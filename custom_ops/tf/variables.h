// Access to TensorFlow's variables by the list of pending ones.
#ifndef TFSCALE_TF_VARIABLES_H_
#define TFSCALE_TF_VARIABLES_H_

#include <memory>
#include <vector>

#include "comm/pending.h"
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

// Gives a variable the elements of `flat` from `begin` on, which must start at
// a multiple of 64 bytes. Nothing is copied: the variable refers to that part
// of the memory, and readers of its old value keep what they have. A variable
// that is read sparsely gets a copy, as TensorFlow then allows no aliases.
absl::Status SetFromSlice(tensorflow::Var* variable, const tensorflow::Tensor& flat, int64_t begin,
                          const tensorflow::TensorShape& shape);

}  // namespace tfscale

#endif  // TFSCALE_TF_VARIABLES_H_
