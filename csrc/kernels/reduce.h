// Sums of quantized gradients on raw pointers. src/laconic/ops/reference/reduce.py is the
// specification.
#pragma once

#include <cstdint>

#include "blockwise.h"

namespace laconic {

// One row per shard, `stride` elements apart.
template <class T>
struct Rows {
  const T* first;
  int64_t stride;
  const T* at(int64_t row, int64_t column) const { return first + row * stride + column; }
};

struct Sum {
  int64_t num_shards;
  int64_t length;       // elements per shard
  Rows<uint8_t> codes;  // int8
  Rows<float> scales;
  Rows<uint8_t> residual_codes;  // int4, two per byte; null: none
  Rows<float> residual_scales;
  const Codebook* codebook;  // of int4
  float factor;
  float* values;  // null: the sum is quantized into what follows
  uint8_t* new_codes;
  float* new_scales;
  uint8_t* new_residual_codes;
  float* new_residual_scales;
};

// Process blocks [first, last) of kGradientBlock elements.
struct ReduceKernels {
  void (*sum)(const Sum&, int64_t first, int64_t last);
};

extern const ReduceKernels kReducePortable;
extern const ReduceKernels kReduceAvx2;
extern const ReduceKernels kReduceAvx512;

}  // namespace laconic
