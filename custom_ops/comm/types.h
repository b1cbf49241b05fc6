// Element types, reductions and status codes of the engine.
#ifndef TFSCALE_COMM_TYPES_H_
#define TFSCALE_COMM_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tfscale {

// Values are part of the C interface (see c_api.h) and of the op attributes.
enum class DType : int {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBfloat16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kInt8 = 6,
  kUint8 = 7,
};

// Averages are a sum with a postscale factor of 1/size.
enum class ReduceOp : int { kSum = 0, kMin = 1, kMax = 2, kProduct = 3 };

inline size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kInt8:
    case DType::kUint8:
      return 1;
    default:
      return 4;
  }
}

// Why an operation did not succeed. kStopped: a peer ended its epoch or asked
// to stop before this step, so nothing is broken and no data was changed.
enum class StatusCode : int { kOk = 0, kFailed = 1, kStopped = 2, kInvalid = 3 };

struct Status {
  StatusCode code = StatusCode::kOk;
  std::string message;

  bool ok() const { return code == StatusCode::kOk; }
  static Status Ok() { return {}; }
  static Status Failed(std::string text) { return {StatusCode::kFailed, std::move(text)}; }
  static Status Stopped(std::string text) { return {StatusCode::kStopped, std::move(text)}; }
  static Status Invalid(std::string text) { return {StatusCode::kInvalid, std::move(text)}; }
};

// Thrown inside the engine only; the communication thread turns it into a
// Status of the failing operation.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_TYPES_H_
