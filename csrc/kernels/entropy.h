// Blocks of entropy-coded messages on raw pointers. docs/formats.md, "Entropy-coded messages", has
// every byte; src/laconic/ops/reference/entropy.py is the specification.
#pragma once

#include <cstdint>

namespace laconic {

constexpr int kEntropyBlock = 1 << 18;  // words
constexpr int kEntropyGuard = 8;        // bytes behind the blocks that a decoder may read

struct EntropyWords {
  uint64_t numel;
  int itemsize;     // bytes of a word: 1, 2, 4 or 8
  bool is_rotated;  // by a bit, so that the highest byte is an exponent of 8 bits; itemsize 2 or 4
};

// Memory that a kernel works in: words, their planes, a mask of them, streams of 11 bits a byte.
constexpr uint64_t entropy_scratch_nbytes(const EntropyWords& words) {
  const uint64_t n = words.numel < kEntropyBlock ? words.numel : kEntropyBlock;
  return n * (2 * words.itemsize + 2) + 256;
}

struct EntropyKernels {
  // Writes all blocks and returns how many bytes they have: at most those of the words, one for
  // eight words, and itemsize + 3 for each block.
  uint64_t (*encode)(const EntropyWords&, const uint8_t* words, uint8_t* scratch, uint8_t* blocks);
  // Writes all words; returns how many bytes the blocks have, 0 if they are not what an encoder
  // writes (some words may be written then). Reads `nbytes` and kEntropyGuard bytes of the blocks,
  // whatever they are, and nothing else.
  uint64_t (*decode)(const EntropyWords&, const uint8_t* blocks, uint64_t nbytes, uint8_t* scratch,
                     uint8_t* words);
};

extern const EntropyKernels kEntropyPortable;
extern const EntropyKernels kEntropyAvx2;  // and BMI2

}  // namespace laconic
