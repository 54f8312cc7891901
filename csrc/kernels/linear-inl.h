// Products of a few rows with the rows of a coded matrix: a row of codes becomes numbers in a
// buffer once for all rows of x. Over the vocabulary of blockwise-inl.h.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "blockwise-inl.h"
#include "linear.h"
#include "sums-inl.h"

namespace laconic {
namespace {

// So many outputs of so many rows are summed in registers of AVX-512.
constexpr int kOutputsAtOnce = 2, kRowsAtOnce = 2;

// kSums products of each pair of a row of weights and a row of x; rows begin `stride` apart.
template <int kOutputs, int kRows>
__attribute__((always_inline)) inline void add_products(
    const Sixteen* weights, int64_t weights_stride, const float* x, int64_t x_stride,
    Sixteen (&sums)[kOutputs][kRows][kParts]) {
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    Sixteen values[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) std::memcpy(&values[r], x + r * x_stride + 16 * part, 64);
#pragma GCC unroll 4
    for (int o = 0; o < kOutputs; ++o) {
      const Sixteen weight = weights[o * weights_stride + part];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[o][r][part] += weight * values[r];
    }
  }
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
    dequantize_any<S, float, kBits>(task.codebook, its_codes, scaling, size, weights + column);
  }
}

// Calls `work` with the number as a constant, 1 or 2.
template <class Work>
inline void with_one_or_two(int64_t number, const Work& work) {
  if (number == 1) {
    work(std::integral_constant<int, 1>());
  } else {
    work(std::integral_constant<int, 2>());
  }
}

template <int kOutputs, int kRows>
inline void multiply(const Linear& task, const Sixteen* weights, int64_t output, int64_t row) {
  const int64_t length = task.length, lines = ceil_div(length, 16);
  const float* x = task.x + row * length;
  Sixteen sums[kOutputs][kRows][kParts] = {};
  int64_t k = 0;
  for (; k + kSums <= length; k += kSums)
    add_products<kOutputs, kRows>(weights + k / 16, lines, x + k, length, sums);
  if (const int64_t rest = length - k) {  // filled up with zeros, whose products change no sum
    Sixteen last_weights[kOutputs][kParts] = {};
    float last_x[kRows][kSums] = {};
    for (int o = 0; o < kOutputs; ++o)
      std::memcpy(last_weights[o], weights + o * lines + k / 16, rest * sizeof(float));
    for (int r = 0; r < kRows; ++r) std::memcpy(last_x[r], x + r * length + k, rest * sizeof(float));
    add_products<kOutputs, kRows>(last_weights[0], kParts, last_x[0], kSums, sums);
  }
  for (int o = 0; o < kOutputs; ++o) {
    for (int r = 0; r < kRows; ++r)
      store(task, (row + r) * task.num_outputs + output + o, total_of(sums[o][r]));
  }
}

template <class S, int kBits>
void linear_range(const Linear& task, int64_t first, int64_t last) {
  const int64_t lines = ceil_div(task.length, 16);
  std::vector<Sixteen> weights(kOutputsAtOnce * lines);
  for (int64_t output = first; output < last; output += kOutputsAtOnce) {
    const int64_t outputs = std::min<int64_t>(kOutputsAtOnce, last - output);
    for (int64_t o = 0; o < outputs; ++o)
      dequantize_row<S, kBits>(task, output + o,
                               reinterpret_cast<float*>(weights.data() + o * lines));
    for (int64_t row = 0; row < task.num_rows; row += kRowsAtOnce) {
      const int64_t rows = std::min<int64_t>(kRowsAtOnce, task.num_rows - row);
      with_one_or_two(outputs, [&](auto some_outputs) {
        with_one_or_two(rows, [&](auto some_rows) {
          multiply<some_outputs, some_rows>(task, weights.data(), output, row);
        });
      });
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
