// The largest float32 values of each chunk of a vector, in 14 bits each.
#ifndef TFSCALE_COMM_SPARSE_CODE_H_
#define TFSCALE_COMM_SPARSE_CODE_H_

#include <cstddef>

namespace tfscale {

// The code of a vector that is cut into chunks, the last of which may be short.
//
// Of each chunk a share of the values is sent: those of the largest magnitudes, of
// equal ones the first. Each has a position of 12 bits, a sign and one of two
// levels. The levels are the means of the magnitudes up to their mean and of those
// above it, as bfloat16. A value below half of its level is not sent: zero stays
// zero, what is not sent of a value is never larger than the value, and the
// difference is exact in float32. What is not sent, the error, is so known bit by bit.
//
// A chunk with NaN, infinity or a magnitude of 2^127 and more decodes to NaN, and its
// error stays as it was. Values below 2^-100 are not sent, so errors are never denormal,
// which TensorFlow's threads take for 0.
//
// Bytes of a vector from a chunk on do not depend on what is before it. Stateless
// and thread-safe.
class SparseCode {
 public:
  static constexpr size_t kLargestChunk = 4096;  // of which 12 bits can name a value

  // Throws CommError unless 0 < share <= 1 and `chunk` is 1 to 4096.
  SparseCode(double share, size_t chunk);

  size_t chunk() const { return chunk_; }
  // Values that are sent of a chunk of `count` values.
  size_t Kept(size_t count) const;
  // Bytes of `count` values from the beginning of a chunk.
  size_t Bytes(size_t count) const;

  // Encodes v = factor * in + decay * error. `new_error` becomes v minus what `out`
  // decodes to.
  void Encode(const float* in, float factor, const float* error, float decay, size_t count,
              char* out, float* new_error) const;
  // Adds factor times what `in` decodes to.
  void DecodeOnto(const char* in, float factor, size_t count, float* out) const;

 private:
  size_t ChunkBytes(size_t count) const;
  void EncodeChunk(const float* v, const float* error, size_t count, char* out,
                   float* new_error) const;
  void DecodeChunkOnto(const char* in, float factor, size_t count, float* out) const;

  double share_;
  size_t chunk_;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_SPARSE_CODE_H_
