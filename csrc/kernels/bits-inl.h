// Packing and unpacking of bits over a vocabulary of three functions, each for words of 8, 16, 32
// and 64 bits:
//
//   uint64_t nonzero(const T* x, T magnitude)            bit i: whether x[i] & magnitude is not 0
//   void choose(uint64_t bits, T zero, T one, T* values)
//   void select(uint64_t bits, const T* x, T* values)    x[i] where bit i is set, else zero
//
// PlainBits has them for any processor; other vocabularies override what intrinsics do better.
#pragma once

#include <cstring>

#include "bits.h"

namespace laconic {
namespace {

struct PlainBits {
  template <class T>
  static uint64_t nonzero(const T* x, T magnitude) {
    uint64_t bits = 0;
    for (int byte = 0; byte < 8; ++byte) {
      uint64_t eight = 0;
      for (int i = 0; i < 8; ++i) {
        eight |= static_cast<uint64_t>((x[8 * byte + i] & magnitude) != 0) << i;
      }
      bits |= eight << 8 * byte;
    }
    return bits;
  }
  template <class T>
  static void choose(uint64_t bits, T zero, T one, T* values) {
    const T change = zero ^ one;
    for (int byte = 0; byte < 8; ++byte) {
      const auto eight = static_cast<uint32_t>(bits >> 8 * byte);
      for (int i = 0; i < 8; ++i) {
        values[8 * byte + i] = zero ^ (change & static_cast<T>(-static_cast<T>((eight >> i) & 1)));
      }
    }
  }
  // Eight bytes at a time, as the bytes of one word: each keeps its own bit of the eight and
  // becomes 0xFF if that is set.
  static void choose(uint64_t bits, uint8_t zero, uint8_t one, uint8_t* values) {
    constexpr uint64_t kEach = 0x0101010101010101, kOwn = 0x8040201008040201;
    for (int byte = 0; byte < 8; ++byte) {
      const uint64_t own = ((bits >> 8 * byte) & 0xFF) * kEach & kOwn;
      const uint64_t set = (((own + 0x7F * kEach) >> 7) & kEach) * 0xFF;
      const uint64_t eight = zero * kEach ^ (set & (zero ^ one) * kEach);
      std::memcpy(values + 8 * byte, &eight, 8);
    }
  }
  template <class T>
  static void select(uint64_t bits, const T* x, T* values) {
    for (int byte = 0; byte < 8; ++byte) {
      const auto eight = static_cast<uint32_t>(bits >> 8 * byte);
      for (int i = 0; i < 8; ++i) {
        values[8 * byte + i] = x[8 * byte + i] & static_cast<T>(-static_cast<T>((eight >> i) & 1));
      }
    }
  }
};

// How many values of the group there are.
inline int64_t size_of_group(int64_t group, int64_t length) {
  const int64_t left = length - group * kBitsGroup;
  return left < kBitsGroup ? left : kBitsGroup;
}

template <class V, class T>
void pack_words(const PackBits& task, int64_t first, int64_t last) {
  const auto magnitude = static_cast<T>(task.magnitude);
  for (int64_t group = first; group < last; ++group) {
    const T* x = static_cast<const T*>(task.x) + group * kBitsGroup;
    const int64_t size = size_of_group(group, task.length);
    T padded[kBitsGroup] = {};
    if (size < kBitsGroup) {
      std::memcpy(padded, x, size * sizeof(T));
      x = padded;
    }
    const uint64_t bits = V::nonzero(x, magnitude);
    for (int64_t byte = 0; byte < (size + 7) / 8; ++byte) {
      task.codes[group * 8 + byte] = static_cast<uint8_t>(bits >> 8 * byte);
    }
  }
}

// The bits of a group, from the bytes that it has.
inline uint64_t bits_of_group(const uint8_t* codes, int64_t group, int64_t size) {
  uint64_t bits = 0;
  for (int64_t byte = 0; byte < (size + 7) / 8; ++byte) {
    bits |= static_cast<uint64_t>(codes[group * 8 + byte]) << 8 * byte;
  }
  return bits;
}

template <class V, class T>
void unpack_words(const UnpackBits& task, int64_t first, int64_t last) {
  const auto zero = static_cast<T>(task.zero), one = static_cast<T>(task.one);
  for (int64_t group = first; group < last; ++group) {
    T* values = static_cast<T*>(task.values) + group * kBitsGroup;
    const int64_t size = size_of_group(group, task.length);
    const uint64_t bits = bits_of_group(task.codes, group, size);
    if (size == kBitsGroup) {
      V::choose(bits, zero, one, values);
      continue;
    }
    T padded[kBitsGroup];
    V::choose(bits, zero, one, padded);
    std::memcpy(values, padded, size * sizeof(T));
  }
}

template <class V, class T>
void select_words(const SelectBits& task, int64_t first, int64_t last) {
  for (int64_t group = first; group < last; ++group) {
    const T* x = static_cast<const T*>(task.x) + group * kBitsGroup;
    T* values = static_cast<T*>(task.values) + group * kBitsGroup;
    const int64_t size = size_of_group(group, task.length);
    const uint64_t bits = bits_of_group(task.codes, group, size);
    if (size == kBitsGroup) {
      V::select(bits, x, values);
      continue;
    }
    for (int64_t i = 0; i < size; ++i) values[i] = (bits >> i) & 1 ? x[i] : 0;
  }
}

template <class V>
void pack_bits(const PackBits& task, int64_t first, int64_t last) {
  switch (task.itemsize) {
    case 1:
      return pack_words<V, uint8_t>(task, first, last);
    case 2:
      return pack_words<V, uint16_t>(task, first, last);
    case 4:
      return pack_words<V, uint32_t>(task, first, last);
    default:
      return pack_words<V, uint64_t>(task, first, last);
  }
}

template <class V>
void unpack_bits(const UnpackBits& task, int64_t first, int64_t last) {
  switch (task.itemsize) {
    case 1:
      return unpack_words<V, uint8_t>(task, first, last);
    case 2:
      return unpack_words<V, uint16_t>(task, first, last);
    case 4:
      return unpack_words<V, uint32_t>(task, first, last);
    default:
      return unpack_words<V, uint64_t>(task, first, last);
  }
}

template <class V>
void select_bits(const SelectBits& task, int64_t first, int64_t last) {
  switch (task.itemsize) {
    case 1:
      return select_words<V, uint8_t>(task, first, last);
    case 2:
      return select_words<V, uint16_t>(task, first, last);
    case 4:
      return select_words<V, uint32_t>(task, first, last);
    default:
      return select_words<V, uint64_t>(task, first, last);
  }
}

// The kernels of one instruction set.
template <class S>
constexpr BitsKernels kBitsKernels = {pack_bits<S>, unpack_bits<S>, select_bits<S>};

}  // namespace
}  // namespace laconic
