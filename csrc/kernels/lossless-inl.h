// One block of the lossless format, for every instruction set: a vocabulary `S` (documented in
// lossless_portable-inl.h) splits words, runs tiers and joins words again; what is decided from the
// sample, where sections lie and what is checked is here.
#pragma once

#include <algorithm>
#include <cstring>

#include "lossless.h"
#include "lossless_ranked.h"
#include "scalar-inl.h"

namespace laconic {
namespace {

// --- element types ---

// Words of one byte: the exponent is `mask` after a shift, with some bits flipped; other bits are
// planes.
template <int kShift, int kMask, int kFlipped, int... kBits>
struct ByteWord {
  static constexpr int kSize = 1, kNumBytes = 0, kNumBits = sizeof...(kBits);
  static constexpr int kExponentMask = kMask;
};
struct BFloat16Word {
  static constexpr int kSize = 2, kNumBytes = 1, kNumBits = 0, kExponentMask = 255;
};
struct Float16Word {
  static constexpr int kSize = 2, kNumBytes = 1, kNumBits = 3, kExponentMask = 31;
};
struct Float32Word {
  static constexpr int kSize = 4, kNumBytes = 3, kNumBits = 0, kExponentMask = 255;
};
using UInt8Word = ByteWord<4, 15, 0, 0, 1, 2, 3>;
using Int8Word = ByteWord<4, 15, 8, 0, 1, 2, 3>;
using E4M3Word = ByteWord<3, 15, 0, 0, 1, 2, 7>;
using E5M2Word = ByteWord<2, 31, 0, 0, 1, 7>;

template <class Visit>
auto with_word(LosslessType type, const Visit& visit) {
  switch (type) {
    case LosslessType::kUInt8:
      return visit(UInt8Word{});
    case LosslessType::kBFloat16:
      return visit(BFloat16Word{});
    case LosslessType::kFloat16:
      return visit(Float16Word{});
    case LosslessType::kFloat32:
      return visit(Float32Word{});
    case LosslessType::kFloat8E4M3:
      return visit(E4M3Word{});
    case LosslessType::kFloat8E5M2:
      return visit(E5M2Word{});
    default:
      return visit(Int8Word{});
  }
}

// Room behind the elements of a scratch array: vectors read and write whole groups of 64 there.
constexpr int kSlack = 64;

constexpr int plane_nbytes(int n) { return (n + 7) / 8; }

// --- tiers ---

struct Tier {
  int width;
  uint8_t start;  // first exponent of the tier's window
  uint8_t below;  // exponents of this tier under the inner window: its offset
  uint8_t inner;  // exponents of the inner window, 0 for the first tier
};

struct Tiers {
  int count = 0;
  Tier tier[3] = {};
  uint8_t base = 0, nest = 0;
  void add(int width, int start, int offset) {
    const int inner = count ? tier[count - 1].inner + (1 << tier[count - 1].width) - 1 : 0;
    tier[count] = {width, static_cast<uint8_t>(start), static_cast<uint8_t>(offset),
                   static_cast<uint8_t>(inner)};
    if (count == 0) base = static_cast<uint8_t>(start);
    if (count > 0) nest = static_cast<uint8_t>(nest | offset << 3 * (count - 1));
    ++count;
  }
};

constexpr int kCodeMask = 7, kZerosLeftOut = 8, kByteLeftOut = 16;  // of a kind
constexpr int kNumExponentCodes = 4;  // raw, (3), (2, 2, 3), (3, 2, 2)
constexpr int kWidths[kNumExponentCodes][3] = {{0, 0, 0}, {3, 0, 0}, {2, 2, 3}, {3, 2, 2}};

// False: no encoder writes this kind and nest.
inline bool read_tiers(const LosslessBlock& block, Tiers& tiers) {
  const int code = block.kind & kCodeMask;
  if (code == 0 || code >= kNumExponentCodes) return false;
  int start = block.base;
  for (int t = 0; t < 3 && kWidths[code][t]; ++t) {
    const int offset = t ? block.nest >> 3 * (t - 1) & 7 : 0;
    if (offset >= 1 << kWidths[code][t]) return false;
    start -= offset;
    tiers.add(kWidths[code][t], start, offset);
  }
  return tiers.nest == block.nest;
}

// --- what an encoder decides ---

constexpr int kSampleRun = 32, kSampleStep = 512;
constexpr int kSampleMax = kLosslessBlock / kSampleStep * kSampleRun;
constexpr int kExponents = 32;  // considered

// The sample's exponents E - 31 ... E. Windows may reach kRoom places beyond, where nothing is.
struct Histogram {
  static constexpr int kRoom = 16;
  int largest = 0;  // E
  int total = 0;    // elements, whatever their exponent
  uint16_t counts[kExponents] = {};
};

class Chooser {
 public:
  explicit Chooser(const Histogram& histogram)
      : total_(histogram.total), largest_(histogram.largest) {
    int32_t sum = 0;
    std::fill_n(before_, Histogram::kRoom, 0);
    for (int i = 0; i < kExponents; ++i) {
      before_[Histogram::kRoom + i] = sum;
      sum += histogram.counts[i];
    }
    std::fill_n(before_ + Histogram::kRoom + kExponents, Histogram::kRoom + 1, sum);
  }

