// Entropy-coded blocks: Huffman codes of at most 11 bits. A plane has four streams, so that the
// processor looks for values in four places at a time.
#pragma once

#include <cstring>

#include "entropy.h"

namespace laconic {
namespace {

constexpr int kMaxBits = 11, kWindows = 1 << kMaxBits, kStreams = 4, kValues = 256;
constexpr uint8_t kRawPlane = 0, kConstantPlane = 1, kCodedPlane = 2;
constexpr int kPlaneHead = 3 + 4 * kStreams;  // kind, first and last value, bytes of the streams
constexpr int kSampleRun = 128, kSampleStep = 2048;
constexpr int kZeroShare = 32;  // zeros are left out if more than 1 of so many words is one

template <class T>
T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
void store(uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

// A long memcpy to an odd address is slow where it is one instruction of the processor's.
uint8_t* copy(const uint8_t* from, int64_t nbytes, uint8_t* to) {
  constexpr int64_t kPiece = 2048;
  for (; nbytes > kPiece; nbytes -= kPiece, from += kPiece, to += kPiece) {
    std::memcpy(to, from, kPiece);
  }
  std::memcpy(to, from, nbytes);
  return to + nbytes;
}

// --- codes ---

using Counts = uint32_t[kValues];
using Lengths = uint8_t[kValues];  // bits of each value, 0 for those that do not come

// Counts the first `run` of each `step` bytes.
int count_values(const uint8_t* plane, int n, int run, int step, Counts& counts) {
  uint32_t parts[4][kValues] = {};
  int counted = 0;
  for (int start = 0; start < n; start += step) {
    const int end = n - start < run ? n : start + run;
    counted += end - start;
    int i = start;
    for (; i + 4 <= end; i += 4) {
      for (int k = 0; k < 4; ++k) ++parts[k][plane[i + k]];
    }
    for (; i < end; ++i) ++parts[0][plane[i]];
  }
  for (int v = 0; v < kValues; ++v) {
    counts[v] = parts[0][v] + parts[1][v] + parts[2][v] + parts[3][v];
  }
  return counted;
}

// The lengths of a Huffman code of the values that come, two or more.
void choose_lengths(const Counts& counts, Lengths& lengths) {
  uint8_t values[kValues];
  int n = 0;
  for (int v = 0; v < kValues; ++v) {
    lengths[v] = 0;
    if (!counts[v]) continue;
    int i = n++;
    for (; i && counts[values[i - 1]] > counts[v]; --i) values[i] = values[i - 1];
    values[i] = static_cast<uint8_t>(v);
  }
  uint32_t weights[2 * kValues];  // of leaves in ascending order, then of nodes as they are made
  int above[2 * kValues], depths[2 * kValues];
  for (int i = 0; i < n; ++i) weights[i] = counts[values[i]];
  for (;;) {
    int leaf = 0, node = n;
    for (int made = n; made < 2 * n - 1; ++made) {
      weights[made] = 0;
      for (int k = 0; k < 2; ++k) {
        const bool is_leaf = leaf < n && (node == made || weights[leaf] <= weights[node]);
        const int taken = is_leaf ? leaf++ : node++;
        weights[made] += weights[taken];
        above[taken] = made;
      }
    }
    int deepest = depths[2 * n - 2] = 0;
    for (int i = 2 * n - 3; i >= 0; --i) {
      depths[i] = depths[above[i]] + 1;
      deepest = depths[i] > deepest ? depths[i] : deepest;
    }
    if (deepest <= kMaxBits) break;
    for (int i = 0; i < n; ++i) weights[i] = (weights[i] + 1) / 2;
  }
  for (int i = 0; i < n; ++i) lengths[values[i]] = static_cast<uint8_t>(depths[i]);
}

// Calls visit(value, code, length): canonical codes, whose first bit is the lowest.
template <class Visit>
void for_codes(const Lengths& lengths, const Visit& visit) {
  uint32_t code = 0;  // its first bit is the highest
  for (int length = 1; length <= kMaxBits; ++length, code <<= 1) {
    for (int v = 0; v < kValues; ++v) {
      if (lengths[v] != length) continue;
      uint32_t reversed = 0;
      for (int b = 0; b < length; ++b) reversed |= (code >> b & 1) << (length - 1 - b);
      visit(v, reversed, length);
      ++code;
    }
  }
}

// Where stream k of a plane of n bytes begins, or the one before ends.
int part_of(int n, int k) {
  const int at = (n + kStreams - 1) / kStreams * k;
  return at < n ? at : n;
}

// --- encode ---

struct Bits {
  uint64_t bits, count;
};

// Writes a stream and up to 8 bytes more; returns where it ends.
uint8_t* encode_stream(const uint8_t* plane, int n, const Bits* codes, uint8_t* out) {
  const auto join = [](const Bits& a, const Bits& b) {
    return Bits{a.bits | b.bits << a.count, a.count + b.count};
  };
  Bits open{0, 0};  // less than a byte of them between two calls of put
  const auto put = [&](const Bits& more) {  // at most 44
    open = join(open, more);
    store(out, open.bits);
    out += open.count >> 3;
    open.bits >>= open.count & ~uint64_t{7};
    open.count &= 7;
  };
  int i = 0;
  for (; i + 4 <= n; i += 4) {
    put(join(join(codes[plane[i]], codes[plane[i + 1]]),
             join(codes[plane[i + 2]], codes[plane[i + 3]])));
  }
  for (; i < n; ++i) put(codes[plane[i]]);
  return out + (open.count != 0);
}

// Whether a sixteenth of a plane leaves a chance that it gets shorter: where the squares of its
// values' shares add up to less than 1.125 / 256, no code takes less than 7.8 bits a byte.
bool is_uneven(const uint8_t* plane, int n) {
  Counts counts;
  const int64_t counted = count_values(plane, n, kSampleRun, kSampleStep, counts);
  int64_t squares = 0;
  for (const uint32_t count : counts) squares += int64_t{count} * (int64_t{count} - 1);
  return 2048 * squares >= 9 * counted * counted;
}

// Returns where the plane ends; at most n + 1 bytes. `room`: for streams, 11 bits a byte, and 12.
uint8_t* encode_plane(const uint8_t* plane, int n, uint8_t* room, uint8_t* out) {
  if (!n) return out;
  Counts counts;
  Lengths lengths;
  int first = 0, last = kValues - 1, halves = 0;
  bool pays = n < 8 * kSampleStep || is_uneven(plane, n);
  if (pays) {
    count_values(plane, n, n, n, counts);
    while (!counts[first]) ++first;
    while (!counts[last]) --last;
    if (first == last) {
      out[0] = kConstantPlane;
      out[1] = plane[0];
      return out + 2;
    }
    choose_lengths(counts, lengths);
    uint64_t bits = 0;
    for (int v = 0; v < kValues; ++v) bits += uint64_t{counts[v]} * lengths[v];
    halves = (last - first) / 2 + 1;
    pays = 32 * (kPlaneHead + halves + bits / 8 + kStreams) <= 31 * static_cast<uint64_t>(n);
  }
  if (!pays) {
    out[0] = kRawPlane;
    return copy(plane, n, out + 1);
  }
  out[0] = kCodedPlane;
  out[1] = static_cast<uint8_t>(first);
  out[2] = static_cast<uint8_t>(last);
  Bits codes[kValues];
  for_codes(lengths, [&](int v, uint32_t code, int length) {
    codes[v] = {code, static_cast<uint64_t>(length)};
  });
  uint8_t *end = room, *sizes = out + 3;
  for (int k = 0; k < kStreams; ++k, sizes += 4) {
    uint8_t* const stream = end;
    end = encode_stream(plane + part_of(n, k), part_of(n, k + 1) - part_of(n, k), codes, stream);
    store(sizes, static_cast<uint32_t>(end - stream));
  }
  out = sizes;
  std::memset(out, 0, halves);
  for (int v = first; v <= last; ++v) {
    const int i = v - first;
    out[i / 2] = static_cast<uint8_t>(out[i / 2] | lengths[v] << i % 2 * 4);
  }
  return copy(room, end - room, out + halves);
}

// --- decode ---

struct Reader {
  const uint8_t *next, *end;
  const uint8_t* take(uint64_t nbytes) {
    if (static_cast<uint64_t>(end - next) < nbytes) return nullptr;
    next += nbytes;
    return next - nbytes;
  }
};

struct Stream {
  const uint8_t* bytes;
  uint64_t position, end;  // in bits
  uint8_t *next, *last;    // of the plane

  // At least 57. A position behind the end stays one bit behind it: only the guard is read there.
  uint64_t bits() {
    position = position < end + 1 ? position : end + 1;
    return load<uint64_t>(bytes + (position >> 3)) >> (position & 7);
  }
  bool is_whole() const {
    if (position == end) return true;
    return position < end && end - position < 8 && !(bytes[position >> 3] >> (position & 7));
  }
};

// What each window of 11 bits begins with: one value and its bits; up to six values, 8 bits each,
// with their number and bits above them.
struct Windows {
  uint16_t one[kWindows];
  uint64_t several[kWindows];
};

void make_windows(const Lengths& lengths, Windows& windows) {
  for_codes(lengths, [&](int v, uint32_t code, int length) {
    for (uint32_t i = code; i < kWindows; i += 1u << length) {
      windows.one[i] = static_cast<uint16_t>(v | length << 8);
    }
  });
  for (uint32_t i = 0; i < kWindows; ++i) {
    uint64_t values = 0, count = 0, bits = 0;
    for (; count < 6; ++count) {
      const uint64_t next = windows.one[i >> bits], length = next >> 8;
      if (bits + length > kMaxBits) break;
      values |= (next & 255) << 8 * count;
      bits += length;
    }
    windows.several[i] = values | count << 48 | bits << 56;
  }
}

// The code is complete, so that each window has a value.
bool decode_streams(Stream (&streams)[kStreams], const Lengths& lengths) {
  Windows windows;
  make_windows(lengths, windows);
  constexpr int kTimes = 5, kWritten = kTimes * 6 + 2;  // the last 8 bytes may begin at the 25th
  const auto have_room = [&] {
    bool found = true;
    for (const Stream& s : streams) found &= s.last - s.next >= kWritten;
    return found;
  };
  while (have_room()) {
    uint64_t bits[kStreams];
    for (int k = 0; k < kStreams; ++k) bits[k] = streams[k].bits();
    for (int j = 0; j < kTimes; ++j) {
      for (int k = 0; k < kStreams; ++k) {
        const uint64_t found = windows.several[bits[k] % kWindows], count = found >> 56;
        store(streams[k].next, found);
        streams[k].next += found >> 48 & 255;
        streams[k].position += count;
        bits[k] >>= count;
      }
    }
  }
  bool is_whole = true;
  for (Stream& s : streams) {
    while (s.next < s.last) {
      const uint16_t found = windows.one[s.bits() % kWindows];
      *s.next++ = static_cast<uint8_t>(found);
      s.position += found >> 8;
    }
    is_whole &= s.is_whole();
  }
  return is_whole;
}

// The n bytes of a plane, where they lie or in `room`; null if they are not what an encoder writes.
const uint8_t* decode_plane(Reader& reader, int n, uint8_t* room) {
  if (!n) return room;
  const uint8_t* const kind = reader.take(1);
  if (!kind || *kind > kCodedPlane) return nullptr;
  if (*kind == kRawPlane) return reader.take(n);
  if (*kind == kConstantPlane) {
    const uint8_t* const value = reader.take(1);
    return value ? static_cast<const uint8_t*>(std::memset(room, *value, n)) : nullptr;
  }
  const uint8_t* const head = reader.take(kPlaneHead - 1);
  if (!head) return nullptr;
  const int first = head[0], last = head[1], num_halves = (last - first) / 2 + 1;
  const uint8_t* const halves = first < last ? reader.take(num_halves) : nullptr;
  if (!halves) return nullptr;
  Lengths lengths = {};
  uint32_t windows = 0;
  for (int i = 0; i < 2 * num_halves; ++i) {
    const int length = halves[i / 2] >> i % 2 * 4 & 15;
    if (!length) continue;
    if (length > kMaxBits || first + i > last) return nullptr;
    lengths[first + i] = static_cast<uint8_t>(length);
    windows += kWindows >> length;
  }
  if (windows != kWindows || !lengths[first] || !lengths[last]) return nullptr;
  Stream streams[kStreams];
  for (int k = 0; k < kStreams; ++k) {
    const auto nbytes = load<uint32_t>(head + 2 + 4 * k);
    const uint8_t* const bytes = reader.take(nbytes);
    if (!bytes) return nullptr;
    streams[k] = {bytes, 0, uint64_t{nbytes} * 8, room + part_of(n, k), room + part_of(n, k + 1)};
  }
  return decode_streams(streams, lengths) ? room : nullptr;
}

// --- words ---

template <class Word, bool kIsRotated>
struct Blocks {
  static constexpr int kSize = sizeof(Word), kBits = 8 * kSize;
  static constexpr bool kMayLeaveOut = kSize > 1;

  static uint8_t* encode_block(const uint8_t* words, int n, uint8_t* scratch, uint8_t* out) {
    uint8_t* const planes = scratch + uint64_t{kSize} * n;
    uint8_t* const room = planes + uint64_t{kSize} * n;
    int zeros = 0;
    for (int i = 0; kMayLeaveOut && i < n; ++i) zeros += load<Word>(words + kSize * i) == 0;
    const bool leaves_out = zeros * int64_t{kZeroShare} > n;
    *out++ = leaves_out;
    if (leaves_out) {
      uint8_t* const mask = planes;
      std::memset(mask, 0, (n + 7) / 8);
      int m = 0;
      for (int i = 0; i < n; ++i) {
        const auto word = load<Word>(words + kSize * i);
        store(scratch + kSize * m, word);
        m += word != 0;
        mask[i / 8] = static_cast<uint8_t>(mask[i / 8] | (word != 0) << i % 8);
      }
      out = encode_plane(mask, (n + 7) / 8, room, out);
      words = scratch;
      n = m;
    }
    if (kSize == 1) return encode_plane(words, n, room, out);
    for (int i = 0; i < n; ++i) {
      auto word = load<Word>(words + kSize * i);
      if (kIsRotated) word = static_cast<Word>(word << 1 | word >> (kBits - 1));
      for (int k = 0; k < kSize; ++k) {
        planes[int64_t{k} * n + i] = static_cast<uint8_t>(word >> 8 * k);
      }
    }
    for (int k = 0; k < kSize; ++k) out = encode_plane(planes + int64_t{k} * n, n, room, out);
    return out;
  }

  static bool decode_block(Reader& reader, int n, uint8_t* scratch, uint8_t* words) {
    const uint8_t* const leaves_out = reader.take(1);
    if (!leaves_out || *leaves_out > kMayLeaveOut) return false;
    uint8_t* const room = scratch + uint64_t{kSize} * n;
    int m = n;
    const uint8_t* mask = nullptr;
    if (*leaves_out) {
      const int nbytes = (n + 7) / 8;
      mask = decode_plane(reader, nbytes, room + uint64_t{kSize} * n);
      if (!mask || (n % 8 && mask[nbytes - 1] >> n % 8)) return false;
      m = 0;
      for (int i = 0; i < nbytes; ++i) m += __builtin_popcount(mask[i]);
    }
    const uint8_t* planes[kSize];
    for (int k = 0; k < kSize; ++k) {
      planes[k] = decode_plane(reader, m, room + int64_t{k} * n);
      if (!planes[k]) return false;
    }
    uint8_t* const joined = mask ? scratch : words;
    for (int i = 0; i < m; ++i) {
      Word word = 0;
      for (int k = 0; k < kSize; ++k) word = static_cast<Word>(word | Word{planes[k][i]} << 8 * k);
      if (kIsRotated) word = static_cast<Word>(word >> 1 | word << (kBits - 1));
      store(joined + kSize * i, word);
    }
    const uint8_t* next = scratch;
    for (int i = 0; mask && i < n; ++i) {
      const int is_there = mask[i / 8] >> i % 8 & 1;
      store(words + kSize * i, static_cast<Word>(load<Word>(next) & -static_cast<Word>(is_there)));
      next += kSize * is_there;
    }
    return true;
  }

  static uint64_t encode(uint64_t numel, const uint8_t* words, uint8_t* scratch, uint8_t* blocks) {
    uint8_t* out = blocks;
    for (uint64_t i = 0; i < numel; i += kEntropyBlock) {
      const uint64_t n = numel - i < kEntropyBlock ? numel - i : kEntropyBlock;
      out = encode_block(words + kSize * i, static_cast<int>(n), scratch, out);
    }
    return out - blocks;
  }

  static uint64_t decode(uint64_t numel, const uint8_t* blocks, uint64_t nbytes, uint8_t* scratch,
                         uint8_t* words) {
    Reader reader{blocks, blocks + nbytes};
    for (uint64_t i = 0; i < numel; i += kEntropyBlock) {
      const uint64_t n = numel - i < kEntropyBlock ? numel - i : kEntropyBlock;
      if (!decode_block(reader, static_cast<int>(n), scratch, words + kSize * i)) return 0;
    }
    return reader.next - blocks;
  }
};

template <class Visit>
uint64_t with_words(const EntropyWords& words, const Visit& visit) {
  switch (words.itemsize) {
    case 1:
      return visit(Blocks<uint8_t, false>{});
    case 2:
      return words.is_rotated ? visit(Blocks<uint16_t, true>{}) : visit(Blocks<uint16_t, false>{});
    case 4:
      return words.is_rotated ? visit(Blocks<uint32_t, true>{}) : visit(Blocks<uint32_t, false>{});
    default:
      return visit(Blocks<uint64_t, false>{});
  }
}

uint64_t encode(const EntropyWords& words, const uint8_t* from, uint8_t* scratch, uint8_t* blocks) {
  return with_words(words,
                    [&](auto kind) { return kind.encode(words.numel, from, scratch, blocks); });
}

uint64_t decode(const EntropyWords& words, const uint8_t* blocks, uint64_t nbytes, uint8_t* scratch,
                uint8_t* to) {
  return with_words(
      words, [&](auto kind) { return kind.decode(words.numel, blocks, nbytes, scratch, to); });
}

// The kernels of one instruction set.
constexpr EntropyKernels kEntropyKernels = {encode, decode};

}  // namespace
}  // namespace laconic
