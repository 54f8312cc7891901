// Rows times a matrix that is held as codes, on raw pointers. src/laconic/ops/reference/linear.py
// is the specification.
#pragma once

#include <cstdint>

#include "blockwise.h"

namespace laconic {

struct Linear {
  const float* x;  // rows of `length`, contiguous
  int64_t num_rows;
  int64_t length;
  const uint8_t* codes;  // a row for each output
  const void* scales;
  FloatType scale_type;
  int64_t block_size;
  int bits;                  // per code: 4, 5, 6 or 8
  const Codebook* codebook;  // of 4 bits; null where codes are integers
  int64_t num_outputs;
  void* out;  // rows of `num_outputs`, contiguous
  FloatType out_type;
};

// Process outputs [first, last) of all rows.
struct LinearKernels {
  void (*run)(const Linear&, int64_t first, int64_t last);
};

extern const LinearKernels kLinearPortable;
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512;

}  // namespace laconic