  // The tiers of the given widths, and what they cost in bits on the sample.
  int choose(const int (&widths)[3], Tiers& tiers) const {
    int range = (1 << widths[0]) - 1;
    int32_t best = 0;
    for (int p = 0; p + range <= kExponents; ++p) {
      best = std::max(best, key(Histogram::kRoom + p, range));
    }
    int place = place_of(best);
    tiers.add(widths[0], exponent(place), 0);
    int cost = widths[0] * total_;
    for (int t = 1; t < 3 && widths[t]; ++t) {
      cost += widths[t] * (total_ - covered(best));
      const int most = (1 << widths[t]) - 1;
      range += most;
      best = 0;
      for (int offset = 0; offset <= most; ++offset) {
        best = std::max(best, key(place - offset, range));
      }
      tiers.add(widths[t], exponent(place_of(best)), place - place_of(best));
      place = place_of(best);
    }
    return cost + 8 * (total_ - covered(best));
  }

 private:
  static constexpr int kPlaces = Histogram::kRoom + kExponents + Histogram::kRoom;
  static_assert(kPlaces == 64);
  int exponent(int place) const { return largest_ - (kExponents - 1) + place - Histogram::kRoom; }
  // Of two windows the one with the larger key covers more, or as much and starts lower.
  int32_t key(int place, int range) const {
    return (before_[place + range] - before_[place]) * kPlaces + kPlaces - 1 - place;
  }
  static int place_of(int32_t key) { return kPlaces - 1 - key % kPlaces; }
  static int covered(int32_t key) { return key / kPlaces; }
  int total_, largest_;
  int32_t before_[kPlaces + 1];  // how many of the sample lie in places before
};

// The exponent code's number.
inline int choose_tiers(const Histogram& histogram, LosslessCode code, Tiers& tiers) {
  const Chooser chooser(histogram);
  if (code == LosslessCode::kWindow) {
    chooser.choose(kWidths[1], tiers);
    return 1;
  }
  Tiers flatter;
  const int cost = chooser.choose(kWidths[2], tiers);
  if (chooser.choose(kWidths[3], flatter) >= cost) return 2;
  tiers = flatter;
  return 3;
}

template <class S, class W>
Histogram sample(const uint8_t* words, int n, bool& leave_zeros_out) {
  alignas(64) uint8_t taken[kSampleMax * W::kSize + kSlack];
  alignas(64) uint8_t exponents[kSampleMax + kSlack];
  alignas(64) uint8_t unused[3 * (kSampleMax + kSlack)];
  int size = 0;
  for (int i = 0; i < n; i += kSampleStep, size += kSampleRun) {
    constexpr int kRunNbytes = kSampleRun * W::kSize;
    if (i + kSampleRun <= n) {
      std::memcpy(taken + size * W::kSize, words + i * W::kSize, kRunNbytes);
    } else {
      std::memcpy(taken + size * W::kSize, words + i * W::kSize, (n - i) * W::kSize);
      size -= kSampleRun - (n - i);
    }
  }
  const int zeros = size - S::template count_nonzero<W::kSize>(taken, size);
  uint8_t* const planes[3] = {unused, unused + kSampleMax, unused + 2 * kSampleMax};
  S::split(W{}, taken, size, exponents, planes, unused);
  leave_zeros_out = 8 * zeros > size;
  const int zero_exponent = std::is_same_v<W, Int8Word> ? 8 : 0;
  return S::histogram(exponents, size, zero_exponent, leave_zeros_out ? zeros : 0,
                      W::kExponentMask == 255);
}

// What the next block will read and write, asked for a quarter at a time between the steps of this
// one: each block is read from memory once and worked on in the cache, and without this memory
// would wait meanwhile. Addresses that do not exist do no harm.
class NextBlock {
 public:
  NextBlock(const void* reads, int reads_nbytes, const void* writes, int writes_nbytes)
      : reads_(static_cast<const char*>(reads)),
        writes_(static_cast<const char*>(writes)),
        reads_nbytes_(reads_nbytes / 4),
        writes_nbytes_(writes_nbytes / 4) {}
  void fetch_quarter() {
    for (int at = 0; at < reads_nbytes_; at += kLine) __builtin_prefetch(reads_ + at, 0, 3);
    for (int at = 0; at < writes_nbytes_; at += kLine) __builtin_prefetch(writes_ + at, 1, 3);
    reads_ += reads_nbytes_;
    writes_ += writes_nbytes_;
  }

