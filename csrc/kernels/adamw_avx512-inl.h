// Codes of Adam's moments with AVX-512, and with VBMI where the including file is compiled for it.
#pragma once

#include <immintrin.h>

#include "adamw-inl.h"

namespace laconic {
namespace {

template <bool kSigned, int kBits>
class Avx512Codes {
 public:
  static constexpr int kLanes = 64;

  explicit Avx512Codes(const DynamicMap& map) : map_(map) {
    // Line 0 is zero; line i begins above border i, and the last one is the level of 1.
    alignas(64) float slope[16] = {}, offset[16] = {};
    alignas(64) int32_t last[16] = {};
    for (float& border : borders_) border = float_of(kInfinityBits);
    int lines = 0;
    const auto begin_line = [&](float border, float its_slope, float its_offset, float its_last) {
      borders_[lines++] = border;
      slope[lines] = its_slope;
      offset[lines] = its_offset;
      last[lines] = static_cast<int32_t>(its_last);
    };
    begin_line(map.zero_border, map.slopes[0], map.offsets[0], map.last[0]);
    for (int d = 1; d < 7 && map.borders[d - 1] < 1.0f; ++d)
      begin_line(map.borders[d - 1], map.slopes[d], map.offsets[d], map.last[d]);
    begin_line(map.top, 0.0f, map.last[7] + 1.0f, map.last[7] + 1.0f);
    slope_ = _mm512_load_ps(slope);
    offset_ = _mm512_load_ps(offset);
    last_ = _mm512_load_si512(last);
    if (!kOneLevelALine) index_borders();
    levels_ = _mm512_loadu_ps(map.levels);
#ifdef __AVX512VBMI__
    for (int byte = 0; byte < 4; ++byte) {
      alignas(64) uint8_t bytes[256];
      for (int code = 0; code < 256; ++code) bytes[code] = bits_of(map.levels[code]) >> 8 * byte;
      for (int i = 0; i < 4; ++i) level_bytes_[byte][i] = _mm512_load_si512(bytes + 64 * i);
    }
#endif
  }

  void load(const uint8_t* codes, float scale, float* x) const {
    if constexpr (kBits == 4) {
      for (int i = 0; i < kLanes; i += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
        const __m512 level = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(bytes), levels_);
        _mm512_storeu_ps(x + i, _mm512_mul_ps(level, _mm512_set1_ps(scale)));
      }
      return;
    }
#ifdef __AVX512VBMI__
    // Each of the four bytes of a level is found by itself. Unpacking works within 128 bits, hence
    // the codes are put in the order that it undoes.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i code = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes));
    const __mmask64 bit6 = _mm512_test_epi8_mask(code, _mm512_set1_epi8(0x40)),
                    bit7 = _mm512_movepi8_mask(code);
    const __mmask64 second = bit6 & ~bit7, third = bit7 & ~bit6, fourth = bit6 & bit7;
    const auto byte = [&](const __m512i* table) {
      __m512i found = _mm512_permutexvar_epi8(code, table[0]);
      found = _mm512_mask_permutexvar_epi8(found, second, code, table[1]);
      found = _mm512_mask_permutexvar_epi8(found, third, code, table[2]);
      return _mm512_mask_permutexvar_epi8(found, fourth, code, table[3]);
    };
    const __m512i b0 = byte(level_bytes_[0]), b1 = byte(level_bytes_[1]),
                  b2 = byte(level_bytes_[2]), b3 = byte(level_bytes_[3]);
    const __m512i low0 = _mm512_unpacklo_epi8(b0, b1), low1 = _mm512_unpackhi_epi8(b0, b1),
                  high0 = _mm512_unpacklo_epi8(b2, b3), high1 = _mm512_unpackhi_epi8(b2, b3);
    const __m512 scales = _mm512_set1_ps(scale);
    const auto put = [&](int i, __m512i level) {
      _mm512_storeu_ps(x + 16 * i, _mm512_mul_ps(_mm512_castsi512_ps(level), scales));
    };
    put(0, _mm512_unpacklo_epi16(low0, high0));
    put(1, _mm512_unpackhi_epi16(low0, high0));
    put(2, _mm512_unpacklo_epi16(low1, high1));
    put(3, _mm512_unpackhi_epi16(low1, high1));
#else
    for (int i = 0; i < kLanes; ++i) x[i] = map_.levels[codes[i]] * scale;  // gathers are no faster
#endif
  }

