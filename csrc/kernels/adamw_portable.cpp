#include "adamw-inl.h"

namespace laconic {
namespace {

// Loops without branches and lookups, which compilers turn into vectors. Magnitudes are not
// negative, so that they compare like their bits.
template <bool kSigned, int kBits>
class PortableCodes {
 public:
  static constexpr int kLanes = 32;

  explicit PortableCodes(const DynamicMap& map)
      : map_(map), zero_border_(signed_bits(map.zero_border)), top_(signed_bits(map.top)) {
    for (int d = 0; d < 7; ++d) {
      border_[d] = signed_bits(map.borders[d]);
      slope_[d] = signed_bits(map.slopes[d]);
      offset_[d] = signed_bits(map.offsets[d]);
      last_[d] = static_cast<int32_t>(map.last[d]);
    }
    for (int d = 6; d > 0; --d) {
      slope_[d] -= slope_[d - 1];
      offset_[d] -= offset_[d - 1];
      last_[d] -= last_[d - 1];
    }
  }

  void load(const uint8_t* codes, float scale, float* x) const {
    for (int i = 0; i < kLanes; ++i) x[i] = map_.levels[codes[i]] * scale;
  }

  void store(const float* x, float inverse, uint8_t* out) const {
    // 1. The line of each number's decade, as a sum of differences from decade to decade.
    int32_t magnitude[kLanes], slope[kLanes], offset[kLanes], last[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      magnitude[i] = signed_bits(x[i] * inverse) & 0x7FFFFFFF;
      slope[i] = slope_[0];
      offset[i] = offset_[0];
      last[i] = last_[0];
    }
    for (int d = 0; d < 6; ++d) {
      const int32_t border = border_[d], slope_by = slope_[d + 1], offset_by = offset_[d + 1],
                    last_by = last_[d + 1];
      for (int i = 0; i < kLanes; ++i) {
        const int32_t beyond = -static_cast<int32_t>(magnitude[i] > border);
        slope[i] += slope_by & beyond;
        offset[i] += offset_by & beyond;
        last[i] += last_by & beyond;
      }
    }

    // 2. Numbers of levels, and their codes. The level of 1 has no negative: there is one level
    // more above zero than below.
    constexpr int32_t kZero = zero_code(kSigned, kBits);
    int32_t code[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const float line = float_of(magnitude[i]) * float_of(slope[i]) + float_of(offset[i]);
      const int32_t over = static_cast<int32_t>(line) - last[i];
      int32_t number = last[i] + (over & (over >> 31)) + (magnitude[i] > top_);
      number &= -static_cast<int32_t>(magnitude[i] > zero_border_);
      if constexpr (kSigned) {
        const int32_t negative = signed_bits(x[i] * inverse) >> 31, most = kZero + 1 + negative;
        const int32_t beyond = number - most;
        number = most + (beyond & (beyond >> 31));
        number = (number ^ negative) - negative;
      }
      code[i] = kZero + number;
    }
    for (int i = 0; i < kLanes; ++i) out[i] = static_cast<uint8_t>(code[i]);
  }

 private:
  static int32_t signed_bits(float value) { return static_cast<int32_t>(bits_of(value)); }

  const DynamicMap& map_;
  // By decade, what its line has more than the one before, of bits where they are fp32 numbers.
  int32_t border_[7], slope_[7], offset_[7], last_[7];
  int32_t zero_border_, top_;
};

}  // namespace

const AdamWKernels kAdamWPortable = kAdamWKernels<PortableCodes>;

}  // namespace laconic
