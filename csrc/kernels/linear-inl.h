// Products of a few rows with the rows of a coded matrix: a row of codes becomes numbers in a
// buffer once for all rows of x. Over the vocabulary of blockwise-inl.h.
#pragma once

#include <algorithm>
#include <vector>

#include "blockwise-inl.h"
#include "linear.h"

namespace laconic {
namespace {

// Product k is added to sum k % kSums, whatever the instruction set: reference/linear.py.
constexpr int64_t kSums = 64;
// Sums of as many rows are kept in registers of AVX-512.
constexpr int kRowsAtOnce = 4;

// Sixteen numbers, which narrower instruction sets take in parts.
using Sixteen = float __attribute__((vector_size(64)));

inline void load(const float* from, Sixteen& to) { std::memcpy(&to, from, sizeof(to)); }

// sums[r][k % kSums] += weights[k] * x[r][k] for kRows rows.
template <int kRows>
inline void add_products(const float* weights, const float* x, int64_t length,
                         float (&sums)[kRowsAtOnce][kSums]) {
  constexpr int kParts = kSums / 16;
  Sixteen total[kRows][kParts] = {};
  int64_t k = 0;
  for (; k + kSums <= length; k += kSums) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      Sixteen weight, value;
      load(weights + k + 16 * part, weight);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        load(x + r * length + k + 16 * part, value);
        total[r][part] += weight * value;
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(sums[r], total[r], sizeof(sums[r]));
    for (int64_t i = 0; i < length - k; ++i) sums[r][i] += weights[k + i] * x[r * length + k + i];
  }
}

inline float total_of(float (&sums)[kSums]) {
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

inline void store(const Linear& task, int64_t at, float total) {
  switch (task.out_type) {
    case FloatType::kFloat32:
      static_cast<float*>(task.out)[at] = narrow<float>(total);
      break;
    case FloatType::kBFloat16:
      static_cast<BFloat16*>(task.out)[at] = narrow<BFloat16>(total);
      break;
    case FloatType::kFloat16:
      static_cast<Float16*>(task.out)[at] = narrow<Float16>(total);
      break;
  }
}

// One row of the matrix.
template <class S, int kBits>
inline void dequantize_row(const Linear& task, int64_t output, float* weights) {
  const uint8_t* codes = task.codes + output * ceil_div(task.length * kBits, 8);
  int64_t block = output * ceil_div(task.length, task.block_size);
  for (int64_t column = 0; column < task.length; column += task.block_size, ++block) {
    const int64_t size = std::min(task.block_size, task.length - column);
    const uint8_t* its_codes = codes + column * kBits / 8;
    const Scaling scaling(load_scale(task.scales, task.scale_type, block));
    prefetch(its_codes, size * kBits / 8);
    if (__builtin_expect(scaling.is_finite() && size % S::kGroup == 0, 1)) {
      dequantize_block<S, float, kBits>(task.codebook, its_codes, scaling, size, weights + column);
    } else {
      float padded[kMaxBlock];
      dequantize_padded<S, float, kBits>(task.codebook, its_codes, scaling, size, padded);
      std::memcpy(weights + column, padded, size * sizeof(float));
    }
  }
}

template <class S, int kBits>
void linear_range(const Linear& task, int64_t first, int64_t last) {
  std::vector<float> weights(task.length);
  alignas(64) float sums[kRowsAtOnce][kSums];
  for (int64_t output = first; output < last; ++output) {
    dequantize_row<S, kBits>(task, output, weights.data());
    for (int64_t row = 0; row < task.num_rows; row += kRowsAtOnce) {
      const float* x = task.x + row * task.length;
      const int64_t rows = std::min<int64_t>(kRowsAtOnce, task.num_rows - row);
      switch (rows) {
        case 1:
          add_products<1>(weights.data(), x, task.length, sums);
          break;
        case 2:
          add_products<2>(weights.data(), x, task.length, sums);
          break;
        case 3:
          add_products<3>(weights.data(), x, task.length, sums);
          break;
        default:
          add_products<4>(weights.data(), x, task.length, sums);
      }
      for (int64_t r = 0; r < rows; ++r)
        store(task, (row + r) * task.num_outputs + output, total_of(sums[r]));
    }
  }
}

template <class S>
void linear(const Linear& task, int64_t first, int64_t last) {
  with_bits(task.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    if constexpr (kBits != 2) linear_range<S, kBits>(task, first, last);
  });
}

}  // namespace
}  // namespace laconic
