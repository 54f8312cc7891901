#include "norms-inl.h"

namespace laconic {

const NormKernels kNormAvx2 = kNormKernels;

}  // namespace laconic
