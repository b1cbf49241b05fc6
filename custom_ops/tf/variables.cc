#include "tf/variables.h"

#include <cstring>
#include <string>
#include <utility>

#include "tensorflow/core/framework/resource_mgr.h"

namespace tfscale {

using tensorflow::OpInputList;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;
using tensorflow::core::RefCountPtr;
using tensorflow::core::WeakPtr;

absl::Status FindVariables(OpKernelContext* context, const char* name, VariableList* variables) {
  OpInputList handles;
  TF_RETURN_IF_ERROR(context->input_list(name, &handles));
  for (const Tensor& handle : handles) {
    RefCountPtr<Var> variable;
    TF_RETURN_IF_ERROR(
        tensorflow::LookupResource(context, handle.scalar<ResourceHandle>()(), &variable));
    variables->push_back(std::move(variable));
  }
  return absl::OkStatus();
}

std::vector<PendingVariables::Key> KeysOf(const VariableList& variables) {
  std::vector<PendingVariables::Key> keys;
  for (const auto& variable : variables) keys.push_back(variable.get());
  return keys;
}

std::vector<std::shared_ptr<void>> AnchorsOf(const VariableList& variables) {
  std::vector<std::shared_ptr<void>> anchors;
  for (const auto& variable : variables) {
    const PendingVariables::Key key = variable.get();
    anchors.push_back(std::make_shared<WeakPtr<Var>>(
        variable.get(), [key] { PendingVariables::Get().Forget(key); }));
  }
  return anchors;
}

absl::Status SetFromSlice(Var* variable, const Tensor& slice, const TensorShape& shape) {
  if (shape.num_elements() == 0) return absl::OkStatus();
  tensorflow::mutex_lock lock(*variable->mu());
  Tensor* own = variable->tensor();
  if (own->dtype() != slice.dtype() || own->shape() != shape) {
    return absl::InternalError("variable must keep its type and shape. Received: " +
                               own->DebugString(0) + " for a " + shape.DebugString());
  }
  if (variable->copy_on_read_mode.load()) {
    std::memcpy(own->data(), slice.data(), slice.TotalBytes());
    return absl::OkStatus();
  }
  if (!own->CopyFrom(slice, shape)) return absl::InternalError("A slice has another length.");
  return absl::OkStatus();
}

absl::Status TakeBuffer(OpKernelContext* context, Var* variable, tensorflow::DataType dtype,
                        const TensorShape& shape, Tensor* output) {
  tensorflow::mutex_lock lock(*variable->mu());
  const Tensor& own = *variable->tensor();
  if (own.RefCountIsOne() && own.dtype() == dtype && own.shape() == shape) {
    *output = own;
    return absl::OkStatus();
  }
  return context->allocate_temp(dtype, shape, output);
}

void Delivery::End(Status status) {
  for (size_t i = 0; status.ok() && i < variables.size(); ++i) {
    const absl::Status set = SetFromSlice(variables[i].get(), values[i], shapes[i]);
    if (!set.ok()) status = Status::Failed(std::string(set.message()));
  }
  values.clear();
  std::vector<std::shared_ptr<void>> anchors;
  if (!status.ok()) anchors = AnchorsOf(variables);
  PendingVariables::Get().End(KeysOf(variables), status, std::move(anchors));
  variables.clear();
}

void PostKernel::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  auto delivery = std::make_shared<Delivery>();
  OP_REQUIRES_OK_ASYNC(context, FindVariables(context, "after", &delivery->variables), done);
  const auto keys = KeysOf(delivery->variables);
  // Wait for pending values first; it no longer matters whether they arrive.
  PendingVariables::Get().Await(keys, [this, context, done, delivery](const Status&) {
    OP_REQUIRES_OK_ASYNC(context, Begin(context, delivery), done);
    done();
  });
}

absl::Status PostKernel::Begin(OpKernelContext* context,
                               const std::shared_ptr<Delivery>& delivery) {
  auto memory = std::make_shared<TensorList>();
  absl::StatusOr<OperationHandle> operation = Prepare(context, delivery.get(), memory.get());
  if (!operation.ok()) return operation.status();
  delivery->Begin();
  Call call = MakeCall();
  // A collective that was given up may still read and write it.
  call.memory = std::move(memory);
  SetOrder(&call);
  call.done = [delivery](const Status& status) { delivery->End(status); };
  tfscale::Submit(*std::move(operation), std::move(call));
  return absl::OkStatus();
}

}  // namespace tfscale
