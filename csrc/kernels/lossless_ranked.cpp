#include "lossless_ranked.h"

#include <algorithm>
#include <cstring>

#include "lossless_portable-inl.h"

namespace laconic {
namespace {

constexpr int kMaxItemsize = 8, kValues = 256, kNumCodes = 16, kMaxTiers = 3;
constexpr int kRankWidths[kNumCodes][kMaxTiers] = {
    {0, 0, 0}, {1, 0, 0}, {2, 0, 0}, {3, 0, 0}, {4, 0, 0}, {5, 0, 0}, {6, 0, 0}, {7, 0, 0},
    {1, 1, 0}, {1, 2, 2}, {1, 2, 4}, {2, 1, 1}, {2, 2, 3}, {3, 2, 3}, {4, 3, 4}, {5, 4, 4}};

// How many ranks the tiers of a code cover.
int size_of(int number) {
  int size = 0;
  for (int width : kRankWidths[number]) size += (1 << width) - 1;
  return size;
}

bool has_wide_exponent(LosslessType type) {
  return type == LosslessType::kBFloat16 || type == LosslessType::kFloat32;
}

// --- words and planes ---

using Planes = uint8_t[kMaxItemsize][kLosslessBlock + kSlack];

template <int kSize>
void take_bytes(const uint8_t* words, int n, Planes& planes) {
  for (int i = 0; i < n; ++i) {
    for (int k = 0; k < kSize; ++k) planes[k][i] = words[i * kSize + k];
  }
}

template <int kSize>
void put_bytes(const Planes& planes, int n, uint8_t* words) {
  for (int i = 0; i < n; ++i) {
    for (int k = 0; k < kSize; ++k) words[i * kSize + k] = planes[k][i];
  }
}

template <class Visit>
auto with_size(int itemsize, const Visit& visit) {
  switch (itemsize) {
    case 1:
      return visit(std::integral_constant<int, 1>{});
    case 2:
      return visit(std::integral_constant<int, 2>{});
    case 4:
      return visit(std::integral_constant<int, 4>{});
    default:
      return visit(std::integral_constant<int, 8>{});
  }
}

// An exponent of 8 bits gets a plane of its own, the last.
void split_planes(LosslessType type, const uint8_t* words, int n, Planes& planes) {
  const int itemsize = lossless_itemsize(type);
  with_size(itemsize, [&](auto size) { take_bytes<size()>(words, n, planes); });
  if (!has_wide_exponent(type)) return;
  uint8_t *const low = planes[itemsize - 2], *const high = planes[itemsize - 1];
  for (int i = 0; i < n; ++i) {
    const int exponent = (high[i] & 127) << 1 | low[i] >> 7;
    low[i] = static_cast<uint8_t>((low[i] & 127) | (high[i] & 128));
    high[i] = static_cast<uint8_t>(exponent);
  }
}

void join_planes(LosslessType type, Planes& planes, int n, uint8_t* words) {
  const int itemsize = lossless_itemsize(type);
  if (has_wide_exponent(type)) {
    uint8_t *const rest = planes[itemsize - 2], *const high = planes[itemsize - 1];
    for (int i = 0; i < n; ++i) {
      const int sign = rest[i] & 128;
      rest[i] = static_cast<uint8_t>((rest[i] & 127) | high[i] << 7);
      high[i] = static_cast<uint8_t>(sign | high[i] >> 1);
    }
  }
  with_size(itemsize, [&](auto size) { put_bytes<size()>(planes, n, words); });
}

// --- codes and bit planes ---

// The bits of eight bytes as an 8 x 8 matrix, transposed: bit b of byte k becomes bit k of byte b.
uint64_t transposed(uint64_t x) {
  uint64_t t = (x ^ x >> 7) & 0x00AA00AA00AA00AA;
  x ^= t ^ t << 7;
  t = (x ^ x >> 14) & 0x0000CCCC0000CCCC;
  x ^= t ^ t << 14;
  t = (x ^ x >> 28) & 0x00000000F0F0F0F0;
  return x ^ t ^ t << 28;
}

// `width` bit planes of n codes, one behind the other; `codes` is scratch memory, zeros behind n.
template <int kWidth>
void take_codes(const uint8_t* codes, int n, uint8_t* planes) {
  const int stride = plane_nbytes(n);
  for (int i = 0; i < stride; ++i) {
    const uint64_t rows = transposed(LosslessPortable::load<uint64_t>(codes + 8 * i));
    for (int b = 0; b < kWidth; ++b) planes[b * stride + i] = static_cast<uint8_t>(rows >> 8 * b);
  }
}

// The reverse; writes whole groups of 8.
template <int kWidth>
void put_codes(const uint8_t* planes, int n, uint8_t* codes) {
  const int stride = plane_nbytes(n);
  for (int i = 0; i < stride; ++i) {
    uint64_t rows = 0;
    for (int b = 0; b < kWidth; ++b) rows |= uint64_t{planes[b * stride + i]} << 8 * b;
    LosslessPortable::store(codes + 8 * i, transposed(rows));
  }
}

template <class Visit>
void with_width(int width, const Visit& visit) {
  switch (width) {
    case 1:
      return visit(std::integral_constant<int, 1>{});
    case 2:
      return visit(std::integral_constant<int, 2>{});
    case 3:
      return visit(std::integral_constant<int, 3>{});
    case 4:
      return visit(std::integral_constant<int, 4>{});
    case 5:
      return visit(std::integral_constant<int, 5>{});
    case 6:
      return visit(std::integral_constant<int, 6>{});
    default:
      return visit(std::integral_constant<int, 7>{});
  }
}

// --- one plane ---

struct Ranking {
  int number = 0, num_listed = 0, nbytes = 0;
  uint8_t values[kValues];  // by rank
  uint8_t ranks[kValues];   // by value
};

// The values of `order`, which ascend, by descending count; equal counts stay in their order.
void sort_by_count(const uint16_t* counts, const uint8_t* order, int n, uint8_t* sorted) {
  constexpr int kDigitBits = 7, kDigits = 1 << kDigitBits;
  static_assert(kLosslessBlock < 1 << 2 * kDigitBits);
  uint8_t between[kValues], *to = between;
  const uint8_t* from = order;
  for (int shift = 0; shift <= kDigitBits; shift += kDigitBits) {
    const auto digit = [&](int i) { return kDigits - 1 - (counts[from[i]] >> shift & (kDigits - 1)); };
    int starts[kDigits + 1] = {};
    for (int i = 0; i < n; ++i) ++starts[digit(i) + 1];
    for (int d = 0; d < kDigits; ++d) starts[d + 1] += starts[d];
    for (int i = 0; i < n; ++i) to[starts[digit(i)]++] = from[i];
    from = to;
    to = sorted;
  }
}

void choose_ranking(const uint8_t* plane, int m, bool is_last, Ranking& ranking) {
  // 1. Ranks: by count, equal counts by value.
  uint16_t quarters[4][kValues] = {};
  for (int i = 0; i < m; ++i) ++quarters[i % 4][plane[i]];
  uint16_t counts[kValues];
  uint8_t order[kValues];
  int num_values = 0;
  for (int v = 0; v < kValues; ++v) {
    counts[v] =
        static_cast<uint16_t>(quarters[0][v] + quarters[1][v] + quarters[2][v] + quarters[3][v]);
    order[num_values] = static_cast<uint8_t>(v);
    num_values += counts[v] != 0;
  }
  sort_by_count(counts, order, num_values, ranking.values);
  int covered[kValues + 1] = {};
  for (int r = 0; r < kValues; ++r) {
    covered[r + 1] = covered[r] + (r < num_values ? counts[ranking.values[r]] : 0);
  }
  for (int r = 0; r < num_values; ++r) {
    ranking.ranks[ranking.values[r]] = static_cast<uint8_t>(r);
  }

  // 2. The shortest code. One without any bits is not for the last plane: each word takes at least
  // one.
  ranking.nbytes = 1 << 30;
  for (int number = is_last && num_values == 1; number < kNumCodes; ++number) {
    int nbytes = 2, size = 0, left = m;
    for (int width : kRankWidths[number]) {
      nbytes += width * plane_nbytes(left);
      size += (1 << width) - 1;
      left = m - covered[size];
    }
    const bool is_complete = num_values <= size + 1;
    nbytes += is_complete ? num_values : size + left;
    if (nbytes < ranking.nbytes) {
      ranking.number = number;
      ranking.nbytes = nbytes;
      ranking.num_listed = is_complete ? num_values : size;
    }
  }
}

uint8_t* write_plane(const Ranking& ranking, const uint8_t* plane, int m, uint8_t* out) {
  *out++ = static_cast<uint8_t>(ranking.number);
  *out++ = static_cast<uint8_t>(ranking.num_listed);
  std::memcpy(out, ranking.values, ranking.num_listed);
  out += ranking.num_listed;
  uint8_t ranks[kLosslessBlock + kSlack], codes[kLosslessBlock + kSlack];
  for (int i = 0; i < m; ++i) ranks[i] = ranking.ranks[plane[i]];
  int left = m, inner = 0;
  for (int width : kRankWidths[ranking.number]) {
    if (!width) break;
    const auto last = static_cast<uint8_t>((1 << width) - 1);
    for (int i = 0; i < left; ++i) {
      codes[i] = std::min(static_cast<uint8_t>(ranks[i] - inner), last);
    }
    std::memset(codes + left, 0, 8);
    with_width(width, [&](auto constant) { take_codes<constant()>(codes, left, out); });
    out += width * plane_nbytes(left);
    int passed = 0;
    for (int i = 0; i < left; ++i) {
      ranks[passed] = ranks[i];
      passed += codes[i] == last;
    }
    left = passed;
    inner += last;
  }
  if (ranking.num_listed <= inner) {
    for (int i = 0; i < left; ++i) *out++ = ranking.values[ranks[i]];
  }
  return out;
}

bool read_plane(Sections& sections, int m, uint8_t* plane) {
  const uint8_t* const head = sections.take(2);
  if (head == nullptr || head[0] >= kNumCodes) return false;
  const int number = head[0], num_listed = head[1], size = size_of(number);
  if (num_listed > size + 1) return false;
  const uint8_t* const listed = sections.take(num_listed);
  if (listed == nullptr) return false;
  uint8_t values[kValues] = {};
  std::memcpy(values, listed, num_listed);

  // Tier by tier; then backwards, each taking in what the next one made of the words it passed on.
  uint8_t codes[kMaxTiers][kLosslessBlock + kSlack];
  int counts[kMaxTiers + 1] = {m}, num_tiers = 0;
  for (; num_tiers < kMaxTiers && kRankWidths[number][num_tiers]; ++num_tiers) {
    const int t = num_tiers, width = kRankWidths[number][t], n = counts[t], last = (1 << width) - 1;
    const uint8_t* const planes = sections.take_planes(n, width);
    if (planes == nullptr) return false;
    with_width(width, [&](auto constant) { put_codes<constant()>(planes, n, codes[t]); });
    int passed = 0;
    for (int i = 0; i < n; ++i) passed += codes[t][i] == last;
    counts[t + 1] = passed;
  }
  uint8_t one[kLosslessBlock + kSlack], other[kLosslessBlock + kSlack];
  uint8_t *from = one, *to = other;
  const int left = counts[num_tiers];
  if (num_listed <= size) {
    const uint8_t* const escaped = sections.take(left);
    if (escaped == nullptr) return false;
    std::memcpy(from, escaped, left);
  } else {
    std::memset(from, values[size], left);
  }
  int inner = size;
  for (int t = num_tiers - 1; t >= 0; --t) {
    const int last = (1 << kRankWidths[number][t]) - 1;
    inner -= last;
    const uint8_t* passed = from;
    for (int i = 0; i < counts[t]; ++i) {
      const int code = codes[t][i], is_passed = code == last;
      const int own = values[inner + code];
      to[i] = static_cast<uint8_t>(own ^ ((own ^ *passed) & -is_passed));
      passed += is_passed;
    }
    std::swap(from, to);
  }
  std::memcpy(plane, from, m);
  return true;
}

// --- what the probe says ---

constexpr int kProbeRun = 8;

struct Probe {
  int counted = 0, distinct = 0;
  bool has_few(int eighths) const { return counted && 8 * distinct <= eighths * counted; }
};

// Of the words of the probe that are not zero, or of all, a byte each.
template <class Word, class Plane>
Probe probe(const uint8_t* words, int n, bool zeros_out, const Plane& plane) {
  Probe probe;
  uint8_t seen[kValues] = {};
  for (int start = 0; start < n; start += kSampleStep) {
    for (int i = start; i < std::min(n, start + kProbeRun); ++i) {
      const auto word = LosslessPortable::load<Word>(words + i * sizeof(Word));
      if (zeros_out && !word) continue;
      const auto byte = static_cast<uint8_t>(plane(word));
      ++probe.counted;
      probe.distinct += !seen[byte];
      seen[byte] = 1;
    }
  }
  return probe;
}

template <int kSize>
int compact_words(const uint8_t* words, int n, uint8_t* mask, uint8_t* nonzero) {
  int count = 0;
  std::memset(mask, 0, plane_nbytes(n));
  for (int i = 0; i < n; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, words + i * kSize, kSize);
    std::memcpy(nonzero + count * kSize, &word, kSize);
    count += word != 0;
    mask[i / 8] = static_cast<uint8_t>(mask[i / 8] | (word != 0) << i % 8);
  }
  return count;
}

}  // namespace

