// Gated products and gradients, block by block: codes become values on the stack, and plain loops,
// which compilers turn into vectors, do the rest.
#pragma once

#include "blockwise-inl.h"
#include "gated.h"

namespace laconic {
namespace {

// The numbers of src/laconic/ops/gated_activations.py.
constexpr float kActivationLimit = 128.0f;
constexpr float kExpLimit = 86.0f;
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -2.12194440e-4f;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2**23

// NaN stays.
inline float clamped(float x, float limit) {
  const float above = x < -limit ? -limit : x;
  return x > limit ? limit : above;
}

// exp(z) for z in [-kExpLimit, kExpLimit]; any number for NaN.
__attribute__((always_inline)) inline float exponential(float z) {
  const float shifted = z * kLog2E + kRounder;
  const float k = shifted - kRounder;
  float f = z - k * kLn2High;
  f = f - k * kLn2Low;
  float polynomial = 1.9875691500e-4f;
  polynomial = polynomial * f + 1.3981999507e-3f;
  polynomial = polynomial * f + 8.3334519073e-3f;
  polynomial = polynomial * f + 4.1665795894e-2f;
  polynomial = polynomial * f + 1.6666665459e-1f;
  polynomial = polynomial * f + 5.0000001201e-1f;
  const float power = float_of((bits_of(shifted) - bits_of(kRounder) + 127u) << 23);
  return (polynomial * (f * f) + f + 1.0f) * power;
}

struct Activated {
  float value, derivative;
};

__attribute__((always_inline)) inline Activated activated(float x, const Curve& curve) {
  const float inside = clamped(x, kActivationLimit);
  const float square = inside * inside;
  const float exponent = -clamped(inside * (square * curve.cubic + curve.linear), kExpLimit);
  const float sigmoid = 1.0f / (1.0f + exponential(exponent));
  const float slope = square * curve.three_cubic + curve.linear;
  const float from_below = x < -kActivationLimit ? -kActivationLimit : x;
  return {from_below * sigmoid, sigmoid * ((1.0f - sigmoid) * slope * inside + 1.0f)};
}

// A rebuilt value; one of fp16 whose rounding left the range is the largest.
template <class T>
inline float in_range(float value) {
  return value;
}
template <>
inline float in_range<Float16>(float value) {
  return clamped(value, 65504.0f);
}

// widen(narrow<T>(value)), for vectors of one width.
template <class T>
inline float rounded(float value) {
  return widen(narrow<T>(value));
}
template <>
inline float rounded<BFloat16>(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000;
  return float_of(value != value ? 0x7FC00000 : nearest);
}

// narrow<T> of what is rounded already.
template <class T>
inline T exactly(float value) {
  return narrow<T>(value);
}
template <>
inline BFloat16 exactly<BFloat16>(float value) {
  return {static_cast<uint16_t>(bits_of(value) >> 16)};
}

template <class T>
inline void store(const float* values, int64_t size, T* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = exactly<T>(values[i]);
}

// table[code] for a block of codes of 4 bits, and something for what fills up the last group.
template <class S>
inline void look_up(const float (&table)[16], const uint8_t* codes, int64_t size, float* out) {
  const typename S::template Values<float> ready(table, 1.0f);
  for (int64_t i = 0; i < size; i += S::kGroup) S::expand_pairs(ready, codes + i / 2, out + i);
}

// The codes of a block: the row's own, or where these end inside of a group a copy that goes on.
template <class S, int kBits>
class BlockCodes {
 public:
  BlockCodes(const uint8_t* codes, int64_t size) : codes_(codes) {
    if (size % S::kGroup == 0) return;
    std::memset(padded_, 0, sizeof(padded_));
    std::memcpy(padded_, codes, ceil_div(size * kBits, 8));
    codes_ = padded_;
  }
  const uint8_t* get() const { return codes_; }

