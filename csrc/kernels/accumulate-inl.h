// The kernels of the gradient store, written once over the vector vocabulary of blockwise-inl.h and
// the quantizer there. A block's values live on the stack in between, so each byte of the store and
// of the gradient moves once. Loops over plain arrays are left to the compiler's vectorizer.
#pragma once

#include "accumulate.h"
#include "blockwise-inl.h"

namespace laconic {
namespace {

inline int64_t gradient_block_size(int64_t length, int64_t block) {
  const int64_t left = length - block * kGradientBlock;
  return left < kGradientBlock ? left : kGradientBlock;
}

template <class S>
inline void dequantize_codes(const uint8_t* codes, float scale, int64_t n, float* values) {
  for (int64_t i = 0; i < n; i += S::kGroup) S::expand_bytes(codes + i, scale, values + i);
}

// Between pairs of int4 codes and one int8 code per byte; n is even.
inline void unpack(const uint8_t* pairs, int64_t n, uint8_t* codes) {
  for (int64_t i = 0; i < n / 2; ++i) {
    codes[2 * i] = static_cast<uint8_t>(static_cast<int8_t>(pairs[i] << 4) >> 4);
    codes[2 * i + 1] = static_cast<uint8_t>(static_cast<int8_t>(pairs[i]) >> 4);
  }
}
inline void pack(const uint8_t* codes, int64_t n, uint8_t* pairs) {
  for (int64_t i = 0; i < n / 2; ++i)
    pairs[i] = static_cast<uint8_t>((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
}

// values += alpha * gradient, then values -> codes, scales and what they lost -> residual. All n
// elements, a multiple of the group, may be touched; the first `size` of them are real.
//
// int4 goes through int8's kernels with 7 as its largest level: both round half to even, and no
// value normalized by its block's scale reaches 7.5.
template <class S, class T, bool kResidual>
class Accumulator {
  using Encoder = IntegerEncoder<S, false, 8>;

 public:
  explicit Accumulator(const Accumulate& a)
      : a_(a),
        main_(format(a.scales, 127.0f)),
        rest_(format(a.residual_scales, 7.0f)),
        encoder_(main_) {}

  void block(int64_t b, int64_t size, int64_t n, uint8_t* codes, uint8_t* pairs) const {
    alignas(64) float values[kGradientBlock], rest[kGradientBlock];
    alignas(64) uint8_t rest_codes[kGradientBlock];
    dequantize_codes<S>(codes, a_.scales[b], n, values);
    if constexpr (kResidual) {
      unpack(pairs, n, rest_codes);
      dequantize_codes<S>(rest_codes, a_.residual_scales[b], n, rest);
      for (int64_t i = 0; i < n; ++i) values[i] += rest[i];
    }
    const T* gradient = static_cast<const T*>(a_.gradient) + b * kGradientBlock;
    prefetch(gradient, size * sizeof(T));
    const float alpha = a_.alpha;
    for (int64_t i = 0; i < size; ++i) values[i] += widen(gradient[i]) * alpha;
    quantize_block<S, float, Encoder, false>(main_, encoder_, values, n, b, 0, codes);
    if constexpr (kResidual) {
      dequantize_codes<S>(codes, a_.scales[b], n, rest);
      for (int64_t i = 0; i < n; ++i) rest[i] = values[i] - rest[i];
      quantize_block<S, float, Encoder, false>(rest_, encoder_, rest, n, b, 0, rest_codes);
      pack(rest_codes, n, pairs);
    }
  }

 private:
  static Quantize format(float* scales, float level_max) {
    Quantize q{};
    q.scales = scales;
    q.scale_type = FloatType::kFloat32;
    q.level_max = level_max;
    return q;
  }
  const Accumulate& a_;
  const Quantize main_, rest_;
  const Encoder encoder_;
};

template <class S, class T, bool kResidual>
void accumulate_range(const Accumulate& a, int64_t first, int64_t last) {
  const Accumulator<S, T, kResidual> accumulator(a);
  for (int64_t b = first; b < last; ++b) {
    const int64_t size = gradient_block_size(a.length, b);
    uint8_t* codes = a.codes + b * kGradientBlock;
    uint8_t* residual_codes = kResidual ? a.residual_codes + b * (kGradientBlock / 2) : nullptr;
    if (size == kGradientBlock) {
      accumulator.block(b, size, size, codes, residual_codes);
      continue;
    }
    uint8_t padded[kGradientBlock] = {}, residual_padded[kGradientBlock / 2] = {};
    std::memcpy(padded, codes, size);
    if (kResidual) std::memcpy(residual_padded, residual_codes, ceil_div(size, 2));
    accumulator.block(b, size, ceil_div(size, S::kGroup) * S::kGroup, padded, residual_padded);
    std::memcpy(codes, padded, size);
    if (kResidual) std::memcpy(residual_codes, residual_padded, ceil_div(size, 2));
  }
}

template <class S, class T>
void accumulate_as(const Accumulate& a, int64_t first, int64_t last) {
  a.residual_codes != nullptr ? accumulate_range<S, T, true>(a, first, last)
                              : accumulate_range<S, T, false>(a, first, last);
}

template <class S>
void accumulate(const Accumulate& a, int64_t first, int64_t last) {
  switch (a.gradient_type) {
    case FloatType::kFloat32:
      return accumulate_as<S, float>(a, first, last);
    case FloatType::kBFloat16:
      return accumulate_as<S, BFloat16>(a, first, last);
    case FloatType::kFloat16:
      return accumulate_as<S, Float16>(a, first, last);
  }
}

// --- sums of squares: whole numbers within a block, fp64 from there on ---

inline int16_t low_nibble(uint8_t byte) {
  return static_cast<int16_t>(static_cast<int8_t>(byte << 4) >> 4);
}
inline int16_t high_nibble(uint8_t byte) {
  return static_cast<int16_t>(static_cast<int8_t>(byte) >> 4);
}

inline double square_of_block(const SquareSum& q, int64_t b) {
  const int64_t size = gradient_block_size(q.length, b);
  const int8_t* codes = reinterpret_cast<const int8_t*>(q.codes) + b * kGradientBlock;
  int32_t squares = 0;
  for (int64_t i = 0; i < size; ++i) squares += int16_t{codes[i]} * int16_t{codes[i]};
  const double scale = q.scales[b];
  const double main = scale * scale * squares;
  if (q.residual_codes == nullptr) return main;

  const uint8_t* pairs = q.residual_codes + b * (kGradientBlock / 2);
  int32_t products = 0, residual_squares = 0;
  for (int64_t i = 0; i < size / 2; ++i) {
    const int16_t even = low_nibble(pairs[i]), odd = high_nibble(pairs[i]);
    products += even * codes[2 * i] + odd * codes[2 * i + 1];
    residual_squares += even * even + odd * odd;
  }
  if (size % 2 == 1) {
    const int16_t even = low_nibble(pairs[size / 2]);
    products += even * codes[size - 1];
    residual_squares += even * even;
  }
  const double residual_scale = q.residual_scales[b];
  return main + 2.0 * scale * residual_scale * products +
         residual_scale * residual_scale * residual_squares;
}

inline void square_sum(const SquareSum& q, int64_t first, int64_t last) {
  const int64_t num_blocks = ceil_div(q.length, kGradientBlock);
  for (int64_t part = first; part < last; ++part) {
    double squares[kSquarePart];
    const int64_t begin = part * kSquarePart, left = num_blocks - begin;
    const int64_t count = left < kSquarePart ? left : kSquarePart;
    for (int64_t i = 0; i < count; ++i) {
      prefetch(q.codes + (begin + i) * kGradientBlock, kGradientBlock);
      squares[i] = square_of_block(q, begin + i);
    }
    q.sums[part] = tree_sum(squares, count);
  }
}

// The kernels of one instruction set.
template <class S>
constexpr AccumulateKernels kAccumulateKernels = {accumulate<S>, square_sum};

}  // namespace
}  // namespace laconic
