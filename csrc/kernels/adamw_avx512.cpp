#include <immintrin.h>

#include "adamw-inl.h"

namespace laconic {
namespace {

template <bool kSigned>
class Avx512Codes {
 public:
  static constexpr int kLanes = 16;
  static constexpr uint8_t kZero = kSigned ? 127 : 0;
  explicit Avx512Codes(const DynamicMap& map)
      : slopes_(table(map.slopes)),
        offsets_(table(map.offsets)),
        last_(_mm512_cvtps_epi32(table(map.last))),
        zero_border_(_mm512_set1_ps(map.zero_border)),
        top_(_mm512_set1_ps(map.top)) {
    for (int d = 0; d < 6; ++d) borders_[d] = _mm512_set1_ps(map.borders[d]);
  }

  void store(const float* x, float inverse, uint8_t* out) const {
    const __m512i one = _mm512_set1_epi32(1);
    const __m512 n = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inverse));
    const __m512 magnitude = _mm512_abs_ps(n);
    __m512i decade = _mm512_maskz_mov_epi32(greater(magnitude, borders_[0]), one);
    for (int d = 1; d < 6; ++d) {
      decade = _mm512_mask_add_epi32(decade, greater(magnitude, borders_[d]), decade, one);
    }
    const __m512 line =
        _mm512_add_ps(_mm512_mul_ps(magnitude, _mm512_permutexvar_ps(decade, slopes_)),
                      _mm512_permutexvar_ps(decade, offsets_));
    __m512i number =
        _mm512_min_epi32(_mm512_cvttps_epi32(line), _mm512_permutexvar_epi32(decade, last_));
    number = _mm512_mask_add_epi32(number, greater(magnitude, top_), number, one);
    number = _mm512_maskz_mov_epi32(greater(magnitude, zero_border_), number);
    if (kSigned) {
      const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(n));
      const __m512i zero = _mm512_set1_epi32(127);
      const __m512i below = _mm512_sub_epi32(zero, _mm512_min_epi32(number, zero));
      number = _mm512_mask_mov_epi32(_mm512_add_epi32(number, zero), negative, below);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(number));
  }

 private:
  static __m512 table(const float (&values)[8]) {
    return _mm512_castps256_ps512(_mm256_loadu_ps(values));
  }
  static __mmask16 greater(__m512 a, __m512 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  __m512 borders_[6], slopes_, offsets_;
  __m512i last_;
  __m512 zero_border_, top_;
};

}  // namespace

const AdamWKernels kAdamWAvx512 = kAdamWKernels<Avx512Codes>;

}  // namespace laconic
