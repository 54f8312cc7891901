#include "bits-inl.h"

namespace laconic {

const BitsKernels kBitsPortable = kBitsKernels<PlainBits>;

}  // namespace laconic
