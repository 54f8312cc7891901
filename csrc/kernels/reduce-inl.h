// Sums of quantized gradients, block by block: everything between reading the shards' codes and
// writing the result stays in the first-level cache. Over the vocabulary of blockwise-inl.h.
#pragma once

#include <algorithm>

#include "blockwise-inl.h"
#include "reduce.h"

namespace laconic {
namespace {

template <class S>
class BlockSum {
 public:
  explicit BlockSum(const Sum& sum)
      : sum_(sum),
        int8_(format(sum.new_scales, 127.0f, nullptr)),
        int4_(format(sum.new_residual_scales, 7.0f, sum.codebook)),
        int8_encoder_(int8_),
        int4_encoder_(int4_) {}

  void run(int64_t block) {
    const int64_t start = block * kGradientBlock;
    const int64_t size = std::min(kGradientBlock, sum_.length - start);
    const int64_t padded = ceil_div(size, S::kGroup) * S::kGroup;
    float total[kGradientBlock], shard[kGradientBlock];
    read_shard(0, block, start, size, padded, total);
    for (int64_t i = 1; i < sum_.num_shards; ++i) {
      read_shard(i, block, start, size, padded, shard);
      for (int64_t j = 0; j < padded; ++j) total[j] += shard[j];
    }
    for (int64_t j = 0; j < padded; ++j) total[j] = narrow<float>(total[j] * sum_.factor);
    // What was filled up is zero only where a shard's scale is finite and its last half byte zero.
    std::fill(total + size, total + padded, 0.0f);
    if (sum_.values != nullptr) {
      std::memcpy(sum_.values + start, total, size * sizeof(float));
    } else {
      requantize(block, start, size, padded, total);
    }
  }

 private:
  static Quantize format(float* scales, float level_max, const Codebook* codebook) {
    Quantize q{};
    q.scales = scales;
    q.scale_type = FloatType::kFloat32;
    q.level_max = level_max;
    q.codebook = codebook;
    return q;
  }

  // Bytes [at, at + nbytes) of a row, or a copy that is filled up with zeros to `padded` bytes.
  static const uint8_t* whole(const uint8_t* bytes, int64_t nbytes, int64_t padded,
                              uint8_t* buffer) {
    if (nbytes == padded) return bytes;
    std::memset(buffer, 0, padded);
    std::memcpy(buffer, bytes, nbytes);
    return buffer;
  }

  void read_shard(int64_t i, int64_t block, int64_t start, int64_t size, int64_t padded,
                  float* values) const {
    uint8_t buffer[kGradientBlock];
    const uint8_t* codes = sum_.codes.at(i, start);
    prefetch(codes, kGradientBlock);
    dequantize_block<S, float, 8>(nullptr, whole(codes, size, padded, buffer),
                                  *sum_.scales.at(i, block), padded, values);
    if (sum_.residual_codes.first == nullptr) return;
    float residual[kGradientBlock];
    const uint8_t* pairs = sum_.residual_codes.at(i, start / 2);
    prefetch(pairs, kGradientBlock / 2);
    dequantize_block<S, float, 4>(sum_.codebook,
                                  whole(pairs, ceil_div(size, 2), padded / 2, buffer),
                                  *sum_.residual_scales.at(i, block), padded, residual);
    for (int64_t j = 0; j < padded; ++j) values[j] += residual[j];
  }

  void requantize(int64_t block, int64_t start, int64_t size, int64_t padded,
                  const float* total) const {
    uint8_t codes[kGradientBlock];
    quantize_block<S, float, Encoder<S, false, 8>, false>(int8_, int8_encoder_, total, padded,
                                                           block, 0, codes);
    std::memcpy(sum_.new_codes + start, codes, size);
    if (sum_.new_residual_codes == nullptr) return;
    float rest[kGradientBlock];
    dequantize_block<S, float, 8>(nullptr, codes, sum_.new_scales[block], padded, rest);
    for (int64_t j = 0; j < padded; ++j) rest[j] = total[j] - rest[j];
    uint8_t pairs[kGradientBlock / 2];
    quantize_block<S, float, TableEncoder<S, false>, false>(int4_, int4_encoder_, rest, padded,
                                                            block, 0, pairs);
    // The filled-up elements are zero, and so is int4's code of zero.
    std::memcpy(sum_.new_residual_codes + start / 2, pairs, ceil_div(size, 2));
  }

  const Sum& sum_;
  Quantize int8_, int4_;
  Encoder<S, false, 8> int8_encoder_;
  TableEncoder<S, false> int4_encoder_;
};

template <class S>
void sum(const Sum& task, int64_t first, int64_t last) {
  BlockSum<S> each(task);
  for (int64_t block = first; block < last; ++block) each.run(block);
}

// The kernels of one instruction set.
template <class S>
constexpr ReduceKernels kReduceKernels = {sum<S>};

}  // namespace
}  // namespace laconic
