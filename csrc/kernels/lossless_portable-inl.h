// The vocabulary of lossless-inl.h in plain C++, with the documentation; the others inherit it and
// replace what they do faster. Element counts are those of one block unless said otherwise; arrays
// in scratch memory have kSlack bytes behind them, everything else is read and written exactly.
#pragma once

#include <cstring>

#include "lossless-inl.h"

namespace laconic {
namespace {

struct LosslessPortable {
  template <class T>
  static T load(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value;
  }
  template <class T>
  static void store(uint8_t* at, T value) {
    std::memcpy(at, &value, sizeof(T));
  }
  template <int kSize>
  using Unsigned =
      std::conditional_t<kSize == 1, uint8_t, std::conditional_t<kSize == 2, uint16_t, uint32_t>>;

  // The sums of words, of any number of bytes, and their bitwise or where it is asked for.
  static WordSums sums(const uint8_t* bytes, uint64_t nbytes) {
    uint32_t unused;
    return sums(bytes, nbytes, unused);
  }
  static WordSums sums(const uint8_t* bytes, uint64_t nbytes, uint32_t& bits_set) {
    WordSums sums;
    uint32_t set = 0;
    const uint64_t num_words = nbytes / 4;
    for (uint64_t j = 0; j < num_words; ++j) {
      const uint32_t word = load<uint32_t>(bytes + 4 * j);
      set |= word;
      sums.sum += word;
      sums.weighted += (j + 1) * word;
    }
    if (nbytes % 4) {
      uint32_t word = 0;
      std::memcpy(&word, bytes + 4 * num_words, nbytes % 4);
      set |= word;
      sums.sum += word;
      sums.weighted += (num_words + 1) * word;
    }
    bits_set = set;
    return sums;
  }

  // How many of n exponents there are of each, `removed` fewer of `removed_exponent`. Where
  // exponents are wide, 255 counts only in the total. `exponents` is scratch memory.
  static Histogram histogram(const uint8_t* exponents, int n, int removed_exponent, int removed,
                             bool wide) {
    // Four counts of each, because one waits for the one before it and neighbours are alike.
    uint16_t quarters[4][256] = {}, counts[256];
    for (int i = 0; i < n; ++i) ++quarters[i % 4][exponents[i]];
    for (int e = 0; e < 256; ++e) {
      counts[e] =
          static_cast<uint16_t>(quarters[0][e] + quarters[1][e] + quarters[2][e] + quarters[3][e]);
    }
    counts[removed_exponent] -= static_cast<uint16_t>(removed);
    Histogram histogram;
    histogram.total = n - removed;
    histogram.largest = wide ? 254 : 255;
    while (histogram.largest > 0 && !counts[histogram.largest]) --histogram.largest;
    for (int i = 0; i < kExponents; ++i) {
      const int exponent = histogram.largest - (kExponents - 1) + i;
      if (exponent >= 0) histogram.counts[i] = counts[exponent];
    }
    return histogram;
  }

  template <int kSize>
  static int count_nonzero(const uint8_t* words, int n) {
    int count = 0;
    for (int i = 0; i < n; ++i) count += load<Unsigned<kSize>>(words + i * kSize) != 0;
    return count;
  }

  // Sets bit i of the mask where word i is not 0, copies those words to scratch memory and returns
  // their number.
  template <int kSize>
  static int compact(const uint8_t* words, int n, uint8_t* mask, uint8_t* nonzero) {
    int count = 0;
    std::memset(mask, 0, plane_nbytes(n));
    for (int i = 0; i < n; ++i) {
      const auto word = load<Unsigned<kSize>>(words + i * kSize);
      store(nonzero + count * kSize, word);
      count += word != 0;
      mask[i / 8] = static_cast<uint8_t>(mask[i / 8] | (word != 0) << i % 8);
    }
    return count;
  }

  // The reverse; `nonzero` is scratch memory.
  template <int kSize>
  static void spread(const uint8_t* mask, const uint8_t* nonzero, int n, uint8_t* words) {
    int count = 0;
    for (int i = 0; i < n; ++i) {
      const int present = mask[i / 8] >> i % 8 & 1;
      const auto word = load<Unsigned<kSize>>(nonzero + count * kSize);
      store(words + i * kSize, static_cast<Unsigned<kSize>>(present ? word : 0));
      count += present;
    }
  }

