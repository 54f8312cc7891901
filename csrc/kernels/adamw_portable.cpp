#include "adamw-inl.h"

namespace laconic {
namespace {

template <bool kSigned>
class PortableCodes {
 public:
  static constexpr int kLanes = 8;
  static constexpr uint8_t kZero = kSigned ? 127 : 0;
  explicit PortableCodes(const DynamicMap& map) : map_(map) {}
  void store(const float* x, float inverse, uint8_t* out) const {
    // Decades in a loop of their own, which the compiler can vectorize.
    float magnitudes[kLanes];
    int decades[kLanes] = {};
    for (int i = 0; i < kLanes; ++i) magnitudes[i] = std::fabs(x[i] * inverse);
    for (int d = 0; d < 6; ++d) {
      const float border = map_.borders[d];
      for (int i = 0; i < kLanes; ++i) decades[i] += magnitudes[i] > border;
    }
    for (int i = 0; i < kLanes; ++i) {
      const float magnitude = magnitudes[i];
      const int decade = decades[i];
      const int line = static_cast<int>(magnitude * map_.slopes[decade] + map_.offsets[decade]);
      const int last = static_cast<int>(map_.last[decade]);
      int number = (line < last ? line : last) + (magnitude > map_.top);
      if (magnitude <= map_.zero_border) number = 0;
      if (kSigned && x[i] < 0) number = number < 127 ? -number : -127;
      out[i] = static_cast<uint8_t>(kZero + number);
    }
  }

 private:
  const DynamicMap& map_;
};

}  // namespace

const AdamWKernels kAdamWPortable = {update<PortableCodes>};

}  // namespace laconic
