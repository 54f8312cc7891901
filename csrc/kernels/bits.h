// One bit per value, on raw pointers. src/laconic/ops/reference/bits.py is the specification.
#pragma once

#include <cstdint>

namespace laconic {

// Values that one call of a kernel's inner loop takes: the bits of a 64-bit word.
constexpr int64_t kBitsGroup = 64;

struct PackBits {
  const void* x;
  int itemsize;        // bytes of a value: 1, 2, 4 or 8
  uint64_t magnitude;  // the bits of a value that are zero if the value is: all but a float's sign
  int64_t length;
  uint8_t* codes;  // ceil(length / 8); bit i % 8 of byte i / 8 says whether value i is not zero
};

struct UnpackBits {
  const uint8_t* codes;
  int64_t length;
  int itemsize;
  uint64_t zero, one;  // the bits of the value that stands for a zero and for a one
  void* values;
};

struct SelectBits {
  const void* x;
  const uint8_t* codes;
  int64_t length;
  int itemsize;
  void* values;  // x where the bit is set, else zero
};

// Process groups [first, last) of kBitsGroup values; the last one may be shorter.
struct BitsKernels {
  void (*pack)(const PackBits&, int64_t first, int64_t last);
  void (*unpack)(const UnpackBits&, int64_t first, int64_t last);
  void (*select)(const SelectBits&, int64_t first, int64_t last);
};

extern const BitsKernels kBitsPortable;
extern const BitsKernels kBitsAvx2;
extern const BitsKernels kBitsAvx512;

}  // namespace laconic
