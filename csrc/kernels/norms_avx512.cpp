#include "norms-inl.h"

namespace laconic {

const NormKernels kNormAvx512 = kNormKernels;

}  // namespace laconic
