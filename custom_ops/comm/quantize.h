// Blocks of float32 values, rounded to few bits with a scale for each block.
#ifndef TFSCALE_COMM_QUANTIZE_H_
#define TFSCALE_COMM_QUANTIZE_H_

#include <cstddef>
#include <vector>

namespace tfscale {

// The code of a vector that is cut into blocks, the last of which may be short.
//
// With 8 or 4 bits a value v of a block is sent as q = rint(v / s), and the block as
// its scale s (bfloat16) and all q. s is the largest magnitude divided by the largest
// q, 127 or 7, and rounded up to a bfloat16: so q * s and v - q * s are exact in
// float32, and what is not sent, the error, is known bit by bit. It is added to the
// next vector. With 16 bits values are sent as bfloat16, without scales.
//
// A block with NaN, infinity or a magnitude of 2^127 and more decodes to NaN, and its
// error stays as it was. A block of magnitudes so small that products or errors could
// be denormal, which TensorFlow's threads take for 0, is sent as zeros.
//
// Bytes of a vector from a block on do not depend on what is before it. Stateless
// and thread-safe. Vectorised for AVX2 where the CPU has it.
class BlockCode {
 public:
  // 16, 8 or 4 bits; blocks of 256 or 64 values. Throws CommError for others.
  BlockCode(int bits, size_t block);

  size_t block() const { return block_; }
  // Bytes of `count` values from the beginning of a block.
  size_t Bytes(size_t count) const;

  // Encodes v = factor * in + error. `new_error` becomes v minus what `out` decodes
  // to. `error` may be null for zeros, and both if errors are not kept.
  void Encode(const float* in, float factor, const float* error, size_t count, char* out,
              float* new_error) const;
  void Decode(const char* in, size_t count, float* out) const;
  // out = base + what `in` decodes to.
  void DecodeOnto(const char* in, const float* base, size_t count, float* out) const;
  // out = factor * the sum of what `sources` decode to, added in their order.
  void DecodeSum(const std::vector<const char*>& sources, double factor, size_t count,
                 float* out) const;
  // Encodes that sum plus `error`, as Encode does.
  void EncodeSum(const std::vector<const char*>& sources, double factor, const float* error,
                 size_t count, char* out, float* new_error) const;

 private:
  struct Kernels;
  template <int kBits, size_t kBlock>
  static const Kernels* Find();

  int bits_;
  size_t block_;
  const Kernels* kernels_;
};

}  // namespace tfscale

#endif  // TFSCALE_COMM_QUANTIZE_H_
