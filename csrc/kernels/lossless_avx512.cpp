#include "lossless_avx512-inl.h"

namespace laconic {

const LosslessKernels kLosslessAvx512 = Lossless<LosslessAvx512>::kKernels;

}  // namespace laconic