 private:
  static constexpr int kLine = 64;
  const char *reads_, *writes_;
  int reads_nbytes_, writes_nbytes_;
};

// --- encode ---

inline LosslessBlock encode_raw(const uint8_t* words, int nbytes, uint8_t* payload) {
  std::memcpy(payload, words, nbytes);
  return {static_cast<uint16_t>(nbytes), 0, 0, 0};
}

// Of length `limit`, and not written, if it would not be shorter.
inline LosslessBlock encode_ranked_block(LosslessType type, const uint8_t* words, int n,
                                         bool zeros_out, int limit, uint8_t* payload) {
  const int nbytes = encode_ranked(type, words, n, zeros_out, limit, payload);
  const int kind = kRanked | (zeros_out ? kZerosLeftOut : 0);
  return {static_cast<uint16_t>(nbytes), static_cast<uint8_t>(kind), 0, 0};
}

// Of words without an exponent.
inline LosslessBlock encode_plain_words(LosslessType type, const uint8_t* words, int n,
                                        uint8_t* payload) {
  const int original_nbytes = n * lossless_itemsize(type);
  const LosslessBlock block = encode_ranked_block(
      type, words, n, ranked_zeros_out(type, words, n), original_nbytes, payload);
  return block.length < original_nbytes ? block : encode_raw(words, original_nbytes, payload);
}

template <class S, class W>
LosslessBlock encode_words(LosslessType type, LosslessCode code, const uint8_t* words, int n, uint8_t* payload,
                           WordSums& sums) {
  const int original_nbytes = n * W::kSize;
  // 1. One pass from memory; everything after reads the cache.
  uint32_t bits_set = 0;
  sums =
      W::kSize == 4 ? S::sums(words, original_nbytes, bits_set) : S::sums(words, original_nbytes);

  NextBlock next(words + original_nbytes, original_nbytes, nullptr, 0);
  next.fetch_quarter();

  // 2. Decide.
  bool leave_zeros_out;
  Tiers tiers;
  const Histogram histogram = sample<S, W>(words, n, leave_zeros_out);
  int kind = choose_tiers(histogram, code, tiers);
  uint8_t* out = payload;

  // 3. Zeros.
  alignas(64) uint8_t nonzero[kLosslessBlock * W::kSize + kSlack];
  int m = n;
  const uint8_t* source = words;
  if (leave_zeros_out) {
    kind |= kZerosLeftOut;
    m = S::template compact<W::kSize>(words, n, out, nonzero);
    out += plane_nbytes(n);
    source = nonzero;
  }

  // 4. Signs and mantissas.
  const int num_kept = m;
  uint8_t* bytes[3] = {};
  for (int b = 0; b < W::kNumBytes; ++b) {
    if (W::kSize == 4 && b < 2 && !(bits_set >> 8 * b & 0xFF)) {
      kind |= kByteLeftOut << b;
    } else {
      bytes[b] = out;
      out += m;
    }
  }
  alignas(64) uint8_t first[kLosslessBlock + kSlack], second[kLosslessBlock + kSlack];
  next.fetch_quarter();
  S::split(W{}, source, m, first, bytes, out);
  next.fetch_quarter();
  out += W::kNumBits * plane_nbytes(m);

  // 5. Exponents.
  uint8_t *from = first, *to = second;
  for (int t = 0; t < tiers.count; ++t) {
    const int passed = S::encode_tier(tiers.tier[t], from, m, out, to);
    out += tiers.tier[t].width * plane_nbytes(m);
    std::swap(from, to);
    m = passed;
    if (t == 0) next.fetch_quarter();
  }
  std::memcpy(out, from, m);
  out += m;

  // 6. By rank if that is shorter, or raw.
  const int nbytes = static_cast<int>(out - payload), limit = std::min(nbytes, original_nbytes);
  const bool is_bad = 16 * nbytes >= 15 * original_nbytes || 8 * m > num_kept;
  const int low_plane = bytes[0] ? 0 : bytes[1] ? 1 : -1;
  leave_zeros_out &= W::kSize > 1;
  if (may_be_ranked(type, words, n, leave_zeros_out, low_plane, is_bad)) {
    const LosslessBlock block = encode_ranked_block(type, words, n, leave_zeros_out, limit, payload);
    if (block.length < limit) return block;
  }
  if (nbytes >= original_nbytes) return encode_raw(words, original_nbytes, payload);
  return {static_cast<uint16_t>(out - payload), static_cast<uint8_t>(kind), tiers.base, tiers.nest};
}

// --- decode ---

// Takes sections off the front of a payload.
class Sections {
 public:
  Sections(const uint8_t* payload, int nbytes) : next_(payload), left_(nbytes) {}
  const uint8_t* take(int nbytes) {
    if (nbytes > left_) return nullptr;
    const uint8_t* const section = next_;
    next_ += nbytes;
    left_ -= nbytes;
    return section;
  }
  // Bit planes of n bits each; the unused bits of each must be 0.
  const uint8_t* take_planes(int n, int count) {
    const int nbytes = plane_nbytes(n);
    const uint8_t* const planes = take(count * nbytes);
    if (planes == nullptr || n % 8 == 0) return planes;
    for (int p = 1; p <= count; ++p) {
      if (planes[p * nbytes - 1] >> n % 8) return nullptr;
    }
    return planes;
  }
  int left() const { return left_; }