  // Words -> exponents (scratch memory), byte planes (null: left out), and bit planes one behind
  // the other.
  static void split(BFloat16Word, const uint8_t* words, int n, uint8_t* exponents,
                    uint8_t* const (&bytes)[3], uint8_t*) {
    for (int i = 0; i < n; ++i) {
      const auto word = load<uint16_t>(words + 2 * i);
      exponents[i] = static_cast<uint8_t>(word >> 7);
      bytes[0][i] = static_cast<uint8_t>((word >> 8 & 0x80) | (word & 0x7F));
    }
  }
  static void split(Float32Word, const uint8_t* words, int n, uint8_t* exponents,
                    uint8_t* const (&bytes)[3], uint8_t*) {
    for (int i = 0; i < n; ++i) {
      const auto word = load<uint32_t>(words + 4 * i);
      exponents[i] = static_cast<uint8_t>(word >> 23);
      if (bytes[0]) bytes[0][i] = static_cast<uint8_t>(word);
      if (bytes[1]) bytes[1][i] = static_cast<uint8_t>(word >> 8);
      bytes[2][i] = static_cast<uint8_t>((word >> 24 & 0x80) | (word >> 16 & 0x7F));
    }
  }
  static void split(Float16Word, const uint8_t* words, int n, uint8_t* exponents,
                    uint8_t* const (&bytes)[3], uint8_t* bits) {
    uint8_t high[kLosslessBlock + kSlack];
    for (int i = 0; i < n; ++i) {
      const auto word = load<uint16_t>(words + 2 * i);
      exponents[i] = static_cast<uint8_t>(word >> 10 & 31);
      bytes[0][i] = static_cast<uint8_t>(word);
      high[i] = static_cast<uint8_t>(word >> 8);
    }
    std::memset(high + n, 0, 8);
    const int stride = plane_nbytes(n);
    take_plane(high, 0, n, bits);
    take_plane(high, 1, n, bits + stride);
    take_plane(high, 7, n, bits + 2 * stride);
  }
  template <int kShift, int kMask, int kFlipped, int... kBits>
  static void split(ByteWord<kShift, kMask, kFlipped, kBits...>, const uint8_t* words, int n,
                    uint8_t* exponents, uint8_t* const (&)[3], uint8_t* bits) {
    uint8_t padded[kLosslessBlock + kSlack];
    for (int i = 0; i < n; ++i) {
      padded[i] = words[i];
      exponents[i] = static_cast<uint8_t>((words[i] >> kShift & kMask) ^ kFlipped);
    }
    std::memset(padded + n, 0, 8);
    ((take_plane(padded, kBits, n, bits), bits += plane_nbytes(n)), ...);
  }

  // Bit `bit` of n bytes, behind which are 8 zeros, as a plane; eight at a time in one register.
  static constexpr uint64_t kOnes = 0x0101010101010101;
  static void take_plane(const uint8_t* bytes, int bit, int n, uint8_t* plane) {
    for (int i = 0; i < plane_nbytes(n); ++i) {
      // The product moves the bit of byte k to place 56 + k.
      const uint64_t ones = load<uint64_t>(bytes + 8 * i) >> bit & kOnes;
      plane[i] = static_cast<uint8_t>(ones * 0x0102040810204080 >> 56);
    }
  }
  // Sets bit `bit` of bytes, in scratch memory, that do not have it yet where the plane has ones.
  static void put_plane(const uint8_t* plane, int bit, int n, uint8_t* bytes) {
    for (int i = 0; i < plane_nbytes(n); ++i) {
      // Byte k keeps bit k; adding carries it, whichever it is, to the byte's highest.
      const uint64_t chosen = plane[i] * kOnes & 0x8040201008040201;
      const uint64_t ones = (chosen + 0x7F * kOnes) >> 7 & kOnes;
      store(bytes + 8 * i, load<uint64_t>(bytes + 8 * i) | ones << bit);
    }
  }

  // The reverse: exponents (scratch memory) and planes -> words. Byte planes left out are null.
  static void join(BFloat16Word, const uint8_t* exponents, int n, const uint8_t* const (&bytes)[3],
                   const uint8_t*, uint8_t* words) {
    for (int i = 0; i < n; ++i) {
      const int rest = bytes[0][i];
      store(words + 2 * i,
            static_cast<uint16_t>((rest & 0x80) << 8 | exponents[i] << 7 | (rest & 0x7F)));
    }
  }
  static void join(Float32Word, const uint8_t* exponents, int n, const uint8_t* const (&bytes)[3],
                   const uint8_t*, uint8_t* words) {
    for (int i = 0; i < n; ++i) {
      const uint32_t rest = bytes[2][i], exponent = exponents[i];
      uint32_t word = (rest & 0x80) << 24 | exponent << 23 | (rest & 0x7F) << 16;
      if (bytes[1]) word |= uint32_t{bytes[1][i]} << 8;
      if (bytes[0]) word |= bytes[0][i];
      store(words + 4 * i, word);
    }
  }
  static void join(Float16Word, const uint8_t* exponents, int n, const uint8_t* const (&bytes)[3],
                   const uint8_t* bits, uint8_t* words) {
    uint8_t high[kLosslessBlock + kSlack];
    for (int i = 0; i < n; ++i) high[i] = static_cast<uint8_t>(exponents[i] << 2);
    const int stride = plane_nbytes(n);
    put_plane(bits, 0, n, high);
    put_plane(bits + stride, 1, n, high);
    put_plane(bits + 2 * stride, 7, n, high);
    for (int i = 0; i < n; ++i) {
      store(words + 2 * i, static_cast<uint16_t>(high[i] << 8 | bytes[0][i]));
    }
  }
  template <int kShift, int kMask, int kFlipped, int... kBits>
  static void join(ByteWord<kShift, kMask, kFlipped, kBits...>, const uint8_t* exponents, int n,
                   const uint8_t* const (&)[3], const uint8_t* bits, uint8_t* words) {
    uint8_t padded[kLosslessBlock + kSlack];
    for (int i = 0; i < n; ++i) {
      padded[i] = static_cast<uint8_t>((exponents[i] ^ kFlipped) << kShift);
    }
    ((put_plane(bits, kBits, n, padded), bits += plane_nbytes(n)), ...);
    std::memcpy(words, padded, n);
  }

