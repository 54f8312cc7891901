// AdamW with moments in 8 or 4 bits on raw pointers. src/laconic/ops/reference/adamw.py is the
// specification.
#pragma once

#include <cstdint>

#include "blockwise.h"

namespace laconic {

// Elements that share a scale.
constexpr int64_t state_block(int bits) { return bits == 8 ? 256 : 128; }

// The tables of one map, as src/laconic/ops/dynamic_map.py documents them.
struct DynamicMap {
  float levels[256];  // by code; 16 of them in 4 bits
  float borders[8];   // by decade from the second on
  float slopes[8];    // by decade, as the next two
  float offsets[8];
  float last[8];
  float zero_border;
  float top;
};

// As src/laconic/ops/adamw_scalars.py documents them.
struct AdamWScalars {
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float ratio_max;
  float inverse_correction2;
  float eps;
  float decay;
  float step_size;
};

// Codes and scales of one moment: rows cut into blocks. In 4 bits a byte has two codes, and every
// row begins at a byte.
struct Moment {
  uint8_t* codes;
  float* scales;
  const DynamicMap* map;
};

struct AdamW {
  void* parameter;  // rows of `length`, contiguous
  FloatType parameter_type;
  int64_t length;
  int bits;  // of a code of a moment
  Moment first, second;
  const void* gradient;  // dense
  FloatType gradient_type;
  const uint8_t* gradient_codes;  // or int8 codes in blocks of 128, flat; null if dense
  const float* gradient_scales;
  const uint8_t* residual_codes;  // int4; null if there is no residual
  const float* residual_scales;
  const float* factor;  // null: 1
  bool maximize;
  AdamWScalars scalars;
};

// Updates blocks [first, last); block b is block b % blocks_per_row of row b / blocks_per_row.
struct AdamWKernels {
  void (*update)(const AdamW&, int64_t first, int64_t last);
};

extern const AdamWKernels kAdamWPortable;
extern const AdamWKernels kAdamWAvx2;
extern const AdamWKernels kAdamWAvx512;
extern const AdamWKernels kAdamWAvx512Vbmi;

}  // namespace laconic
