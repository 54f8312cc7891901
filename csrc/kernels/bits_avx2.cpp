#include <immintrin.h>

#include "bits-inl.h"

namespace laconic {
namespace {

// Choosing and selecting are plain loops, which compilers turn into vectors; they do not do so with
// comparisons into bits.
struct Avx2Bits : PlainBits {
  using PlainBits::nonzero;

  static __m256i load(const void* x) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(x));
  }
  static __m256i zeros() { return _mm256_setzero_si256(); }

  static uint64_t nonzero(const uint8_t* x, uint8_t magnitude) {
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(magnitude));
    uint64_t is_zero = 0;
    for (int i = 0; i < 2; ++i) {
      const __m256i equal = _mm256_cmpeq_epi8(_mm256_and_si256(load(x + 32 * i), mask), zeros());
      is_zero |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(equal))} << 32 * i;
    }
    return ~is_zero;
  }
  static uint64_t nonzero(const uint16_t* x, uint16_t magnitude) {
    const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(magnitude));
    uint64_t is_zero = 0;
    for (int i = 0; i < 2; ++i) {
      const __m256i low = _mm256_and_si256(load(x + 32 * i), mask);
      const __m256i high = _mm256_and_si256(load(x + 32 * i + 16), mask);
      // Packing works within halves of 128 bits, so the quarters come out as 0, 2, 1, 3.
      const __m256i equal = _mm256_permute4x64_epi64(
          _mm256_packs_epi16(_mm256_cmpeq_epi16(low, zeros()), _mm256_cmpeq_epi16(high, zeros())),
          0xD8);
      is_zero |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(equal))} << 32 * i;
    }
    return ~is_zero;
  }
  static uint64_t nonzero(const uint32_t* x, uint32_t magnitude) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(magnitude));
    uint64_t is_zero = 0;
    for (int i = 0; i < 8; ++i) {
      const __m256i equal = _mm256_cmpeq_epi32(_mm256_and_si256(load(x + 8 * i), mask), zeros());
      is_zero |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal))) << 8 * i;
    }
    return ~is_zero;
  }
};

}  // namespace

const BitsKernels kBitsAvx2 = kBitsKernels<Avx2Bits>;

}  // namespace laconic
