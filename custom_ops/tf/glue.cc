#include "tf/glue.h"

#include <atomic>
#include <cstdio>
#include <locale>
#include <memory>
#include <sstream>
#include <utility>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/platform/errors.h"

namespace tfscale {

using tensorflow::CancellationManager;
using tensorflow::CancellationToken;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status ToTensorFlow(const Status& status) {
  switch (status.code) {
    case StatusCode::kOk:
      return absl::OkStatus();
    case StatusCode::kStopped:
      // Recognised by tfscale.fit.progress, which ends `fit` without an error.
      return absl::AbortedError("TFSCALE_STOPPED: " + status.message);
    case StatusCode::kInvalid:
      return absl::InvalidArgumentError(status.message);
    case StatusCode::kFailed:
      break;
  }
  return absl::InternalError("TFSCALE_FAILED: " + status.message);
}

DType ToDType(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_DOUBLE:
      return DType::kFloat64;
    case tensorflow::DT_HALF:
      return DType::kFloat16;
    case tensorflow::DT_BFLOAT16:
      return DType::kBfloat16;
    case tensorflow::DT_INT32:
      return DType::kInt32;
    case tensorflow::DT_INT64:
      return DType::kInt64;
    case tensorflow::DT_INT8:
      return DType::kInt8;
    case tensorflow::DT_UINT8:
      return DType::kUint8;
    default:
      return DType::kFloat32;
  }
}

CollectiveKernel::CollectiveKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
  OP_REQUIRES_OK(context, context->GetAttr("plan", &plan_));
  OP_REQUIRES_OK(context, context->GetAttr("slot", &slot_));
  OP_REQUIRES_OK(context, context->GetAttr("group", &group_));
  OP_REQUIRES_OK(context, context->GetAttr("group_size", &group_size_));
  OP_REQUIRES_OK(context, context->GetAttr("label", &label_));
  OP_REQUIRES_OK(context, context->GetAttr("compares", &compares_));
}

void CollectiveKernel::Submit(OpKernelContext* context, DoneCallback done,
                              OperationHandle operation, std::shared_ptr<TensorList> tensors) {
  Call call = MakeCall();
  call.memory = std::move(tensors);
  call.shapes = ShapesOf(context);
  // TensorFlow returns from a step with a failed op only when all others have
  // ended: those that wait for an earlier slot must not wait for ever.
  CancellationManager* manager = plan_ < 0 ? nullptr : context->cancellation_manager();
  const CancellationToken token = manager ? manager->get_cancellation_token() : 0;
  call.is_cancelled = manager ? std::make_shared<std::atomic<bool>>(false) : nullptr;
  const auto cancel = [plan = plan_, is_cancelled = call.is_cancelled] {
    *is_cancelled = true;
    GiveUpWaiting(plan);
  };
  if (manager && !manager->RegisterCallback(token, cancel)) {
    context->SetStatus(absl::CancelledError("The step failed on this rank."));
    return done();
  }
  call.done = [context, done, manager, token](const Status& status) {
    if (manager) manager->TryDeregisterCallback(token);
    if (!status.ok()) context->SetStatus(ToTensorFlow(status));
    done();
  };
  tfscale::Submit(std::move(operation), std::move(call));
}

Call CollectiveKernel::MakeCall() const {
  Call call;
  call.name = label_;
  call.group = group_;
  call.plan = plan_;
  call.slot = slot_;
  return call;
}

std::string CollectiveKernel::ShapesOf(OpKernelContext* context) const {
  std::string text;
  if (compares_ == "nothing") return text;
  const bool is_rows = compares_ == "rows";  // of the first input; others say who receives them
  for (int i = 0; i < (is_rows ? 1 : context->num_inputs()); ++i) {
    if (context->input_dtype(i) == tensorflow::DT_RESOURCE) continue;
    TensorShape shape = context->input(i).shape();
    if (is_rows) shape.RemoveDim(0);
    text += (is_rows ? "rows of " : i > 0 ? " " : "") + shape.DebugString();
  }
  return text;
}

absl::Status GetFactor(OpKernelConstruction* context, const char* name, double* factor) {
  std::string text;
  TF_RETURN_IF_ERROR(context->GetAttr(name, &text));
  // Not strtod, which reads 1.0 as 1 where the process's locale has a decimal comma.
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  if (stream >> *factor && stream.peek() == EOF) return absl::OkStatus();
  return absl::InvalidArgumentError(std::string(name) + " must be a number. Received: " + text);
}

TensorShape WithRows(const TensorShape& like, int64_t rows) {
  TensorShape shape = like;
  shape.set_dim(0, rows);
  return shape;
}

int64_t RowBytes(const Tensor& tensor) {
  int64_t elements = 1;
  for (int i = 1; i < tensor.dims(); ++i) elements *= tensor.dim_size(i);
  return elements * tensorflow::DataTypeSize(tensor.dtype());
}

}  // namespace tfscale
