// TfscaleMerge.
#include <algorithm>
#include <cstring>
#include <string>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/variables.h"

namespace tfscale {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TfscaleMerge")
    .Input("variables: n * resource")
    .Input("vectors: n_vectors * T")
    .Output("squares: double")
    .Attr("n: int >= 1")
    .Attr("n_vectors: int = 4")
    .Attr("T: {float, double, half, bfloat16}")
    .Attr("weight: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int n = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("n", &n));
      c->set_output(0, c->Vector(n));
      return absl::OkStatus();
    })
    .Doc(
        "Sets each variable to new + weight * (variable - origin). The vectors, of all variables' "
        "elements, are two, whose squared distance is returned, for each variable its part; new; "
        "and origin.");

absl::Status WrongSize(int64_t wanted, int64_t received) {
  return absl::InvalidArgumentError(
      "vector must have as many elements as all variables, and their type. Received: " +
      std::to_string(received) + " for " + std::to_string(wanted) + " elements.");
}

// Gives the variable memory that nothing else refers to. The caller has its lock.
absl::Status MakeOwn(OpKernelContext* context, Var* variable) {
  Tensor* own = variable->tensor();
  // One that is read sparsely has no aliases.
  if (own->RefCountIsOne() || variable->copy_on_read_mode.load()) return absl::OkStatus();
  Tensor fresh;
  TF_RETURN_IF_ERROR(context->allocate_temp(own->dtype(), own->shape(), &fresh));
  if (own->TotalBytes() > 0) std::memcpy(fresh.data(), own->data(), own->TotalBytes());
  *own = fresh;
  return absl::OkStatus();
}

// The vectors of a merge, from one variable's first element on.
template <typename T>
struct Vectors {
  const T* first;
  const T* second;
  const T* after;
  const T* origin;
  T weight;
};

// Rounds as TensorFlow's operations do; returns the squared distance of the pair. Its order is
// fixed, so that its bits do not depend on timing.
template <typename T, typename Wide>
double Merge(const Vectors<T>& v, T* __restrict own, int64_t count) {
  constexpr int64_t kLanes = 16;  // for vector instructions
  constexpr int64_t kBlock = 4096;
  const auto merge_one = [&](int64_t i) {
    own[i] = v.after[i] + v.weight * (own[i] - v.origin[i]);
    const Wide change = static_cast<Wide>(v.first[i] - v.second[i]);
    return change * change;
  };
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    Wide lanes[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int64_t k = 0; k < kLanes; ++k) lanes[k] += merge_one(i + k);
    }
    for (; i < end; ++i) lanes[0] += merge_one(i);
    for (const Wide lane : lanes) total += static_cast<double>(lane);
  }
  return total;
}

template <typename T, typename Wide>
class MergeOp : public OpKernel {
 public:
  explicit MergeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, GetFactor(context, "weight", &weight_));
  }

  void Compute(OpKernelContext* context) override {
    VariableList variables;
    OP_REQUIRES_OK(context, FindVariables(context, "variables", &variables));
    const int n = static_cast<int>(variables.size());
    OP_REQUIRES(context, context->num_inputs() == n + 4,
                absl::InvalidArgumentError("merge needs four vectors. Received: " +
                                           std::to_string(context->num_inputs() - n)));
    const int64_t size = context->input(n).NumElements();
    for (int i = n; i < context->num_inputs(); ++i) {
      const int64_t own = context->input(i).NumElements();
      OP_REQUIRES(context, own == size, WrongSize(size, own));
    }
    Tensor* squares = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({n}), &squares));
    int64_t begin = 0;
    for (int i = 0; i < n; ++i) {
      Var* variable = variables[static_cast<size_t>(i)].get();
      tensorflow::mutex_lock lock(*variable->mu());
      const int64_t count = variable->tensor()->NumElements();
      OP_REQUIRES(context,
                  variable->tensor()->dtype() == context->input(n).dtype() && begin + count <= size,
                  WrongSize(begin + count, size));
      OP_REQUIRES_OK(context, MakeOwn(context, variable));
      const auto from = [&](int input) {
        return context->input(n + input).flat<T>().data() + begin;
      };
      const Vectors<T> vectors{from(0), from(1), from(2), from(3), static_cast<T>(weight_)};
      squares->vec<double>()(i) =
          Merge<T, Wide>(vectors, variable->tensor()->flat<T>().data(), count);
      begin += count;
    }
    OP_REQUIRES(context, begin == size, WrongSize(begin, size));
  }

 private:
  double weight_ = 1.0;
};

// As for TfscalePostGather: variables refer to memory of the host.
#define REGISTER_MERGE(T, Wide)                                                   \
  REGISTER_KERNEL_BUILDER(                                                        \
      Name("TfscaleMerge").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), \
      MergeOp<T, Wide>)
REGISTER_MERGE(float, float);
REGISTER_MERGE(double, double);
REGISTER_MERGE(Eigen::half, float);
REGISTER_MERGE(Eigen::bfloat16, float);
#undef REGISTER_MERGE

}  // namespace
}  // namespace tfscale
