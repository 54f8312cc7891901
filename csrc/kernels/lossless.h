// Lossless float coding on raw pointers. docs/formats.md, "Lossless float format", defines every
// byte; src/laconic/ops/reference/lossless.py is the specification.
#pragma once

#include <cstdint>

namespace laconic {

constexpr int kLosslessBlock = 4096;  // elements

// Kinds of words. The first seven numbers are also those of the header's dtypes; the others have no
// exponent that windows code.
enum class LosslessType : int {
  kUInt8 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kFloat32 = 3,
  kFloat8E4M3 = 4,
  kFloat8E5M2 = 5,
  kInt8 = 6,
  kWord2 = 7,
  kWord4 = 8,
  kWord8 = 9
};

enum class LosslessCode : int { kRaw = 0, kWindow = 1, kTiered = 2 };

constexpr int lossless_itemsize(LosslessType type) {
  switch (type) {
    case LosslessType::kWord8:
      return 8;
    case LosslessType::kFloat32:
    case LosslessType::kWord4:
      return 4;
    case LosslessType::kBFloat16:
    case LosslessType::kFloat16:
    case LosslessType::kWord2:
      return 2;
    default:
      return 1;
  }
}

// Of bytes read as little-endian u32 words: the sum of w_j and the sum of (j + 1) w_j, modulo 2^64.
struct WordSums {
  uint64_t sum = 0, weighted = 0;
  // Adds the sums of words that begin at word `first` of the whole.
  void add(const WordSums& part, uint64_t first) {
    sum += part.sum;
    weighted += part.weighted + first * part.sum;
  }
};

// What the message's front says of one block.
struct LosslessBlock {
  uint16_t length;  // bytes of the payload
  uint8_t kind, base, nest;
};

// The longest payload of a block: the raw bytes of its words. Before one that is too long is replaced
// by them it has 3 byte planes, 7 planes of a tier's bits, as many escapes as elements, and the mask
// of zeros.
constexpr int kLosslessPayloadBound = kLosslessBlock * 8;

// Each works on one block of n <= kLosslessBlock elements; no pointer needs to be aligned.
struct LosslessKernels {
  // Writes the payload, at most kLosslessPayloadBound bytes of it even on the way, and sets `sums`
  // to those of the block's words.
  LosslessBlock (*encode)(LosslessType, LosslessCode, const uint8_t* words, int n, uint8_t* payload,
                          WordSums& sums);
  // Writes n words and sets `sums` to theirs. Reads block.length bytes of the payload, whatever
  // they are, and nothing else. False: they are not what an encoder writes; some words may be
  // written.
  bool (*decode)(LosslessType, const LosslessBlock&, const uint8_t* payload, int n, uint8_t* words,
                 WordSums& sums);
  // total[i] += fp32(word i).
  bool (*decode_add)(LosslessType, const LosslessBlock&, const uint8_t* payload, int n,
                     float* total, WordSums& sums);
  // total[i] += fp32(word i), of words that are not coded; any number of them.
  void (*add)(LosslessType, const uint8_t* words, int64_t n, float* total);
  // Of any number of bytes; the last word is filled up with zeros.
  WordSums (*sums)(const uint8_t* bytes, uint64_t nbytes);
};

extern const LosslessKernels kLosslessPortable;
extern const LosslessKernels kLosslessAvx2;    // and POPCNT
extern const LosslessKernels kLosslessAvx512;  // and VBMI, VBMI2, VPOPCNTDQ

}  // namespace laconic
