// The vector vocabulary of blockwise-inl.h in AVX-512 F, BW, VL and DQ: groups of 32.
// simd_portable-inl.h documents each member.
#pragma once

#include <immintrin.h>

#include "scalar-inl.h"
#include "simd_avx2-inl.h"

namespace laconic {
namespace {

struct Avx512 {
  static constexpr int kGroup = 32;
  using F = __m512;
  using I = __m512i;

  static __m256i load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

  static void load(const BFloat16* x, F& even, F& odd) {
    const I both = _mm512_loadu_si512(x);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-65536)));
  }
  static void load(const Float16* x, F& even, F& odd) {
    const I both = _mm512_loadu_si512(x);
    even = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both));
    odd = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
  }
  static void load(const float* x, F& even, F& odd) {
    const F a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const I evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even = _mm512_permutex2var_ps(a, evens, b);
    odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), b);
  }

  static F quiet(F a) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a,
                                _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
  }
  static void store(F even, F odd, BFloat16* out) {
    const I low = _mm512_srli_epi32(to_bfloat16(quiet(even)), 16);
    _mm512_storeu_si512(out, _mm512_mask_blend_epi16(0xAAAAAAAA, low, to_bfloat16(quiet(odd))));
  }
  static void store(F even, F odd, Float16* out) {
    const I low = _mm512_cvtepu16_epi32(narrow16(quiet(even), Float16{}));
    const I high = _mm512_cvtepu16_epi32(narrow16(quiet(odd), Float16{}));
    _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  static void store(F even, F odd, float* out) {
    const F low = quiet(even), high = quiet(odd);
    const I first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(low, first, high));
    const I second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(low, second, high));
  }

  static uint32_t words_max(const void* x, int64_t n) {
    I largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += kGroup) {
      const I words = _mm512_loadu_si512(static_cast<const uint16_t*>(x) + i);
      largest = _mm512_max_epu16(largest, _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF)));
    }
    const __m256i half =
        _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
    return Avx2::words_max(
        _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
  }
  static uint32_t magnitude_max(const BFloat16* x, int64_t n) { return words_max(x, n) << 16; }
  static uint32_t magnitude_max(const Float16* x, int64_t n) {
    return bits_of(widen(Float16{static_cast<uint16_t>(words_max(x, n))}));
  }
  static uint32_t magnitude_max(const float* x, int64_t n) {
    I largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16) {
      largest = _mm512_max_epu32(
          largest, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7FFFFFFF)));
    }
    const __m256i half =
        _mm256_max_epu32(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
    return Avx2::dwords_max(
        _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
  }

  static F splat(float value) { return _mm512_set1_ps(value); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F floor(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static I round_to_int(F a) { return _mm512_cvtps_epi32(a); }
  static I add_where_less(I index, F a, F b) {
    return _mm512_mask_add_epi32(index, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), index,
                                 _mm512_set1_epi32(1));
  }

  // 32 buckets over the range of the levels, narrow enough that each holds at most one threshold:
  // one lookup gives the count below the bucket, another the threshold to compare with. Which
  // bucket a number falls into is decided by the same instructions for thresholds and for values
  // and never decreases, so the count is exact wherever borders lie.
  class Table {
   public:
    Table(const float (&thresholds)[16], float level_max)
        : level_max_(_mm512_set1_ps(level_max)),
          buckets_per_unit_(_mm512_set1_ps(15.4f / level_max)) {
      float inside[32];
      int32_t below[32] = {};
      for (float& threshold : inside) threshold = float_of(kInfinityBits);
      for (int k = 0; k < 15 && thresholds[k] < float_of(kInfinityBits); ++k) {
        const int bucket = _mm512_cvtsi512_si32(bucket_of(_mm512_set1_ps(thresholds[k]))) & 31;
        inside[bucket] = thresholds[k];
        for (int b = bucket + 1; b < 32; ++b) ++below[b];
      }
      inside_low_ = _mm512_loadu_ps(inside);
      inside_high_ = _mm512_loadu_ps(inside + 16);
      below_low_ = _mm512_loadu_si512(below);
      below_high_ = _mm512_loadu_si512(below + 16);
    }
    I count(F n) const {
      const I bucket = bucket_of(n);
      const F threshold = _mm512_permutex2var_ps(inside_low_, bucket, inside_high_);
      const I below = _mm512_permutex2var_epi32(below_low_, bucket, below_high_);
      const __mmask16 above = _mm512_cmp_ps_mask(n, threshold, _CMP_GT_OQ);
      return _mm512_mask_add_epi32(below, above, below, _mm512_set1_epi32(1));
    }

   private:
    // 1..31 in the low five bits, the only ones that the lookups read.
    I bucket_of(F n) const {
      constexpr int kSmallerMagnitudeSignOfFirst = 2;
      const F clamped = _mm512_range_ps(n, level_max_, kSmallerMagnitudeSignOfFirst);
      // Adding 1.5 * 2**23 leaves the nearest integer in the low bits.
      return _mm512_castps_si512(
          _mm512_fmadd_ps(clamped, buckets_per_unit_, _mm512_set1_ps(0x1.8p23f + 16)));
    }
    F level_max_, buckets_per_unit_, inside_low_, inside_high_;
    I below_low_, below_high_;
  };

  class Lookup {
   public:
    explicit Lookup(const float (&table)[16]) : table_(_mm512_loadu_ps(table)) {}
    F operator()(I index) const { return _mm512_permutexvar_ps(index, table_); }

   private:
    F table_;
  };

  static void uniform(const Keys& keys, uint64_t index, F& even, F& odd) {
    const I first = _mm512_add_epi32(
        _mm512_set1_epi32(static_cast<int32_t>(index)),
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
    even = uniform(keys, first);
    odd = uniform(keys, _mm512_add_epi32(first, _mm512_set1_epi32(1)));
  }
  static F uniform(const Keys& keys, I index) {
    I h = _mm512_xor_si512(index, _mm512_set1_epi32(static_cast<int32_t>(keys.first)));
    h = _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 16)),
                           _mm512_set1_epi32(0x7FEB352D));
    h = _mm512_xor_si512(h, _mm512_set1_epi32(static_cast<int32_t>(keys.second)));
    h = _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 15)),
                           _mm512_set1_epi32(static_cast<int32_t>(0x846CA68Bu)));
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(h, 8)), _mm512_set1_ps(0x1p-24f));
  }

  // Codes as they appear in the low and in the high half of a byte.
  struct Codes {
    I low, high;
    explicit Codes(const float (&codes)[16])
        : low(_mm512_cvtps_epi32(_mm512_loadu_ps(codes))), high(_mm512_slli_epi32(low, 4)) {}
  };
  static void store_pairs(const Codes& codes, I even, I odd, uint8_t* out) {
    const I pairs = _mm512_or_si512(_mm512_permutexvar_epi32(even, codes.low),
                                    _mm512_permutexvar_epi32(odd, codes.high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(pairs));
  }

  static void store_bytes(I even, I odd, uint8_t* out) {
    const I words = _mm512_mask_blend_epi16(0xAAAAAAAA, even, _mm512_slli_epi32(odd, 16));
    const __m256i bytes = _mm256_max_epi8(_mm512_cvtsepi16_epi8(words), _mm256_set1_epi8(-127));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
  }

  template <int kBits>
  static void store_packed(I even, I odd, uint8_t* out) {
    const I largest = _mm512_set1_epi32((1 << (kBits - 1)) - 1);
    const I smallest = _mm512_sub_epi32(_mm512_setzero_si512(), largest);
    const I mask = _mm512_set1_epi32((1 << kBits) - 1);
    const I low = _mm512_min_epi32(_mm512_max_epi32(even, smallest), largest);
    const I high = _mm512_min_epi32(_mm512_max_epi32(odd, smallest), largest);
    const I pairs = _mm512_or_si512(_mm512_and_si512(low, mask),
                                    _mm512_slli_epi32(_mm512_and_si512(high, mask), kBits));
    const __m256i eights = Avx2::packed_eights<kBits>(_mm512_cvtepi32_epi16(pairs));
    // kBits bytes of each 64-bit lane, first within halves of 128 bits.
    int8_t at[16];
    for (int i = 0; i < 16; ++i)
      at[i] = static_cast<int8_t>(i < kBits ? i : i < 2 * kBits ? i - kBits + 8 : -1);
    const __m256i halves = _mm256_shuffle_epi8(eights, _mm256_broadcastsi128_si256(load128(at)));
    constexpr __mmask16 kBytes = (1 << 2 * kBits) - 1;
    _mm_mask_storeu_epi8(out, kBytes, _mm256_castsi256_si128(halves));
    _mm_mask_storeu_epi8(out + 2 * kBits, kBytes, _mm256_extracti128_si256(halves, 1));
  }

  // --- dequantize; scales are finite here, so no value is NaN ---

  // The bits of 16 fp32 numbers, none of them NaN, rounded to bf16 in the high halves; the low
  // halves are left over.
  static I to_bfloat16(F values) {
    const I bits = _mm512_castps_si512(values);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  }
  static __m256i narrow16(F values, BFloat16) {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(to_bfloat16(values), 16));
  }
  static __m256i narrow16(F values, Float16) {
    return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  // 16 ready values. Two-byte types hold them twice, because their lookup reads five bits of an
  // index and we have four.
  template <class T>
  struct Values {
    I table;
    Values(const float (&levels)[16], float scale) {
      const F products = mul(_mm512_loadu_ps(levels), splat(scale));
      if constexpr (sizeof(T) == 4) {
        table = _mm512_castps_si512(products);
      } else {
        table = _mm512_broadcast_i64x4(narrow16(products, T{}));
      }
    }
  };
  template <class T>
  static void expand_pairs(const Values<T>& values, const uint8_t* codes, T* out) {
    // A byte b = odd * 16 + even is spread over a pair of lanes so that their low bits read even
    // and odd.
    if constexpr (sizeof(T) == 4) {
      for (int half = 0; half < 2; ++half) {
        const I bytes = _mm512_cvtepu8_epi64(Avx2::load64(codes + 8 * half));
        const I index = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
        _mm512_storeu_si512(out + 16 * half, _mm512_permutexvar_epi32(index, values.table));
      }
    } else {
      const I bytes = _mm512_cvtepu8_epi32(load128(codes));
      const I index = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
      _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, values.table));
    }
  }

  template <class T>
  static void expand_bytes(const uint8_t* codes, float scale, T* out) {
    store_scaled(_mm512_cvtepi8_epi16(load256(codes)), scale, out);
  }

  template <int kBits, class T>
  static void expand_packed(const uint8_t* codes, float scale, T* out) {
    // Each part of 128 bits gets the 64 bits, on a border of 32, that hold its eight codes.
    constexpr __mmask32 kBytes = static_cast<__mmask32>((uint64_t{1} << 4 * kBits) - 1);
    const __m256i bytes = _mm256_maskz_loadu_epi8(kBytes, codes);
    constexpr int kFirst1 = kBits / 4, kFirst2 = 2 * kBits / 4, kFirst3 = 3 * kBits / 4;
    const I spread =
        _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 0, 0, kFirst1, kFirst1 + 1, 0, 0, kFirst2,
                                                   kFirst2 + 1, 0, 0, kFirst3, kFirst3 + 1, 0, 0),
                                 _mm512_castsi256_si512(bytes));
    I at = _mm512_castsi128_si512(Avx2::bytes_of_eight<kBits>(0));
    at = _mm512_inserti32x4(at, Avx2::bytes_of_eight<kBits>(kBits % 4), 1);
    at = _mm512_inserti32x4(at, Avx2::bytes_of_eight<kBits>(2 * kBits % 4), 2);
    at = _mm512_inserti32x4(at, Avx2::bytes_of_eight<kBits>(3 * kBits % 4), 3);
    const I factors = _mm512_broadcast_i32x4(Avx2::shifts_of_eight<kBits>());
    const I words =
        _mm512_srai_epi16(_mm512_mullo_epi16(_mm512_shuffle_epi8(spread, at), factors), 16 - kBits);
    store_scaled(words, scale, out);
  }

  // 32 signed 16-bit integers, each times the scale.
  static void store_scaled(I words, float scale, BFloat16* out) {
    const F s = splat(scale);
    const F even = mul(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16)), s);
    const F odd = mul(_mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16)), s);
    const I low = _mm512_srli_epi32(to_bfloat16(even), 16);
    _mm512_storeu_si512(out, _mm512_mask_blend_epi16(0xAAAAAAAA, low, to_bfloat16(odd)));
  }
  static void store_scaled(I words, float scale, Float16* out) {
    const __m256i first = narrow16(scaled(_mm512_castsi512_si256(words), scale), Float16{});
    const __m256i second = narrow16(scaled(_mm512_extracti64x4_epi64(words, 1), scale), Float16{});
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), second);
  }
  static void store_scaled(I words, float scale, float* out) {
    _mm512_storeu_ps(out, scaled(_mm512_castsi512_si256(words), scale));
    _mm512_storeu_ps(out + 16, scaled(_mm512_extracti64x4_epi64(words, 1), scale));
  }
  static F scaled(__m256i words, float scale) {
    return mul(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(words)), splat(scale));
  }
};

}  // namespace
}  // namespace laconic
