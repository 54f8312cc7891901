#include "lossless_portable-inl.h"

namespace laconic {

const LosslessKernels kLosslessPortable = Lossless<LosslessPortable>::kKernels;

}  // namespace laconic
