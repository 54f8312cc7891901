#include <immintrin.h>

#include "adamw-inl.h"

namespace laconic {
namespace {

template <bool kSigned, int kBits>
class Avx2Codes {
 public:
  static constexpr int kLanes = 8;
  explicit Avx2Codes(const DynamicMap& map)
      : map_(map),
        low_levels_(_mm256_loadu_ps(map.levels)),
        high_levels_(_mm256_loadu_ps(map.levels + 8)),
        slopes_(_mm256_loadu_ps(map.slopes)),
        offsets_(_mm256_loadu_ps(map.offsets)),
        last_(_mm256_cvtps_epi32(_mm256_loadu_ps(map.last))),
        zero_border_(_mm256_set1_ps(map.zero_border)),
        top_(_mm256_set1_ps(map.top)) {
    for (int d = 0; d < 6; ++d) borders_[d] = _mm256_set1_ps(map.borders[d]);
  }

  void load(const uint8_t* codes, float scale, float* x) const {
    if constexpr (kBits == 4) {
      const __m256i code =
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
      const __m256 low = _mm256_permutevar8x32_ps(low_levels_, code),
                   high = _mm256_permutevar8x32_ps(high_levels_, code);
      const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
      _mm256_storeu_ps(x, _mm256_mul_ps(_mm256_blendv_ps(low, high, is_high), _mm256_set1_ps(scale)));
    } else {
      for (int i = 0; i < kLanes; ++i) x[i] = map_.levels[codes[i]] * scale;
    }
  }

  void store(const float* x, float inverse, uint8_t* out) const {
    const __m256 n = _mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(inverse));
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), n);
    // A comparison that holds is -1.
    __m256i decade = greater(magnitude, borders_[0]);
    for (int d = 1; d < 6; ++d) decade = _mm256_add_epi32(decade, greater(magnitude, borders_[d]));
    decade = _mm256_sub_epi32(_mm256_setzero_si256(), decade);
    const __m256 line =
        _mm256_add_ps(_mm256_mul_ps(magnitude, _mm256_permutevar8x32_ps(slopes_, decade)),
                      _mm256_permutevar8x32_ps(offsets_, decade));
    __m256i number =
        _mm256_min_epi32(_mm256_cvttps_epi32(line), _mm256_permutevar8x32_epi32(last_, decade));
    number = _mm256_sub_epi32(number, greater(magnitude, top_));
    number = _mm256_and_si256(number, greater(magnitude, zero_border_));
    if (kSigned) {
      const __m256i negative = _mm256_srai_epi32(_mm256_castps_si256(n), 31);
      // The level of 1 has no negative: there is one level more above zero than below.
      const __m256i most = _mm256_add_epi32(_mm256_set1_epi32(zero_code(true, kBits) + 1), negative);
      number = _mm256_min_epi32(number, most);
      number = _mm256_sub_epi32(_mm256_xor_si256(number, negative), negative);
      number = _mm256_add_epi32(number, _mm256_set1_epi32(zero_code(true, kBits)));
    }
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(number), _mm256_extracti128_si256(number, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
  }

 private:
  static __m256i greater(__m256 a, __m256 b) {
    return _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GT_OQ));
  }
  const DynamicMap& map_;
  __m256 low_levels_, high_levels_;
  __m256 borders_[6], slopes_, offsets_;
  __m256i last_;
  __m256 zero_border_, top_;
};

}  // namespace

const AdamWKernels kAdamWAvx2 = kAdamWKernels<Avx2Codes>;

}  // namespace laconic
