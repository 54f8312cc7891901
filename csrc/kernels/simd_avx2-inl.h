// The vector vocabulary of blockwise-inl.h in AVX2 and F16C: groups of 16. simd_portable-inl.h
// documents each member.
#pragma once

#include <immintrin.h>

#include "scalar-inl.h"

namespace laconic {
namespace {

struct Avx2 {
  static constexpr int kGroup = 16;
  using F = __m256;
  using I = __m256i;

  static __m256i load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }

  static void load(const BFloat16* x, F& even, F& odd) {
    const __m256i both = load256(x);
    even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(-65536)));
  }
  static void load(const Float16* x, F& even, F& odd) {
    load_halves(_mm256_cvtph_ps(load128(x)), _mm256_cvtph_ps(load128(x + 8)), even, odd);
  }
  static void load(const float* x, F& even, F& odd) {
    load_halves(_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8), even, odd);
  }
  static void load_halves(F a, F b, F& even, F& odd) {
    const F low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
    even = _mm256_shuffle_ps(low, high, 0x88);
    odd = _mm256_shuffle_ps(low, high, 0xDD);
  }

  // Every NaN without sign and payload.
  static F quiet(F a) {
    const F nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    return _mm256_blendv_ps(a, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
  static void store(F even, F odd, BFloat16* out) {
    const I high = _mm256_slli_epi32(to_bfloat16(quiet(odd)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_or_si256(to_bfloat16(quiet(even)), high));
  }
  static void store(F even, F odd, Float16* out) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m128i low = _mm256_cvtps_ph(quiet(even), kNearest);
    const __m128i high = _mm256_cvtps_ph(quiet(odd), kNearest);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi16(low, high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8), _mm_unpackhi_epi16(low, high));
  }
  static void store(F even, F odd, float* out) {
    const F low = _mm256_unpacklo_ps(quiet(even), quiet(odd));
    const F high = _mm256_unpackhi_ps(quiet(even), quiet(odd));
    _mm256_storeu_ps(out, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(out + 8, _mm256_permute2f128_ps(low, high, 0x31));
  }

  static uint32_t words_max(const void* x, int64_t n) {
    __m256i largest = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += kGroup) {
      const __m256i words = load256(static_cast<const uint16_t*>(x) + i);
      largest = _mm256_max_epu16(largest, _mm256_and_si256(words, _mm256_set1_epi16(0x7FFF)));
    }
    return words_max(
        _mm_max_epu16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1)));
  }
  static uint32_t words_max(__m128i words) {
    // The only horizontal instruction finds a minimum, so it is given the complement.
    const __m128i flipped = _mm_xor_si128(words, _mm_set1_epi16(-1));
    return 0xFFFFu ^ static_cast<uint32_t>(_mm_extract_epi16(_mm_minpos_epu16(flipped), 0));
  }
  static uint32_t dwords_max(__m128i dwords) {
    dwords = _mm_max_epu32(dwords, _mm_shuffle_epi32(dwords, 0x4E));
    dwords = _mm_max_epu32(dwords, _mm_shuffle_epi32(dwords, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(dwords));
  }
  static uint32_t magnitude_max(const BFloat16* x, int64_t n) { return words_max(x, n) << 16; }
  static uint32_t magnitude_max(const Float16* x, int64_t n) {
    return bits_of(widen(Float16{static_cast<uint16_t>(words_max(x, n))}));
  }
  static uint32_t magnitude_max(const float* x, int64_t n) {
    __m256i largest = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 8) {
      largest = _mm256_max_epu32(largest,
                                 _mm256_and_si256(load256(x + i), _mm256_set1_epi32(0x7FFFFFFF)));
    }
    return dwords_max(
        _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1)));
  }

  static F splat(float value) { return _mm256_set1_ps(value); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F floor(F a) { return _mm256_floor_ps(a); }
  static I round_to_int(F a) { return _mm256_cvtps_epi32(a); }
  static I add_where_less(I index, F a, F b) {
    return _mm256_sub_epi32(index, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
  }

  // Binary search in four steps: each looks up the next threshold among 1, 2, 4, 8 and doubles the
  // index.
  class Table {
   public:
    Table(const float (&t)[16], float)
        : first_(_mm256_set1_ps(t[7])),
          second_(_mm256_setr_ps(t[3], t[11], 0, 0, 0, 0, 0, 0)),
          third_(_mm256_setr_ps(t[1], t[5], t[9], t[13], 0, 0, 0, 0)),
          fourth_(_mm256_setr_ps(t[0], t[2], t[4], t[6], t[8], t[10], t[12], t[14])) {}
    I count(F n) const {
      I index = step(_mm256_setzero_si256(), n, first_);
      index = step(index, n, _mm256_permutevar8x32_ps(second_, index));
      index = step(index, n, _mm256_permutevar8x32_ps(third_, index));
      return step(index, n, _mm256_permutevar8x32_ps(fourth_, index));
    }

   private:
    static I step(I index, F n, F threshold) {
      const I above = _mm256_castps_si256(_mm256_cmp_ps(n, threshold, _CMP_GT_OQ));
      return _mm256_sub_epi32(_mm256_add_epi32(index, index), above);
    }
    F first_, second_, third_, fourth_;
  };

  static F look_up(F low, F high, I index) {
    const F upper_half =
        _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));  // bit 3 becomes the sign
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index),
                            _mm256_permutevar8x32_ps(high, index), upper_half);
  }
  class Lookup {
   public:
    explicit Lookup(const float (&table)[16])
        : low_(_mm256_loadu_ps(table)), high_(_mm256_loadu_ps(table + 8)) {}
    F operator()(I index) const { return look_up(low_, high_, index); }

   private:
    F low_, high_;
  };

  static void uniform(const Keys& keys, uint64_t index, F& even, F& odd) {
    const I first = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int32_t>(index)),
                                     _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    even = uniform(keys, first);
    odd = uniform(keys, _mm256_add_epi32(first, _mm256_set1_epi32(1)));
  }
  static F uniform(const Keys& keys, I index) {
    I h = _mm256_xor_si256(index, _mm256_set1_epi32(static_cast<int32_t>(keys.first)));
    h = _mm256_mullo_epi32(_mm256_xor_si256(h, _mm256_srli_epi32(h, 16)),
                           _mm256_set1_epi32(0x7FEB352D));
    h = _mm256_xor_si256(h, _mm256_set1_epi32(static_cast<int32_t>(keys.second)));
    h = _mm256_mullo_epi32(_mm256_xor_si256(h, _mm256_srli_epi32(h, 15)),
                           _mm256_set1_epi32(static_cast<int32_t>(0x846CA68Bu)));
    h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(h, 8)), _mm256_set1_ps(0x1p-24f));
  }

  // 16 bytes, one per code, in both halves of a register.
  struct Codes {
    __m256i bytes;
    explicit Codes(const float (&codes)[16]) {
      uint8_t each[16];
      for (int i = 0; i < 16; ++i) each[i] = static_cast<uint8_t>(codes[i]);
      bytes = _mm256_broadcastsi128_si256(load128(each));
    }
  };
  static void store_pairs(const Codes& codes, I even, I odd, uint8_t* out) {
    const I words = _mm256_or_si256(even, _mm256_slli_epi32(odd, 16));
    const I each = _mm256_shuffle_epi8(codes.bytes, _mm256_packus_epi16(words, words));
    const I pairs = _mm256_maddubs_epi16(each, _mm256_set1_epi16(0x1001));  // even * 1 + odd * 16
    const I bytes = _mm256_packus_epi16(pairs, pairs);
    const int32_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
    std::memcpy(out, &low, 4);
    std::memcpy(out + 4, &high, 4);
  }

  static void store_bytes(I even, I odd, uint8_t* out) {
    // Saturate to 16 bits first: halves [e0-3 o0-3 | e4-7 o4-7], then order them as e0 o0 e1 o1 ...
    const I words = _mm256_packs_epi32(even, odd);
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    const __m128i first = _mm_unpacklo_epi16(low, _mm_unpackhi_epi64(low, low));
    const __m128i second = _mm_unpacklo_epi16(high, _mm_unpackhi_epi64(high, high));
    const __m128i bytes = _mm_max_epi8(_mm_packs_epi16(first, second), _mm_set1_epi8(-127));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  }

  // The low kBits of even and odd integers, saturated to the symmetric range, side by side.
  template <int kBits>
  static I packed_pairs(I even, I odd) {
    const I largest = _mm256_set1_epi32((1 << (kBits - 1)) - 1);
    const I smallest = _mm256_sub_epi32(_mm256_setzero_si256(), largest);
    const I mask = _mm256_set1_epi32((1 << kBits) - 1);
    const I low = _mm256_min_epi32(_mm256_max_epi32(even, smallest), largest);
    const I high = _mm256_min_epi32(_mm256_max_epi32(odd, smallest), largest);
    return _mm256_or_si256(_mm256_and_si256(low, mask),
                           _mm256_slli_epi32(_mm256_and_si256(high, mask), kBits));
  }
  // 16-bit lanes of two codes each -> 64-bit lanes of eight.
  template <int kBits>
  static I packed_eights(I pairs) {
    constexpr int64_t kFour = (int64_t{1} << 4 * kBits) - 1;
    const I fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 | 1 << (16 + 2 * kBits)));
    const I high = _mm256_srli_epi64(fours, 32 - 4 * kBits);
    return _mm256_or_si256(_mm256_and_si256(fours, _mm256_set1_epi64x(kFour)),
                           _mm256_and_si256(high, _mm256_set1_epi64x(kFour << 4 * kBits)));
  }
  template <int kBits>
  static void store_packed(I even, I odd, uint8_t* out) {
    const I pairs = packed_pairs<kBits>(even, odd);
    const I eights = packed_eights<kBits>(_mm256_packus_epi32(pairs, pairs));
    const int64_t first = _mm256_extract_epi64(eights, 0), second = _mm256_extract_epi64(eights, 2);
    std::memcpy(out, &first, kBits);
    std::memcpy(out + kBits, &second, kBits);
  }

  // --- dequantize; scales are finite here, so no value is NaN ---

  // Eight fp32 numbers, none of them NaN, as bf16 in the low halves of 32-bit lanes.
  static I to_bfloat16(F values) {
    const I bits = _mm256_castps_si256(values);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
  }
  static __m256i narrow16(F a, F b, BFloat16) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(to_bfloat16(a), to_bfloat16(b)), 0xD8);
  }
  static __m256i narrow16(F a, F b, Float16) {
    return _mm256_set_m128i(_mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                            _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  // 16 ready values: two-byte types as a table of low and one of high bytes, fp32 as two registers
  // of eight.
  template <class T>
  struct Values {
    __m128i low, high;
    Values(const float (&levels)[16], float scale) {
      const F s = splat(scale);
      const I words =
          narrow16(mul(_mm256_loadu_ps(levels), s), mul(_mm256_loadu_ps(levels + 8), s), T{});
      const __m128i a = _mm256_castsi256_si128(words), b = _mm256_extracti128_si256(words, 1);
      low = _mm_packus_epi16(_mm_and_si128(a, _mm_set1_epi16(0xFF)),
                             _mm_and_si128(b, _mm_set1_epi16(0xFF)));
      high = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
    }
  };
  template <class T>
  static void expand_pairs(const Values<T>& values, const uint8_t* codes, T* out) {
    const __m128i packed = load64(codes), mask = _mm_set1_epi8(15);
    const __m128i index = _mm_unpacklo_epi8(_mm_and_si128(packed, mask),
                                            _mm_and_si128(_mm_srli_epi16(packed, 4), mask));
    if constexpr (sizeof(T) == 4) {
      _mm256_storeu_ps(out, look_up(values.low, values.high, _mm256_cvtepu8_epi32(index)));
      _mm256_storeu_ps(out + 8, look_up(values.low, values.high,
                                        _mm256_cvtepu8_epi32(_mm_srli_si128(index, 8))));
    } else {
      const __m128i low = _mm_shuffle_epi8(values.low, index),
                    high = _mm_shuffle_epi8(values.high, index);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi8(low, high));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8), _mm_unpackhi_epi8(low, high));
    }
  }

  template <class T>
  static void expand_bytes(const uint8_t* codes, float scale, T* out) {
    store_scaled(_mm256_cvtepi8_epi32(load64(codes)), _mm256_cvtepi8_epi32(load64(codes + 8)),
                 scale, out);
  }

  // Where the two bytes are that hold each of eight codes, for the byte shuffle; `first` is the
  // byte where the codes start.
  template <int kBits>
  static __m128i bytes_of_eight(int first) {
    int8_t at[16];
    for (int i = 0; i < 8; ++i) {
      at[2 * i] = static_cast<int8_t>(first + i * kBits / 8);
      // The last code ends with its first byte; the byte behind it may not be there.
      at[2 * i + 1] = static_cast<int8_t>(i == 7 ? -1 : at[2 * i] + 1);
    }
    return load128(at);
  }
  // What shifts the top bit of each of eight codes to bit 15, as factors.
  template <int kBits>
  static __m128i shifts_of_eight() {
    int16_t factors[8];
    for (int i = 0; i < 8; ++i)
      factors[i] = static_cast<int16_t>(1 << (16 - kBits - i * kBits % 8));
    return load128(factors);
  }
  template <int kBits, class T>
  static void expand_packed(const uint8_t* codes, float scale, T* out) {
    static_assert(kBits >= 4 && kBits <= 8, "below 4 bits the second load would begin before `codes`");
    // The first eight bytes and the last eight; kBits = 5 or 6 of each hold the codes.
    const I bytes = _mm256_set_m128i(load64(codes + 2 * kBits - 8), load64(codes));
    const I at = _mm256_set_m128i(bytes_of_eight<kBits>(8 - kBits), bytes_of_eight<kBits>(0));
    const I factors = _mm256_broadcastsi128_si256(shifts_of_eight<kBits>());
    const I words =
        _mm256_srai_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, at), factors), 16 - kBits);
    store_scaled(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(words)),
                 _mm256_cvtepi16_epi32(_mm256_extracti128_si256(words, 1)), scale, out);
  }

  template <class T>
  static void store_scaled(I first, I second, float scale, T* out) {
    const F s = splat(scale);
    const F a = mul(_mm256_cvtepi32_ps(first), s), b = mul(_mm256_cvtepi32_ps(second), s);
    if constexpr (sizeof(T) == 4) {
      _mm256_storeu_ps(out, a);
      _mm256_storeu_ps(out + 8, b);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), narrow16(a, b, T{}));
    }
  }
};

template <>
struct Avx2::Values<float> {
  F low, high;
  Values(const float (&levels)[16], float scale)
      : low(mul(_mm256_loadu_ps(levels), splat(scale))),
        high(mul(_mm256_loadu_ps(levels + 8), splat(scale))) {}
};

}  // namespace
}  // namespace laconic