  // Codes of n exponents as bit planes, one behind the other; exponents that the tier passes on go
  // to `passed` in order. Both exponent arrays are scratch memory. Returns how many it passes on.
  static int encode_tier(const Tier& tier, const uint8_t* exponents, int n, uint8_t* planes,
                         uint8_t* passed) {
    // Bytes throughout, for the compiler to make vectors of.
    const uint8_t start = tier.start, below = tier.below, inner = tier.inner;
    const auto last = static_cast<uint8_t>((1 << tier.width) - 1);
    uint8_t codes[kLosslessBlock + kSlack];
    for (int i = 0; i < n; ++i) {
      // A word of the inner window never comes here, so code does not become negative.
      const auto distance = static_cast<uint8_t>(exponents[i] - start);
      const auto code = static_cast<uint8_t>(distance - (distance >= below ? inner : 0));
      codes[i] = std::min(code, last);
    }
    std::memset(codes + n, 0, 8);
    for (int b = 0; b < tier.width; ++b) {
      take_plane(codes, b, n, planes);
      planes += plane_nbytes(n);
    }
    int num_passed = 0;
    for (int i = 0; i < n; ++i) {
      passed[num_passed] = exponents[i];
      num_passed += codes[i] == last;
    }
    return num_passed;
  }

  // The reverse.
  static void decode_tier(const Tier& tier, const uint8_t* planes, int n, const uint8_t* passed,
                          uint8_t* exponents) {
    const int last = (1 << tier.width) - 1;
    uint8_t table[8], codes[kLosslessBlock + kSlack];
    for (int code = 0; code <= last; ++code) {
      table[code] = static_cast<uint8_t>(tier.start + code + (code >= tier.below ? tier.inner : 0));
    }
    std::memset(codes, 0, 8 * plane_nbytes(n));
    for (int b = 0; b < tier.width; ++b) {
      put_plane(planes, b, n, codes);
      planes += plane_nbytes(n);
    }
    for (int i = 0; i < n; ++i) {
      // Without a branch: which words are passed on cannot be predicted.
      const int is_passed = codes[i] == last;
      const int own = table[codes[i]];
      exponents[i] = static_cast<uint8_t>(own ^ ((own ^ *passed) & -is_passed));
      passed += is_passed;
    }
  }

  // At how many of n places all of the bit planes, one behind the other, are set. Unused bits are
  // 0.
  static int count_ones(int num_planes, const uint8_t* planes, int n) {
    const int stride = plane_nbytes(n);
    const auto ones = [&](int i, int nbytes) {
      uint64_t all = ~uint64_t{0};
      for (int p = 0; p < num_planes; ++p) {
        uint64_t bits = 0;
        std::memcpy(&bits, planes + p * stride + i, nbytes);
        all &= bits;
      }
      return __builtin_popcountll(all);
    };
    int count = 0, i = 0;
    for (; i + 8 <= stride; i += 8) count += ones(i, 8);
    if (i < stride) count += ones(i, stride - i);
    return count;
  }

  static void add(BFloat16Word, const uint8_t* words, int64_t n, float* total) {
    for (int64_t i = 0; i < n; ++i) total[i] += widen(BFloat16{load<uint16_t>(words + 2 * i)});
  }
  static void add(Float16Word, const uint8_t* words, int64_t n, float* total) {
    for (int64_t i = 0; i < n; ++i) total[i] += widen(Float16{load<uint16_t>(words + 2 * i)});
  }
  static void add(Float32Word, const uint8_t* words, int64_t n, float* total) {
    for (int64_t i = 0; i < n; ++i) total[i] += load<float>(words + 4 * i);
  }
};

}  // namespace
}  // namespace laconic
