// The vocabulary of lossless-inl.h in AVX2 (with POPCNT and F16C): groups of 32 elements, of which
// the last goes through a buffer. Bytes are packed and spread eight at a time, by tables of
// shuffles. lossless_portable-inl.h documents each member.
#pragma once

#include <immintrin.h>

#include <array>

#include "lossless_portable-inl.h"

namespace laconic {
namespace {

struct LosslessAvx2 : LosslessPortable {
  using V = __m256i;
  using Half = __m128i;
  static constexpr int kGroup = 32;

  static V load(const uint8_t* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  }
  static Half load16(const uint8_t* at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  }
  static Half load8(const void* at) { return _mm_loadl_epi64(static_cast<const __m128i*>(at)); }
  static void store(uint8_t* at, V value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), value);
  }
  static V byte(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }

  // Calls group(i, count) for each group; the count is a constant where it is full.
  using Full = std::integral_constant<int, kGroup>;
  template <class Group>
  static void for_groups(int n, const Group& group) {
    int i = 0;
    for (; i + kGroup <= n; i += kGroup) group(i, Full{});
    if (i < n) group(i, n - i);
  }
  template <class Count>
  static constexpr bool kIsFull = std::is_same_v<Count, Full>;

  // Reads a group of words of which the last may not be there; these are 0.
  template <int kSize, class Count>
  struct Read {
    V vectors[kSize];
    Read(const uint8_t* group, Count count) {
      if constexpr (kIsFull<Count>) {
        for (int v = 0; v < kSize; ++v) vectors[v] = load(group + 32 * v);
      } else {
        uint8_t buffer[kGroup * kSize] = {};
        std::memcpy(buffer, group, count * kSize);
        for (int v = 0; v < kSize; ++v) vectors[v] = load(buffer + 32 * v);
      }
    }
    V operator[](int v) const { return vectors[v]; }
  };
  template <int kSize, class Count>
  static Read<kSize, Count> read(const uint8_t* group, Count count) {
    return {group, count};
  }
  template <int kSize, class Count>
  static void write(uint8_t* group, Count count, const V (&vectors)[kSize]) {
    if constexpr (kIsFull<Count>) {
      for (int v = 0; v < kSize; ++v) store(group + 32 * v, vectors[v]);
    } else {
      uint8_t buffer[kGroup * kSize];
      for (int v = 0; v < kSize; ++v) store(buffer + 32 * v, vectors[v]);
      std::memcpy(group, buffer, count * kSize);
    }
  }
  template <class Count>
  static void write(uint8_t* group, Count count, V vector) {
    const V vectors[1] = {vector};
    write<1>(group, count, vectors);
  }
  template <class Count>
  static void store_bits(uint8_t* plane, Count count, uint32_t bits) {
    if constexpr (kIsFull<Count>) {
      std::memcpy(plane, &bits, 4);
    } else {
      bits &= (uint32_t{1} << count) - 1;
      std::memcpy(plane, &bits, plane_nbytes(count));
    }
  }
  template <class Count>
  static uint32_t load_bits(const uint8_t* plane, Count count) {
    uint32_t bits = 0;
    std::memcpy(&bits, plane, kIsFull<Count> ? 4 : plane_nbytes(count));
    return bits;
  }
  template <class Count>
  static uint32_t all_of(Count count) {
    return kIsFull<Count> ? ~uint32_t{0} : (uint32_t{1} << count % kGroup) - 1;
  }

  // For each mask of eight: where its set places come from, packed; and where each place gets its
  // byte from packed ones, 0x80 if it is not set.
  struct Shuffles {
    uint8_t pack[256][8], spread[256][8];
  };
  static constexpr Shuffles make_shuffles() {
    Shuffles shuffles{};
    for (int mask = 0; mask < 256; ++mask) {
      int rank = 0;
      for (int place = 0; place < 8; ++place) {
        const bool is_set = mask >> place & 1;
        shuffles.spread[mask][place] = static_cast<uint8_t>(is_set ? rank : 0x80);
        if (is_set) shuffles.pack[mask][rank++] = static_cast<uint8_t>(place);
      }
    }
    return shuffles;
  }
  static const Shuffles& shuffles() {
    alignas(64) static constexpr Shuffles kShuffles = make_shuffles();
    return kShuffles;
  }

