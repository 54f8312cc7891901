// Sums of rows: a part of a sum that fits the first-level cache is made from all of its rows before
// the next one. Plain loops, which compilers turn into vectors.
#pragma once

#include <algorithm>

#include "rows.h"
#include "scalar-inl.h"

namespace laconic {
namespace {

constexpr int64_t kPartOfRow = 1024;

template <class T>
void sum_rows(const SumRows& task, int64_t first, int64_t last) {
  const T* rows = static_cast<const T*>(task.rows);
  T* sums = static_cast<T*>(task.sums);
  float total[kPartOfRow];
  for (int64_t i = first; i < last; ++i) {
    for (int64_t start = 0; start < task.width; start += kPartOfRow) {
      const int64_t size = std::min(kPartOfRow, task.width - start);
      std::fill(total, total + size, 0.0f);
      for (int64_t entry = task.offsets[i]; entry < task.offsets[i + 1]; ++entry) {
        const T* row = rows + task.index[entry] * task.width + start;
        if (task.weights == nullptr) {
          for (int64_t j = 0; j < size; ++j) total[j] += widen(row[j]);
        } else {
          const float weight = task.weights[entry];
          for (int64_t j = 0; j < size; ++j) total[j] += weight * widen(row[j]);
        }
      }
      T* sum = sums + i * task.width + start;
      for (int64_t j = 0; j < size; ++j) sum[j] = narrow<T>(total[j]);
    }
  }
}

void sum_rows(const SumRows& task, int64_t first, int64_t last) {
  switch (task.type) {
    case FloatType::kFloat32:
      return sum_rows<float>(task, first, last);
    case FloatType::kBFloat16:
      return sum_rows<BFloat16>(task, first, last);
    default:
      return sum_rows<Float16>(task, first, last);
  }
}

// The kernels of one instruction set.
constexpr RowsKernels kRowsKernels = {sum_rows};

}  // namespace
}  // namespace laconic
