// Gated products and their gradients from codes of gate and up, on raw pointers.
// src/laconic/ops/reference/gated.py is the specification.
#pragma once

#include <cstdint>

#include "blockwise.h"

namespace laconic {

// x * sigmoid(x * (linear + cubic * x**2)).
struct Curve {
  float linear, cubic, three_cubic;
};

// Gate and up have one format, rows of `length` elements.
struct Gated {
  const uint8_t* gate_codes;
  const void* gate_scales;
  const uint8_t* up_codes;
  const void* up_scales;
  FloatType scale_type;
  int64_t length;
  int64_t block_size;
  int bits;                  // per code: 4, 5, 6 or 8
  const Codebook* codebook;  // of 4 bits; null where codes are integers
  Curve curve;
  FloatType type;    // of all that follow, rows of `length`, contiguous
  const void* grad;  // null: make the product
  void* product;     // or the gradient of gate
  void* grad_up;     // null without grad
};

// Process blocks [first, last); block b is block b % blocks_per_row of row b / blocks_per_row.
struct GatedKernels {
  void (*run)(const Gated&, int64_t first, int64_t last);
};

extern const GatedKernels kGatedPortable;
extern const GatedKernels kGatedAvx2;
extern const GatedKernels kGatedAvx512;

}  // namespace laconic