  void store(const float* x, float inverse, uint8_t* out) const {
    const __m512i low = _mm512_packus_epi32(codes(x, inverse), codes(x + 16, inverse)),
                  high = _mm512_packus_epi32(codes(x + 32, inverse), codes(x + 48, inverse));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
  }

 private:
  // Then there are too many borders near 1 for `line_by_exponent`, and lines are all to be found.
  static constexpr bool kOneLevelALine = kSigned && kBits == 4;

  // Codes of 16 numbers.
  __m512i codes(const float* x, float inverse) const {
    const __m512 n = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inverse));
    const __m512 magnitude = _mm512_abs_ps(n);
    const __m512i number = kOneLevelALine ? line_by_borders(magnitude) : number_on_line(magnitude);
    if (!kSigned) return number;
    const __m512i zero = _mm512_set1_epi32(zero_code(true, kBits));
    return _mm512_mask_sub_epi32(_mm512_add_epi32(number, zero),
                                 _mm512_movepi32_mask(_mm512_castps_si512(n)), zero,
                                 _mm512_min_epi32(number, zero));
  }

  __m512i number_on_line(__m512 magnitude) const {
    const __m512i line = line_by_exponent(magnitude);
    const __m512 place = _mm512_add_ps(_mm512_mul_ps(magnitude, _mm512_permutexvar_ps(line, slope_)),
                                       _mm512_permutexvar_ps(line, offset_));
    return _mm512_min_epi32(_mm512_cvttps_epi32(place), _mm512_permutexvar_epi32(line, last_));
  }

  __m512i line_by_borders(__m512 magnitude) const {
    __m512i line = _mm512_setzero_si512();
    for (const float border : borders_) {
      const __mmask16 beyond = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(border), _CMP_GT_OQ);
      line = _mm512_mask_add_epi32(line, beyond, line, _mm512_set1_epi32(1));
    }
    return line;
  }

  // A power of two holds one border at most: the exponent of a number and one comparison tell its
  // line.
  __m512i line_by_exponent(__m512 magnitude) const {
    // Of the index of a table of 32 only five bits are read: 96, the smallest exponent, is 0.
    const __m512i exponent = _mm512_max_epi32(
        _mm512_srli_epi32(_mm512_castps_si512(magnitude), 23), _mm512_set1_epi32(kSmallestExponent));
    const __m512 border = _mm512_permutex2var_ps(border_[0], exponent, border_[1]);
    const __m512i below = _mm512_permutex2var_epi32(lines_below_[0], exponent, lines_below_[1]);
    return _mm512_mask_add_epi32(below, _mm512_cmp_ps_mask(magnitude, border, _CMP_GT_OQ), below,
                                 _mm512_set1_epi32(1));
  }

  void index_borders() {
    alignas(64) float border[32];
    alignas(64) int32_t lines_below[32];
    int exponent = 0;
    for (int line = 0; exponent < 32; ++exponent) {
      lines_below[exponent] = line;
      const bool is_here = line < 8 && exponent_of(borders_[line]) == exponent;
      border[exponent] = is_here ? borders_[line++] : float_of(kInfinityBits);
    }
    for (int half = 0; half < 2; ++half) {
      border_[half] = _mm512_load_ps(border + 16 * half);
      lines_below_[half] = _mm512_load_si512(lines_below + 16 * half);
    }
  }

  static constexpr int kSmallestExponent = 96;
  static int exponent_of(float value) {
    const int exponent = static_cast<int>(bits_of(value) >> 23);
    return exponent < kSmallestExponent ? 0 : exponent - kSmallestExponent;
  }

  const DynamicMap& map_;
  float borders_[8];
  __m512 border_[2] = {}, slope_, offset_, levels_;
  __m512i lines_below_[2] = {}, last_;
#ifdef __AVX512VBMI__
  __m512i level_bytes_[4][4];
#endif
};

}  // namespace
}  // namespace laconic
