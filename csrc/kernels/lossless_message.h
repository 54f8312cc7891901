// A lossless message from front to end, on raw pointers: header, directory, threads. The blocks in
// between are the kernels' of lossless.h.
#pragma once

#include <cstdint>

#include "lossless.h"

namespace laconic {

// What decoding found; the numbers are those of `Status` in src/laconic/ops/lossless.py.
enum class LosslessStatus : int {
  kSound = 0,
  kTruncated = 1,
  kNotAMessage = 2,
  kVersion = 3,
  kField = 4,
  kLength = 5,
  kHeaderSum = 6,
  kTooLong = 7,
  kMismatch = 8,
  kDirectory = 9,
  kPayload = 10,
  kChecksum = 11,
  kTrailing = 12
};

// What the words of each of the header's dtypes are; the first seven are those of version 1.
constexpr int kLosslessFirstTypes = 7, kLosslessNumTypes = 21;
constexpr LosslessType kLosslessTypes[kLosslessNumTypes] = {
    LosslessType::kUInt8,    LosslessType::kBFloat16,   LosslessType::kFloat16,
    LosslessType::kFloat32,  LosslessType::kFloat8E4M3, LosslessType::kFloat8E5M2,
    LosslessType::kInt8,     LosslessType::kUInt8,      // bool
    LosslessType::kWord2,    LosslessType::kWord2,      // int16, uint16
    LosslessType::kWord4,    LosslessType::kWord4,      // int32, uint32
    LosslessType::kWord8,    LosslessType::kWord8,      // int64, uint64
    LosslessType::kWord8,                               // float64
    LosslessType::kFloat16,  LosslessType::kFloat32,    // parts of complex32, complex64
    LosslessType::kWord8,                               // parts of complex128
    LosslessType::kFloat8E4M3, LosslessType::kFloat8E5M2,  // their variants fnuz
    LosslessType::kUInt8};                                 // float8_e8m0fnu

struct LosslessEncode {
  uint8_t type;  // the header's dtype
  LosslessCode code;
  const uint8_t* words;  // contiguous
  uint64_t numel;        // of words: parts of complex numbers
  int num_dims;  // at most 8
  const uint64_t* shape;
  uint8_t* message;
  uint64_t message_nbytes;  // at least those of header, shape, original and 5 per block; or the
  bool has_capacity;        // capacity, at least those of header and shape
};

// Writes the message. With a capacity the bytes behind it are set to 0, else they are left alone.
// Returns how many bytes it has without them.
uint64_t encode_message(const LosslessKernels&, int64_t num_threads, const LosslessEncode&);

struct LosslessDecode {
  const uint8_t* message;  // any bytes
  uint64_t message_nbytes;
  uint64_t numel;  // what the result has room for; any other number is a mismatch
  bool adds;       // the values to `total`, whatever their type
  float* total;
  uint8_t type;    // the header's dtype where `words` are written; any other is a mismatch
  uint8_t* words;
};

// Writes nothing outside the result, whatever the message holds. Unless the status is kSound the
// result is to be thrown away: the checksum is only known when all of it was written or added.
LosslessStatus decode_message(const LosslessKernels&, int64_t num_threads, const LosslessDecode&);

}  // namespace laconic