bool may_be_ranked(LosslessType type, const uint8_t* words, int n, bool zeros_out, int low_plane,
                   bool is_bad) {
  switch (type) {
    case LosslessType::kBFloat16: {
      const Probe rest = probe<uint16_t>(words, n, zeros_out,
                                         [](int w) { return (w >> 8 & 128) | (w & 127); });
      if (rest.has_few(6)) return true;
      return is_bad &&
             probe<uint16_t>(words, n, zeros_out, [](int w) { return w >> 7; }).has_few(6);
    }
    case LosslessType::kFloat32: {
      const Probe rest = probe<uint32_t>(
          words, n, zeros_out, [](uint32_t w) { return (w >> 24 & 128) | (w >> 16 & 127); });
      if (rest.has_few(6)) return true;
      if (low_plane >= 0 &&
          probe<uint32_t>(words, n, zeros_out, [&](uint32_t w) { return w >> 8 * low_plane; })
              .has_few(6)) {
        return true;
      }
      return is_bad &&
             probe<uint32_t>(words, n, zeros_out, [](uint32_t w) { return w >> 23; }).has_few(6);
    }
    case LosslessType::kFloat16: {
      if (probe<uint16_t>(words, n, zeros_out, [](int w) { return w; }).has_few(6)) return true;
      return is_bad &&
             probe<uint16_t>(words, n, zeros_out, [](int w) { return w >> 8; }).has_few(6);
    }
    case LosslessType::kWord2:
    case LosslessType::kWord4:
    case LosslessType::kWord8:
      return true;
    default:
      return probe<uint8_t>(words, n, false, [](int w) { return w; }).has_few(is_bad ? 6 : 3);
  }
}

