// One AdamW step, block by block: moments and gradient become fp32 on the stack, are updated there,
// and the moments go back to 8 bits, so that each byte in memory moves once. Loops over plain
// arrays are left to the compiler's vectorizer, lookups of levels too: gathers are no faster. Only
// finding codes needs a vocabulary, which the including file provides as a class template:
//   kLanes                                             numbers handled at once
//   Codes(map, kSigned)                                tables in registers
//   store(const float* x, float inverse, uint8_t* out) codes of kLanes numbers x * inverse
#pragma once

#include <cmath>

#include "adamw.h"
#include "scalar-inl.h"

namespace laconic {
namespace {

constexpr int64_t kGradientBlock = 128;
// How many blocks ahead of the one at hand memory is fetched.
constexpr int64_t kPrefetchBlocks = 2;
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

inline void dequantize_moment(const Moment& moment, int64_t first, int64_t block, int64_t n,
                              float* out) {
  const float* levels = moment.map->levels;
  const float scale = moment.scales[block];
  const uint8_t* codes = moment.codes + first;
  for (int64_t i = 0; i < n; ++i) out[i] = levels[codes[i]] * scale;
}

template <class Codes>
inline void quantize_moment(const Codes& codes_of, const Moment& moment, int64_t first,
                            int64_t block, int64_t n, float* x) {
  // The largest magnitude, as bits: NaN > infinity > every finite number.
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  uint8_t* codes = moment.codes + first;
  if (__builtin_expect(largest - kSmallestNormalBits >= kInfinityBits - kSmallestNormalBits, 0)) {
    const bool broken = largest >= kInfinityBits;
    moment.scales[block] = broken ? float_of(0x7FC00000) : 0.0f;
    std::memset(codes, Codes::kZero, n);
    return;
  }
  moment.scales[block] = float_of(largest);
  const float inverse = 1.0f / float_of(largest);
  int64_t i = 0;
  for (; i + Codes::kLanes <= n; i += Codes::kLanes) codes_of.store(x + i, inverse, codes + i);
  if (i < n) {
    uint8_t padded[Codes::kLanes];
    codes_of.store(x + i, inverse, padded);  // x is a whole block long
    std::memcpy(codes + i, padded, n - i);
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

inline void prefetch_block(const AdamW& a, int64_t at) {
  const int64_t parameter_size = size_of(a.parameter_type),
                gradient_size = size_of(a.gradient_type);
  prefetch(a.parameter, at * parameter_size, kStateBlock * parameter_size);
  prefetch(a.first.codes, at, kStateBlock);
  prefetch(a.second.codes, at, kStateBlock);
  if (a.gradient_codes == nullptr) {
    prefetch(a.gradient, at * gradient_size, kStateBlock * gradient_size);
  } else {
    prefetch(a.gradient_codes, at, kStateBlock);
    if (a.residual_codes != nullptr) prefetch(a.residual_codes, at / 2, kStateBlock / 2);
  }
}

template <template <bool> class CodesOf>
void update(const AdamW& a, int64_t first, int64_t last) {
  const CodesOf<true> signed_codes(*a.first.map);
  const CodesOf<false> unsigned_codes(*a.second.map);
  const int64_t blocks_per_row = blocks_of(a.length, kStateBlock);
  alignas(64) float m[kStateBlock] = {}, v[kStateBlock] = {}, g[kStateBlock], change[kStateBlock];
  for (int64_t b = first; b < last; ++b) {
    const int64_t column = b % blocks_per_row * kStateBlock;
    const int64_t at = b / blocks_per_row * a.length + column;
    const int64_t n = a.length - column < kStateBlock ? a.length - column : kStateBlock;
    prefetch_block(a, at + kPrefetchBlocks * kStateBlock);
    load_gradient(a, at, n, g);
    dequantize_moment(a.first, at, b, n, m);
    dequantize_moment(a.second, at, b, n, v);
    update_moments(a.scalars, g, n, m, v, change);
    if (a.parameter_type == FloatType::kFloat32) {
      update_parameter(a.scalars, change, n, static_cast<float*>(a.parameter) + at);
    } else if (a.parameter_type == FloatType::kBFloat16) {
      update_parameter(a.scalars, change, n, static_cast<BFloat16*>(a.parameter) + at);
    } else {
      update_parameter(a.scalars, change, n, static_cast<Float16*>(a.parameter) + at);
    }
    quantize_moment(signed_codes, a.first, at, b, n, m);
    quantize_moment(unsigned_codes, a.second, at, b, n, v);
  }
}

// The kernels of one instruction set.
template <template <bool> class CodesOf>
constexpr AdamWKernels kAdamWKernels = {update<CodesOf>};

}  // namespace
}  // namespace laconic
