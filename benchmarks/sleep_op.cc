// BenchSleep: an operation that takes a given time without computing. See benchmarks/sleeping.py.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using Clock = std::chrono::steady_clock;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// The one core of a host that does nothing else: tasks take turns in the order of their arrival.
// A task begins when it arrives or when the one before should have ended: late wake-ups of the
// thread do not add up.
class SleepingCore {
 public:
  static SleepingCore& Get() {
    static SleepingCore* core = new SleepingCore;  // never ends: threads may still use it
    return *core;
  }

  void Add(Clock::duration duration, std::function<void()> done) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_at_ = std::max(free_at_, Clock::now()) + duration;
    tasks_.push_back({free_at_, std::move(done)});
    has_task_.notify_one();
  }

 private:
  struct Task {
    Clock::time_point end;
    std::function<void()> done;
  };

  SleepingCore() {
    std::thread([this] { Run(); }).detach();
  }

  void Run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      has_task_.wait(lock, [this] { return !tasks_.empty(); });
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      std::this_thread::sleep_until(task.end);
      task.done();
    }
  }

  std::mutex mutex_;
  std::condition_variable has_task_;
  std::deque<Task> tasks_;
  Clock::time_point free_at_;
};

REGISTER_OP("BenchSleep")
    .Input("x: float")
    .Input("waits_for: n * float")
    .Output("results: m * float")
    .Attr("n: int >= 0")
    .Attr("m: int >= 1")
    .Attr("shapes: list(shape)")
    .Attr("seconds: float")
    .Attr("seconds_per_row: float = 0.0")
    .SetIsStateful()  // or equal ones would be merged into one
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      std::vector<tensorflow::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes));
      for (size_t i = 0; i < shapes.size(); ++i) {
        tensorflow::shape_inference::ShapeHandle shape;
        TF_RETURN_IF_ERROR(context->MakeShapeFromPartialTensorShape(shapes[i], &shape));
        context->set_output(static_cast<int>(i), shape);
      }
      return absl::OkStatus();
    })
    .Doc(
        "Ends after `seconds`, and `seconds_per_row` for each row of x, of this process's one "
        "core. Results have small values; their first dimension is that of x where it is unknown.");

class SleepOp : public tensorflow::AsyncOpKernel {
 public:
  explicit SleepOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
    OP_REQUIRES_OK(context, context->GetAttr("seconds", &seconds_));
    OP_REQUIRES_OK(context, context->GetAttr("seconds_per_row", &seconds_per_row_));
    results_.resize(shapes_.size());
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const int64_t n_rows = context->input(0).dims() > 0 ? context->input(0).dim_size(0) : 1;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      tensorflow::PartialTensorShape partial = shapes_[i];
      TensorShape shape;
      if (partial.dims() > 0 && partial.dim_size(0) < 0) partial.set_dim(0, n_rows);
      OP_REQUIRES_ASYNC(context, partial.AsTensorShape(&shape),
                        tensorflow::errors::InvalidArgument("unknown dimensions"), done);
      context->set_output(static_cast<int>(i), Result(i, shape));
    }
    const std::chrono::duration<double> seconds(seconds_ + n_rows * double{seconds_per_row_});
    SleepingCore::Get().Add(std::chrono::duration_cast<Clock::duration>(seconds),
                            [context, done] { (*context->runner())(done); });
  }

  bool IsExpensive() override { return false; }

 private:
  // Written once and handed out in each step: memory that real layers write is not written here.
  Tensor Result(size_t i, const TensorShape& shape) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Tensor& result = results_[i];
    if (!result.IsInitialized() || result.shape() != shape) {
      result = Tensor(tensorflow::DT_FLOAT, shape);
      float* values = result.flat<float>().data();
      for (int64_t k = 0; k < result.NumElements(); ++k) {
        values[k] = 1e-4F * static_cast<float>((k * 2654435761U >> 8) % 255 - 127.0);
      }
    }
    return result;
  }

  std::vector<tensorflow::PartialTensorShape> shapes_;
  float seconds_ = 0, seconds_per_row_ = 0;
  std::mutex mutex_;
  std::vector<Tensor> results_;
};

REGISTER_KERNEL_BUILDER(Name("BenchSleep").Device(tensorflow::DEVICE_CPU), SleepOp);

}  // namespace
