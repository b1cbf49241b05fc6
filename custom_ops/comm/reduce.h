// Sums and other reductions of buffers that arrived from several ranks.
#ifndef TFSCALE_COMM_REDUCE_H_
#define TFSCALE_COMM_REDUCE_H_

#include <cstddef>
#include <vector>

#include "comm/types.h"

namespace tfscale {

// out[i] = scale * (sources[0][i] op sources[1][i] op ...), in this order, so
// that every rank that reduces the same sources gets the same bits.
// 16-bit floats are accumulated in float32 and rounded once. Integers are
// scaled in double and truncated; a scale of 1 leaves them exact.
// `out` may be one of the sources.
void Reduce(const std::vector<const void*>& sources, void* out, size_t count, DType dtype,
            ReduceOp op, double scale);

// out[i] = scale * in[i]; a copy when scale is 1. `out` may equal `in`.
void ScaledCopy(const void* in, void* out, size_t count, DType dtype, double scale);

}  // namespace tfscale

#endif  // TFSCALE_COMM_REDUCE_H_
