// Base of the op kernels: conversion between TensorFlow's and the engine's types.
#ifndef TFSCALE_TF_GLUE_H_
#define TFSCALE_TF_GLUE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfscale {

absl::Status ToTensorFlow(const Status& status);

// Throws nothing; float32 for a type that the op's registration rules out.
DType ToDType(tensorflow::DataType dtype);

// Tensors that an operation reads and writes; copies share the memory.
using TensorList = std::vector<tensorflow::Tensor>;

// The attributes of every collective: its position in its plan.
//   plan: id, or -1 for a collective called eagerly;  slot: number in the plan;
//   group: process set;  label: its name in logs and errors;
//   compares: "nothing" where all shapes were compared with the plans; else, at run
//   time, "shapes", or "rows" where the first dimension may differ.
class CollectiveKernel : public tensorflow::AsyncOpKernel {
 public:
  explicit CollectiveKernel(tensorflow::OpKernelConstruction* context);

 protected:
  // Hands `operation` to the engine and returns at once. `tensors` stay alive
  // as long as the operation. `done` runs on the communication thread.
  void Submit(tensorflow::OpKernelContext* context, DoneCallback done, OperationHandle operation,
              std::shared_ptr<TensorList> tensors);
  // The call, still without memory and callback.
  Call MakeCall() const;
  // Ranks of the group, as far as the kernel needs to know: given by Python.
  int group_size() const { return group_size_; }

 private:
  // What is compared over ranks at run time; "" is nothing.
  std::string ShapesOf(tensorflow::OpKernelContext* context) const;

  int plan_;
  int slot_;
  int group_;
  int group_size_;
  std::string label_;
  std::string compares_;
};

// Reads a factor of a reduction. A float attribute has 32 bits only, too few for a
// mean of float64; so factors are passed as text.
absl::Status GetFactor(tensorflow::OpKernelConstruction* context, const char* name, double* factor);

// A dimension-0 length for a gather; `rows` of shape like[1:].
tensorflow::TensorShape WithRows(const tensorflow::TensorShape& like, int64_t rows);
// Bytes of one row of `tensor`: everything but dimension 0.
int64_t RowBytes(const tensorflow::Tensor& tensor);

}  // namespace tfscale

// Attributes of CollectiveKernel, for REGISTER_OP. Ops are stateful so that they
// are neither merged, pruned nor folded. `after` are handles of the variables
// whose gradients the op exchanges: TensorFlow then orders the op against other
// users of these variables only, and it starts as soon as its inputs exist.
// Without handles collectives run in the order in which they were traced.
#define TFSCALE_COLLECTIVE_ATTRS                                   \
  Input("after: n_after * resource")                               \
      .Attr("n_after: int >= 0")                                   \
      .Attr("plan: int")                                           \
      .Attr("slot: int")                                           \
      .Attr("group: int")                                          \
      .Attr("group_size: int")                                     \
      .Attr("label: string")                                       \
      .Attr("compares: {'nothing', 'shapes', 'rows'} = 'nothing'") \
      .SetIsStateful()                                             \
      .SetIsDistributedCommunication()

// Tensors on a GPU are staged through host memory by TensorFlow itself: `host`
// names all arguments as .HostMemory("name").
#define TFSCALE_REGISTER_KERNEL(op, kernel, host)                           \
  REGISTER_KERNEL_BUILDER(Name(op).Device(tensorflow::DEVICE_CPU), kernel); \
  REGISTER_KERNEL_BUILDER(Name(op).Device(tensorflow::DEVICE_GPU) host.HostMemory("after"), kernel)

#endif  // TFSCALE_TF_GLUE_H_