  static WordSums sums(const uint8_t* bytes, uint64_t nbytes) {
    uint32_t unused;
    return sums(bytes, nbytes, unused);
  }
  static WordSums sums(const uint8_t* bytes, uint64_t nbytes, uint32_t& bits_set) {
    // A lane of 64 bits has two words. Of v vectors, each added to `once` and then `once` to
    // `twice`, the k-th counts v - k times in `twice`.
    V set = _mm256_setzero_si256(), once = set, twice = set, once_high = set, twice_high = set;
    const uint64_t num_vectors = nbytes / 32;
    for (uint64_t k = 0; k < num_vectors; ++k) {
      const V words = load(bytes + 32 * k);
      set = _mm256_or_si256(set, words);
      once = _mm256_add_epi64(once, words);  // the high words times 2^32 go again below
      twice = _mm256_add_epi64(twice, once);
      once_high = _mm256_add_epi64(once_high, _mm256_srli_epi64(words, 32));
      twice_high = _mm256_add_epi64(twice_high, once_high);
    }
    uint64_t lanes[5][4];
    const V* const vectors[] = {&once, &twice, &once_high, &twice_high, &set};
    for (int v = 0; v < 5; ++v) store(reinterpret_cast<uint8_t*>(lanes[v]), *vectors[v]);
    WordSums sums;
    uint64_t all_set = 0;
    for (int lane = 0; lane < 4; ++lane) {
      const uint64_t high = lanes[2][lane], high_twice = lanes[3][lane];
      const uint64_t all = lanes[0][lane] - (high << 32) + high;
      const uint64_t all_twice = lanes[1][lane] - (high_twice << 32) + high_twice;
      sums.sum += all;
      sums.weighted += 8 * (num_vectors * all - all_twice) + (2 * lane + 1) * all + high;
      all_set |= lanes[4][lane];
    }
    bits_set = static_cast<uint32_t>(all_set | all_set >> 32);
    if (nbytes % 32) {
      uint32_t rest_set;
      sums.add(LosslessPortable::sums(bytes + 32 * num_vectors, nbytes % 32, rest_set),
               8 * num_vectors);
      bits_set |= rest_set;
    }
    return sums;
  }

