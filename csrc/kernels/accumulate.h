// The gradient store on raw pointers: flat int8 codes in blocks of 128 with fp32 scales, with or
// without an int4 residual. src/laconic/ops/reference/accumulate.py is the specification.
#pragma once

#include <cstdint>

#include "blockwise.h"

namespace laconic {

// Blocks whose sum of squares is one number; a power of two, so that parts are subtrees.
constexpr int64_t kSquarePart = 512;

struct Accumulate {
  int64_t length;  // elements
  uint8_t* codes;
  float* scales;
  uint8_t* residual_codes;  // null: int8 alone
  float* residual_scales;
  const void* gradient;  // contiguous
  FloatType gradient_type;
  float alpha;
};

struct SquareSum {
  int64_t length;
  const uint8_t* codes;
  const float* scales;
  const uint8_t* residual_codes;  // null: int8 alone
  const float* residual_scales;
  double* sums;  // one per part
};

// Accumulates blocks [first, last); sums up parts [first, last).
struct AccumulateKernels {
  void (*accumulate)(const Accumulate&, int64_t first, int64_t last);
  void (*square_sum)(const SquareSum&, int64_t first, int64_t last);
};

extern const AccumulateKernels kAccumulatePortable;
extern const AccumulateKernels kAccumulateAvx2;
extern const AccumulateKernels kAccumulateAvx512;

// v[0] + ... + v[n - 1] as a binary tree over neighbours, as if zeros filled v up to a power of
// two.
double tree_sum(const double* v, int64_t n);

}  // namespace laconic
