#include "lossless_avx2-inl.h"

namespace laconic {

const LosslessKernels kLosslessAvx2 = Lossless<LosslessAvx2>::kKernels;

}  // namespace laconic
