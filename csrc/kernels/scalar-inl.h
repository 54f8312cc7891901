// Scalar arithmetic that every instruction set shares: conversions between float types, and the
// random numbers of stochastic rounding. Included once per instruction set, hence everything in an
// unnamed namespace: two translation units must never share a function that one of them compiled
// for a newer CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "blockwise.h"

namespace laconic {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

constexpr uint32_t kInfinityBits = 0x7F800000;
constexpr uint32_t kSmallestNormalBits = 0x00800000;

// --- widening: exact ---

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) { return float_of(uint32_t{value.bits} << 16); }
inline float widen(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16, rest = value.bits & 0x7FFFu;
  if (rest >= 0x7C00) return float_of(sign | (rest << 13) | kInfinityBits);
  // Shifted into place the exponent is 112 too small; a multiplication by 2**112 repairs it for
  // subnormals too.
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
}

// --- narrowing: round to nearest even; every NaN becomes the positive quiet NaN with an empty
// payload ---

template <class T>
T narrow(float value);

template <>
inline float narrow<float>(float value) {
  return value != value ? float_of(0x7FC00000) : value;
}

template <>
inline BFloat16 narrow<BFloat16>(float value) {
  if (value != value) return {0x7FC0};
  const uint32_t bits = bits_of(value);
  return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

template <>
inline Float16 narrow<Float16>(float value) {
  if (value != value) return {0x7E00};
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
  uint32_t rounded;
  if (magnitude >= 0x47800000) {  // 2**16 and above, infinity too
    rounded = 0x7C00;
  } else if (magnitude >= 0x38800000) {  // 2**-14: normal in both
    rounded = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  } else {  // adding 0.5 leaves units of 2**-24, rounded to nearest even, in the low bits
    rounded = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
  }
  return {static_cast<uint16_t>(sign | rounded)};
}

inline float load_scale(const void* scales, FloatType type, int64_t i) {
  switch (type) {
    case FloatType::kFloat32:
      return static_cast<const float*>(scales)[i];
    case FloatType::kBFloat16:
      return widen(static_cast<const BFloat16*>(scales)[i]);
    default:
      return widen(static_cast<const Float16*>(scales)[i]);
  }
}

// Stores `value` as scale i, rounded to nearest even, and returns what was stored.
inline float store_scale(void* scales, FloatType type, int64_t i, float value) {
  switch (type) {
    case FloatType::kFloat32:
      return static_cast<float*>(scales)[i] = narrow<float>(value);
    case FloatType::kBFloat16:
      return widen(static_cast<BFloat16*>(scales)[i] = narrow<BFloat16>(value));
    default:
      return widen(static_cast<Float16*>(scales)[i] = narrow<Float16>(value));
  }
}

// Scale i, whose bits change by `steps`: the next number of its type that is larger or smaller in
// magnitude.
inline float move_scale(void* scales, FloatType type, int64_t i, int steps) {
  switch (type) {
    case FloatType::kFloat32:
      break;  // nothing was rounded
    case FloatType::kBFloat16:
      static_cast<BFloat16*>(scales)[i].bits += static_cast<uint16_t>(steps);
      break;
    default:
      static_cast<Float16*>(scales)[i].bits += static_cast<uint16_t>(steps);
  }
  return load_scale(scales, type, i);
}

// Stores the largest number at or below `value` as scale i and returns it; -infinity where there is
// none.
inline float store_scale_below(void* scales, FloatType type, int64_t i, float value) {
  const float stored = store_scale(scales, type, i, value);
  if (!(stored > value)) return stored;
  return move_scale(scales, type, i, bits_of(stored) >> 31 ? 1 : -1);
}

// The same for the smallest number at or above a `value` that is not negative.
inline float store_scale_above(void* scales, FloatType type, int64_t i, float value) {
  const float stored = store_scale(scales, type, i, value);
  return stored < value ? move_scale(scales, type, i, 1) : stored;
}

// --- random numbers: k * 2**-24 from (seed, index), as `uniform` of reference/blockwise.py ---

inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The two keys that the seed and the high half of an index make.
struct Keys {
  uint32_t first, second;
  Keys(uint64_t seed, uint64_t index) {
    const uint64_t key = mix64(mix64(seed + 0x9E3779B97F4A7C15u) + (index >> 32));
    first = static_cast<uint32_t>(key);
    second = static_cast<uint32_t>(key >> 32);
  }
};

inline float uniform(const Keys& keys, uint64_t index) {
  uint32_t h = static_cast<uint32_t>(index) ^ keys.first;
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h ^= keys.second;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  h ^= h >> 16;
  return static_cast<float>(h >> 8) * 0x1p-24f;
}

}  // namespace
}  // namespace laconic
