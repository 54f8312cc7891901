#include <immintrin.h>

#include "bits-inl.h"

namespace laconic {
namespace {

struct Avx512Bits : PlainBits {
  using PlainBits::choose;
  using PlainBits::nonzero;
  using PlainBits::select;

  static uint64_t nonzero(const uint8_t* x, uint8_t magnitude) {
    return _mm512_test_epi8_mask(_mm512_loadu_si512(x),
                                 _mm512_set1_epi8(static_cast<char>(magnitude)));
  }
  static uint64_t nonzero(const uint16_t* x, uint16_t magnitude) {
    const __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(magnitude));
    uint64_t bits = 0;
    for (int i = 0; i < 2; ++i) {
      bits |= uint64_t{_mm512_test_epi16_mask(_mm512_loadu_si512(x + 32 * i), mask)} << 32 * i;
    }
    return bits;
  }
  static uint64_t nonzero(const uint32_t* x, uint32_t magnitude) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int32_t>(magnitude));
    uint64_t bits = 0;
    for (int i = 0; i < 4; ++i) {
      bits |= uint64_t{_mm512_test_epi32_mask(_mm512_loadu_si512(x + 16 * i), mask)} << 16 * i;
    }
    return bits;
  }

  static void choose(uint64_t bits, uint16_t zero, uint16_t one, uint16_t* values) {
    const __m512i zeros = _mm512_set1_epi16(static_cast<int16_t>(zero));
    const __m512i ones = _mm512_set1_epi16(static_cast<int16_t>(one));
    for (int i = 0; i < 2; ++i) {
      const auto half = static_cast<__mmask32>(bits >> 32 * i);
      _mm512_storeu_si512(values + 32 * i, _mm512_mask_blend_epi16(half, zeros, ones));
    }
  }
  static void choose(uint64_t bits, uint32_t zero, uint32_t one, uint32_t* values) {
    const __m512i zeros = _mm512_set1_epi32(static_cast<int32_t>(zero));
    const __m512i ones = _mm512_set1_epi32(static_cast<int32_t>(one));
    for (int i = 0; i < 4; ++i) {
      const auto quarter = static_cast<__mmask16>(bits >> 16 * i);
      _mm512_storeu_si512(values + 16 * i, _mm512_mask_blend_epi32(quarter, zeros, ones));
    }
  }

  static void select(uint64_t bits, const uint16_t* x, uint16_t* values) {
    for (int i = 0; i < 2; ++i) {
      const auto half = static_cast<__mmask32>(bits >> 32 * i);
      _mm512_storeu_si512(values + 32 * i, _mm512_maskz_loadu_epi16(half, x + 32 * i));
    }
  }
  static void select(uint64_t bits, const uint32_t* x, uint32_t* values) {
    for (int i = 0; i < 4; ++i) {
      const auto quarter = static_cast<__mmask16>(bits >> 16 * i);
      _mm512_storeu_si512(values + 16 * i, _mm512_maskz_loadu_epi32(quarter, x + 16 * i));
    }
  }
};

}  // namespace

const BitsKernels kBitsAvx512 = kBitsKernels<Avx512Bits>;

}  // namespace laconic
