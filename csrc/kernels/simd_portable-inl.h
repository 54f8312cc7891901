// The vector vocabulary of blockwise-inl.h in plain C++, on arrays short enough for the compiler to
// vectorize.
//
// What every instruction set provides, here with the documentation:
// - kGroup: elements handled at once; even-numbered and odd-numbered ones sit in two vectors
// - F, I: a vector of kGroup / 2 floats; of as many 32-bit integers
// - load: a group, widened to fp32
// - store: a group, rounded to nearest even, every NaN alike
// - min, max: of two vectors of finite numbers, per lane
// - magnitude_max: the largest |x| of n elements (a multiple of kGroup), as the bits of an fp32
//   number
// - Table: count(n) is how many of 15 ascending thresholds lie strictly below n, per lane
// - uniform: random numbers for kGroup consecutive indices that share their high half
// - store_pairs: indices -> codes -> two codes per byte, kGroup / 2 bytes
// - store_bytes: integers, saturated to [-127, 127], one per byte, kGroup bytes
// - store_packed: integers, saturated to the symmetric range of kBits = 5 or 6, kGroup * kBits / 8
//   bytes
// - expand_pairs: kGroup / 2 bytes of 4-bit codes -> kGroup values, looked up in 16 ready values
// - expand_bytes: kGroup signed bytes -> kGroup values, each times a scale
// - expand_packed: the same from store_packed's bytes
#pragma once

#include "scalar-inl.h"

namespace laconic {
namespace {

struct Portable {
  static constexpr int kGroup = 16;
  static constexpr int kLanes = kGroup / 2;
  struct F {
    float v[kLanes];
  };
  struct I {
    int32_t v[kLanes];
  };

  template <class Op>
  static F map(Op op) {
    F r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = op(i);
    return r;
  }
  template <class Op>
  static I map_int(Op op) {
    I r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = op(i);
    return r;
  }

  template <class T>
  static void load(const T* x, F& even, F& odd) {
    even = map([=](int i) { return widen(x[2 * i]); });
    odd = map([=](int i) { return widen(x[2 * i + 1]); });
  }

  template <class T>
  static void store(F even, F odd, T* out) {
    for (int i = 0; i < kLanes; ++i) {
      out[2 * i] = narrow<T>(even.v[i]);
      out[2 * i + 1] = narrow<T>(odd.v[i]);
    }
  }

  template <class T>
  static uint32_t magnitude_max(const T* x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t magnitude = bits_of(widen(x[i])) & 0x7FFFFFFF;
      largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
  }

