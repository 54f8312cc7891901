// The vocabulary of lossless-inl.h in AVX-512 with byte permutations and compressions (VBMI,
// VBMI2): groups of 64 elements, of which the last is masked. lossless_portable-inl.h documents
// each member.
#pragma once

#include <immintrin.h>

#include <array>

#include "lossless_portable-inl.h"

namespace laconic {
namespace {

struct LosslessAvx512 : LosslessPortable {
  using V = __m512i;

  static V load(const uint8_t* at) { return _mm512_loadu_si512(at); }
  static void store(uint8_t* at, V value) { _mm512_storeu_si512(at, value); }
  static V byte(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
  static __mmask64 first_of(int64_t n) { return _cvtu64_mask64(~uint64_t{0} >> (64 - n)); }

  // Calls group(i, mask) for each group of 64 elements; the mask is a constant where it is full.
  template <class Group>
  static void for_groups(int n, const Group& group) {
    int i = 0;
    for (; i + 64 <= n; i += 64) group(i, std::integral_constant<uint64_t, ~uint64_t{0}>{});
    if (i < n) group(i, ~uint64_t{0} >> (64 - (n - i)));
  }
  using Full = std::integral_constant<uint64_t, ~uint64_t{0}>;
  template <class Mask>
  static constexpr bool kIsFull = std::is_same_v<Mask, Full>;

  // Vector v of a group's kSize vectors of words; what the mask leaves out is 0 and not read.
  template <int kSize, class Mask>
  static V load_words(const uint8_t* group, int v, Mask mask) {
    if constexpr (kIsFull<Mask>) {
      return load(group + 64 * v);
    } else if constexpr (kSize == 1) {
      return _mm512_maskz_loadu_epi8(mask, group);
    } else if constexpr (kSize == 2) {
      return _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask >> 32 * v), group + 64 * v);
    } else {
      return _mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask >> 16 * v), group + 64 * v);
    }
  }
  template <int kSize, class Mask>
  static void store_words(uint8_t* group, int v, Mask mask, V words) {
    if constexpr (kIsFull<Mask>) {
      store(group + 64 * v, words);
    } else if constexpr (kSize == 1) {
      _mm512_mask_storeu_epi8(group, mask, words);
    } else if constexpr (kSize == 2) {
      _mm512_mask_storeu_epi16(group + 64 * v, static_cast<__mmask32>(mask >> 32 * v), words);
    } else {
      _mm512_mask_storeu_epi32(group + 64 * v, static_cast<__mmask16>(mask >> 16 * v), words);
    }
  }
  // 64 bits of a plane, of which the group has as many as the mask; the others are 0 and neither
  // read nor written.
  template <class Mask>
  static void store_bits(uint8_t* plane, Mask mask, uint64_t bits) {
    if constexpr (kIsFull<Mask>) {
      std::memcpy(plane, &bits, 8);
    } else {
      bits &= mask;
      std::memcpy(plane, &bits, (_mm_popcnt_u64(mask) + 7) / 8);
    }
  }
  template <class Mask>
  static uint64_t load_bits(const uint8_t* plane, Mask mask) {
    uint64_t bits = 0;
    std::memcpy(&bits, plane, kIsFull<Mask> ? 8 : (_mm_popcnt_u64(mask) + 7) / 8);
    return bits;
  }

  static WordSums sums(const uint8_t* bytes, uint64_t nbytes) {
    uint32_t unused;
    return sums_and_bits<false>(bytes, nbytes, unused);
  }
  static WordSums sums(const uint8_t* bytes, uint64_t nbytes, uint32_t& bits_set) {
    return sums_and_bits<true>(bytes, nbytes, bits_set);
  }
  template <bool kWithBits>
  static WordSums sums_and_bits(const uint8_t* bytes, uint64_t nbytes, uint32_t& bits_set) {
    // A lane of 64 bits has two words. Of v vectors, each added to `once` and then `once` to
    // `twice`, the k-th counts v - k times in `twice`.
    V set = _mm512_setzero_si512(), once = set, twice = set, once_high = set, twice_high = set;
    const uint64_t num_vectors = nbytes / 64;
    for (uint64_t k = 0; k < num_vectors; ++k) {
      const V words = load(bytes + 64 * k);
      if (kWithBits) set = _mm512_or_si512(set, words);
      once = _mm512_add_epi64(once, words);  // the high words times 2^32 go again below
      twice = _mm512_add_epi64(twice, once);
      once_high = _mm512_add_epi64(once_high, _mm512_srli_epi64(words, 32));
      twice_high = _mm512_add_epi64(twice_high, once_high);
    }
    once = _mm512_sub_epi64(once, _mm512_slli_epi64(once_high, 32));
    twice = _mm512_sub_epi64(twice, _mm512_slli_epi64(twice_high, 32));
    const V all = _mm512_add_epi64(once, once_high);
    const V all_twice = _mm512_add_epi64(twice, twice_high);
    const V places = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    const V in_vector = _mm512_add_epi64(_mm512_mullo_epi64(all, places), once_high);
    WordSums sums;
    sums.sum = static_cast<uint64_t>(_mm512_reduce_add_epi64(all));
    sums.weighted =
        16 * (num_vectors * sums.sum - static_cast<uint64_t>(_mm512_reduce_add_epi64(all_twice))) +
        static_cast<uint64_t>(_mm512_reduce_add_epi64(in_vector));
    bits_set = static_cast<uint32_t>(_mm512_reduce_or_epi32(set));
    if (nbytes % 64) {
      uint32_t rest_set;
      sums.add(LosslessPortable::sums(bytes + 64 * num_vectors, nbytes % 64, rest_set),
               16 * num_vectors);
      bits_set |= rest_set;
    }
    return sums;
  }

  static Histogram histogram(const uint8_t* exponents, int n, int removed_exponent, int removed,
                             bool wide) {
    Histogram histogram;
    histogram.total = n - removed;
    constexpr int kVectors = kSampleMax / 64;
    V values[kVectors];
    __mmask64 present[kVectors], others[kVectors];
    int kept = removed ? -removed : -1;
    V largest = _mm512_setzero_si512(), smallest = byte(255);
    for (int v = 0; v < kVectors; ++v) {
      const int left = std::min(std::max(n - 64 * v, 0), 64);
      values[v] = load(exponents + 64 * v);
      present[v] = left ? first_of(left) : 0;
      if (wide) present[v] = _mm512_mask_cmpneq_epi8_mask(present[v], values[v], byte(255));
      if (removed) {
        others[v] = _mm512_mask_cmpneq_epi8_mask(present[v], values[v], byte(removed_exponent));
        kept += static_cast<int>(_mm_popcnt_u64(present[v] & ~others[v]));
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      if (kept == 0) present[v] = others[v];  // where none is left they do not count as the largest
      largest = _mm512_mask_max_epu8(largest, present[v], largest, values[v]);
      smallest = _mm512_mask_min_epu8(smallest, present[v], smallest, values[v]);
    }
    const int last = reduce_max(largest);
    const int first = 255 - reduce_max(_mm512_xor_si512(smallest, byte(255)));
    histogram.largest = last;
    for (int e = std::max(first, last - (kExponents - 1)); e <= last; ++e) {
      int count = 0;
      for (int v = 0; v < kVectors; ++v) {
        count += static_cast<int>(
            _mm_popcnt_u64(_mm512_mask_cmpeq_epi8_mask(present[v], values[v], byte(e))));
      }
      histogram.counts[kExponents - 1 - last + e] = static_cast<uint16_t>(count);
    }
    const int place = kExponents - 1 - last + removed_exponent;
    if (kept > 0 && place >= 0) histogram.counts[place] = static_cast<uint16_t>(kept);
    return histogram;
  }
  static int reduce_max(V bytes) {
    const __m256i a =
        _mm256_max_epu8(_mm512_castsi512_si256(bytes), _mm512_extracti64x4_epi64(bytes, 1));
    __m128i b = _mm_max_epu8(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_max_epu8(b, _mm_srli_epi16(b, 8));
    // The smallest of eight 16-bit numbers is an instruction.
    b = _mm_andnot_si128(b, _mm_set1_epi16(0xFF));
    return 0xFF - _mm_extract_epi16(_mm_minpos_epu16(b), 0);
  }

  template <int kSize>
  static uint64_t nonzero_mask(V words) {
    if constexpr (kSize == 1) return _mm512_test_epi8_mask(words, words);
    if constexpr (kSize == 2) return _mm512_test_epi16_mask(words, words);
    return _mm512_test_epi32_mask(words, words);
  }

  template <int kSize>
  static int count_nonzero(const uint8_t* words, int n) {
    int count = 0;
    for_groups(n, [&](int i, auto mask) {
      for (int v = 0; v < kSize; ++v) {
        count += static_cast<int>(
            _mm_popcnt_u64(nonzero_mask<kSize>(load_words<kSize>(words + i * kSize, v, mask))));
      }
    });
    return count;
  }

  template <int kSize>
  static int compact(const uint8_t* words, int n, uint8_t* mask_out, uint8_t* nonzero) {
    uint8_t* next = nonzero;
    for_groups(n, [&](int i, auto mask) {
      uint64_t bits = 0;
      for (int v = 0; v < kSize; ++v) {
        const V group = load_words<kSize>(words + i * kSize, v, mask);
        const uint64_t present = nonzero_mask<kSize>(group);
        bits |= present << 64 / kSize % 64 * v;
        if constexpr (kSize == 1) {
          store(next, _mm512_maskz_compress_epi8(present, group));
        } else if constexpr (kSize == 2) {
          store(next, _mm512_maskz_compress_epi16(static_cast<__mmask32>(present), group));
        } else {
          store(next, _mm512_maskz_compress_epi32(static_cast<__mmask16>(present), group));
        }
        next += kSize * _mm_popcnt_u64(present);
      }
      store_bits(mask_out + i / 8, mask, bits);
    });
    return static_cast<int>(next - nonzero) / kSize;
  }

  template <int kSize>
  static void spread(const uint8_t* mask_in, const uint8_t* nonzero, int n, uint8_t* words) {
    const uint8_t* next = nonzero;
    for_groups(n, [&](int i, auto mask) {
      const uint64_t bits = load_bits(mask_in + i / 8, mask);
      for (int v = 0; v < kSize; ++v) {
        const uint64_t present = bits >> 64 / kSize % 64 * v & (~uint64_t{0} >> (64 - 64 / kSize));
        V group;
        if constexpr (kSize == 1) {
          group = _mm512_maskz_expand_epi8(present, load(next));
        } else if constexpr (kSize == 2) {
          group = _mm512_maskz_expand_epi16(static_cast<__mmask32>(present), load(next));
        } else {
          group = _mm512_maskz_expand_epi32(static_cast<__mmask16>(present), load(next));
        }
        store_words<kSize>(words + i * kSize, v, mask, group);
        next += kSize * _mm_popcnt_u64(present);
      }
    });
  }

  // Where `mask` has a bit the result has a's, elsewhere b's.
  static V choose_bits(int mask, V a, V b) {
    return _mm512_ternarylogic_epi32(byte(mask), a, b, 0xCA);
  }
  // The low (0) or high (1) bytes of 64 words of 16 bits.
  static V half_words(V a, V b, int half) {
    alignas(64) static constexpr auto kPlaces = [] {
      std::array<uint8_t, 64> places{};
      for (int i = 0; i < 64; ++i) places[i] = static_cast<uint8_t>(2 * i);
      return places;
    }();
    const V places = _mm512_add_epi8(_mm512_load_si512(kPlaces.data()), byte(half));
    return _mm512_permutex2var_epi8(a, places, b);
  }
  // 32 words of 16 bits from their low and high bytes: those from 32 v on.
  static V whole_words(V low, V high, int v) {
    alignas(64) static constexpr auto kPlaces = [] {
      std::array<uint8_t, 64> places{};
      for (int i = 0; i < 64; ++i) places[i] = static_cast<uint8_t>(i / 2 + i % 2 * 64);
      return places;
    }();
    const V places = _mm512_add_epi8(_mm512_load_si512(kPlaces.data()), byte(32 * v));
    return _mm512_permutex2var_epi8(low, places, high);
  }

  static void split(BFloat16Word, const uint8_t* words, int n, uint8_t* exponents,
                    uint8_t* const (&bytes)[3], uint8_t*) {
    uint8_t* const plane = bytes[0];
    for_groups(n, [&](int i, auto mask) {
      const V a = load_words<2>(words + 2 * i, 0, mask), b = load_words<2>(words + 2 * i, 1, mask);
      const V low = half_words(a, b, 0), high = half_words(a, b, 1);
      // The high byte's lower seven bits, one up, and the low byte's highest.
      store(exponents + i, choose_bits(1, _mm512_srli_epi16(low, 7), _mm512_add_epi8(high, high)));
      store_words<1>(plane + i, 0, mask, choose_bits(0x80, high, low));
    });
  }
  static void split(Float32Word, const uint8_t* words, int n, uint8_t* exponents,
                    uint8_t* const (&bytes)[3], uint8_t*) {
    uint8_t *const first = bytes[0], *const second = bytes[1], *const third = bytes[2];
    for_groups(n, [&](int i, auto mask) {
      V low[2], high[2];  // halves of the words, 32 each
      for (int v = 0; v < 2; ++v) {
        const V a = load_words<4>(words + 4 * i, 2 * v, mask);
        const V b = load_words<4>(words + 4 * i, 2 * v + 1, mask);
        low[v] = _mm512_permutex2var_epi16(a, even_words(0), b);
        high[v] = _mm512_permutex2var_epi16(a, even_words(1), b);
      }
      if (first) store_words<1>(first + i, 0, mask, half_words(low[0], low[1], 0));
      if (second) store_words<1>(second + i, 0, mask, half_words(low[0], low[1], 1));
      const V lower = half_words(high[0], high[1], 0), upper = half_words(high[0], high[1], 1);
      store(exponents + i,
            choose_bits(1, _mm512_srli_epi16(lower, 7), _mm512_add_epi8(upper, upper)));
      store_words<1>(third + i, 0, mask, choose_bits(0x80, upper, lower));
    });
  }
  static V even_words(int odd) {
    alignas(64) static constexpr auto kPlaces = [] {
      std::array<uint16_t, 32> places{};
      for (int i = 0; i < 32; ++i) places[i] = static_cast<uint16_t>(2 * i);
      return places;
    }();
    return _mm512_add_epi16(_mm512_load_si512(kPlaces.data()),
                            _mm512_set1_epi16(static_cast<short>(odd)));
  }
  static void split(Float16Word, const uint8_t* words, int n, uint8_t* exponents,
                    uint8_t* const (&bytes)[3], uint8_t* bits) {
    uint8_t* const plane = bytes[0];
    const int stride = plane_nbytes(n);
    for_groups(n, [&](int i, auto mask) {
      const V a = load_words<2>(words + 2 * i, 0, mask), b = load_words<2>(words + 2 * i, 1, mask);
      const V low = half_words(a, b, 0), high = half_words(a, b, 1);
      store(exponents + i, _mm512_and_si512(_mm512_srli_epi16(high, 2), byte(31)));
      store_words<1>(plane + i, 0, mask, low);
      store_bits(bits + i / 8, mask, _mm512_test_epi8_mask(high, byte(1)));
      store_bits(bits + stride + i / 8, mask, _mm512_test_epi8_mask(high, byte(2)));
      store_bits(bits + 2 * stride + i / 8, mask, _mm512_movepi8_mask(high));
    });
  }
  template <int kShift, int kMask, int kFlipped, int... kBits>
  static void split(ByteWord<kShift, kMask, kFlipped, kBits...>, const uint8_t* words, int n,
                    uint8_t* exponents, uint8_t* const (&)[3], uint8_t* bits) {
    const int stride = plane_nbytes(n);
    for_groups(n, [&](int i, auto mask) {
      const V word = load_words<1>(words + i, 0, mask);
      const V shifted = _mm512_and_si512(_mm512_srli_epi16(word, kShift), byte(kMask));
      store(exponents + i, _mm512_xor_si512(shifted, byte(kFlipped)));
      uint8_t* plane = bits + i / 8;
      ((store_bits(plane, mask, _mm512_test_epi8_mask(word, byte(1 << kBits))), plane += stride),
       ...);
    });
  }

  static void join(BFloat16Word, const uint8_t* exponents, int n, const uint8_t* const (&bytes)[3],
                   const uint8_t*, uint8_t* words) {
    const uint8_t* const plane = bytes[0];
    for_groups(n, [&](int i, auto mask) {
      const V exponent = load(exponents + i), rest = load_words<1>(plane + i, 0, mask);
      const V low = choose_bits(0x7F, rest, _mm512_slli_epi16(exponent, 7));
      const V high = choose_bits(0x80, rest, _mm512_srli_epi16(exponent, 1));
      store_words<2>(words + 2 * i, 0, mask, whole_words(low, high, 0));
      store_words<2>(words + 2 * i, 1, mask, whole_words(low, high, 1));
    });
  }
  static void join(Float32Word, const uint8_t* exponents, int n, const uint8_t* const (&bytes)[3],
                   const uint8_t*, uint8_t* words) {
    const uint8_t *const first = bytes[0], *const second = bytes[1], *const third = bytes[2];
    for_groups(n, [&](int i, auto mask) {
      const V exponent = load(exponents + i), rest = load_words<1>(third + i, 0, mask);
      const V b0 = first ? load_words<1>(first + i, 0, mask) : _mm512_setzero_si512();
      const V b1 = second ? load_words<1>(second + i, 0, mask) : _mm512_setzero_si512();
      const V b2 = choose_bits(0x7F, rest, _mm512_slli_epi16(exponent, 7));
      const V b3 = choose_bits(0x80, rest, _mm512_srli_epi16(exponent, 1));
      for (int v = 0; v < 2; ++v) {
        const V low = whole_words(b0, b1, v), high = whole_words(b2, b3, v);
        for (int w = 0; w < 2; ++w) {
          const V places = _mm512_add_epi16(alternating_words(), _mm512_set1_epi16(16 * w));
          store_words<4>(words + 4 * i, 2 * v + w, mask,
                         _mm512_permutex2var_epi16(low, places, high));
        }
      }
    });
  }
  static V alternating_words() {
    alignas(64) static constexpr auto kPlaces = [] {
      std::array<uint16_t, 32> places{};
      for (int i = 0; i < 32; ++i) places[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
      return places;
    }();
    return _mm512_load_si512(kPlaces.data());
  }
  static void join(Float16Word, const uint8_t* exponents, int n, const uint8_t* const (&bytes)[3],
                   const uint8_t* bits, uint8_t* words) {
    const uint8_t* const plane = bytes[0];
    const int stride = plane_nbytes(n);
    for_groups(n, [&](int i, auto mask) {
      const V low = load_words<1>(plane + i, 0, mask);
      V high = _mm512_slli_epi16(load(exponents + i), 2);
      high = set_where(high, load_bits(bits + i / 8, mask), 1);
      high = set_where(high, load_bits(bits + stride + i / 8, mask), 2);
      high = set_where(high, load_bits(bits + 2 * stride + i / 8, mask), 0x80);
      store_words<2>(words + 2 * i, 0, mask, whole_words(low, high, 0));
      store_words<2>(words + 2 * i, 1, mask, whole_words(low, high, 1));
    });
  }
  template <int kShift, int kMask, int kFlipped, int... kBits>
  static void join(ByteWord<kShift, kMask, kFlipped, kBits...>, const uint8_t* exponents, int n,
                   const uint8_t* const (&)[3], const uint8_t* bits, uint8_t* words) {
    const int stride = plane_nbytes(n);
    for_groups(n, [&](int i, auto mask) {
      V word = _mm512_xor_si512(load(exponents + i), byte(kFlipped));
      word = _mm512_slli_epi16(word, kShift);
      const uint8_t* plane = bits + i / 8;
      ((word = set_where(word, load_bits(plane, mask), 1 << kBits), plane += stride), ...);
      store_words<1>(words + i, 0, mask, word);
    });
  }
  // Sets bits that are not set.
  static V set_where(V bytes, uint64_t mask, int bits) {
    return _mm512_mask_add_epi8(bytes, mask, bytes, byte(bits));
  }

  static int encode_tier(const Tier& tier, const uint8_t* exponents, int n, uint8_t* planes,
                         uint8_t* passed) {
    if (tier.inner == 0) {
      return tier.width == 2 ? encode_codes<2, true>(tier, exponents, n, planes, passed)
                             : encode_codes<3, true>(tier, exponents, n, planes, passed);
    }
    return tier.width == 2 ? encode_codes<2, false>(tier, exponents, n, planes, passed)
                           : encode_codes<3, false>(tier, exponents, n, planes, passed);
  }
  template <int kWidth, bool kInnermost>
  static int encode_codes(const Tier& tier, const uint8_t* exponents, int n, uint8_t* planes,
                          uint8_t* passed) {
    const int stride = plane_nbytes(n);
    const V start = byte(tier.start), below = byte(tier.below), inner = byte(tier.inner);
    uint8_t* next = passed;
    for_groups(n, [&](int i, auto mask) {
      const V exponent = load(exponents + i);
      V code = _mm512_sub_epi8(exponent, start);
      if (!kInnermost) {
        code = _mm512_mask_sub_epi8(code, _mm512_cmpge_epu8_mask(code, below), code, inner);
      }
      code = _mm512_min_epu8(code, byte((1 << kWidth) - 1));
      uint64_t further = mask;
      for (int b = 0; b < kWidth; ++b) {
        const uint64_t bits = _mm512_test_epi8_mask(code, byte(1 << b));
        store_bits(planes + b * stride + i / 8, mask, bits);
        further &= bits;
      }
      store(next, _mm512_maskz_compress_epi8(further, exponent));
      next += _mm_popcnt_u64(further);
    });
    return static_cast<int>(next - passed);
  }

  static void decode_tier(const Tier& tier, const uint8_t* planes, int n, const uint8_t* passed,
                          uint8_t* exponents) {
    if (tier.width == 2) return decode_codes<2>(tier, planes, n, passed, exponents);
    decode_codes<3>(tier, planes, n, passed, exponents);
  }
  template <int kWidth>
  static void decode_codes(const Tier& tier, const uint8_t* planes, int n, const uint8_t* passed,
                           uint8_t* exponents) {
    const int stride = plane_nbytes(n);
    // What each code stands for, in the lowest bytes of a lane: a shuffle looks it up.
    alignas(16) uint8_t table[16] = {};
    for (int code = 0; code < 1 << kWidth; ++code) {
      table[code] = static_cast<uint8_t>(tier.start + code + (code >= tier.below ? tier.inner : 0));
    }
    const V lookup =
        _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    for_groups(n, [&](int i, auto mask) {
      V code = _mm512_setzero_si512();
      uint64_t further = mask;
      for (int b = 0; b < kWidth; ++b) {
        const uint64_t bits = load_bits(planes + b * stride + i / 8, mask);
        code = b ? set_where(code, bits, 1 << b) : _mm512_maskz_mov_epi8(bits, byte(1));
        further &= bits;
      }
      V value = _mm512_shuffle_epi8(lookup, code);
      value = _mm512_mask_expand_epi8(value, further, load(passed));
      passed += _mm_popcnt_u64(further);
      store(exponents + i, value);
    });
  }

  static int count_ones(int num_planes, const uint8_t* planes, int n) {
    const int stride = plane_nbytes(n);
    V count = _mm512_setzero_si512();
    for_groups(stride, [&](int i, auto mask) {
      V all = load_words<1>(planes + i, 0, mask);
      for (int p = 1; p < num_planes; ++p) {
        all = _mm512_and_si512(all, load_words<1>(planes + p * stride + i, 0, mask));
      }
      count = _mm512_add_epi64(count, _mm512_popcnt_epi64(all));
    });
    return static_cast<int>(_mm512_reduce_add_epi64(count));
  }

  template <class Widen>
  static void add_words(int64_t n, float* total, const Widen& widened) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      _mm512_storeu_ps(total + i,
                       _mm512_add_ps(_mm512_loadu_ps(total + i), widened(i, __mmask16{0xFFFF})));
    }
    if (i < n) {
      const auto mask = static_cast<__mmask16>(0xFFFF >> (16 - (n - i)));
      _mm512_mask_storeu_ps(
          total + i, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, total + i), widened(i, mask)));
    }
  }
  static void add(BFloat16Word, const uint8_t* words, int64_t n, float* total) {
    add_words(n, total, [&](int64_t i, __mmask16 mask) {
      const __m256i word = _mm256_maskz_loadu_epi16(mask, words + 2 * i);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(word), 16));
    });
  }
  static void add(Float16Word, const uint8_t* words, int64_t n, float* total) {
    add_words(n, total, [&](int64_t i, __mmask16 mask) {
      return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, words + 2 * i));
    });
  }
  static void add(Float32Word, const uint8_t* words, int64_t n, float* total) {
    add_words(n, total, [&](int64_t i, __mmask16 mask) {
      return _mm512_maskz_loadu_ps(mask, words + 4 * i);
    });
  }
};

}  // namespace
}  // namespace laconic
