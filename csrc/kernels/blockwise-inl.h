// The block-wise kernels, written once over a vector vocabulary (simd_portable-inl.h says which)
// and compiled once per instruction set. A block that is shorter than the vocabulary's group is
// filled up with its last element on the stack: that changes neither its largest magnitude nor its
// range, and the codes of what was added are thrown away.
#pragma once

#include <limits>
#include <type_traits>

#include "scalar-inl.h"
#include "simd_portable-inl.h"

namespace laconic {
namespace {

constexpr int64_t kMaxBlock = 256;

// How far ahead of the block at hand its successors are fetched. Left alone, the hardware
// prefetcher loses track of blocks of 64 and below: int8 ran at 3 instead of 10 GB/s on 32 MB.
constexpr int64_t kPrefetchNbytes = 2048;

inline void prefetch(const void* p, int64_t nbytes) {
  // As an integer, because the address may lie beyond the tensor; fetching from there does nothing.
  const uintptr_t address = reinterpret_cast<uintptr_t>(p) + kPrefetchNbytes;
  for (int64_t i = 0; i < nbytes; i += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(address + i));
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Walks blocks [first, last) of rows cut into blocks.
struct BlockWalk {
  int64_t length, block_size, blocks_per_row, row, column, left;
  BlockWalk(int64_t length, int64_t block_size, int64_t first, int64_t last)
      : length(length),
        block_size(block_size),
        blocks_per_row(ceil_div(length, block_size)),
        row(first / blocks_per_row),
        column(first % blocks_per_row * block_size),
        left(last - first) {}
  bool done() const { return left == 0; }
  int64_t size() const { return length - column < block_size ? length - column : block_size; }
  void next() {
    --left;
    column += block_size;
    if (column >= length) {
      column = 0;
      ++row;
    }
  }
};

// Random numbers for the group of elements that starts at `index`.
template <class S>
void draw(uint64_t seed, uint64_t index, typename S::F& even, typename S::F& odd) {
  if (index >> 32 == (index + S::kGroup - 1) >> 32) {
    S::uniform(Keys(seed, index), index, even, odd);
    return;
  }
  float each[S::kGroup];
  for (int i = 0; i < S::kGroup; ++i) each[i] = uniform(Keys(seed, index + i), index + i);
  S::load(each, even, odd);
}

// --- from normalized values to codes: one class per family of codes ---

template <class S, bool kStochastic>
class TableEncoder {
  using F = typename S::F;
  using I = typename S::I;

 public:
  static constexpr int kBits = 4;
  explicit TableEncoder(const Quantize& q)
      : table_(kStochastic ? q.codebook->floor_thresholds : q.codebook->thresholds, q.level_max),
        levels_(q.codebook->sorted_levels),
        reciprocal_gaps_(q.codebook->reciprocal_gaps),
        codes_(q.codebook->codes),
        zeros_(static_cast<uint8_t>(static_cast<int>(q.codebook->zero_code) * 0x11)) {}
  uint8_t zeros() const { return zeros_; }
  void nearest(F even, F odd, uint8_t* out) const {
    S::store_pairs(codes_, table_.count(even), table_.count(odd), out);
  }
  void stochastic(F even, F odd, F u_even, F u_odd, uint8_t* out) const {
    S::store_pairs(codes_, one_of_two(even, u_even), one_of_two(odd, u_odd), out);
  }

 private:
  I one_of_two(F n, F u) const {
    const I lower = table_.count(n);
    return S::add_where_less(lower, u, S::mul(S::sub(n, levels_(lower)), reciprocal_gaps_(lower)));
  }
  typename S::Table table_;
  typename S::Lookup levels_, reciprocal_gaps_;
  typename S::Codes codes_;
  uint8_t zeros_;
};

template <class S, bool kStochastic, int kIntegerBits>
class IntegerEncoder {
  using F = typename S::F;
  using I = typename S::I;

 public:
  static constexpr int kBits = kIntegerBits;
  explicit IntegerEncoder(const Quantize&) {}
  uint8_t zeros() const { return 0; }
  void nearest(F even, F odd, uint8_t* out) const {
    store(S::round_to_int(even), S::round_to_int(odd), out);
  }
  void stochastic(F even, F odd, F u_even, F u_odd, uint8_t* out) const {
    store(one_of_two(even, u_even), one_of_two(odd, u_odd), out);
  }

 private:
  static void store(I even, I odd, uint8_t* out) {
    if constexpr (kBits == 8) {
      S::store_bytes(even, odd, out);
    } else {
      S::template store_packed<kBits>(even, odd, out);
    }
  }
  static typename S::I one_of_two(F n, F u) {
    const F lower = S::floor(n);
    return S::add_where_less(S::round_to_int(lower), u, S::sub(n, lower));
  }
};

// Two-bit integers from 0 to 3, four to a byte.
template <class S, bool kStochastic>
class Uint2Encoder {
  using F = typename S::F;
  using I = typename S::I;

 public:
  static constexpr int kBits = 2;
  explicit Uint2Encoder(const Quantize&) : saturated_(kSaturated) {}
  uint8_t zeros() const { return 0; }
  void nearest(F even, F odd, uint8_t* out) const {
    store(S::round_to_int(even), S::round_to_int(odd), out);
  }
  void stochastic(F even, F odd, F u_even, F u_odd, uint8_t* out) const {
    store(one_of_two(even, u_even), one_of_two(odd, u_odd), out);
  }

 private:
  static constexpr float kSaturated[16] = {0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3};
  static I one_of_two(F n, F u) {
    const F lower = S::floor(n);
    return S::add_where_less(S::round_to_int(lower), u, S::sub(n, lower));
  }
  // Codes of four bits first, then their lower halves side by side.
  void store(I even, I odd, uint8_t* out) const {
    uint8_t pairs[S::kGroup / 2];
    S::store_pairs(saturated_, even, odd, pairs);
    for (int i = 0; i < S::kGroup / 2; i += 8, out += 4) {
      uint64_t word;
      std::memcpy(&word, pairs + i, 8);
      word = (word | word >> 2) & 0x0F0F0F0F0F0F0F0F;
      word = (word | word >> 4) & 0x00FF00FF00FF00FF;
      word = (word | word >> 8) & 0x0000FFFF0000FFFF;
      const uint32_t packed = static_cast<uint32_t>(word | word >> 16);
      std::memcpy(out, &packed, 4);
    }
  }
  typename S::Codes saturated_;
};

template <class S, bool kStochastic, int kBits>
using Encoder = std::conditional_t<
    kBits == 2, Uint2Encoder<S, kStochastic>,
    std::conditional_t<kBits == 4, TableEncoder<S, kStochastic>,
                       IntegerEncoder<S, kStochastic, kBits>>>;

// Call run(std::integral_constant<int, bits>()): the widths of codes that kernels are compiled for.
template <class Run>
inline void with_bits(int bits, const Run& run) {
  switch (bits) {
    case 2:
      return run(std::integral_constant<int, 2>());
    case 4:
      return run(std::integral_constant<int, 4>());
    case 5:
      return run(std::integral_constant<int, 5>());
    case 6:
      return run(std::integral_constant<int, 6>());
    default:
      return run(std::integral_constant<int, 8>());
  }
}

// --- quantize ---

// The smallest and the largest of n finite elements, a multiple of the group.
template <class S, class T>
inline void range_of(const T* x, int64_t n, float& least, float& greatest) {
  typename S::F low, high, even, odd;
  S::load(x, low, high);
  even = S::min(low, high);
  odd = S::max(low, high);
  low = even;
  high = odd;
  for (int64_t i = S::kGroup; i < n; i += S::kGroup) {
    S::load(x + i, even, odd);
    low = S::min(low, S::min(even, odd));
    high = S::max(high, S::max(even, odd));
  }
  constexpr int kLanes = S::kGroup / 2;
  float lows[kLanes], highs[kLanes];
  std::memcpy(lows, &low, sizeof(lows));
  std::memcpy(highs, &high, sizeof(highs));
  least = lows[0];
  greatest = highs[0];
  for (int i = 1; i < kLanes; ++i) {
    least = lows[i] < least ? lows[i] : least;
    greatest = highs[i] > greatest ? highs[i] : greatest;
  }
}

// Stores the scale of a block, and says whether its codes are more than zeros; if not, `scale` is NaN
// or 0.
template <class S, class T>
inline bool store_magnitude(const Quantize& q, const T* x, int64_t n, int64_t block, float& scale) {
  const uint32_t magnitude = S::magnitude_max(x, n);
  const float exact =
      magnitude < kInfinityBits ? float_of(magnitude) / q.level_max : float_of(kInfinityBits);
  scale = store_scale(q.scales, q.scale_type, block, exact);
  const uint32_t bits = bits_of(scale);
  if (__builtin_expect(bits - kSmallestNormalBits < kInfinityBits - kSmallestNormalBits, 1))
    return true;
  scale = store_scale(q.scales, q.scale_type, block,
                      bits >= kInfinityBits ? float_of(0x7FC00000) : 0.0f);
  return false;
}

// Stores step and minimum of a block, and says whether its codes are more than zeros.
template <class S, class T>
inline bool store_range(const Quantize& q, const T* x, int64_t n, int64_t block, float& minimum,
                        float& step) {
  constexpr float kSmallestNormal = 0x1p-126f;
  bool broken = S::magnitude_max(x, n) >= kInfinityBits;
  float exact = 0.0f;
  if (!broken) {
    float greatest;
    range_of<S>(x, n, minimum, greatest);
    if (minimum < kSmallestNormal && minimum > -kSmallestNormal)
      minimum = minimum < 0 ? -kSmallestNormal : 0.0f;
    minimum = store_scale_below(q.scales, q.scale_type, 2 * block + 1, minimum);
    exact = (greatest - minimum) / q.level_max;
    step = store_scale_above(q.scales, q.scale_type, 2 * block, exact);
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    broken = minimum == -kInfinity || !(step < kInfinity);
  }
  if (broken) store_scale(q.scales, q.scale_type, 2 * block + 1, float_of(0x7FC00000));
  const bool ordinary = !broken && exact >= kSmallestNormal;
  if (!ordinary)
    store_scale(q.scales, q.scale_type, 2 * block, broken ? float_of(0x7FC00000) : 0.0f);
  return ordinary;
}

// product = factor * x, rounded once, for n elements.
template <class S, class T>
inline void multiply(const T* factor, const T* x, int64_t n, T* product) {
  int64_t i = 0;
  for (; i + S::kGroup <= n; i += S::kGroup) {
    typename S::F even, odd, factor_even, factor_odd;
    S::load(x + i, even, odd);
    S::load(factor + i, factor_even, factor_odd);
    S::store(S::mul(factor_even, even), S::mul(factor_odd, odd), product + i);
  }
  for (; i < n; ++i) product[i] = narrow<T>(widen(factor[i]) * widen(x[i]));
}

// One block of n elements, a multiple of the group. `x` and `codes` may be stack buffers.
template <class S, class T, class E, bool kStochastic>
inline void quantize_block(const Quantize& q, const E& encoder, const T* x, int64_t n,
                           int64_t block, uint64_t index, uint8_t* codes) {
  constexpr int kBytes = S::kGroup * E::kBits / 8;
  constexpr bool kAffine = E::kBits == 2;
  float minimum = 0.0f, scale;
  if constexpr (kAffine) {
    if (!store_range<S>(q, x, n, block, minimum, scale)) {
      std::memset(codes, 0, n * E::kBits / 8);
      return;
    }
  } else if (!store_magnitude<S>(q, x, n, block, scale)) {
    const bool broken = scale != scale;
    std::memset(codes, broken ? 0 : encoder.zeros(), n * E::kBits / 8);
    return;
  }
  const auto inverse = S::splat(1.0f / scale);
  const auto origin = S::splat(minimum);
  for (int64_t i = 0; i < n; i += S::kGroup, codes += kBytes) {
    typename S::F even, odd;
    S::load(x + i, even, odd);
    if constexpr (kAffine) {
      even = S::sub(even, origin);
      odd = S::sub(odd, origin);
    }
    even = S::mul(even, inverse);
    odd = S::mul(odd, inverse);
    if constexpr (kStochastic) {
      typename S::F u_even, u_odd;
      draw<S>(q.seed, index + i, u_even, u_odd);
      encoder.stochastic(even, odd, u_even, u_odd, codes);
    } else {
      encoder.nearest(even, odd, codes);
    }
  }
}

template <class S, class T, class E, bool kStochastic>
void quantize_range(const Quantize& q, int64_t first, int64_t last) {
  const E encoder(q);
  const int64_t codes_per_row = ceil_div(q.length * E::kBits, 8);
  BlockWalk walk(q.length, q.block_size, first, last);
  for (int64_t b = first; !walk.done(); walk.next(), ++b) {
    const T* x = static_cast<const T*>(q.x) + walk.row * q.row_stride + walk.column;
    uint8_t* codes = q.codes + walk.row * codes_per_row + walk.column * E::kBits / 8;
    const uint64_t index = q.first_index + static_cast<uint64_t>(walk.row * q.length + walk.column);
    const int64_t size = walk.size();
    prefetch(x, size * sizeof(T));
    if (q.factor != nullptr) {
      const int64_t start = walk.row * q.length + walk.column;
      const T* factor = static_cast<const T*>(q.factor) + start;
      prefetch(factor, size * sizeof(T));
      multiply<S, T>(factor, x, size, static_cast<T*>(q.product) + start);
    }
    if (q.center == nullptr && size % S::kGroup == 0) {
      quantize_block<S, T, E, kStochastic>(q, encoder, x, size, b, index, codes);
      continue;
    }
    uint8_t padded_codes[kMaxBlock];
    const int64_t padded_size = ceil_div(size, S::kGroup) * S::kGroup;
    if (q.center != nullptr) {
      float centered[kMaxBlock];
      for (int64_t i = 0; i < size; ++i) centered[i] = widen(x[i]) - q.center[walk.column + i];
      for (int64_t i = size; i < padded_size; ++i) centered[i] = centered[size - 1];
      quantize_block<S, float, E, kStochastic>(q, encoder, centered, padded_size, b, index,
                                               padded_codes);
    } else {
      T padded[kMaxBlock];
      std::memcpy(padded, x, size * sizeof(T));
      for (int64_t i = size; i < padded_size; ++i) padded[i] = x[size - 1];
      quantize_block<S, T, E, kStochastic>(q, encoder, padded, padded_size, b, index,
                                           padded_codes);
    }
    std::memcpy(codes, padded_codes, ceil_div(size * E::kBits, 8));
    if (const int rest = size * E::kBits % 8)
      codes[size * E::kBits / 8] &= static_cast<uint8_t>((1 << rest) - 1);
  }
}

template <class S, class T, int kBits>
void quantize_with(const Quantize& q, int64_t first, int64_t last) {
  q.stochastic ? quantize_range<S, T, Encoder<S, true, kBits>, true>(q, first, last)
               : quantize_range<S, T, Encoder<S, false, kBits>, false>(q, first, last);
}

template <class S, class T>
void quantize_as(const Quantize& q, int64_t first, int64_t last) {
  with_bits(q.bits, [&](auto bits) {
    quantize_with<S, T, decltype(bits)::value>(q, first, last);
  });
}

template <class S>
void quantize(const Quantize& q, int64_t first, int64_t last) {
  switch (q.x_type) {
    case FloatType::kFloat32:
      return quantize_as<S, float>(q, first, last);
    case FloatType::kBFloat16:
      return quantize_as<S, BFloat16>(q, first, last);
    case FloatType::kFloat16:
      return quantize_as<S, Float16>(q, first, last);
  }
}

// --- dequantize ---

inline bool is_finite(float scale) { return (bits_of(scale) & 0x7FFFFFFF) < kInfinityBits; }

// What a block's codes are scaled with: a scale, or step and minimum.
struct Scaling {
  float scale, minimum;
  Scaling(float scale, float minimum = 0.0f) : scale(scale), minimum(minimum) {}
  bool is_finite() const { return laconic::is_finite(scale) && laconic::is_finite(minimum); }
};

// The codes of two bits in n bytes, a multiple of 4, as codes of four bits in twice as many.
inline void widen_codes(const uint8_t* codes, int64_t n, uint8_t* pairs) {
  for (int64_t i = 0; i < n; i += 4, codes += 4, pairs += 8) {
    uint32_t packed;
    std::memcpy(&packed, codes, 4);
    uint64_t word = packed;
    word = (word | word << 16) & 0x0000FFFF0000FFFF;
    word = (word | word << 8) & 0x00FF00FF00FF00FF;
    word = (word | word << 4) & 0x0F0F0F0F0F0F0F0F;
    word = (word | word << 2) & 0x3333333333333333;
    std::memcpy(pairs, &word, 8);
  }
}

template <class S, class T, int kBits>
inline void dequantize_block(const Codebook* codebook, const uint8_t* codes, Scaling scaling,
                             int64_t n, T* values) {
  const float scale = scaling.scale;
  if constexpr (kBits == 2) {
    float each[16];
    for (int i = 0; i < 16; ++i)
      each[i] = static_cast<float>(i & 3) * scale + scaling.minimum;
    const typename S::template Values<T> ready(each, 1.0f);
    for (int64_t i = 0; i < n; i += S::kGroup) {
      uint8_t pairs[S::kGroup / 2];
      widen_codes(codes + i / 4, S::kGroup / 4, pairs);
      S::expand_pairs(ready, pairs, values + i);
    }
  } else if constexpr (kBits == 4) {
    const typename S::template Values<T> ready(codebook->levels, scale);
    for (int64_t i = 0; i < n; i += S::kGroup) S::expand_pairs(ready, codes + i / 2, values + i);
  } else if constexpr (kBits == 8) {
    for (int64_t i = 0; i < n; i += S::kGroup) S::expand_bytes(codes + i, scale, values + i);
  } else {
    // Below 4 bits the vectors' loads would reach beyond the codes.
    using V = std::conditional_t<(kBits < 4), Portable, S>;
    for (int64_t i = 0; i < n; i += V::kGroup)
      V::template expand_packed<kBits>(codes + i * kBits / 8, scale, values + i);
  }
}

// A block of any size and scaling; `values` has room for kMaxBlock. The vector code rounds by integer
// arithmetic that knows no NaN; only a scale or a minimum of infinity or NaN makes one.
template <class S, class T, int kBits>
inline void dequantize_padded(const Codebook* codebook, const uint8_t* codes, Scaling scaling,
                              int64_t size, T* values) {
  uint8_t padded_codes[kMaxBlock] = {};
  std::memcpy(padded_codes, codes, ceil_div(size * kBits, 8));
  if (scaling.is_finite()) {
    dequantize_block<S, T, kBits>(codebook, padded_codes, scaling,
                                  ceil_div(size, S::kGroup) * S::kGroup, values);
  } else {
    constexpr int kGroup = Portable::kGroup;
    dequantize_block<Portable, T, kBits>(codebook, padded_codes, scaling,
                                         ceil_div(size, kGroup) * kGroup, values);
  }
}

// A block of any size and scaling, and nothing behind it.
template <class S, class T, int kBits>
inline void dequantize_any(const Codebook* codebook, const uint8_t* codes, Scaling scaling,
                           int64_t size, T* values) {
  if (__builtin_expect(scaling.is_finite() && size % S::kGroup == 0, 1)) {
    dequantize_block<S, T, kBits>(codebook, codes, scaling, size, values);
  } else {
    T padded[kMaxBlock];
    dequantize_padded<S, T, kBits>(codebook, codes, scaling, size, padded);
    std::memcpy(static_cast<void*>(values), padded, size * sizeof(T));
  }
}

template <class S, class T, int kBits>
void dequantize_range(const Dequantize& d, int64_t first, int64_t last) {
  const int64_t codes_per_row = ceil_div(d.length * kBits, 8);
  BlockWalk walk(d.length, d.block_size, first, last);
  for (int64_t b = first; !walk.done(); walk.next(), ++b) {
    const uint8_t* codes = d.codes + walk.row * codes_per_row + walk.column * kBits / 8;
    T* values = static_cast<T*>(d.values) + walk.row * d.length + walk.column;
    Scaling scaling = load_scale(d.scales, d.scale_type, kBits == 2 ? 2 * b : b);
    if (kBits == 2) scaling.minimum = load_scale(d.scales, d.scale_type, 2 * b + 1);
    const int64_t size = walk.size();
    if (d.center != nullptr) {
      float products[kMaxBlock];
      dequantize_any<S, float, kBits>(d.codebook, codes, scaling, size, products);
      const float* center = d.center + walk.column;
      for (int64_t i = 0; i < size; ++i) values[i] = narrow<T>(products[i] + center[i]);
    } else {
      dequantize_any<S, T, kBits>(d.codebook, codes, scaling, size, values);
    }
  }
}

template <class S, class T>
void dequantize_as(const Dequantize& d, int64_t first, int64_t last) {
  with_bits(d.bits, [&](auto bits) {
    dequantize_range<S, T, decltype(bits)::value>(d, first, last);
  });
}

template <class S>
void dequantize(const Dequantize& d, int64_t first, int64_t last) {
  switch (d.value_type) {
    case FloatType::kFloat32:
      return dequantize_as<S, float>(d, first, last);
    case FloatType::kBFloat16:
      return dequantize_as<S, BFloat16>(d, first, last);
    case FloatType::kFloat16:
      return dequantize_as<S, Float16>(d, first, last);
  }
}

// The kernels of one instruction set.
template <class S>
constexpr BlockwiseKernels kBlockwiseKernels = {quantize<S>, dequantize<S>};

}  // namespace
}  // namespace laconic
