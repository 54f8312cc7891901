#include "norms-inl.h"

namespace laconic {

const NormKernels kNormPortable = kNormKernels;

}  // namespace laconic
