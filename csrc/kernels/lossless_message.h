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

struct LosslessEncode {
  LosslessType type;
  LosslessCode code;
  const uint8_t* words;  // contiguous
  uint64_t numel;
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
  LosslessType type;  // of `words`, where they are written otherwise; any other is a mismatch
  uint8_t* words;
};

// Writes nothing outside the result, whatever the message holds. Unless the status is kSound the
// result is to be thrown away: the checksum is only known when all of it was written or added.
LosslessStatus decode_message(const LosslessKernels&, int64_t num_threads, const LosslessDecode&);

}  // namespace laconic