 private:
  const uint8_t* next_;
  int left_;
};

template <class S, class W>
bool decode_words(const LosslessBlock& block, const uint8_t* payload, int n, uint8_t* words,
                  NextBlock& next) {
  if (block.kind == 0) {
    if (block.base || block.nest || block.length != n * W::kSize) return false;
    std::memcpy(words, payload, block.length);
    return true;
  }
  // 1. Find the sections.
  Tiers tiers;
  constexpr int kLeavable = W::kSize == 4 ? 3 * kByteLeftOut : 0;
  if (block.kind & ~(kCodeMask | kZerosLeftOut | kLeavable) || !read_tiers(block, tiers))
    return false;
  Sections sections(payload, block.length);
  const uint8_t* mask = nullptr;
  int m = n;
  if (block.kind & kZerosLeftOut) {
    if ((mask = sections.take_planes(n, 1)) == nullptr) return false;
    m = S::count_ones(1, mask, n);
  }
  const uint8_t* bytes[3] = {};
  for (int b = 0; b < W::kNumBytes; ++b) {
    if (b < 2 && block.kind & kByteLeftOut << b) continue;
    if ((bytes[b] = sections.take(m)) == nullptr) return false;
  }
  const uint8_t* const bits = sections.take_planes(m, W::kNumBits);
  if (bits == nullptr) return false;
  const uint8_t* planes[3];
  int sizes[4] = {m};
  for (int t = 0; t < tiers.count; ++t) {
    const int width = tiers.tier[t].width;
    if ((planes[t] = sections.take_planes(sizes[t], width)) == nullptr) return false;
    sizes[t + 1] = S::count_ones(width, planes[t], sizes[t]);
  }
  const int num_escapes = sizes[tiers.count];
  if (sections.left() != num_escapes) return false;

  next.fetch_quarter();

  // 2. From the escapes back to the exponents of all words.
  alignas(64) uint8_t first[kLosslessBlock + kSlack], second[kLosslessBlock + kSlack];
  uint8_t *from = first, *to = second;
  std::memcpy(from, sections.take(num_escapes), num_escapes);
  for (int t = tiers.count - 1; t >= 0; --t) {
    S::decode_tier(tiers.tier[t], planes[t], sizes[t], from, to);
    std::swap(from, to);
  }

  if (W::kExponentMask < 255) {
    int bits_set = 0;
    for (int i = 0; i < m; ++i) bits_set |= from[i];
    if (bits_set & ~W::kExponentMask) return false;  // words of this type have no such exponent
  }

  next.fetch_quarter();

  // 3. Words.
  if (mask == nullptr) {
    S::join(W{}, from, m, bytes, bits, words);
  } else {
    alignas(64) uint8_t nonzero[kLosslessBlock * W::kSize + kSlack];
    S::join(W{}, from, m, bytes, bits, nonzero);
    S::template spread<W::kSize>(mask, nonzero, n, words);
  }
  return true;
}

// --- by element type ---

// What each byte means.
inline const float* byte_values(LosslessType type) {
  struct Values {
    float of[4][256];
    Values() {
      for (int byte = 0; byte < 256; ++byte) {
        of[0][byte] = static_cast<float>(byte);
        of[1][byte] = static_cast<float>(static_cast<int8_t>(byte));
        const uint32_t sign = static_cast<uint32_t>(byte & 0x80) << 24, rest = byte & 0x7F;
        // Shifted into place the exponent is 120 too small.
        const float magnitude = float_of(rest << 20) * 0x1p120f;
        of[2][byte] = float_of(sign | (rest == 0x7F ? 0x7FF00000 : bits_of(magnitude)));
        of[3][byte] = widen(Float16{static_cast<uint16_t>(byte << 8)});
      }
    }
  };
  static const Values values;
  switch (type) {
    case LosslessType::kUInt8:
      return values.of[0];
    case LosslessType::kInt8:
      return values.of[1];
    case LosslessType::kFloat8E4M3:
      return values.of[2];
    default:
      return values.of[3];
  }
}

template <class S>
struct Lossless {
  static LosslessBlock encode(LosslessType type, LosslessCode code, const uint8_t* words, int n,
                              uint8_t* payload, WordSums& sums) {
    if (type >= LosslessType::kWord2) {
      sums = S::sums(words, n * lossless_itemsize(type));
      return encode_plain_words(type, words, n, payload);
    }
    return with_word(type, [&](auto word) {
      return encode_words<S, decltype(word)>(type, code, words, n, payload, sums);
    });
  }

