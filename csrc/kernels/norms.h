// Norms over the rows of a matrix, and their gradients, on raw pointers. `normalize` and
// `_steps_backward` of src/laconic/activations/backward/norms.py are the specification.
#pragma once

#include <cstdint>

#include "blockwise.h"

namespace laconic {

struct Norm {
  const void* x;
  FloatType type;  // of all tensors
  int64_t rows, length;
  const void* weight;  // null: 1
  const void* bias;    // null: 0
  bool unit_offset;    // the weight is one more than is stored
  bool centered;       // layer norm, else RMS norm
  float eps;
  const void* grad;  // of the result
  void* out;         // the result, or the gradient of x; null: not wanted
  // Sums over the rows of each part, fp32 [parts, length]; null: not wanted.
  float* of_weight;
  float* of_bias;
  int64_t rows_of_part;
};

// `normalize` processes rows [first, last), `differentiate` parts of rows; `sum_parts` adds up what
// that left in [parts, length], in order.
struct NormKernels {
  void (*normalize)(const Norm&, int64_t first, int64_t last);
  void (*differentiate)(const Norm&, int64_t first, int64_t last);
  void (*sum_parts)(float* parts, int64_t num_parts, int64_t length, FloatType type, void* sums);
};

extern const NormKernels kNormPortable;
extern const NormKernels kNormAvx2;
extern const NormKernels kNormAvx512;

}  // namespace laconic
