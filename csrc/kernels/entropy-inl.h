// Entropy-coded blocks: tabled asymmetric numeral systems (Duda, arXiv:1311.2540), eight states
// that take turns in one stream of bits. Plain loops: eight states keep the processor busy.
#pragma once

#include <cstring>

#ifdef __BMI2__
#include <immintrin.h>
#endif

#include "entropy.h"

namespace laconic {
namespace {

constexpr int kLogStates = 12, kNumStates = 1 << kLogStates, kLanes = 8, kValues = 256;
constexpr int kStride = kNumStates / 2 + kNumStates / 8 + 3;
constexpr uint8_t kRawPlane = 0, kConstantPlane = 1, kCodedPlane = 2;
constexpr int kPlaneHead = 6;  // kind, number of values - 1, bytes of the stream
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

// The lowest bits of x, as many as the lowest byte of `count` says, which is at most 63.
uint64_t low_bits(uint64_t x, uint64_t count) {
#ifdef __BMI2__
  return _bzhi_u64(x, count);
#else
  return x & ((uint64_t{1} << (count & 63)) - 1);
#endif
}

int log2_of(uint32_t x) { return 31 - __builtin_clz(x); }

// --- tables ---

using Counts = uint32_t[kValues];
using Shares = uint16_t[kValues];  // of each value, of kNumStates states

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

void share_states(const Counts& counts, int n, Shares& shares) {
  uint64_t before = 0;
  int total = 0;
  for (int v = 0; v < kValues; ++v) {
    const uint64_t start = before * kNumStates / n;
    before += counts[v];
    shares[v] = static_cast<uint16_t>(before * kNumStates / n - start);
    shares[v] = static_cast<uint16_t>(shares[v] + (counts[v] && !shares[v]));
    total += shares[v];
  }
  for (; total > kNumStates; --total) {
    int largest = 0;
    for (int v = 1; v < kValues; ++v) largest = shares[v] > shares[largest] ? v : largest;
    --shares[largest];
  }
}

void spread_values(const Shares& shares, uint8_t* value_of) {
  int place = 0;
  for (int v = 0; v < kValues; ++v) {
    for (int j = 0; j < shares[v]; ++j, place = (place + kStride) % kNumStates) {
      value_of[place] = static_cast<uint8_t>(v);
    }
  }
}

// --- encode ---

// Whether a code for n values saves a thirty-second of their bits, each state being as likely as
// any other. Costs are in 4096ths of a bit.
bool pays(const Counts& counts, const Shares& shares, int n) {
  uint64_t cost = 0;
  for (int v = 0; v < kValues; ++v) {
    if (!counts[v]) continue;
    const int most = kLogStates - log2_of(shares[v]);
    cost += counts[v] * (uint64_t{kNumStates} * (most + 1) - (uint64_t{shares[v]} << most));
  }
  return cost < uint64_t{31 * 8 * kNumStates / 32} * n;
}

// Writes a stream that ends before `end`, from its end to its beginning, which it returns. It has
// at most 12 bits a byte and 14 bytes more, and up to 8 bytes in front of it are written to.
uint8_t* encode_stream(const uint8_t* plane, int n, const Shares& shares, uint8_t* end) {
  struct Value {
    uint64_t extra;  // bits that a state gives away are (state + extra) >> 16
    int64_t first;
  } values[kValues];
  uint16_t states[kNumStates], next[kValues];
  uint8_t value_of[kNumStates];
  spread_values(shares, value_of);
  for (int v = 0, first = 0; v < kValues; first += shares[v++]) {
    if (!shares[v]) continue;
    const int most = kLogStates - log2_of(shares[v]);
    values[v] = {(uint64_t{1} << 16) * most - (uint64_t{shares[v]} << most), first - shares[v]};
    next[v] = static_cast<uint16_t>(first);
  }
  // A state below shares << most gives away one bit less: it does not reach `most` << 16.
  for (int place = 0; place < kNumStates; ++place) {
    states[next[value_of[place]]++] = static_cast<uint16_t>(kNumStates + place);
  }

  struct Bits {
    uint64_t bits, count;
  };
  uint64_t lanes[kLanes];
  for (uint64_t& state : lanes) state = kNumStates;
  const auto take = [&](uint8_t v, uint64_t& state) {
    const uint64_t count = (state + values[v].extra) >> 16;
    const Bits given{low_bits(state, count), count};
    state = states[static_cast<int64_t>(state >> count) + values[v].first];
    return given;
  };
  const auto join = [](const Bits& a, const Bits& b) {
    return Bits{a.bits << b.count | b.bits, a.count + b.count};
  };
  Bits open{0, 0};  // less than a byte of them between two calls of put, what is above is written
  const auto put = [&](const Bits& more) {  // at most 48
    open = join(open, more);
    store(end - 8, open.bits << (64 - open.count) % 64);
    end -= open.count >> 3;
    open.count &= 7;
  };
  int i = n - n % kLanes;
  for (int k = n % kLanes - 1; k >= 0; --k) put(take(plane[i + k], lanes[k]));
  while (i) {
    i -= kLanes;
    for (int k = kLanes - 1; k > 0; k -= 4) {
      Bits four[4];
      for (int j = 0; j < 4; ++j) four[j] = take(plane[i + k - j], lanes[k - j]);
      put(join(join(four[0], four[1]), join(four[2], four[3])));
    }
  }
  for (int k = kLanes - 1; k >= 0; --k) put({lanes[k] - kNumStates, kLogStates});
  put({1, 1});
  return open.count ? end - 1 : end;
}

// Returns where the plane ends; at most n + 1 bytes. `end`: of room for a stream.
uint8_t* encode_plane(const uint8_t* plane, int n, uint8_t* end, uint8_t* out) {
  if (!n) return out;
  Counts counts;
  Shares shares;
  const auto count = [&](int run, int step) {
    const int counted = count_values(plane, n, run, step, counts);
    share_states(counts, counted, shares);
    return pays(counts, shares, counted);
  };
  // Most planes that do not get shorter are seen by a sixteenth of them.
  const bool may_pay = n < kSampleStep * 8 || count(kSampleRun, kSampleStep);
  int num_values = 0;
  if (may_pay && count(n, n)) {
    for (uint32_t each : counts) num_values += each != 0;
    if (num_values == 1) {
      out[0] = kConstantPlane;
      out[1] = plane[0];
      return out + 2;
    }
  }
  if (num_values && kPlaneHead + 3 * num_values < n) {
    const uint8_t* const stream = encode_stream(plane, n, shares, end);
    const auto nbytes = static_cast<uint32_t>(end - stream);
    if (kPlaneHead + 3 * num_values + nbytes <= static_cast<uint32_t>(n)) {
      out[0] = kCodedPlane;
      out[1] = static_cast<uint8_t>(num_values - 1);
      store(out + 2, nbytes);
      uint8_t *values = out + kPlaneHead, *their_shares = values + num_values;
      for (int v = 0; v < kValues; ++v) {
        if (!counts[v]) continue;
        *values++ = static_cast<uint8_t>(v);
        store(their_shares, shares[v]);
        their_shares += 2;
      }
      std::memcpy(their_shares, stream, nbytes);
      return their_shares + nbytes;
    }
  }
  out[0] = kRawPlane;
  std::memcpy(out + 1, plane, n);
  return out + 1 + n;
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

bool decode_stream(const uint8_t* stream, uint32_t nbytes, const Shares& shares, int n,
                   uint8_t* plane) {
  uint32_t entries[kNumStates];  // bits to read, value, and what the bits are added to
  uint16_t next[kValues];
  uint8_t value_of[kNumStates];
  spread_values(shares, value_of);
  std::memcpy(next, shares, sizeof(next));
  for (int place = 0; place < kNumStates; ++place) {
    const uint32_t state = next[value_of[place]]++;
    const int count = kLogStates - log2_of(state);
    entries[place] = count | value_of[place] << 8 | ((state << count) - kNumStates) << 16;
  }
  if (!nbytes || !stream[0]) return false;
  // A position behind the end stays one bit behind it: nothing beyond the guard is read.
  const uint64_t end = uint64_t{nbytes} * 8;
  uint64_t position = __builtin_ctz(stream[0]) + 1, bits = 0;
  const auto refill = [&] {  // at least 57 bits
    position = position < end + 1 ? position : end + 1;
    bits = load<uint64_t>(stream + (position >> 3)) >> (position & 7);
  };
  uint64_t lanes[kLanes];
  for (uint64_t& state : lanes) {
    refill();
    state = bits & (kNumStates - 1);
    position += kLogStates;
  }
  const auto next_entry = [&](uint64_t& state) {
    const uint64_t entry = entries[state];
    state = (entry >> 16) + low_bits(bits, entry);
    bits >>= entry & 63;
    return entry;
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < kLanes; k += 4) {
      refill();
      uint64_t sum = 0;  // in its lowest byte that of the bits
      for (int j = 0; j < 4; ++j) {
        const uint64_t entry = next_entry(lanes[k + j]);
        plane[i + k + j] = static_cast<uint8_t>(entry >> 8);
        sum += entry;
      }
      position += sum & 255;
    }
  }
  for (int k = 0; i + k < n; ++k) {
    refill();
    const uint64_t entry = next_entry(lanes[k]);
    plane[i + k] = static_cast<uint8_t>(entry >> 8);
    position += entry & 255;
  }
  uint64_t left = 0;
  for (uint64_t state : lanes) left |= state;
  return !left && position == end;
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
  const int num_values = head[0] + 1;
  const auto nbytes = load<uint32_t>(head + 1);
  const uint8_t *const values = reader.take(num_values), *const given = reader.take(2 * num_values);
  const uint8_t* const stream = reader.take(nbytes);
  if (!given || !stream) return nullptr;
  Shares shares = {};
  int total = 0;
  for (int i = 0; i < num_values; ++i) {
    const auto share = load<uint16_t>(given + 2 * i);
    if ((i && values[i] <= values[i - 1]) || !share || share >= kNumStates) return nullptr;
    shares[values[i]] = share;
    total += share;
  }
  return total == kNumStates && decode_stream(stream, nbytes, shares, n, room) ? room : nullptr;
}

// --- words ---

template <class Word, bool kIsRotated>
struct Blocks {
  static constexpr int kSize = sizeof(Word), kBits = 8 * kSize;
  static constexpr bool kMayLeaveOut = kSize > 1;

  static uint8_t* encode_block(const uint8_t* words, int n, uint8_t* scratch, uint8_t* out) {
    uint8_t* const planes = scratch + uint64_t{kSize} * n;
    uint8_t* const end = planes + (uint64_t{kSize} + 2) * n + 256;
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
      out = encode_plane(mask, (n + 7) / 8, end, out);
      words = scratch;
      n = m;
    }
    if (kSize == 1) return encode_plane(words, n, end, out);
    for (int i = 0; i < n; ++i) {
      auto word = load<Word>(words + kSize * i);
      if (kIsRotated) word = static_cast<Word>(word << 1 | word >> (kBits - 1));
      for (int k = 0; k < kSize; ++k) {
        planes[int64_t{k} * n + i] = static_cast<uint8_t>(word >> 8 * k);
      }
    }
    for (int k = 0; k < kSize; ++k) out = encode_plane(planes + int64_t{k} * n, n, end, out);
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
