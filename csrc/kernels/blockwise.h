// Block-wise quantization on raw pointers: what one call is told, and the two functions each
// instruction set provides. docs/formats.md defines every byte; src/laconic/ops/reference is the
// specification.
#pragma once

#include <cstdint>

namespace laconic {

// Element types; the numbers are those of src/laconic/ops/native.py.
enum class FloatType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// The tables of a 4-bit code, as src/laconic/ops/codebooks.py documents them.
struct Codebook {
  float levels[16];            // by code
  float sorted_levels[16];     // by index
  float codes[16];             // by index
  float thresholds[16];        // index = how many lie strictly below n
  float floor_thresholds[16];  // the same count gives the level at or below n
  float reciprocal_gaps[16];   // by index
  float zero_code;
};

// Elements of a stored gradient that share one scale.
constexpr int64_t kGradientBlock = 128;

struct Quantize {
  const void* x;  // rows of `length` elements, `row_stride` elements apart
  FloatType x_type;
  int64_t row_stride;
  int64_t length;
  int64_t block_size;  // 16, 32, 64, 128 or 256
  uint8_t* codes;      // rows of ceil(length * bits / 8), contiguous
  void* scales;        // rows of ceil(length / block_size), contiguous; of 2 bits twice as many
  FloatType scale_type;
  int bits;  // per code: 2, 4, 5, 6 or 8
  float level_max;
  const Codebook* codebook;  // of 4 bits; null where codes are integers
  bool stochastic;
  uint64_t seed;
  uint64_t first_index;  // linear index of the first element, for stochastic rounding
  const float* center;   // `length` numbers, subtracted from each row first; null: none
  const void* factor;    // of x's type, rows of `length`, contiguous; null: none
  void* product;         // factor * x, likewise
};

struct Dequantize {
  const uint8_t* codes;
  const void* scales;
  FloatType scale_type;
  int64_t length;
  int64_t block_size;
  void* values;  // rows of `length`, contiguous
  FloatType value_type;
  int bits;                  // per code: 2, 4, 5, 6 or 8
  const Codebook* codebook;  // of 4 bits; null where codes are integers
  const float* center;       // `length` numbers, added to each row; null: none
};

// Process blocks [first, last); block b is block b % blocks_per_row of row b / blocks_per_row.
struct BlockwiseKernels {
  void (*quantize)(const Quantize&, int64_t first, int64_t last);
  void (*dequantize)(const Dequantize&, int64_t first, int64_t last);
};

extern const BlockwiseKernels kBlockwisePortable;
extern const BlockwiseKernels kBlockwiseAvx2;
extern const BlockwiseKernels kBlockwiseAvx512;

}  // namespace laconic
