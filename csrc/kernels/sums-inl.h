// Sums of the terms of a row in a fixed order, so that every instruction set gives the same bits:
// term k is added to sum k % kSums, then the upper half of the sums to the lower until one is left.
#pragma once

#include <cstdint>
#include <cstring>

namespace laconic {
namespace {

constexpr int64_t kSums = 64;

// Sixteen numbers, a cache line, which narrower instruction sets take in parts.
using Sixteen = float __attribute__((vector_size(64)));

constexpr int kParts = kSums / 16;

inline float total_of(const Sixteen (&sums)[kParts]) {
  const Sixteen total = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  float left[16];
  std::memcpy(left, &total, sizeof(left));
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) left[i] += left[i + half];
  }
  return left[0];
}

}  // namespace
}  // namespace laconic