  // Which of 32 words are not 0.
  template <int kSize, class Words>
  static uint32_t nonzero_mask(const Words& words) {
    const V zero = _mm256_setzero_si256();
    if constexpr (kSize == 1) return ~mask_of(_mm256_cmpeq_epi8(words[0], zero));
    if constexpr (kSize == 2) {
      return ~mask_of(
          packed(_mm256_cmpeq_epi16(words[0], zero), _mm256_cmpeq_epi16(words[1], zero)));
    }
    uint32_t bits = 0;
    for (int v = 0; v < kSize; ++v) {
      const V equal = _mm256_cmpeq_epi32(words[v], zero);
      bits |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal))) << 8 * v;
    }
    return ~bits;
  }
  static uint32_t mask_of(V bytes) { return static_cast<uint32_t>(_mm256_movemask_epi8(bytes)); }
  // Bytes of 16 and 16 words whose high byte repeats the sign, in order.
  static V packed(V a, V b) { return _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xD8); }

  template <int kSize>
  static int count_nonzero(const uint8_t* words, int n) {
    int count = 0;
    for_groups(n, [&](int i, auto size) {
      count += _mm_popcnt_u32(nonzero_mask<kSize>(read<kSize>(words + i * kSize, size)));
    });
    return count;
  }

  template <int kSize>
  static int compact(const uint8_t* words, int n, uint8_t* mask_out, uint8_t* nonzero) {
    uint8_t* next = nonzero;
    for_groups(n, [&](int i, auto count) {
      const auto group = read<kSize>(words + i * kSize, count);
      uint8_t bytes[kGroup * kSize];
      for (int v = 0; v < kSize; ++v) store(bytes + 32 * v, group[v]);
      const uint32_t bits = nonzero_mask<kSize>(group);
      store_bits(mask_out + i / 8, count, bits);
      for (int q = 0; q < 4; ++q) {
        const uint32_t mask = bits >> 8 * q & 0xFF;
        const Half places = load8(shuffles().pack[mask]);
        const uint8_t* const eight = bytes + 8 * q * kSize;
        if constexpr (kSize == 1) {
          _mm_storel_epi64(reinterpret_cast<__m128i*>(next),
                           _mm_shuffle_epi8(load8(eight), places));
        } else if constexpr (kSize == 2) {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(next),
                           _mm_shuffle_epi8(load16(eight), of_pairs(places)));
        } else {
          store(next, _mm256_permutevar8x32_epi32(load(eight), _mm256_cvtepu8_epi32(places)));
        }
        next += kSize * _mm_popcnt_u32(mask);
      }
    });
    return static_cast<int>(next - nonzero) / kSize;
  }
  // Places of words of two bytes as places of their bytes; 0x80 and more stays so.
  static Half of_pairs(Half places) {
    const Half doubled = _mm_adds_epu8(places, places);
    return _mm_unpacklo_epi8(doubled, _mm_adds_epu8(doubled, _mm_set1_epi8(1)));
  }

  template <int kSize>
  static void spread(const uint8_t* mask_in, const uint8_t* nonzero, int n, uint8_t* words) {
    const uint8_t* next = nonzero;
    for_groups(n, [&](int i, auto count) {
      const uint32_t bits = load_bits(mask_in + i / 8, count);
      uint8_t bytes[kGroup * kSize];
      for (int q = 0; q < 4; ++q) {
        const uint32_t mask = bits >> 8 * q & 0xFF;
        const Half places = load8(shuffles().spread[mask]);
        uint8_t* const eight = bytes + 8 * q * kSize;
        if constexpr (kSize == 1) {
          _mm_storel_epi64(reinterpret_cast<__m128i*>(eight),
                           _mm_shuffle_epi8(load8(next), places));
        } else if constexpr (kSize == 2) {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(eight),
                           _mm_shuffle_epi8(load16(next), of_pairs(places)));
        } else {
          const V lanes = _mm256_cvtepu8_epi32(places);
          const V absent = _mm256_srai_epi32(_mm256_slli_epi32(lanes, 24), 31);
          store(eight, _mm256_andnot_si256(absent, _mm256_permutevar8x32_epi32(load(next), lanes)));
        }
        next += kSize * _mm_popcnt_u32(mask);
      }
      std::memcpy(words + i * kSize, bytes, count * kSize);
    });
  }

  // Where `mask` has a bit the result has a's, elsewhere b's.
  static V choose_bits(int mask, V a, V b) {
    return _mm256_or_si256(_mm256_and_si256(byte(mask), a), _mm256_andnot_si256(byte(mask), b));
  }
  // The low and the high bytes of 32 words of 16 bits.
  static V low_bytes(V a, V b) {
    const V mask = _mm256_set1_epi16(0xFF);
    return _mm256_permute4x64_epi64(
        _mm256_packus_epi16(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)), 0xD8);
  }
  static V high_bytes(V a, V b) {
    return _mm256_permute4x64_epi64(
        _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)), 0xD8);
  }
  // The reverse.
  static void whole_words(V low, V high, V (&words)[2]) {
    low = _mm256_permute4x64_epi64(low, 0xD8);
    high = _mm256_permute4x64_epi64(high, 0xD8);
    words[0] = _mm256_unpacklo_epi8(low, high);
    words[1] = _mm256_unpackhi_epi8(low, high);
  }
  // The exponents and the rest of bfloat16 words, from their low and high bytes, and the reverse.
  static V exponents_of(V low, V high) {
    return choose_bits(1, _mm256_srli_epi16(low, 7), _mm256_add_epi8(high, high));
  }
  static V rest_of(V low, V high) { return choose_bits(0x80, high, low); }
  static V low_of(V exponents, V rest) {
    return choose_bits(0x7F, rest, _mm256_slli_epi16(exponents, 7));
  }
  static V high_of(V exponents, V rest) {
    return choose_bits(0x80, rest, _mm256_srli_epi16(exponents, 1));
  }
  // Bit b of each byte.
  static uint32_t bits_of_bytes(V bytes, int b) { return mask_of(_mm256_slli_epi16(bytes, 7 - b)); }
  // The bytes with `bits` set where the mask is, which were not set before.
  static V set_where(V bytes, uint32_t mask, int bits) {
    return _mm256_or_si256(bytes, _mm256_and_si256(spread_mask(mask), byte(bits)));
  }
  // All bits of byte k are bit k of the mask.
  static V spread_mask(uint32_t mask) {
    const V repeated = _mm256_shuffle_epi8(
        _mm256_set1_epi32(static_cast<int>(mask)),
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const V bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    return _mm256_cmpeq_epi8(_mm256_and_si256(repeated, bit), bit);
  }

  static void split(BFloat16Word, const uint8_t* words, int n, uint8_t* exponents,
                    uint8_t* const (&bytes)[3], uint8_t*) {
    uint8_t* const plane = bytes[0];
    for_groups(n, [&](int i, auto count) {
      const auto word = read<2>(words + 2 * i, count);
      const V low = low_bytes(word[0], word[1]), high = high_bytes(word[0], word[1]);
      store(exponents + i, exponents_of(low, high));
      write(plane + i, count, rest_of(low, high));
    });
  }
  static void split(Float32Word, const uint8_t* words, int n, uint8_t* exponents,
                    uint8_t* const (&bytes)[3], uint8_t*) {
    uint8_t *const first = bytes[0], *const second = bytes[1], *const third = bytes[2];
    for_groups(n, [&](int i, auto count) {
      const auto word = read<4>(words + 4 * i, count);
      V low[2], high[2];  // halves of the words, 16 each
      for (int v = 0; v < 2; ++v) {
        const V a = word[2 * v], b = word[2 * v + 1], mask = _mm256_set1_epi32(0xFFFF);
        low[v] = _mm256_permute4x64_epi64(
            _mm256_packus_epi32(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)), 0xD8);
        high[v] = _mm256_permute4x64_epi64(
            _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16)), 0xD8);
      }
      if (first) write(first + i, count, low_bytes(low[0], low[1]));
      if (second) write(second + i, count, high_bytes(low[0], low[1]));
      const V lower = low_bytes(high[0], high[1]), upper = high_bytes(high[0], high[1]);
      store(exponents + i, exponents_of(lower, upper));
      write(third + i, count, rest_of(lower, upper));
    });
  }
  static void split(Float16Word, const uint8_t* words, int n, uint8_t* exponents,
                    uint8_t* const (&bytes)[3], uint8_t* bits) {
    uint8_t* const plane = bytes[0];
    const int stride = plane_nbytes(n);
    for_groups(n, [&](int i, auto count) {
      const auto word = read<2>(words + 2 * i, count);
      const V high = high_bytes(word[0], word[1]);
      store(exponents + i, _mm256_and_si256(_mm256_srli_epi16(high, 2), byte(31)));
      write(plane + i, count, low_bytes(word[0], word[1]));
      store_bits(bits + i / 8, count, bits_of_bytes(high, 0));
      store_bits(bits + stride + i / 8, count, bits_of_bytes(high, 1));
      store_bits(bits + 2 * stride + i / 8, count, mask_of(high));
    });
  }
  template <int kShift, int kMask, int kFlipped, int... kBits>
  static void split(ByteWord<kShift, kMask, kFlipped, kBits...>, const uint8_t* words, int n,
                    uint8_t* exponents, uint8_t* const (&)[3], uint8_t* bits) {
    const int stride = plane_nbytes(n);
    for_groups(n, [&](int i, auto count) {
      const V word = read<1>(words + i, count)[0];
      const V shifted = _mm256_and_si256(_mm256_srli_epi16(word, kShift), byte(kMask));
      store(exponents + i, _mm256_xor_si256(shifted, byte(kFlipped)));
      uint8_t* plane = bits + i / 8;
      ((store_bits(plane, count, bits_of_bytes(word, kBits)), plane += stride), ...);
    });
  }

  static void join(BFloat16Word, const uint8_t* exponents, int n, const uint8_t* const (&bytes)[3],
                   const uint8_t*, uint8_t* words) {
    const uint8_t* const plane = bytes[0];
    for_groups(n, [&](int i, auto count) {
      const V exponent = load(exponents + i), rest = read<1>(plane + i, count)[0];
      V word[2];
      whole_words(low_of(exponent, rest), high_of(exponent, rest), word);
      write<2>(words + 2 * i, count, word);
    });
  }
  static void join(Float32Word, const uint8_t* exponents, int n, const uint8_t* const (&bytes)[3],
                   const uint8_t*, uint8_t* words) {
    const uint8_t *const first = bytes[0], *const second = bytes[1], *const third = bytes[2];
    for_groups(n, [&](int i, auto count) {
      const V exponent = load(exponents + i), rest = read<1>(third + i, count)[0];
      const V b0 = first ? read<1>(first + i, count)[0] : _mm256_setzero_si256();
      const V b1 = second ? read<1>(second + i, count)[0] : _mm256_setzero_si256();
      V low[2], high[2], word[4];
      whole_words(b0, b1, low);
      whole_words(low_of(exponent, rest), high_of(exponent, rest), high);
      for (int v = 0; v < 2; ++v) {
        const V a = _mm256_permute4x64_epi64(low[v], 0xD8);
        const V b = _mm256_permute4x64_epi64(high[v], 0xD8);
        word[2 * v] = _mm256_unpacklo_epi16(a, b);
        word[2 * v + 1] = _mm256_unpackhi_epi16(a, b);
      }
      write<4>(words + 4 * i, count, word);
    });
  }
  static void join(Float16Word, const uint8_t* exponents, int n, const uint8_t* const (&bytes)[3],
                   const uint8_t* bits, uint8_t* words) {
    const uint8_t* const plane = bytes[0];
    const int stride = plane_nbytes(n);
    for_groups(n, [&](int i, auto count) {
      V high = _mm256_slli_epi16(load(exponents + i), 2);
      high = set_where(high, load_bits(bits + i / 8, count), 1);
      high = set_where(high, load_bits(bits + stride + i / 8, count), 2);
      high = set_where(high, load_bits(bits + 2 * stride + i / 8, count), 0x80);
      V word[2];
      whole_words(read<1>(plane + i, count)[0], high, word);
      write<2>(words + 2 * i, count, word);
    });
  }
  template <int kShift, int kMask, int kFlipped, int... kBits>
  static void join(ByteWord<kShift, kMask, kFlipped, kBits...>, const uint8_t* exponents, int n,
                   const uint8_t* const (&)[3], const uint8_t* bits, uint8_t* words) {
    const int stride = plane_nbytes(n);
    for_groups(n, [&](int i, auto count) {
      V word = _mm256_xor_si256(load(exponents + i), byte(kFlipped));
      word = _mm256_slli_epi16(word, kShift);
      const uint8_t* plane = bits + i / 8;
      ((word = set_where(word, load_bits(plane, count), 1 << kBits), plane += stride), ...);
      write(words + i, count, word);
    });
  }

  static int encode_tier(const Tier& tier, const uint8_t* exponents, int n, uint8_t* planes,
                         uint8_t* passed) {
    return tier.width == 2 ? encode_codes<2>(tier, exponents, n, planes, passed)
                           : encode_codes<3>(tier, exponents, n, planes, passed);
  }
  template <int kWidth>
  static int encode_codes(const Tier& tier, const uint8_t* exponents, int n, uint8_t* planes,
                          uint8_t* passed) {
    const int stride = plane_nbytes(n);
    const V start = byte(tier.start), below = byte(tier.below), inner = byte(tier.inner);
    uint8_t* next = passed;
    for_groups(n, [&](int i, auto count) {
      V code = _mm256_sub_epi8(load(exponents + i), start);
      const V is_above = _mm256_cmpeq_epi8(_mm256_max_epu8(code, below), code);
      code = _mm256_sub_epi8(code, _mm256_and_si256(is_above, inner));
      code = _mm256_min_epu8(code, byte((1 << kWidth) - 1));
      uint32_t further = all_of(count);
      for (int b = 0; b < kWidth; ++b) {
        const uint32_t bits = bits_of_bytes(code, b);
        store_bits(planes + b * stride + i / 8, count, bits);
        further &= bits;
      }
      for (int q = 0; q < 4; ++q) {
        const uint32_t mask = further >> 8 * q & 0xFF;
        _mm_storel_epi64(
            reinterpret_cast<__m128i*>(next),
            _mm_shuffle_epi8(load8(exponents + i + 8 * q), load8(shuffles().pack[mask])));
        next += _mm_popcnt_u32(mask);
      }
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
    // What each code stands for: a shuffle looks it up. The last one gives 0, for what comes from
    // `passed` to be put there.
    alignas(16) uint8_t table[16] = {};
    for (int code = 0; code < (1 << kWidth) - 1; ++code) {
      table[code] = static_cast<uint8_t>(tier.start + code + (code >= tier.below ? tier.inner : 0));
    }
    const V lookup = _mm256_broadcastsi128_si256(load16(table));
    for_groups(n, [&](int i, auto count) {
      V code = _mm256_setzero_si256();
      uint32_t further = all_of(count);
      for (int b = 0; b < kWidth; ++b) {
        const uint32_t bits = load_bits(planes + b * stride + i / 8, count);
        code = set_where(code, bits, 1 << b);
        further &= bits;
      }
      Half eights[4];
      for (int q = 0; q < 4; ++q) {
        const uint32_t mask = further >> 8 * q & 0xFF;
        eights[q] = _mm_shuffle_epi8(load8(passed), load8(shuffles().spread[mask]));
        passed += _mm_popcnt_u32(mask);
      }
      const V spread = _mm256_set_m128i(_mm_unpacklo_epi64(eights[2], eights[3]),
                                        _mm_unpacklo_epi64(eights[0], eights[1]));
      store(exponents + i, _mm256_or_si256(_mm256_shuffle_epi8(lookup, code), spread));
    });
  }

  template <class Word, int kSize, class Widen>
  static void add_words(const uint8_t* words, int64_t n, float* total, const Widen& widened) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      _mm256_storeu_ps(total + i,
                       _mm256_add_ps(_mm256_loadu_ps(total + i), widened(words + kSize * i)));
    }
    LosslessPortable::add(Word{}, words + kSize * i, n - i, total + i);
  }
  static void add(BFloat16Word, const uint8_t* words, int64_t n, float* total) {
    add_words<BFloat16Word, 2>(words, n, total, [](const uint8_t* at) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(at)), 16));
    });
  }
  static void add(Float16Word, const uint8_t* words, int64_t n, float* total) {
    add_words<Float16Word, 2>(words, n, total,
                              [](const uint8_t* at) { return _mm256_cvtph_ps(load16(at)); });
  }
  static void add(Float32Word, const uint8_t* words, int64_t n, float* total) {
    add_words<Float32Word, 4>(words, n, total,
                              [](const uint8_t* at) { return _mm256_castsi256_ps(load(at)); });
  }
};

}  // namespace
}  // namespace laconic
