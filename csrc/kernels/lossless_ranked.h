// Ranked blocks of the lossless format: every byte of a word is a plane of its own, coded by how
// often its values come. docs/formats.md, "Ranked blocks"; in plain C++ for every instruction set.
#pragma once

#include <cstdint>

#include "lossless.h"

namespace laconic {

constexpr int kRanked = 4;  // the exponent code of such a block's kind

// Whether the block's `itemsize`-byte words may be shorter by rank than by windows, from a
// sixty-fourth of them. `low_plane`: the lower byte plane of float32 to look at, negative for none.
// `is_bad`: windows did not fit.
bool may_be_ranked(LosslessType, const uint8_t* words, int n, bool zeros_out, int low_plane,
                   bool is_bad);

// Whether more than an eighth of the sample of a block is zero words.
bool ranked_zeros_out(LosslessType, const uint8_t* words, int n);

// Writes the payload of a block and returns its length, if that is below `limit`; otherwise writes
// nothing and returns `limit`.
int encode_ranked(LosslessType, const uint8_t* words, int n, bool zeros_out, int limit,
                  uint8_t* payload);

// Writes n words. Reads `nbytes` bytes of the payload, whatever they are, and nothing else. False:
// they are not what an encoder writes; nothing is written then.
bool decode_ranked(LosslessType, const uint8_t* payload, int nbytes, int n, bool zeros_out,
                   uint8_t* words);

}  // namespace laconic