bool ranked_zeros_out(LosslessType type, const uint8_t* words, int n) {
  const int itemsize = lossless_itemsize(type);
  int size = 0, zeros = 0;
  for (int start = 0; start < n; start += kSampleStep) {
    for (int i = start; i < std::min(n, start + kSampleRun); ++i, ++size) {
      uint64_t word = 0;
      std::memcpy(&word, words + i * itemsize, itemsize);
      zeros += !word;
    }
  }
  return 8 * zeros > size;
}

int encode_ranked(LosslessType type, const uint8_t* words, int n, bool zeros_out, int limit,
                  uint8_t* payload) {
  const int itemsize = lossless_itemsize(type);
  alignas(64) uint8_t nonzero[kLosslessBlock * kMaxItemsize + kSlack];
  uint8_t mask[kLosslessBlock / 8];
  int m = n, nbytes = 0;
  if (zeros_out) {
    m = with_size(itemsize,
                  [&](auto size) { return compact_words<size()>(words, n, mask, nonzero); });
    nbytes = plane_nbytes(n);
  }
  static thread_local Planes planes;
  static thread_local Ranking rankings[kMaxItemsize];
  split_planes(type, zeros_out ? nonzero : words, m, planes);
  for (int k = 0; k < itemsize; ++k) {
    choose_ranking(planes[k], m, k == itemsize - 1, rankings[k]);
    nbytes += rankings[k].nbytes;
    if (nbytes >= limit) return limit;
  }
  uint8_t* out = payload;
  if (zeros_out) {
    std::memcpy(out, mask, plane_nbytes(n));
    out += plane_nbytes(n);
  }
  for (int k = 0; k < itemsize; ++k) out = write_plane(rankings[k], planes[k], m, out);
  return nbytes;
}

bool decode_ranked(LosslessType type, const uint8_t* payload, int nbytes, int n, bool zeros_out,
                   uint8_t* words) {
  const int itemsize = lossless_itemsize(type);
  Sections sections(payload, nbytes);
  int m = n;
  const uint8_t* mask = nullptr;
  if (zeros_out) {
    mask = sections.take_planes(n, 1);
    if (mask == nullptr) return false;
    m = LosslessPortable::count_ones(1, mask, n);
  }
  static thread_local Planes planes;
  for (int k = 0; k < itemsize; ++k) {
    if (!read_plane(sections, m, planes[k])) return false;
  }
  if (sections.left()) return false;
  if (!zeros_out) {
    join_planes(type, planes, n, words);
    return true;
  }
  alignas(64) uint8_t nonzero[(kLosslessBlock + 1) * kMaxItemsize];
  join_planes(type, planes, m, nonzero);
  const uint8_t* next = nonzero;
  for (int i = 0; i < n; ++i, words += itemsize) {
    if (mask[i / 8] >> i % 8 & 1) {
      std::memcpy(words, next, itemsize);
      next += itemsize;
    } else {
      std::memset(words, 0, itemsize);
    }
  }
  return true;
}

}  // namespace laconic
