// Norms over rows: a row is widened into buffers that fit the first-level cache, and what follows
// are plain loops over these, which compilers turn into vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "norms.h"
#include "scalar-inl.h"
#include "sums-inl.h"

namespace laconic {
namespace {

// Buffers end with zeros up to a multiple of kSums, whose terms change no sum.
inline int64_t padded(int64_t length) { return (length + kSums - 1) / kSums * kSums; }

// The sum of a row's numbers, each multiplied by that of `other` in its place where there is one.
template <bool kHasOther>
inline float sum(const float* x, const float* other, int64_t length) {
  Sixteen sums[kParts] = {};
  for (int64_t k = 0; k < length; k += kSums) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      Sixteen values, factors;
      std::memcpy(&values, x + k + 16 * part, sizeof(values));
      if constexpr (kHasOther) {
        std::memcpy(&factors, other + k + 16 * part, sizeof(factors));
        values *= factors;
      }
      sums[part] += values;
    }
  }
  return total_of(sums);
}

inline float sum(const float* x, int64_t length) { return sum<false>(x, nullptr, length); }
inline float dot(const float* x, const float* y, int64_t length) { return sum<true>(x, y, length); }

template <class T>
inline void widen_row(const void* from, int64_t row, int64_t length, float* to) {
  const T* values = static_cast<const T*>(from) + row * length;
  for (int64_t k = 0; k < length; ++k) to[k] = widen(values[k]);
}

// What is multiplied by a row that is normalized, and added to it.
struct Affine {
  std::vector<float> scale, shift;
};

template <class T>
Affine affine_of(const Norm& task) {
  Affine affine;
  if (task.weight != nullptr) {
    affine.scale.resize(task.length);
    widen_row<T>(task.weight, 0, task.length, affine.scale.data());
    for (float& scale : affine.scale) scale += task.unit_offset ? 1.0f : 0.0f;
  }
  if (task.bias != nullptr) {
    affine.shift.resize(task.length);
    widen_row<T>(task.bias, 0, task.length, affine.shift.data());
  }
  return affine;
}

// Normalizes a row in place and returns by what its distances from the mean were multiplied.
inline float normalize_row(const Norm& task, float* x) {
  const int64_t length = task.length, all = padded(length);
  const float number = static_cast<float>(length);
  if (task.centered) {
    const float mean = sum(x, all) / number;
    for (int64_t k = 0; k < length; ++k) x[k] -= mean;
  }
  const float inverse = 1.0f / std::sqrt(dot(x, x, all) / number + task.eps);
  for (int64_t k = 0; k < length; ++k) x[k] *= inverse;
  return inverse;
}

template <class T>
void normalize(const Norm& task, int64_t first, int64_t last) {
  const Affine affine = affine_of<T>(task);
  std::vector<float> buffer(padded(task.length));
  float* x = buffer.data();
  for (int64_t row = first; row < last; ++row) {
    widen_row<T>(task.x, row, task.length, x);
    normalize_row(task, x);
    if (!affine.scale.empty()) {
      for (int64_t k = 0; k < task.length; ++k) x[k] *= affine.scale[k];
    }
    if (!affine.shift.empty()) {
      for (int64_t k = 0; k < task.length; ++k) x[k] += affine.shift[k];
    }
    T* y = static_cast<T*>(task.out) + row * task.length;
    for (int64_t k = 0; k < task.length; ++k) y[k] = narrow<T>(x[k]);
  }
}

// With n the normalized row, g the gradient, w the weight and r what the row was multiplied by:
// r (w g - n mean(w g n)), of layer norm less r mean(w g).
template <class T>
void differentiate(const Norm& task, int64_t first, int64_t last) {
  const Affine affine = affine_of<T>(task);
  const int64_t length = task.length, all = padded(length);
  const float number = static_cast<float>(length);
  std::vector<float> normalized(all), gradient(all);
  float *n = normalized.data(), *g = gradient.data();
  for (int64_t part = first; part < last; ++part) {
    float* of_weight = task.of_weight == nullptr ? nullptr : task.of_weight + part * length;
    float* of_bias = task.of_bias == nullptr ? nullptr : task.of_bias + part * length;
    if (of_weight != nullptr) std::fill(of_weight, of_weight + length, 0.0f);
    if (of_bias != nullptr) std::fill(of_bias, of_bias + length, 0.0f);
    const int64_t end = std::min(task.rows, (part + 1) * task.rows_of_part);
    for (int64_t row = part * task.rows_of_part; row < end; ++row) {
      widen_row<T>(task.x, row, length, n);
      widen_row<T>(task.grad, row, length, g);
      const float inverse = normalize_row(task, n);
      if (of_weight != nullptr) {
        for (int64_t k = 0; k < length; ++k) of_weight[k] += g[k] * n[k];
      }
      if (of_bias != nullptr) {
        for (int64_t k = 0; k < length; ++k) of_bias[k] += g[k];
      }
      if (task.out == nullptr) continue;
      if (!affine.scale.empty()) {
        for (int64_t k = 0; k < length; ++k) g[k] *= affine.scale[k];
      }
      const float along = dot(g, n, all) / number;
      const float mean = task.centered ? sum(g, all) / number : 0.0f;
      T* dx = static_cast<T*>(task.out) + row * length;
      for (int64_t k = 0; k < length; ++k) {
        dx[k] = narrow<T>(((g[k] - mean) - n[k] * along) * inverse);
      }
    }
  }
}

template <class T>
void sum_parts(float* parts, int64_t num_parts, int64_t length, void* sums) {
  for (int64_t part = 1; part < num_parts; ++part) {
    for (int64_t k = 0; k < length; ++k) parts[k] += parts[part * length + k];
  }
  for (int64_t k = 0; k < length; ++k) static_cast<T*>(sums)[k] = narrow<T>(parts[k]);
}

// Calls `work` with a value of the type.
template <class Work>
void with_type(FloatType type, const Work& work) {
  switch (type) {
    case FloatType::kFloat32:
      return work(0.0f);
    case FloatType::kBFloat16:
      return work(BFloat16());
    case FloatType::kFloat16:
      return work(Float16());
  }
}

void normalize(const Norm& task, int64_t first, int64_t last) {
  with_type(task.type, [&](auto type) { normalize<decltype(type)>(task, first, last); });
}

void differentiate(const Norm& task, int64_t first, int64_t last) {
  with_type(task.type, [&](auto type) { differentiate<decltype(type)>(task, first, last); });
}

void sum_parts(float* parts, int64_t num_parts, int64_t length, FloatType type, void* sums) {
  with_type(type, [&](auto one) { sum_parts<decltype(one)>(parts, num_parts, length, sums); });
}

// The kernels of one instruction set.
constexpr NormKernels kNormKernels = {normalize, differentiate, sum_parts};

}  // namespace
}  // namespace laconic