 private:
  const uint8_t* codes_;
  uint8_t padded_[kMaxBlock];
};

// The values of a block, each rounded to T, in fp32.
template <class S, class T, int kBits>
inline void rebuild(const Codebook* codebook, const uint8_t* codes, float scale, int64_t size,
                    float* out) {
  const BlockCodes<S, kBits> block(codes, size);
  if constexpr (kBits == 4) {
    float table[16];
    for (int c = 0; c < 16; ++c) table[c] = in_range<T>(rounded<T>(codebook->levels[c] * scale));
    look_up<S>(table, block.get(), size, out);
  } else {
    alignas(64) T values[kMaxBlock];
    if (__builtin_expect(is_finite(scale), 1)) {
      dequantize_block<S, T, kBits>(codebook, block.get(), scale,
                                    ceil_div(size, S::kGroup) * S::kGroup, values);
    } else {
      dequantize_padded<S, T, kBits>(codebook, codes, scale, size, values);
    }
    for (int64_t i = 0; i < size; ++i) out[i] = in_range<T>(widen(values[i]));
  }
}

// The activation of a block of gate, rounded to T, and its derivative, in fp32. Codes of 4 bits
// stand for 16 values only, so 16 exponentials serve the whole block.
template <class S, class T, int kBits>
inline void activate(const Codebook* codebook, const Curve& curve, const uint8_t* codes,
                     float scale, int64_t size, float* value, float* derivative) {
  constexpr int64_t kTable = 16;
  alignas(64) float gate[kMaxBlock], values[kTable], derivatives[kTable];
  if constexpr (kBits == 4) {
    for (int c = 0; c < kTable; ++c) {
      const Activated a =
          activated(in_range<T>(rounded<T>(codebook->levels[c] * scale)), curve);
      values[c] = rounded<T>(a.value);
      derivatives[c] = a.derivative;
    }
    const BlockCodes<S, kBits> block(codes, size);
    look_up<S>(values, block.get(), size, value);
    if (derivative != nullptr) look_up<S>(derivatives, block.get(), size, derivative);
  } else {
    rebuild<S, T, kBits>(codebook, codes, scale, size, gate);
    if (derivative == nullptr) {
      for (int64_t i = 0; i < size; ++i) value[i] = rounded<T>(activated(gate[i], curve).value);
      return;
    }
    for (int64_t i = 0; i < size; ++i) {
      const Activated a = activated(gate[i], curve);
      value[i] = rounded<T>(a.value);
      derivative[i] = a.derivative;
    }
  }
}

template <class S, class T, int kBits>
void gated_range(const Gated& task, int64_t first, int64_t last) {
  const int64_t codes_per_row = ceil_div(task.length * kBits, 8);
  const Curve curve = task.curve;
  BlockWalk walk(task.length, task.block_size, first, last);
  for (int64_t b = first; !walk.done(); walk.next(), ++b) {
    const int64_t at = walk.row * codes_per_row + walk.column * kBits / 8;
    const int64_t start = walk.row * task.length + walk.column, size = walk.size();
    const float gate_scale = load_scale(task.gate_scales, task.scale_type, b);
    const float up_scale = load_scale(task.up_scales, task.scale_type, b);
    // Loops over 32-bit numbers and loops that change the width: compilers turn both into vectors,
    // but not well into the same.
    alignas(64) float value[kMaxBlock], derivative[kMaxBlock], up[kMaxBlock], grad[kMaxBlock];
    rebuild<S, T, kBits>(task.codebook, task.up_codes + at, up_scale, size, up);
    activate<S, T, kBits>(task.codebook, curve, task.gate_codes + at, gate_scale, size, value,
                          task.grad == nullptr ? nullptr : derivative);
    if (task.grad == nullptr) {
      for (int64_t i = 0; i < size; ++i) value[i] = rounded<T>(value[i] * up[i]);
      store<T>(value, size, static_cast<T*>(task.product) + start);
      continue;
    }
    const T* grad_values = static_cast<const T*>(task.grad) + start;
    for (int64_t i = 0; i < size; ++i) grad[i] = widen(grad_values[i]);
    for (int64_t i = 0; i < size; ++i) {
      derivative[i] = rounded<T>(rounded<T>(grad[i] * up[i]) * derivative[i]);
      up[i] = rounded<T>(grad[i] * value[i]);
    }
    store<T>(derivative, size, static_cast<T*>(task.product) + start);
    store<T>(up, size, static_cast<T*>(task.grad_up) + start);
  }
}

template <class S, class T>
void gated_as(const Gated& task, int64_t first, int64_t last) {
  with_bits(task.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    if constexpr (kBits != 2) gated_range<S, T, kBits>(task, first, last);
  });
}

template <class S>
void gated(const Gated& task, int64_t first, int64_t last) {
  switch (task.type) {
    case FloatType::kFloat32:
      return gated_as<S, float>(task, first, last);
    case FloatType::kBFloat16:
      return gated_as<S, BFloat16>(task, first, last);
    default:
      return gated_as<S, Float16>(task, first, last);
  }
}

}  // namespace
}  // namespace laconic
