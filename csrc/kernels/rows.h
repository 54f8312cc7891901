// Sums of rows picked from a matrix, on raw pointers. src/laconic/ops/reference/rows.py is the
// specification.
#pragma once

#include <cstdint>

#include "blockwise.h"

namespace laconic {

struct SumRows {
  const void* rows;
  FloatType type;  // of rows and of sums
  int64_t width;   // elements of a row
  const int64_t* index;
  const int64_t* offsets;  // entries [offsets[i], offsets[i + 1]) make sum i
  const float* weights;    // null: 1
  void* sums;
};

// Process sums [first, last).
struct RowsKernels {
  void (*sum)(const SumRows&, int64_t first, int64_t last);
};

extern const RowsKernels kRowsPortable;
extern const RowsKernels kRowsAvx2;
extern const RowsKernels kRowsAvx512;

}  // namespace laconic
