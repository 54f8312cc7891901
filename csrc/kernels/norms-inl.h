// RMS norms row by row: a row is widened to fp32 on the way in, and plain loops, which compilers
// turn into vectors, do the rest.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "norms.h"
#include "scalar-inl.h"

namespace laconic {
namespace {

inline void widen_all(const void* from, FloatType type, int64_t n, float* to) {
  if (type == FloatType::kFloat32) {
    std::memcpy(to, from, n * sizeof(float));
  } else if (type == FloatType::kBFloat16) {
    const BFloat16* values = static_cast<const BFloat16*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = widen(values[i]);
  } else {
    const Float16* values = static_cast<const Float16*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = widen(values[i]);
  }
}

// The sum of a[i] * b[i], made in lanes whose order is the same on every instruction set.
inline float dot(const float* a, const float* b, int64_t n) {
  using Vector = float __attribute__((vector_size(64)));
  constexpr int64_t kWidth = 16, kVectors = 4;
  Vector sums[kVectors] = {}, left, right;
  int64_t i = 0;
  for (; i + kVectors * kWidth <= n; i += kVectors * kWidth) {
    for (int64_t k = 0; k < kVectors; ++k) {
      std::memcpy(&left, a + i + k * kWidth, sizeof(left));
      std::memcpy(&right, b + i + k * kWidth, sizeof(right));
      sums[k] += left * right;
    }
  }
  const Vector all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float lanes[kWidth];
  std::memcpy(lanes, &all, sizeof(lanes));
  for (int64_t lane = 0; i < n; ++i, lane = (lane + 1) % kWidth) lanes[lane] += a[i] * b[i];
  for (int64_t half = kWidth / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <class T>
void norms_as(const RmsNorm& task, int64_t first, int64_t last) {
  const int64_t n = task.length;
  const float count = static_cast<float>(n);
  std::vector<float> memory(3 * n, 1.0f);
  float* __restrict scale = memory.data();
  float* __restrict row = scale + n;
  float* __restrict grad = row + n;
  if (task.weight != nullptr) {
    widen_all(task.weight, task.weight_type, n, scale);
    for (int64_t i = 0; i < n; ++i) scale[i] += task.offset;
  }
  for (int64_t r = first * task.part_rows, end = std::min(task.rows, last * task.part_rows);
       r < end; ++r) {
    T* result = task.result == nullptr ? nullptr : static_cast<T*>(task.result) + r * n;
    widen_all(static_cast<const T*>(task.x) + r * n, task.type, n, row);
    const float inverse = 1.0f / std::sqrt(dot(row, row, n) / count + task.eps);
    for (int64_t i = 0; i < n; ++i) row[i] *= inverse;
    if (task.grad == nullptr) {
      for (int64_t i = 0; i < n; ++i) row[i] = rounded<T>(row[i] * scale[i]);
      store<T>(row, n, result);
      continue;
    }
    widen_all(static_cast<const T*>(task.grad) + r * n, task.type, n, grad);
    if (task.grad_weight != nullptr) {
      float* __restrict sums = task.grad_weight + r / task.part_rows * n;
      for (int64_t i = 0; i < n; ++i) sums[i] += grad[i] * row[i];
    }
    if (result == nullptr) continue;
    for (int64_t i = 0; i < n; ++i) grad[i] *= scale[i];
    const float along = dot(grad, row, n) / count;
    for (int64_t i = 0; i < n; ++i) grad[i] = rounded<T>((grad[i] - row[i] * along) * inverse);
    store<T>(grad, n, result);
  }
}

void norms(const RmsNorm& task, int64_t first, int64_t last) {
  task.type == FloatType::kFloat32 ? norms_as<float>(task, first, last)
                                   : norms_as<BFloat16>(task, first, last);
}

}  // namespace
}  // namespace laconic
