// RMS norms over rows and their gradients, on raw pointers.
// src/laconic/activations/backward/norms.py has the same step by step.
#pragma once

#include <cstdint>

#include "blockwise.h"

namespace laconic {

// x [rows, length] and what is like it are contiguous and of one type, fp32 or bf16.
struct RmsNorm {
  const void* x;
  FloatType type;
  int64_t rows, length;
  const void* weight;  // [length], or null
  FloatType weight_type;
  float eps;
  float offset;        // added to the weight
  const void* grad;    // null: make the norm
  void* result;        // the norm, or the gradient of x; null where that is not wanted
  int64_t part_rows;   // rows whose contributions to the gradient of the weight make one sum
  float* grad_weight;  // [parts, length], zeros before; null where it is not wanted
};

// Process rows of parts [first, last); part p begins with row p * part_rows.
struct NormKernels {
  void (*run)(const RmsNorm&, int64_t first, int64_t last);
};

extern const NormKernels kNormsPortable;
extern const NormKernels kNormsAvx2;
extern const NormKernels kNormsAvx512;

}  // namespace laconic