  static bool decode(LosslessType type, const LosslessBlock& block, const uint8_t* payload, int n,
                     uint8_t* words, WordSums& sums) {
    const int nbytes = n * lossless_itemsize(type);
    NextBlock next(payload + block.length, block.length, words + nbytes, nbytes);
    return decode(type, block, payload, n, words, sums, next);
  }

  static bool decode_add(LosslessType type, const LosslessBlock& block, const uint8_t* payload,
                         int n, float* total, WordSums& sums) {
    alignas(64) uint8_t words[kLosslessBlock * 4];
    // The total is more than the cache holds of everything else; asking for it early costs time.
    NextBlock next(payload + block.length, block.length, nullptr, 0);
    if (!decode(type, block, payload, n, words, sums, next)) return false;
    add(type, words, n, total);
    return true;
  }

  static bool decode(LosslessType type, const LosslessBlock& block, const uint8_t* payload, int n,
                     uint8_t* words, WordSums& sums, NextBlock& next) {
    const bool is_ranked = (block.kind & kCodeMask) == kRanked;
    if (is_ranked || type >= LosslessType::kWord2) {
      const int nbytes = n * lossless_itemsize(type);
      if (is_ranked) {
        const bool zeros_out = block.kind & kZerosLeftOut;
        if (!decode_ranked(type, payload, block.length, n, zeros_out, words)) return false;
      } else {
        if (block.kind || block.length != nbytes) return false;
        std::memcpy(words, payload, nbytes);
      }
      sums = S::sums(words, nbytes);
      return true;
    }
    return with_word(type, [&](auto word) {
      using W = decltype(word);
      if (!decode_words<S, W>(block, payload, n, words, next)) return false;
      next.fetch_quarter();
      sums = S::sums(words, n * W::kSize);
      next.fetch_quarter();
      return true;
    });
  }

  static void add(LosslessType type, const uint8_t* words, int64_t n, float* total) {
    switch (type) {
      case LosslessType::kBFloat16:
        return S::add(BFloat16Word{}, words, n, total);
      case LosslessType::kFloat16:
        return S::add(Float16Word{}, words, n, total);
      case LosslessType::kFloat32:
        return S::add(Float32Word{}, words, n, total);
      default:
        break;
    }
    const float* const values = byte_values(type);
    for (int64_t i = 0; i < n; ++i) total[i] += values[words[i]];
  }

  static WordSums sums(const uint8_t* bytes, uint64_t nbytes) { return S::sums(bytes, nbytes); }

  static constexpr LosslessKernels kKernels = {encode, decode, decode_add, add, sums};
};

}  // namespace
}  // namespace laconic
