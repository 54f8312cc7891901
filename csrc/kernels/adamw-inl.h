// One AdamW step, block by block: moments and gradient become fp32 on the stack, are updated there,
// and the moments go back to codes, so that each byte in memory moves once. Loops over plain arrays
// are left to the compiler's vectorizer. Only codes and levels need a vocabulary, which the
// including file provides as a class template of <bool kSigned, int kBits>, with a code per byte:
//   kLanes                                             numbers handled at once
//   Codes(map)                                         tables in registers
//   load(const uint8_t* codes, float scale, float* x)  kLanes levels times scale
//   store(const float* x, float inverse, uint8_t* out) codes of kLanes numbers x * inverse
#pragma once

#include <cmath>

#include "adamw.h"
#include "scalar-inl.h"

namespace laconic {
namespace {

constexpr int64_t kGradientBlock = 128;
// How many elements ahead of those at hand memory is fetched.
constexpr int64_t kPrefetchElements = 512;
// 2^62: LARGEST_GRADIENT of src/laconic/ops/adamw_scalars.py.
constexpr uint32_t kLargestGradientBits = 0x5E800000;

inline int64_t blocks_of(int64_t n, int64_t block_size) {
  return (n + block_size - 1) / block_size;
}

// --- the gradient in fp32 ---

template <class T>
inline void widen_all(const void* from, int64_t first, int64_t n, float* out) {
  const T* x = static_cast<const T*>(from) + first;
  for (int64_t i = 0; i < n; ++i) out[i] = widen(x[i]);
}

// Elements [first, first + n) of a quantized gradient, within one of its blocks.
inline void dequantize_gradient(const AdamW& a, int64_t first, int64_t n, float* out) {
  const int8_t* codes = reinterpret_cast<const int8_t*>(a.gradient_codes) + first;
  const float scale = a.gradient_scales[first / kGradientBlock];
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(codes[i]) * scale;
  if (a.residual_codes == nullptr) return;
  const float residual_scale = a.residual_scales[first / kGradientBlock];
  const uint8_t* pairs = a.residual_codes + first / 2;
  int64_t i = 0;
  const auto low = [](uint8_t pair) { return static_cast<int8_t>(pair << 4) >> 4; };
  const auto high = [](uint8_t pair) { return static_cast<int8_t>(pair) >> 4; };
  if (first % 2 == 1) out[i++] += static_cast<float>(high(*pairs++)) * residual_scale;
  const int64_t num_pairs = (n - i) / 2;
  float* even = out + i;
  for (int64_t j = 0; j < num_pairs; ++j) {
    even[2 * j] += static_cast<float>(low(pairs[j])) * residual_scale;
    even[2 * j + 1] += static_cast<float>(high(pairs[j])) * residual_scale;
  }
  if (i + 2 * num_pairs < n)
    out[n - 1] += static_cast<float>(low(pairs[num_pairs])) * residual_scale;
}

inline void load_gradient(const AdamW& a, int64_t first, int64_t n, float* out) {
  if (a.gradient_codes != nullptr) {
    for (int64_t done = 0; done < n;) {
      const int64_t left = kGradientBlock - (first + done) % kGradientBlock;
      const int64_t size = left < n - done ? left : n - done;
      dequantize_gradient(a, first + done, size, out + done);
      done += size;
    }
  } else if (a.gradient_type == FloatType::kFloat32) {
    widen_all<float>(a.gradient, first, n, out);
  } else if (a.gradient_type == FloatType::kBFloat16) {
    widen_all<BFloat16>(a.gradient, first, n, out);
  } else {
    widen_all<Float16>(a.gradient, first, n, out);
  }
  if (a.factor != nullptr) {
    const float factor = *a.factor;
    for (int64_t i = 0; i < n; ++i) out[i] *= factor;
  }
  if (a.maximize) {
    for (int64_t i = 0; i < n; ++i) out[i] = -out[i];
  }
  // A finite gradient makes no infinite square; infinity and NaN go on to where they are seen.
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(out[i]), magnitude = bits & 0x7FFFFFFF;
    const bool is_huge = (magnitude > kLargestGradientBits) & (magnitude < kInfinityBits);
    out[i] = float_of(is_huge ? kLargestGradientBits | (bits & 0x80000000) : bits);
  }
}

// --- moments ---

// The code of zero.
constexpr uint8_t zero_code(bool is_signed, int bits) {
  return static_cast<uint8_t>(is_signed ? (1 << (bits - 1)) - 1 : 0);
}

inline void unpack_pairs(const uint8_t* pairs, int64_t n, uint8_t* codes) {
  for (int64_t j = 0; j < (n + 1) / 2; ++j) {
    codes[2 * j] = pairs[j] & 15;
    codes[2 * j + 1] = pairs[j] >> 4;
  }
}

// The second half of the last byte is 0 where n is odd.
inline void pack_pairs(uint8_t* codes, int64_t n, uint8_t* pairs) {
  if (n % 2 == 1) codes[n] = 0;
  for (int64_t j = 0; j < (n + 1) / 2; ++j)
    pairs[j] = static_cast<uint8_t>(codes[2 * j] | codes[2 * j + 1] << 4);
}

// x, a whole block long, from the n codes that begin at byte `first`.
template <int kBits, class Codes>
inline void dequantize_moment(const Codes& codes_of, const Moment& moment, int64_t first,
                              int64_t block, int64_t n, float* x) {
  const float scale = moment.scales[block];
  const uint8_t* codes = moment.codes + first;
  alignas(64) uint8_t copy[state_block(kBits)] = {};
  if constexpr (kBits == 4) {
    unpack_pairs(codes, n, copy);
    codes = copy;
  } else if (n % Codes::kLanes != 0) {
    std::memcpy(copy, codes, n);
    codes = copy;
  }
  for (int64_t i = 0; i < n; i += Codes::kLanes) codes_of.load(codes + i, scale, x + i);
}

// Whether the scale has the sign of the largest magnitude: 16 levels have 1, and none near -1.
constexpr bool has_signed_scale(bool is_signed, int bits) { return is_signed && bits == 4; }

template <bool kSigned, int kBits, class Codes>
inline void quantize_moment(const Codes& codes_of, const Moment& moment, int64_t first,
                            int64_t block, int64_t n, const float* x) {
  constexpr uint8_t kZero = zero_code(kSigned, kBits);
  // The largest magnitude, as bits: NaN > infinity > every finite number.
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  alignas(64) uint8_t copy[state_block(kBits)];
  const bool is_whole = kBits == 8 && n % Codes::kLanes == 0;
  uint8_t* codes = is_whole ? moment.codes + first : copy;
  if (__builtin_expect(largest - kSmallestNormalBits >= kInfinityBits - kSmallestNormalBits, 0)) {
    const bool broken = largest >= kInfinityBits;
    moment.scales[block] = broken ? float_of(0x7FC00000) : 0.0f;
    std::memset(codes, kZero, is_whole ? n : state_block(kBits));
  } else {
    float scale = float_of(largest);
    if constexpr (has_signed_scale(kSigned, kBits)) {
      uint32_t is_positive = 0;  // as a number, which compilers vectorize
      for (int64_t i = 0; i < n; ++i) is_positive |= bits_of(x[i]) == largest;
      scale = is_positive != 0 ? scale : -scale;
    }
    moment.scales[block] = scale;
    const float inverse = 1.0f / scale;
    for (int64_t i = 0; i < n; i += Codes::kLanes) codes_of.store(x + i, inverse, codes + i);
  }
  if constexpr (kBits == 4) {
    pack_pairs(copy, n, moment.codes + first);
  } else if (!is_whole) {
    std::memcpy(moment.codes + first, copy, n);
  }
}

// --- the update ---

inline void update_moments(const AdamWScalars& a, const float* g, int64_t n, float* m, float* v,
                           float* change) {
  for (int64_t i = 0; i < n; ++i) {
    const float second = v[i] * a.beta2 + g[i] * g[i] * a.one_minus_beta2;
    const float root = std::sqrt(second);
    const float limit = root * a.ratio_max;
    float first = m[i] * a.beta1 + g[i] * a.one_minus_beta1;
    first = limit < first ? limit : first;
    first = -limit > first ? -limit : first;
    v[i] = second;
    m[i] = first;
    change[i] = first / (root * a.inverse_correction2 + a.eps) * a.step_size;
  }
}

template <class T>
inline void update_parameter(const AdamWScalars& a, const float* change, int64_t n, T* parameter) {
  for (int64_t i = 0; i < n; ++i)
    parameter[i] = narrow<T>(widen(parameter[i]) * a.decay - change[i]);
}

// Fetches the bytes of a later block while this one is computed: the hardware follows too few of
// the many streams. As an integer, because the address may lie beyond the tensor; fetching from
// there does nothing.
inline void prefetch(const void* start, int64_t offset, int64_t nbytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(start) + offset;
  for (int64_t i = 0; i < nbytes; i += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(address + i));
}

inline int64_t size_of(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

inline void prefetch_block(const AdamW& a, int64_t at, int64_t code_at, int64_t size) {
  const int64_t parameter_size = size_of(a.parameter_type),
                gradient_size = size_of(a.gradient_type);
  prefetch(a.parameter, at * parameter_size, size * parameter_size);
  prefetch(a.first.codes, code_at, size * a.bits / 8);
  prefetch(a.second.codes, code_at, size * a.bits / 8);
  if (a.gradient_codes == nullptr) {
    prefetch(a.gradient, at * gradient_size, size * gradient_size);
  } else {
    prefetch(a.gradient_codes, at, size);
    if (a.residual_codes != nullptr) prefetch(a.residual_codes, at / 2, size / 2);
  }
}

template <int kBits, template <bool, int> class CodesOf>
void update_blocks(const AdamW& a, int64_t first, int64_t last) {
  constexpr int64_t kBlock = state_block(kBits), kPerByte = 8 / kBits;
  const CodesOf<true, kBits> signed_codes(*a.first.map);
  const CodesOf<false, kBits> unsigned_codes(*a.second.map);
  const int64_t blocks_per_row = blocks_of(a.length, kBlock);
  alignas(64) float m[kBlock] = {}, v[kBlock] = {}, g[kBlock], change[kBlock];
  for (int64_t b = first; b < last; ++b) {
    const int64_t row = b / blocks_per_row, column = b % blocks_per_row * kBlock;
    const int64_t at = row * a.length + column;
    const int64_t code_at = row * blocks_of(a.length, kPerByte) + column / kPerByte;
    const int64_t n = a.length - column < kBlock ? a.length - column : kBlock;
    constexpr int64_t kAhead = kPrefetchElements;
    prefetch_block(a, at + kAhead, code_at + kAhead / kPerByte, kBlock);
    load_gradient(a, at, n, g);
    dequantize_moment<kBits>(signed_codes, a.first, code_at, b, n, m);
    dequantize_moment<kBits>(unsigned_codes, a.second, code_at, b, n, v);
    update_moments(a.scalars, g, n, m, v, change);
    if (a.parameter_type == FloatType::kFloat32) {
      update_parameter(a.scalars, change, n, static_cast<float*>(a.parameter) + at);
    } else if (a.parameter_type == FloatType::kBFloat16) {
      update_parameter(a.scalars, change, n, static_cast<BFloat16*>(a.parameter) + at);
    } else {
      update_parameter(a.scalars, change, n, static_cast<Float16*>(a.parameter) + at);
    }
    quantize_moment<true, kBits>(signed_codes, a.first, code_at, b, n, m);
    quantize_moment<false, kBits>(unsigned_codes, a.second, code_at, b, n, v);
  }
}

template <template <bool, int> class CodesOf>
void update(const AdamW& a, int64_t first, int64_t last) {
  a.bits == 8 ? update_blocks<8, CodesOf>(a, first, last) : update_blocks<4, CodesOf>(a, first, last);
}

// The kernels of one instruction set.
template <template <bool, int> class CodesOf>
constexpr AdamWKernels kAdamWKernels = {update<CodesOf>};

}  // namespace
}  // namespace laconic
