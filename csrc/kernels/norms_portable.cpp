#include "norms-inl.h"

namespace laconic {

const NormKernels kNormsPortable = {norms};

}  // namespace laconic