  static F splat(float value) {
    return map([=](int) { return value; });
  }
  static F mul(F a, F b) {
    return map([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F sub(F a, F b) {
    return map([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F min(F a, F b) {
    return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F max(F a, F b) {
    return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F floor(F a) {
    // |a| < 2**31 here: truncate, then step down where that went up.
    return map([&](int i) {
      const float truncated = static_cast<float>(static_cast<int32_t>(a.v[i]));
      return truncated - static_cast<float>(truncated > a.v[i]);
    });
  }
  static I round_to_int(F a) {
    // Adding 1.5 * 2**23 leaves the integer nearest to a (ties to even) in the low bits; |a| <
    // 2**22 here.
    return map_int([&](int i) {
      return static_cast<int32_t>(bits_of(a.v[i] + 0x1.8p23f) - bits_of(0x1.8p23f));
    });
  }
  static I add_where_less(I index, F a, F b) {
    return map_int([&](int i) { return index.v[i] + (a.v[i] < b.v[i]); });
  }

  struct Table {
    float thresholds[15];
    Table(const float (&values)[16], float) { std::memcpy(thresholds, values, sizeof(thresholds)); }
    I count(F n) const {
      I r{};
      for (float threshold : thresholds) {
        for (int i = 0; i < kLanes; ++i) r.v[i] += n.v[i] > threshold;
      }
      return r;
    }
  };

  struct Lookup {
    float values[16];
    explicit Lookup(const float (&table)[16]) { std::memcpy(values, table, sizeof(values)); }
    F operator()(I index) const {
      return map([&](int i) { return values[index.v[i]]; });
    }
  };

  static void uniform(const Keys& keys, uint64_t index, F& even, F& odd) {
    even = map([&](int i) { return laconic::uniform(keys, index + 2 * i); });
    odd = map([&](int i) { return laconic::uniform(keys, index + 2 * i + 1); });
  }

  struct Codes {
    uint8_t values[16];
    explicit Codes(const float (&codes)[16]) {
      for (int i = 0; i < 16; ++i) values[i] = static_cast<uint8_t>(codes[i]);
    }
  };
  static void store_pairs(const Codes& codes, I even, I odd, uint8_t* out) {
    for (int i = 0; i < kLanes; ++i) {
      out[i] = static_cast<uint8_t>(codes.values[even.v[i]] | codes.values[odd.v[i]] << 4);
    }
  }

  static uint8_t saturate(int32_t value) {
    return static_cast<uint8_t>(value < -127 ? -127 : value > 127 ? 127 : value);
  }
  static void store_bytes(I even, I odd, uint8_t* out) {
    for (int i = 0; i < kLanes; ++i) {
      out[2 * i] = saturate(even.v[i]);
      out[2 * i + 1] = saturate(odd.v[i]);
    }
  }

  // Integers, saturated to the symmetric range of kBits, as a stream of kBits each: eight fill
  // kBits bytes.
  template <int kBits>
  static void store_packed(I even, I odd, uint8_t* out) {
    constexpr int32_t kMax = (1 << (kBits - 1)) - 1;
    for (int eight = 0; eight < kGroup / 8; ++eight, out += kBits) {
      uint64_t stream = 0;
      for (int i = 0; i < 8; ++i) {
        const int32_t value = (i % 2 ? odd : even).v[4 * eight + i / 2];
        const int32_t clamped = value < -kMax ? -kMax : value > kMax ? kMax : value;
        stream |= static_cast<uint64_t>(clamped & ((1 << kBits) - 1)) << (i * kBits);
      }
      for (int i = 0; i < kBits; ++i) out[i] = static_cast<uint8_t>(stream >> (8 * i));
    }
  }

  template <class T>
  struct Values {
    T values[16];
    Values(const float (&levels)[16], float scale) {
      for (int i = 0; i < 16; ++i) values[i] = narrow<T>(levels[i] * scale);
    }
  };
  template <class T>
  static void expand_pairs(const Values<T>& values, const uint8_t* codes, T* out) {
    for (int i = 0; i < kLanes; ++i) {
      out[2 * i] = values.values[codes[i] & 15];
      out[2 * i + 1] = values.values[codes[i] >> 4];
    }
  }
  template <class T>
  static void expand_bytes(const uint8_t* codes, float scale, T* out) {
    for (int i = 0; i < kGroup; ++i)
      out[i] = narrow<T>(static_cast<float>(static_cast<int8_t>(codes[i])) * scale);
  }
  template <int kBits, class T>
  static void expand_packed(const uint8_t* codes, float scale, T* out) {
    constexpr int32_t kSign = 1 << (kBits - 1);
    for (int eight = 0; eight < kGroup / 8; ++eight, codes += kBits, out += 8) {
      uint64_t stream = 0;
      for (int i = 0; i < kBits; ++i) stream |= static_cast<uint64_t>(codes[i]) << (8 * i);
      for (int i = 0; i < 8; ++i) {
        const int32_t code = static_cast<int32_t>(stream >> (i * kBits)) & (2 * kSign - 1);
        out[i] = narrow<T>(static_cast<float>((code ^ kSign) - kSign) * scale);
      }
    }
  }
};

}  // namespace
}  // namespace laconic
